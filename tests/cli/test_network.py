"""The commands on a login node: the cache directory is on NFS, and the job ran on another node."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.settings import Settings
from safetune.store import lookup
from safetune.store.local import db_files
from safetune.store.shared.files import Directory
from tests.store.shared.conftest import SPACE, stored, tuned


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory on NFS, in which a job on another node has left a choice."""
    cache = tmp_path / "home" / "cache"
    cache.parent.mkdir()

    def network_of(path: Path) -> str:
        return "NFS" * path.is_relative_to(cache.parent)

    monkeypatch.setattr(db_files, "network_of", network_of)
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(cache))
    for node in ("job", "login"):
        (tmp_path / node).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / node))
        if node == "job":
            with pytest.warns(UserWarning, match="NFS"):
                opened = lookup.open_lookup(Settings.current())
            tuned(opened.store, 1, 64)
            assert opened.store.shared is not None
            opened.store.shared.pull(SPACE)
            opened.store.close()
    yield cache
    lookup._lookups.clear()


def test_the_choices_of_all_nodes_are_listed_and_cleared(home: Path, safetune: Any) -> None:
    assert [entry["config"] for entry in safetune.json("list")] == [{"BLOCK": 64}]
    assert safetune.json("clear", "add_kernel", "--yes")["cleared"] == 1
    assert safetune.json("list") == [], "it does not come back"
    assert not list(home.rglob("*.json"))


def test_doctor_says_where_the_database_and_the_shared_choices_are(
    home: Path, safetune: Any, tmp_path: Path
) -> None:
    data = json.loads(safetune("doctor", "--quick", "--json").stdout)
    checks = {check["name"]: check["found"] for check in data["checks"]}
    assert "network file system (NFS)" in checks["cache directory"]
    assert checks["database"].startswith(str(tmp_path / "login"))
    assert checks["shared store"].startswith(f"file://{home}")


def test_what_is_exported_and_imported_reaches_the_other_nodes(
    home: Path, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert safetune.json("export", tmp_path / "packs")["written"][0]["choices"] == 1
    safetune.json("clear", "add_kernel", "--yes")
    assert safetune.json("import", tmp_path / "packs")["new"] == 1
    (tmp_path / "another").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "another"))
    assert [entry["config"] for entry in safetune.json("list")] == [{"BLOCK": 64}]


def test_a_choice_is_not_new_whose_later_generation_another_node_has_shared(
    home: Path, safetune: Any, tmp_path: Path
) -> None:
    safetune.json("export", tmp_path / "packs")
    Directory(home).publish(SPACE, [stored(1, 128, generation=2)])
    done = safetune.json("import", tmp_path / "packs")
    assert (done["new"], done["older"]) == (0, 1)
    assert [entry["config"] for entry in safetune.json("list")] == [{"BLOCK": 128}]


def test_tune_ends_before_it_measures_where_nothing_can_be_stored(
    home: Path, safetune: Any, targets: Path, tmp_path: Path
) -> None:
    """The folder below the temporary directory is a symbolic link, as of another user's making."""
    folder = db_files.locate(Settings.current(), writes=False).directory
    folder.symlink_to(tmp_path, target_is_directory=True)

    error = safetune.error("tune", f"{targets / 'add.py'}:add_one")

    assert error.startswith(f"Error: cannot open the store {folder}")
    assert "is a symbolic link" in error
