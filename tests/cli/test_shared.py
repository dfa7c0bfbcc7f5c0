"""`list`, `clear` and `doctor` with a shared store: what this node has, and what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def shared(safetune: Any, tuned: Any, targets: Path) -> str:
    """The URL of a store to which the node of the test has published its choices."""
    url: str = safetune.share()
    safetune.json("tune", targets / "add.py")
    return url


def kernels(listed: list[dict[str, Any]]) -> list[str]:
    return [entry["kernel"] for entry in listed]


def test_what_a_node_has_measured_is_from_here(shared: str, safetune: Any, targets: Path) -> None:
    """Regression: once published, it was "shared" there too."""
    target = f"{targets / 'add.py'}:add_one"
    safetune.json("tune", "--force", target, "--shape", "small")
    safetune.json("tune", target)  # which pulls once more
    assert {entry["origin"] for entry in safetune.json("list")} == {"here"}

    safetune.use_store("node")
    assert safetune.json("tune", target)["measured"] == 0
    assert {entry["origin"] for entry in safetune.json("list")} == {shared}


def test_the_shared_store_is_listed(shared: str, safetune: Any) -> None:
    safetune.use_store("node")
    assert safetune.json("list") == []
    assert kernels(safetune.json("list", "--shared")) == ["add_one", "add_one", "kernel"]
    assert kernels(safetune.json("list", "--shared", "--kernel", "kernel")) == ["kernel"]


def test_clear_says_what_stays_in_the_shared_store(shared: str, safetune: Any) -> None:
    assert safetune("clear", "add_one", "--yes").stdout == (
        "cleared 2 keys of add_one; the shared store still has 2 of them: --shared deletes them "
        "there, and `safetune tune --force` replaces them\n"
    )
    assert kernels(safetune.json("list")) == ["kernel"]
    assert len(safetune.json("list", "--shared")) == 3


def test_clear_deletes_there_what_this_node_never_had(shared: str, safetune: Any) -> None:
    safetune.use_store("node")
    done = safetune.json("clear", "add_one", "--shared", "--yes")
    assert done == {"kernel": "add_one", "cleared": 2, "left_shared": 0}
    assert kernels(safetune.json("list", "--shared")) == ["kernel"]


def test_clear_goes_on_where_the_shared_store_is_away(
    shared: str, safetune: Any, tmp_path: Path
) -> None:
    safetune.set(SAFETUNE_SHARED=f"file://{tmp_path}/mount/point")
    (tmp_path / "mount").mkdir()
    done = safetune("clear", "add_one", "--yes")
    assert (done.exit_code, done.stdout) == (0, "cleared 2 keys of add_one\n")
    assert "Warning: the shared store may still hold them: cannot read" in done.stderr
