"""Kernels for `test_changed_reader.py`: nothing reads T, until something is replaced."""

from __future__ import annotations

from types import ModuleType

import triton.language as tl
from triton.runtime.jit import JITFunction


@JITFunction
def ignores(value, T):
    return value


@JITFunction
def reads(value, T):
    return value + T


@JITFunction
def passes_on(value, T):
    return ignores(value, T)


helpers = ModuleType("helpers")
helpers.act = ignores  # type: ignore[attr-defined]


def plain(out, n, T, BLOCK: tl.constexpr):
    tl.store(out, n)


def calls(out, n, T, BLOCK: tl.constexpr):
    tl.store(out, ignores(n, T))


def calls_through(out, n, T, BLOCK: tl.constexpr):
    tl.store(out, passes_on(n, T))


def calls_in_a_module(out, n, T, BLOCK: tl.constexpr):
    tl.store(out, helpers.act(n, T))


def enclosing(helper=ignores):
    """Return a kernel that calls a variable of this function, and what sets that."""

    def calls_a_closure(out, n, T, BLOCK: tl.constexpr):
        tl.store(out, helper(n, T))

    def replace(other):
        nonlocal helper
        helper = other

    return calls_a_closure, replace


ADDED = tl.constexpr(1)


@JITFunction
def doubles(value):
    return value * 2


@JITFunction
def triples(value):
    return value * 3


def _adding(helper=doubles):
    @JITFunction
    def adds(value):
        return doubles(value) + helper(value) + ADDED + helpers.AMOUNT

    def replace(other):
        nonlocal helper
        helper = other

    return adds, replace


adds, replace_doubles = _adding()


helpers.AMOUNT = tl.constexpr(2)  # type: ignore[attr-defined]


def computes(out, n, T, BLOCK: tl.constexpr):
    tl.store(out, adds(n + T))


def other(out, n, T, BLOCK: tl.constexpr):
    tl.store(out, n + T)


SOURCE_THAT_READS = "def kernel(out, n, T, BLOCK: tl.constexpr):\n    tl.store(out, n + T)\n"


def launch(out, n, T):
    """The launches that show that T stands for no other value."""
    for kernel in (plain, calls, calls_through, calls_in_a_module, other):
        kernel[(1,)](out, n, T)
    calls_a_closure, _ = enclosing()
    calls_a_closure[(1,)](out, n, T)
