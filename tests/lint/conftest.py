"""Files with tuners, and what is found in them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from safetune.lint.check import check
from safetune.lint.rules import RULES, Finding

HEADER = """\
import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]
"""

#: Of several files, the text of each by its name; of one, its text, which follows the header.
Lint = Callable[..., list[Finding]]


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    """What all rules find in a file, or in several."""

    def found(text: str | dict[str, str]) -> list[Finding]:
        files = {"kernels.py": HEADER + textwrap.dedent(text)} if isinstance(text, str) else text
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(content))
        return check([tmp_path], RULES)[0]

    return found


def rules(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]
