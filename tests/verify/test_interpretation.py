"""Kernels run in the interpreter wherever they come from, and nothing is changed afterwards."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from safetune.errors import NotInterpretable
from safetune.verify.interpretation import is_jit
from safetune.verify.overlap import check_overlap

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.internals

kinds = pytest.mark.parametrize("kind", [JITFunction, InterpretedFunction])


def plus_one(value):
    return value + 1


def all_of_language() -> dict[tuple[str, str], Any]:
    """Every attribute of the language, of its classes and of the interpreter's builder."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "triton" and isinstance(module, ModuleType):
            for attribute, value in vars(module).items():
                found[name, attribute] = value
                if isinstance(value, type):
                    found |= {(f"{name}.{attribute}", n): v for n, v in vars(value).items()}
    found |= {("builder", n): v for n, v in vars(interpreter.interpreter_builder).items()}
    return found


def kernel_body(y, n, FAILS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(y + offsets, mask=offsets < n, other=0.0)
    total = tl.sum(values) + tl.max(values) + tl.core.reduce(values, 0, smaller)
    tl.store(y + offsets, total, mask=offsets < n)
    tl.static_assert(not FAILS)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@kinds
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(kind: Any, fails: bool) -> None:
    """Triton's own interpreter leaves `triton.language.core` changed after `tl.sum`."""
    kernel = kind(kernel_body)
    check_overlap(kernel, (1,), torch.zeros(8), 8, False, 8)  # imports what it needs
    before, own = all_of_language(), dict(globals())
    cached = set(InterpretedFunction.rewritten_fn)

    if fails:
        with pytest.raises(NotInterpretable, match="AssertionError"):
            check_overlap(kernel, (2,), torch.zeros(16), 16, True, 8)
    else:
        assert check_overlap(kernel, (2,), torch.zeros(16), 16, False, 8, outputs=["y"]).ok

    after = all_of_language()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []
    assert dict(globals()) == own
    assert set(InterpretedFunction.rewritten_fn) == cached


@kinds
def test_functions_that_a_kernel_calls_are_interpreted(kind: Any) -> None:
    """By name, from a closure, from a module, by name out of the language, and as an argument."""
    helpers = ModuleType("helpers")
    helpers.plus_one = kind(plus_one)
    called = kind(plus_one)
    size, store = 4, tl.store

    def body(y, TURN: tl.constexpr):
        value = TURN(called(helpers.plus_one(tl.zeros([size], tl.float32))))
        store(y + tl.arange(0, size), value)
        tl.device_assert(tl.sum(value) == 12)

    report = check_overlap(kind(body), (1,), torch.zeros(4), kind(plus_one), outputs=["y"])

    assert report.ok


@kinds
def test_counters_of_loops(kind: Any) -> None:
    """They are tensors, as in a compiled kernel, and overflow where they have 32 bits."""

    def body(y, begin, end):
        for index in tl.range(begin, end, num_stages=2):
            tl.store(y + index * 2**16, 1.0)
        for index in range(begin, end):
            tl.store(y + index.to(tl.int64) * 0, 1.0)

    begin = 2**15
    y = torch.zeros(1)
    found = check_overlap(kind(body), (1,), y, begin, begin + 1).find("outside")
    assert [place.index for place in found.places] == [(-(2**31),)]

    def wide_body(y, begin, end):
        for index in range(begin.to(tl.int64), end):
            tl.store(y + index * 2**16, 1.0)

    found = check_overlap(kind(wide_body), (1,), y, begin, begin + 1).find("outside")
    assert [place.index for place in found.places] == [(2**31,)]


@kinds
def test_numbers(kind: Any) -> None:
    """Arguments are tensors, as in a compiled kernel: a float has 32 bits, in a tuple, too."""

    def body(y, scale, flag, both):
        tl.static_assert(scale.dtype == tl.float32 and both[1].dtype == tl.float32)
        tl.static_assert(flag.dtype == tl.int1 and both[0].dtype == tl.int32)
        tl.device_assert(scale.to(tl.float64) != 0.1)
        tl.static_assert((scale * tl.full([4], 1, tl.float16)).dtype == tl.float32)
        tl.store(y, scale.to(tl.float16), mask=flag)

    report = check_overlap(kind(body), (1,), torch.zeros(1), 0.1, True, (1, 0.1), outputs=["y"])

    assert report.ok


@kinds
def test_two_threads(kind: Any) -> None:
    """The interpreter's state is that of the process: a check waits for the other one."""
    reports: list[Any] = []
    both = threading.Barrier(2)

    def body(y, STEP: tl.constexpr):
        tl.store(y + tl.program_id(0) // STEP, 1.0)

    def check(step: int) -> None:
        both.wait()
        for _ in range(5):
            reports.append((step, check_overlap(kind(body), (20,), torch.zeros(20), step).ok))

    threads = [threading.Thread(target=check, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(reports) == [(1, True)] * 5 + [(2, False)] * 5


def test_jit_functions_are_recognised() -> None:
    assert is_jit(JITFunction(plus_one))
    assert is_jit(InterpretedFunction(plus_one))
    assert not is_jit(plus_one)
    assert not is_jit(tl)


SCRIPT = '''
import sys, torch, triton
import triton.experimental.gluon
from types import ModuleType
from typing import Any
from triton.runtime import interpreter
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from safetune.verify.overlap import check_overlap

@triton.jit
def scaled(values, factor):
    return values * factor

@triton.jit
def rows(y, n, BLOCK: tl.constexpr, STEP: tl.constexpr):
    offsets = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    values = tl.load(y + offsets, mask=offsets < n, other=0.0)
    tl.store(y + offsets, scaled(values - tl.sum(values), 2.0), mask=offsets < n)

ALL_OF_LANGUAGE

def compiled():
    """The text of the kernel before it is optimised, for a card that is not there."""
    signature = {"y": "*fp32", "n": "i32", "BLOCK": "constexpr", "STEP": "constexpr"}
    source = ASTSource(rows, signature, {(2,): 16, (3,): 16})
    return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ttir"]

triton.knobs.compilation.always_compile = True
assert type(rows).__name__ == "JITFunction" and type(tl.sum).__name__ == "JITFunction"
if sys.argv[1] == "compile first":
    before = compiled()
language = all_of_language()
y = torch.randn(40)
assert check_overlap(rows, (3,), y, 40, 16, 16, outputs=["y"]).ok
found = check_overlap(rows, (3,), y, 40, 16, 15).find("overlap", "y")
assert (found.elements, found.places[0].lines) == (2, ("script.py:20",)), found
changed = [name for name, value in all_of_language().items() if language.get(name) is not value]
assert changed == [], changed
if sys.argv[1] != "compile first":
    before = compiled()
assert "tt.store" in before
assert compiled() == before
'''


@pytest.mark.parametrize("order", ["compile first", "check first"])
def test_a_process_that_compiles(fresh_process: FreshProcess, tmp_path: Path, order: str) -> None:
    """Without TRITON_INTERPRET; the language is what it was, and the compiler works as before."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("ALL_OF_LANGUAGE", inspect.getsource(all_of_language)))

    fresh_process(script, order, env={"TRITON_INTERPRET": None}, warm=True)
