"""Kernels in a module of their own: what else is in the module of a kernel may read its names."""

from __future__ import annotations

import triton.language as tl

SCALE: tl.constexpr = tl.constexpr(2)


def scale(x, out, n, eps, T, D: tl.constexpr, BLOCK: tl.constexpr, bias=None):
    """T is what nothing reads."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < n) * SCALE * D + eps
    if bias is not None:
        value += tl.load(bias + offset, mask=offset < n)
    tl.store(out + offset, value, mask=offset < n)


def nothing(BLOCK: tl.constexpr):
    """No argument but a config's."""
    tl.arange(0, BLOCK)


def mixed(x, y, n, eps, T, U: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, m=3, bias=None):
    """T and U are what nothing reads."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < n) + eps
    if D:
        value += m
    if bias is not None:
        value += tl.load(bias + offset, mask=offset < n)
    tl.store(y + offset, value, mask=offset < n)


def several(out, *values):
    """As many pointers as are given."""
    tl.store(out, tl.load(values[0]))


def annotated(x, out, n: tl.int64, factor: tl.float32, BLOCK: tl.constexpr):
    """Numbers, whatever is given for them."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n) * factor, mask=offset < n)
