"""What a kernel's text says of its atomic operations, and of what it stores to only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import triton
import triton.language as tl
from triton.language import atomic_add as add_to

from safetune.keys.effects import effects_of


@triton.jit
def put(pointer, offset, value):
    tl.store(pointer + offset, value)


@triton.jit
def taken(counter, by):
    return tl.atomic_add(counter, by)


def commented(x, out, BLOCK: tl.constexpr):
    # no atomics here: atomic_add would be slow
    """An atomic_add in words."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


def summed(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + i)))


def renamed(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    add_to(out, tl.sum(tl.load(x + i)))


def by_descriptor(x, out, BLOCK: tl.constexpr):
    there = tl.make_tensor_descriptor(out, [BLOCK], [1], [BLOCK])
    there.atomic_add([0], tl.load(x + tl.arange(0, BLOCK)))


def by_assembly(x, out, BLOCK: tl.constexpr):
    tl.inline_asm_elementwise("red.global.add.f32 [$1], $2;", "=r,l,f", [out, x], tl.int32, True, 1)


def compacted(x, out, count, BLOCK: tl.constexpr):
    value = tl.load(x + tl.program_id(0))
    place = taken(count, 1)
    put(out, place, value)


@pytest.mark.parametrize(
    ("function", "atomics", "any_order"),
    [
        (commented, False, False),
        (summed, True, False),
        (renamed, True, False),
        (by_descriptor, True, False),
        (by_assembly, True, False),
        (compacted, True, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_calls_are_atomic_operations_and_words_are_not(
    function: Callable[..., None], atomics: bool, any_order: bool
) -> None:
    found = effects_of(triton.jit(function))
    assert (found.atomics, found.any_order) == (atomics, any_order)


@triton.jit
def dropped(value, seed, offset):
    return tl.where(tl.rand(seed, offset) > 0.5, value, 0.0)


def with_dropout(x, out, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, dropped(tl.load(x + i), seed, i))


def with_philox(out, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.randint4x(seed, i)[0])


def timed(out, BLOCK: tl.constexpr):
    tl.store(out, tl.extra.cuda.globaltimer())


def rounded(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    tl.store(out + i, tl.inline_asm_elementwise(code, "=r,f,f", [x, x], tl.int32, True, 1))


@pytest.mark.parametrize(
    ("function", "draws", "repeats"),
    [
        (commented, False, True),
        (with_dropout, True, True),
        (with_philox, True, True),
        (summed, False, False),
        (timed, False, False),
        (rounded, False, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_text_shows_whether_numbers_are_drawn_and_whether_launches_repeat(
    function: Callable[..., None], draws: bool, repeats: bool
) -> None:
    found = effects_of(triton.jit(function))
    assert (found.draws, found.repeats) == (draws, repeats)


def strided(x, out, other, n, BLOCK: tl.constexpr):
    pointers = out + tl.program_id(0) * n
    pointers += tl.arange(0, BLOCK)
    if other is not None:
        put(other, tl.program_id(0), 1)
    tl.store(pointers, tl.load(x + tl.arange(0, BLOCK)).to(out.dtype.element_ty))


def in_place(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)


def by_block(x, out, BLOCK: tl.constexpr):
    there = tl.make_block_ptr(out, (BLOCK,), (1,), (0,), (BLOCK,), (0,))
    here = tl.make_block_ptr(x, (BLOCK,), (1,), (0,), (BLOCK,), (0,))
    for _ in range(2):
        tl.store(there, tl.load(here))
        there = tl.advance(there, (BLOCK,))


def read_later(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    there = out + i
    tl.store(there, i)
    tl.store(x + i, tl.load(there))


def read_by_a_callee(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i)
    taken(out, 1)


def at_an_index(x, out, BLOCK: tl.constexpr):
    tl.store(x + tl.load(out), 1)


def described(x, out, BLOCK: tl.constexpr):
    there = tl.make_tensor_descriptor(out, [BLOCK], [1], [BLOCK])
    there.store([0], x.load([0]))


@pytest.mark.parametrize(
    ("function", "only_stored"),
    [
        (strided, ("n", "other", "out")),
        (in_place, ()),
        (by_block, ("out",)),
        (read_later, ("x",)),
        (read_by_a_callee, ()),
        (at_an_index, ("x",)),
        (described, ("out",)),
        (summed, ()),
        (compacted, ("out",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_parameter_that_is_stored_to_and_never_read(
    function: Callable[..., None], only_stored: tuple[str, ...]
) -> None:
    assert effects_of(triton.jit(function)).only_stored == only_stored
