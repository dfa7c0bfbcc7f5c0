"""A launch whose choice is known costs no more than it did: instructions and memory, counted.

Counts do not depend on the machine or its load. Those below are of one version of Python; where a
change makes one smaller, write the new one down.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton

import safetune
from tests.launch.conftest import Machine

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from tests.launch.conftest import Tuned

pytestmark = [
    pytest.mark.internals,
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the counts are Python 3.11's"),
]

PRODUCT = (str(Path(safetune.__file__).parent), "<safetune launch>")
CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]
X, OUT = torch.zeros(64), torch.zeros(64)

Launch = Callable[[], object]

#: Instructions of safetune's code in one launch on Triton 3.9, which has a switch more to look at
#: than 3.6, and the most bytes in use during it.
MOST = {
    "tuple grid": (347, 496),
    "function grid": (373, 512),
    "ten arguments": (356, 552),
    "one config": (353, 496),
    "heuristics": (390, 1176),
}


class Quiet(Machine):
    """A launch on it costs nothing in Python."""

    def _binary(self, *compiled: Any) -> CompiledKernel:
        kernel = super()._binary(*compiled)
        kernel._run = "".format  # takes any arguments
        return kernel


@pytest.fixture
def machine_type() -> type[Machine]:
    return Quiet


@pytest.fixture
def launches(machine: Machine, tuned: type[Tuned], kernels: Any) -> dict[str, Launch]:
    """A known launch of each kind."""

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (3,)

    def tuner(function: Any, configs: Any = CONFIGS) -> Any:
        jit = machine.kernel_of(function)
        return tuned(jit, configs, key=["n"], phantom="keep").tuner

    scale, mixed = tuner(kernels.scale), tuner(kernels.mixed)
    single, heuristic = tuner(kernels.scale, CONFIGS[:1]), tuner(kernels.scale)
    heuristic.fn = triton.heuristics({"D": lambda named: 4})(heuristic.fn)
    return {
        "tuple grid": lambda: scale[(3,)](X, OUT, 32, 0.5, 7, D=4),
        "function grid": lambda: scale[grid](X, OUT, 32, 0.5, 7, D=4),
        "ten arguments": lambda: mixed[(3,)](X, OUT, 32, 0.5, 7, U=1, D=4, m=5, bias=X),
        "one config": lambda: single[(3,)](X, OUT, 32, 0.5, 7, D=4),
        "heuristics": lambda: heuristic[(3,)](X, OUT, 32, 0.5, 7),
    }


@pytest.mark.parametrize("kind", MOST)
def test_a_known_launch_runs_no_more_instructions(launches: dict[str, Launch], kind: str) -> None:
    launch = launches[kind]
    for _ in range(3):
        launch()
    found = instructions(launch)
    outside = {name for name in found if not name.startswith(PRODUCT)} - own_files()
    assert not outside, f"a known launch runs code of {outside}"
    product = sum(count for name, count in found.items() if name.startswith(PRODUCT))
    assert product <= MOST[kind][0]


@pytest.mark.parametrize("kind", MOST)
def test_a_known_launch_allocates_no_more(launches: dict[str, Launch], kind: str) -> None:
    launch = launches[kind]
    for _ in range(3000):
        launch()  # Python keeps up to 2000 freed tuples of a length
    tracemalloc.start()
    try:
        peaks = [bytes_during(launch) for _ in range(10)]
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            launch()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 1000, "a known launch keeps memory"
    assert min(peaks) <= MOST[kind][1]


def bytes_during(launch: Launch) -> int:
    """Return the most bytes in use during a call, above those before it."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    launch()
    return tracemalloc.get_traced_memory()[1] - before


def own_files() -> set[str]:
    """Files of code that a launch has to run: Triton's `driver.active` and its comparison of the
    constants that a kernel uses, and these tests.
    """
    modules = ("triton.runtime.driver", "triton.language.core", Machine.__module__, __name__)
    return {str(sys.modules[name].__file__) for name in modules}


def instructions(launch: Launch) -> Counter[str]:
    """Count the bytecode instructions that a call runs, by file."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts[frame.f_code.co_filename] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        launch()
    finally:
        sys.settrace(before)
    return counts
