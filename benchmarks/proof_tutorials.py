"""Triton's tutorials up to where they have compared their results; their benchmarks do not run.

PROOF_TUTORIALS is the folder with the scripts. All of their configs count: one of them declares a
single one under pytest, which is not said to it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

FOLDER = Path(os.environ["PROOF_TUTORIALS"])


@pytest.fixture
def tutorial(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a tutorial, as an imported module, and gives its names."""
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    monkeypatch.setattr(triton.testing.Mark, "run", lambda *_, **__: None)
    monkeypatch.syspath_prepend(str(FOLDER))  # the vendored file lies there

    def run(number: str) -> dict[str, Any]:
        (path,) = FOLDER.glob(f"{number}-*.py")
        monkeypatch.setattr(sys, "argv", [str(path)])
        return runpy.run_path(str(path), run_name=f"tutorial_{number}")

    return run


def matched(capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a tutorial says of no result that it differs."""
    printed = capsys.readouterr().out
    assert "✅" in printed
    assert "❌" not in printed


def test_03(tutorial: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """All of the matrix products, in fp16 and fp8."""
    tutorial("03")
    matched(capsys)


def test_06(tutorial: Any) -> None:
    """Forward and backward, causal."""
    tutorial("06")["test_op"](1, 2, 1024, 64, True, False, "bwd", "triton-fp16")


def test_08(tutorial: Any) -> None:
    """Both kernels; the tutorial asserts, itself."""
    tutorial("08")


def test_09(tutorial: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way to multiply, on the shape of the tutorial."""
    tutorial("09")["validate"](8192, 8192, 512, torch.float16)
    matched(capsys)
