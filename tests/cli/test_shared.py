"""`list`, `clear` and `doctor` with a shared store: what this node has, and what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def shared(
    safetune: Any, tuned: Any, targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A shared store to which the node of the test has published its choices."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("SAFETUNE_SHARED", f"file://{folder}")
    monkeypatch.delenv("COLUMNS", raising=False)
    safetune.json("tune", targets / "add.py")
    return folder


@pytest.fixture
def on_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda: monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "node"))


def kernels(listed: list[dict[str, Any]]) -> list[str]:
    return [entry["kernel"] for entry in listed]


def test_what_a_node_has_measured_is_from_here(
    shared: Path, safetune: Any, targets: Path, on_another_node: Any
) -> None:
    """Regression: once published, it was "shared" there too."""
    target = f"{targets / 'add.py'}:add_one"
    safetune.json("tune", "--force", target, "--shape", "small")
    safetune.json("tune", target)  # which pulls once more
    assert {entry["origin"] for entry in safetune.json("list")} == {"here"}

    on_another_node()
    assert safetune.json("tune", target)["measured"] == 0
    assert {entry["origin"] for entry in safetune.json("list")} == {f"file://{shared}"}


def test_the_shared_store_is_listed(shared: Path, safetune: Any, on_another_node: Any) -> None:
    on_another_node()
    assert safetune.json("list") == []
    assert kernels(safetune.json("list", "--shared")) == ["add_one", "add_one", "kernel"]
    assert kernels(safetune.json("list", "--shared", "--kernel", "kernel")) == ["kernel"]


def test_clear_says_what_stays_in_the_shared_store(shared: Path, safetune: Any) -> None:
    assert safetune("clear", "add_one", "--yes").stdout == (
        "cleared 2 keys of add_one; the shared store still has 2 of them: --shared deletes them "
        "there, and `safetune tune --force` replaces them\n"
    )
    assert kernels(safetune.json("list")) == ["kernel"]
    assert len(safetune.json("list", "--shared")) == 3


def test_clear_deletes_there_what_this_node_never_had(
    shared: Path, safetune: Any, on_another_node: Any
) -> None:
    on_another_node()
    done = safetune.json("clear", "add_one", "--shared", "--yes")
    assert done == {"kernel": "add_one", "cleared": 2, "left_shared": 0}
    assert kernels(safetune.json("list", "--shared")) == ["kernel"]


def test_clear_goes_on_where_the_shared_store_is_away(
    shared: Path, safetune: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAFETUNE_SHARED", f"file://{tmp_path}/mount/point")
    (tmp_path / "mount").mkdir()
    done = safetune("clear", "add_one", "--yes")
    assert (done.exit_code, done.stdout) == (0, "cleared 2 keys of add_one\n")
    assert "Warning: the shared store may still hold them: cannot read" in done.stderr


@pytest.mark.parametrize("words", [("list",), ("clear", "add_one", "--yes")])
def test_without_a_shared_store(safetune: Any, tuned: Any, words: tuple[str, ...]) -> None:
    assert safetune.error(*words, "--shared") == (
        "Error: there is no shared store; set SAFETUNE_SHARED to its URL"
    )
    assert len(safetune.json("list")) == 3
