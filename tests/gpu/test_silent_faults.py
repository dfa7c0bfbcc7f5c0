"""Every silent fault on the GPU; `tests/faults/silent.py` has the cases."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

_spec = importlib.util.spec_from_file_location(
    "safetune_tests_gpu_silent", Path(__file__).parents[1] / "faults/silent.py"
)
assert _spec is not None
assert _spec.loader is not None
silent: Any = importlib.util.module_from_spec(_spec)
sys.modules["safetune_tests_gpu_silent"] = silent
_spec.loader.exec_module(silent)


@pytest.mark.parametrize("case", silent.parameters())
def test_silent(case: Callable[..., None], harmless: Any) -> None:
    case(harmless, "cuda")
