"""`safetune export`, `import`, `merge` and `pack`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tuned(safetune: Any, targets: Path) -> list[dict[str, Any]]:
    """The choices for `add_one` at two sizes and for another kernel."""
    safetune.json("tune", targets / "add.py")
    listed: list[dict[str, Any]] = safetune.json("list")
    return listed


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that goes on with another, empty store."""
    return lambda name: monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / name))


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def test_there_and_back(
    safetune: Any, tuned: Any, tmp_path: Path, elsewhere: Any, cache_dir: Path
) -> None:
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
    for one, other in zip(tuned, there, strict=True):
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
    one = tmp_path / "one.json"
    assert safetune("export", one, "--kernel", "kernel").exit_code == 0
    data = json.loads(one.read_text())
    config = data["tunings"][0]["choices"][0]["config"]
    config["BLOCK"] = 64 + 128 - config["BLOCK"]
    one.write_text(json.dumps(data))
    assert safetune("import", one).stdout == (
        "0 choices imported, 0 already stored, 1 not imported: the store has another choice of "
        "the same generation\n"
    )
    assert safetune.json("list") == tuned


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
    assert "is one file, and there are 2 kernels and devices: name a directory, or choose" in line
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


def test_merge(
    safetune: Any, tuned: Any, tmp_path: Path, elsewhere: Any, cache_dir: Path, targets: Path
) -> None:
    """Of two machines, one of which has tuned again."""
    safetune("export", tmp_path / "old")
    elsewhere("other")
    safetune("import", tmp_path / "old")
    safetune("tune", "--force", f"{targets / 'add.py'}:twice")

    safetune("merge", cache_dir, tmp_path / "other", "--into", tmp_path / "new")
    safetune(
        "merge", tmp_path / "other" / "safetune.db", tmp_path / "old", "--into", tmp_path / "n"
    )

    assert contents(tmp_path / "new") == contents(tmp_path / "n")
    new = {n.split(".")[0]: json.loads(t) for n, t in contents(tmp_path / "new").items()}
    generations = {
        name: [choice["generation"] for choice in pack["tunings"][0]["choices"]]
        for name, pack in new.items()
    }
    assert generations == {"add_one": [1, 1], "kernel": [2]}


def test_pack(
    safetune: Any, tuned: Any, tmp_path: Path, elsewhere: Any, monkeypatch: Any, targets: Path
) -> None:
    """For a container: what is stored, and what packs have; readable for all."""
    safetune("export", tmp_path / "mounted", "--kernel", "kernel")
    elsewhere("other")
    safetune("tune", f"{targets / 'add.py'}:add_one")
    monkeypatch.setenv("SAFETUNE_PACKS", f"{tmp_path / 'mounted'}:{tmp_path / 'nowhere'}")

    done = safetune("pack", tmp_path / "image" / "packs")

    assert done.exit_code == 0
    assert done.stdout.endswith(f"use it with SAFETUNE_PACKS={tmp_path / 'image' / 'packs'}\n")
    packed = sorted((tmp_path / "image" / "packs").iterdir())
    assert [path.name.split(".")[0] for path in packed] == ["add_one", "kernel"]
    assert {path.stat().st_mode & 0o777 for path in packed} == {0o644}
    assert (tmp_path / "image" / "packs").stat().st_mode & 0o777 == 0o755
    assert "exists and is not empty" in safetune.error("pack", tmp_path / "image" / "packs")


def test_nothing_is_stored(safetune: Any, tmp_path: Path, cache_dir: Path) -> None:
    for command in ("export", "pack"):
        assert safetune.error(command, tmp_path / "out") == (
            "Error: no choice is stored yet; run `safetune tune` first"
        )
    assert not (tmp_path / "out").exists()
    assert not cache_dir.exists()
