"""A Triton that is newer than those supported: a warning, and tuning and the store as usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Says that Triton is of another version before safetune is imported, as a newer one would.
PROGRAM = """
import sys
import warnings

import torch
import triton
import triton.language as tl

triton.__version__ = sys.argv[1]
from safetune.miss import reporting


def scale(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


configs = [triton.Config({"BLOCK": block}) for block in (32, 64)]
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    from safetune import safetune

    kernel, other = (safetune(configs=configs, key=["n"])(triton.jit(scale)) for _ in range(2))
    x = torch.ones(100)
    for _ in range(2):
        kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
assert (x == 4).all()
print(*(str(each.message).partition(":")[2] for each in warned), sep="\\n")
print(reporting.tunings.begun, kernel.best_config)
"""


def run(fresh_process: Any, folder: Path, version: str) -> list[str]:
    program = folder / "newer.py"
    program.write_text(PROGRAM)
    done = fresh_process(program, version, env={"TRITON_INTERPRET": "1"}, warm=True)
    return [line for line in done.stdout.splitlines() if line]


def test_it_is_warned_of_once_and_tunes_and_stores(fresh_process: Any, tmp_path: Path) -> None:
    first = run(fresh_process, tmp_path, "3.10.0")
    again = run(fresh_process, tmp_path, "3.10.0")
    other = run(fresh_process, tmp_path, "3.11.0")

    for lines, version in ((first, "3.10"), (again, "3.10"), (other, "3.11")):
        assert len(lines) == 2
        assert f"Triton {version} is newer than 3.9" in lines[0]
    assert first[1].startswith("1 BLOCK")
    assert again[1] == f"0 {first[1][2:]}", "the choice is stored"
    assert other[1].startswith("1 BLOCK"), "and is that Triton's alone"
