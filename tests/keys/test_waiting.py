"""Which kernels wait for somebody, by their text."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton.language import load as fetch
from triton.language.extra import libdevice

from safetune.keys.waiting import waits_on_memory

SPIN = "wait: ld.acquire.sys.global.u32 $0, [$1]; setp.ne.u32 p, $0, 1; @p bra wait;"
NO_BRANCH = tl.constexpr("ld.acquire.sys.global.u32 $0, [$1]; // no library's")


@triton.jit
def acquire(flag):
    return tl.inline_asm_elementwise(NO_BRANCH, "=r, l", [flag], tl.int32, False, 1)


@triton.jit
def peek(flag):
    return acquire(flag) + 0


@triton.jit
def spin(flag):
    while tl.load(flag) == 0:
        pass


@triton.jit
def twice(n):
    return n * 2


@triton.jit
def by_load(flag, n):
    while tl.load(flag) < n:
        pass


@triton.jit
def by_another_name(flag, n):
    while fetch(flag) < n:
        pass


@triton.jit
def by_pointer_method(flag, n):
    while flag.atomic_cas(0, 1) == 1:
        pass


@triton.jit
def by_atomic(flag, n):
    while tl.atomic_cas(flag, 0, 1, sem="acquire") == 1:
        pass


@triton.jit
def by_assigned_name(flag, n):
    seen = tl.load(flag)
    while seen < n:
        seen = tl.load(flag)


@triton.jit
def by_assigned_names(flag, n):
    ready, count = 0, 0
    while ready == 0:
        count = tl.atomic_add(flag, 0)
        ready = (count >= n).to(tl.int32)


@triton.jit
def by_assembly(flag, n):
    while acquire(flag) != n:
        pass


@triton.jit
def by_callee_of_callee(flag, n):
    if n > 1:
        while peek(flag) != n:
            pass


@triton.jit
def in_callee(flag, n):
    spin(flag)


@triton.jit
def by_library(flag, n):
    while libdevice.abs(n) > 1:
        pass


@triton.jit
def by_branching_assembly(flag, n):
    tl.inline_asm_elementwise(SPIN, "=r, l", [flag], tl.int32, False, 1)


@triton.jit
def loops_over_numbers(flag, n):
    at = tl.program_id(0)
    while at < twice(n):
        tl.store(flag + at, tl.load(flag + at) + 1)
        at += tl.num_programs(0)


@triton.jit
def reads_before_the_loop(flag, n):
    end = tl.load(flag)
    at = 0
    while at < end:
        at += 1


@triton.jit
def reads_in_a_for(flag, n):
    for i in range(n):
        tl.atomic_add(flag, tl.load(flag + i))
        acquire(flag)


@triton.jit
def says_so_in_a_comment(flag, n):
    # while tl.load(flag) == 0: bra wait
    tl.store(flag, 1)


WAITING = [
    *(by_load, by_another_name, by_pointer_method, by_atomic, by_assigned_name, by_assigned_names),
    *(by_assembly, by_callee_of_callee, in_callee, by_library, by_branching_assembly),
]
OTHERS = [loops_over_numbers, reads_before_the_loop, reads_in_a_for, says_so_in_a_comment]


def name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


@pytest.mark.parametrize("kernel", WAITING, ids=name)
def test_a_kernel_waits(kernel: Any) -> None:
    assert waits_on_memory(kernel)
    assert waits_on_memory(triton.heuristics({"n": lambda named: 1})(kernel))


@pytest.mark.parametrize("kernel", OTHERS, ids=name)
def test_a_kernel_does_not_wait(kernel: Any) -> None:
    assert not waits_on_memory(kernel)
