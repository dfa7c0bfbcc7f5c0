"""Every silent fault in Triton's interpreter; `silent.py` has the cases."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location(
    "safetune_tests_silent", Path(__file__).with_name("silent.py")
)
assert _spec is not None
assert _spec.loader is not None
silent: Any = importlib.util.module_from_spec(_spec)
sys.modules["safetune_tests_silent"] = silent
_spec.loader.exec_module(silent)


@pytest.mark.parametrize("case", silent.parameters())
def test_silent(case: Callable[..., None], harmless: Any) -> None:
    case(harmless, "cpu")
