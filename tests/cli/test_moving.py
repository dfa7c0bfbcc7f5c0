"""`safetune export` and `import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def test_there_and_back(safetune: Any, tuned: Any, tmp_path: Path, cache_dir: Path) -> None:
    out = tmp_path / "out"

    exported = safetune("export", out)

    names = sorted(path.name for path in out.iterdir())
    assert [name.split(".")[:2] for name in names] == [
        ["add_one", "interpreter"],
        ["kernel", "interpreter"],
    ]
    assert exported.stdout == f"{out / names[0]}: 2 choices\n{out / names[1]}: 1 choice\n"

    safetune.use_store("other")
    assert safetune("import", out).stdout == "3 choices imported, 0 already stored\n"
    assert [entry["origin"] for entry in safetune.json("list")] == ["import"] * 3
    written = safetune.json("export", tmp_path / "again")["written"]
    assert [each["choices"] for each in written] == [2, 1]
    assert [each["path"] for each in written] == [str(tmp_path / "again" / n) for n in names]
    assert contents(tmp_path / "again") == contents(out)
    again = safetune.json("import", out, cache_dir)
    assert again == {"new": 0, "known": 3, "kept": 0, "older": 0, "unknown": 0}


def test_a_choice_of_the_same_or_of_an_earlier_generation_is_not_imported(
    safetune: Any, tuned: Any, tmp_path: Path, targets: Path
) -> None:
    safetune("export", tmp_path / "packs", "--kernel", "kernel")
    (pack,) = (tmp_path / "packs").iterdir()
    data = json.loads(pack.read_text())
    config = data["tunings"][0]["choices"][0]["config"]
    config["BLOCK"] = 64 + 128 - config["BLOCK"]
    pack.write_text(json.dumps(data))
    for why in ("another choice of the same generation", "a choice of a later generation"):
        listed = safetune.json("list")
        assert safetune("import", pack).stdout == (
            f"0 choices imported, 0 already stored, 1 not imported: the store has {why}\n"
        )
        assert safetune.json("list") == listed
        safetune("tune", "--force", f"{targets / 'add.py'}:twice")


def test_a_selection(safetune: Any, tuned: Any, tmp_path: Path) -> None:
    safetune("export", tmp_path / "a", "--kernel", "kernel", "--device", "INTERP")
    assert len(list((tmp_path / "a").iterdir())) == 1
    assert safetune.error("export", tmp_path / "b", "--device", "H100") == (
        "Error: no stored choice matches --kernel and --device; see `safetune list`"
    )
    assert not (tmp_path / "b").exists()


def test_a_broken_file_among_good_ones(safetune: Any, tuned: Any, tmp_path: Path) -> None:
    safetune("export", tmp_path / "out")
    broken = tmp_path / "broken.json"
    broken.write_text(next((tmp_path / "out").iterdir()).read_text()[:-30])
    safetune.use_store("other")
    line = safetune.error("import", tmp_path / "out", broken)
    assert line.startswith(f"Error: {broken}: it is not the JSON of a pack: ")
    assert safetune.json("list") == []


def test_merging_into_a_pack(safetune: Any, tuned: Any, tmp_path: Path, targets: Path) -> None:
    """Of two machines, one of which has tuned again."""
    for name in ("old", "older"):
        safetune("export", tmp_path / name)
    safetune.use_store("other")
    safetune("import", tmp_path / "old")
    safetune("tune", "--force", f"{targets / 'add.py'}:twice")
    safetune("clear", "add_one", "--yes")

    for _ in range(2):
        assert safetune("export", "--into", tmp_path / "old").exit_code == 0

    def generations(name: str) -> dict[str, list[int]]:
        packs = {file.split(".")[0]: text for file, text in contents(tmp_path / name).items()}
        return {
            kernel: [choice["generation"] for choice in json.loads(text)["tunings"][0]["choices"]]
            for kernel, text in packs.items()
        }

    assert generations("old") == {"add_one": [1, 1], "kernel": [2]}, "add_one is in the pack alone"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "old").iterdir()} == {0o644}
    safetune("export", "--into", tmp_path / "new" / "packs")
    assert generations("new/packs") == {"kernel": [2]}, "a pack that is not there yet"
    before = contents(tmp_path / "older")
    safetune.use_store("empty")
    assert "no choice is stored yet" not in safetune("import", tmp_path / "old").stdout
    safetune("export", "--into", tmp_path / "older")
    assert contents(tmp_path / "older") == contents(tmp_path / "old") != before
