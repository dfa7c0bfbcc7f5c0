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


def launch_scale(x, out, n, eps, T, D):
    """Shows that T stands for no other value."""
    scale[(1,)](x, out, n, eps, T, D=D)


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


def scale_further(x, out, n, eps, T, D: tl.constexpr, BLOCK: tl.constexpr, bias=None, bias2=None):
    """Another kernel with the same arguments, and one more."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n) * D - eps, mask=offset < n)


def named_debug(out, debug, BLOCK: tl.constexpr):
    """Triton sets an option of this name at each launch; so for the next one."""
    tl.store(out, debug)


def named_run(out, run, BLOCK: tl.constexpr):
    """Functions of ours have a parameter of this name, or had one; so for the next ones."""
    tl.store(out, run)


def named_kernel(out, kernel, BLOCK: tl.constexpr):
    tl.store(out, kernel)


def named_config(out, config, BLOCK: tl.constexpr):
    tl.store(out, config)


def named_args(out, args, BLOCK: tl.constexpr):
    tl.store(out, args)


def named_fn(out, fn, BLOCK: tl.constexpr):
    tl.store(out, fn)


def named_values(out, values, BLOCK: tl.constexpr):
    tl.store(out, values)


def named_as_options(x, out, n, launch_pdl, enable_fp_fusion, BLOCK: tl.constexpr):
    """Triton also takes two of these for options of the compiler."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)


def launch_named_as_options(x, out, n, given, also_given):
    named_as_options[(1,)](x, out, n, launch_pdl=given, enable_fp_fusion=also_given)
