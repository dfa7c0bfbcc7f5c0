"""`safetune export` and `import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that goes on with another, empty store."""
    return lambda name: monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / name))


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def test_there_and_back(
    safetune: Any, tuned: Any, tmp_path: Path, elsewhere: Any, cache_dir: Path
) -> None:
    listed = safetune.json("list")
    out = tmp_path / "out"

    exported = safetune("export", out)

    names = sorted(path.name for path in out.iterdir())
    assert [name.split(".")[:2] for name in names] == [
        ["add_one", "interpreter"],
        ["kernel", "interpreter"],
    ]
    assert exported.stdout == f"{out / names[0]}: 2 choices\n{out / names[1]}: 1 choice\n"

    elsewhere("other")
    assert safetune("import", out).stdout == "3 choices imported, 0 already stored\n"
    there = safetune.json("list")
    for one, other in zip(listed, there, strict=True):
        for fact in ("kernel", "call", "device", "toolchain", "config", "generation"):
            assert other[fact] == one[fact]
        assert other["median_ms"] == pytest.approx(one["median_ms"], rel=1e-4)
    assert safetune.json("export", tmp_path / "again") == {
        "written": [
            {"path": str(tmp_path / "again" / names[0]), "choices": 2},
            {"path": str(tmp_path / "again" / names[1]), "choices": 1},
        ]
    }
    assert contents(tmp_path / "again") == contents(out)
    assert safetune.json("import", out, cache_dir) == {
        "new": 0,
        "known": 3,
        "kept": 0,
        "older": 0,
        "unknown": 0,
    }


def test_another_choice_of_the_same_generation_stays(
    safetune: Any, tuned: Any, tmp_path: Path
) -> None:
    one, listed = tmp_path / "one.json", safetune.json("list")
    assert safetune("export", one, "--kernel", "kernel").exit_code == 0
    data = json.loads(one.read_text())
    config = data["tunings"][0]["choices"][0]["config"]
    config["BLOCK"] = 64 + 128 - config["BLOCK"]
    one.write_text(json.dumps(data))
    assert safetune("import", one).stdout == (
        "0 choices imported, 0 already stored, 1 not imported: the store has another choice of "
        "the same generation\n"
    )
    assert safetune.json("list") == listed


def test_a_choice_of_an_earlier_generation_is_not_counted_as_new(
    safetune: Any, tuned: Any, tmp_path: Path, targets: Path
) -> None:
    safetune("export", tmp_path / "old", "--kernel", "kernel")
    safetune("tune", "--force", f"{targets / 'add.py'}:twice")
    listed = safetune.json("list")
    assert safetune("import", tmp_path / "old").stdout == (
        "0 choices imported, 0 already stored, 1 not imported: the store has a choice of a later "
        "generation\n"
    )
    assert safetune.json("list") == listed


def test_a_selection(safetune: Any, tuned: Any, tmp_path: Path) -> None:
    safetune("export", tmp_path / "a", "--kernel", "kernel", "--device", "INTERP")
    assert len(list((tmp_path / "a").iterdir())) == 1
    assert safetune.error("export", tmp_path / "b", "--device", "H100") == (
        "Error: no choice is stored for device 'H100'; choices are stored for: add_one on "
        "interpreter, kernel on interpreter"
    )
    line = safetune.error("export", tmp_path / "b.json")
    assert "is one file, but 2 packs would be written: give a directory, or choose" in line
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "b.json").exists()


def test_a_broken_file_among_good_ones(
    safetune: Any, tuned: Any, tmp_path: Path, elsewhere: Any
) -> None:
    safetune("export", tmp_path / "out")
    broken = tmp_path / "broken.json"
    broken.write_text(next((tmp_path / "out").iterdir()).read_text()[:-30])
    elsewhere("other")
    line = safetune.error("import", tmp_path / "out", broken)
    assert line.startswith(f"Error: {broken}: it is not the JSON of a pack: ")
    assert safetune.json("list") == []
    assert safetune.error("import", tmp_path / "none") == (
        f"Error: {tmp_path / 'none'}: No such file or directory"
    )


def test_merging_into_a_pack(
    safetune: Any, tuned: Any, tmp_path: Path, elsewhere: Any, targets: Path
) -> None:
    """Of two machines, one of which has tuned again."""
    for name in ("old", "older"):
        safetune("export", tmp_path / name)
    elsewhere("other")
    safetune("import", tmp_path / "old")
    safetune("tune", "--force", f"{targets / 'add.py'}:twice")
    safetune("clear", "add_one", "--yes")

    assert safetune("export", "--into", tmp_path / "old").exit_code == 0
    again = safetune("export", "--into", tmp_path / "old")
    assert again.exit_code == 0

    def generations(name: str) -> dict[str, list[int]]:
        new = {n.split(".")[0]: json.loads(t) for n, t in contents(tmp_path / name).items()}
        return {
            name: [choice["generation"] for choice in pack["tunings"][0]["choices"]]
            for name, pack in new.items()
        }

    assert generations("old") == {"add_one": [1, 1], "kernel": [2]}, "add_one is in the pack alone"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "old").iterdir()} == {0o644}
    safetune("export", "--into", tmp_path / "new" / "packs")
    assert generations("new/packs") == {"kernel": [2]}, "a pack that is not there yet"
    before = contents(tmp_path / "older")
    elsewhere("empty")
    assert "no choice is stored yet" not in safetune("import", tmp_path / "old").stdout
    safetune("export", "--into", tmp_path / "older")
    assert contents(tmp_path / "older") == contents(tmp_path / "old") != before


def test_a_place_to_merge_into_stands_alone(safetune: Any, tuned: Any, tmp_path: Path) -> None:
    for words in ((), (tmp_path, "--into", tmp_path), ("--into", tmp_path, "--format", "hf")):
        result = safetune("export", *words)
        assert result.exit_code == 2, words
        assert "--into PACK" in result.stderr


def test_nothing_is_stored(safetune: Any, tmp_path: Path, cache_dir: Path) -> None:
    for words in ((), ("--into",)):
        assert safetune.error("export", *words, tmp_path / "out") == (
            "Error: no choice is stored yet; run `safetune tune` first"
        )
    assert not (tmp_path / "out").exists()
    assert not cache_dir.exists()
