"""What a tuning says of configs with a bug, also a short one: lines, and never an exception."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: A config adds what it should not, ends its process, needs too much, or is right: by its name.
SCRIPT = """
import ctypes, sys, warnings
import torch, triton, triton.language as tl
from triton.runtime.errors import OutOfResources
from safetune import safetune

MS = {"right": 2.0, "wrong": 1.0, "slow": 9.0, "dies": 2.0, "large": 2.0}
ADDS = {"wrong": 1.0, "slow": 2.0}
current = {}


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr, ADD: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n) + ADD, mask=offset < n)


def config(kind, block):
    def hook(arguments):
        current["kind"] = kind
        if kind == "dies":
            ctypes.string_at(0)
        if kind == "large":
            raise OutOfResources(2, 1, "shared memory")

    return triton.Config({"BLOCK": block, "ADD": ADDS.get(kind, 0.0)}, pre_hook=hook)


def bench(launch, quantiles):
    launch()
    return [MS[current["kind"]]] * 3


def right(arguments):
    return {"dst": arguments["src"]}


warnings.simplefilter("error")
kinds = sys.argv[1].split()
configs = [config(kind, 16 << number) for number, kind in enumerate(kinds)]
options = {"reference": right} if "reference" in sys.argv else {}
kernel = safetune(configs=configs, key=["n"], do_bench=bench, **options)(copy_kernel)
for n in (100, 101) if "twice" in sys.argv else (100,):
    dst, src = torch.zeros(n), torch.ones(n)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
    assert torch.equal(dst, src)
"""

BUGS = (
    "safetune: copy_kernel: {} crashed, hung or gave a different result ({}): "
    "ADD=1.0 BLOCK=256 num_warps=4 num_stages=3{}; `safetune show copy_kernel` has the details"
)
LEFT_OUT = (
    "safetune: copy_kernel: faster configs are left out, because their results differ from the "
    "others': ADD=1.0 BLOCK=256 num_warps=4 num_stages=3 (2.00 times as fast). If they are right, "
    "give the right result with reference=, or name the arguments that may differ in scratch=[...]"
)


@pytest.mark.parametrize(
    ("kinds", "more", "lines"),
    [
        ("right right right large right", (), []),
        (
            "right right right large wrong slow dies",
            ("twice",),
            [BUGS.format("3 of 7 configs", "2 wrong_result, 1 died(SIGSEGV)", ", …"), LEFT_OUT],
        ),
        pytest.param(
            "right right right large wrong",
            ("reference",),
            [BUGS.format("1 of 5 configs", "1 wrong_result", "")],
            marks=pytest.mark.full,
        ),
    ],
    ids=["too large", "a crash and a faster one", "a reference"],
)
def test_a_line_for_each_kernel_where_warnings_are_errors(
    kinds: str,
    more: tuple[str, ...],
    lines: list[str],
    tmp_path: Path,
    fresh_process: FreshProcess,
) -> None:
    script = tmp_path / "launch.py"
    script.write_text(SCRIPT)
    done = fresh_process(script, kinds, *more, warm=True)
    progress = re.compile("safetune: (tuning copy_kernel|copy_kernel tuned for) ")
    assert [line for line in done.stderr.splitlines() if not progress.match(line)] == lines
