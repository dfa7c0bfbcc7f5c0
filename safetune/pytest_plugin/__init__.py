"""Fixtures for projects whose kernels safetune tunes: `safetune_off`, `safetune_store`.

pytest loads this module in every run of any project, so it imports nothing of safetune, torch or
Triton. It is installed as `safetune_pytest`, because a module in the package would import the
package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: What would let choices of other places into a private store.
_OF_OTHERS = ("SAFETUNE_SHARED", "SAFETUNE_PACKS", "SAFETUNE_MODE")


@pytest.fixture
def safetune_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch the first config of every kernel: nothing is tuned, looked up or stored."""
    monkeypatch.setenv("SAFETUNE_MODE", "off")
    _forget_choices()
    yield
    _forget_choices()


@pytest.fixture
def safetune_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tune into an empty store for this test; the value is its directory."""
    for name in _OF_OTHERS:
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "safetune"
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(directory))
    _forget_choices()
    yield directory
    _forget_choices()


def _forget_choices() -> None:
    """Make every kernel that was launched ask the store again."""
    known: Any = sys.modules.get("safetune.launch.key_state")
    if known is not None:
        for tuner in {id(state.tuner): state.tuner for state in known.all_states()}.values():
            tuner.cache.clear()
