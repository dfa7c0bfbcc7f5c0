"""What a copy or a fill cannot do with bytes of a device: the source of `byte_kernels.ptx`.

    python -m safetune.both.byte_kernels

writes that file anew, or another. Children load it through the driver (`device_bytes`), so that
they need neither a compiler nor torch for it.

A view is walked by the numbers of its elements. `dims` holds (size, stride) of the `rank` inner
dimensions, the innermost first; the outermost has the stride `step`. A dense view has rank 0.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

PTX = Path(__file__).with_suffix(".ptx")
#: The oldest GPUs that can run these kernels, and a version that drivers of CUDA 12 understand.
_ARCHITECTURE, _PTX_VERSION = 80, 80
_WARPS = 4
#: Elements that a program takes at once: of a view, and words of a checksum.
BLOCK, LONG_BLOCK = 256, 1024

WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
FLOATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_VIEW = {"dims": "*i64", "rank": "i64", "step": "i64"}
_FLAT = {"count": "i64"}


@triton.jit
def _mixed(x):
    x ^= x >> 32
    x *= 0xD6E8FEB86659FD93
    x ^= x >> 32
    return x * 0xD6E8FEB86659FD93


@triton.jit
def checksum(words, count, first, second, last, found, BLOCK: tl.constexpr):
    """Add a checksum of `count` words of 8 bytes to `found`. Each word is mixed with its place.

    Only some bits count of the first two words and of the last one.
    """
    places = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.uint64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        place = begin + places
        word = tl.load(words + place, mask=place < count, other=0)
        word = tl.where(place == 0, word & first, word)
        word = tl.where(place == 1, word & second, word)
        word = tl.where(place == count - 1, word & last, word)
        mixed = _mixed(word + place.to(tl.uint64) * 0x9E3779B97F4A7C15)
        total += tl.where(place < count, mixed, 0)
    tl.atomic_add(found, tl.sum(total, 0), sem="relaxed")


@triton.jit
def _offsets(numbers, dims, rank, step):
    offsets = tl.zeros_like(numbers)
    for dim in range(rank):
        size = tl.load(dims + 2 * dim)
        offsets += numbers % size * tl.load(dims + 2 * dim + 1)
        numbers = numbers // size
    return offsets + numbers * step


@triton.jit
def fill(base, dims, rank, step, count, value, BLOCK: tl.constexpr):
    """Set the elements of a view."""
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, count, stride):
        numbers = begin + tl.arange(0, BLOCK)
        new = tl.zeros((BLOCK,), base.dtype.element_ty) + tl.cast(value, base.dtype.element_ty)
        tl.store(base + _offsets(numbers, dims, rank, step), new, mask=numbers < count)


@triton.jit
def unlike(base, dims, rank, step, count, value, found, BLOCK: tl.constexpr):
    """Add the number of elements of a view that have another value to `found`."""
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, count, stride):
        numbers = begin + tl.arange(0, BLOCK)
        inside = numbers < count
        held = tl.load(base + _offsets(numbers, dims, rank, step), mask=inside, other=0)
        total += (inside & (held != tl.cast(value, base.dtype.element_ty))).to(tl.int64)
    tl.atomic_add(found, tl.sum(total, 0), sem="relaxed")


@triton.jit
def gather(base, dims, rank, step, count, numbers, values, BLOCK: tl.constexpr):
    """Copy the elements of a view that `numbers` names to `values`, 8 bytes each."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    number = tl.load(numbers + place, mask=inside, other=0)
    held = tl.load(base + _offsets(number, dims, rank, step), mask=inside, other=0)
    tl.store(values + place, held.to(tl.uint64), mask=inside)


@triton.jit
def beyond(mine, theirs, dims, rank, step, count, share, floor, found, BLOCK: tl.constexpr):
    """Add the number of elements that are further apart than `share` of theirs, and than `floor`.

    Equal ones never are, and two NaN are equal; one that is not finite is, from any other.
    """
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    wide = tl.float64 if mine.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, count, stride):
        numbers = begin + tl.arange(0, BLOCK)
        inside = numbers < count
        offsets = _offsets(numbers, dims, rank, step)
        a = tl.load(mine + offsets, mask=inside, other=0).to(wide)
        b = tl.load(theirs + offsets, mask=inside, other=0).to(wide)
        same = (a == b) | ((a != a) & (b != b))
        distance = tl.abs(a - b)
        limit = tl.maximum(tl.cast(share, wide) * tl.abs(b), tl.cast(floor, wide))
        near = (distance <= limit) & (distance < float("inf"))
        total += (inside & ~(same | near)).to(tl.int64)
    tl.atomic_add(found, tl.sum(total, 0), sem="relaxed")


@triton.jit
def draw(base, count, seed, mean, std, low, high, BLOCK: tl.constexpr):
    """Set elements to normal values, cut to [low, high]."""
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, count, stride):
        numbers = begin + tl.arange(0, BLOCK)
        value = tl.randn(seed, numbers) * tl.cast(std, tl.float32) + tl.cast(mean, tl.float32)
        value = tl.minimum(tl.maximum(value, tl.cast(low, tl.float32)), tl.cast(high, tl.float32))
        tl.store(base + numbers, value.to(base.dtype.element_ty), mask=numbers < count)


def _kernels() -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Yield the name, the function and the types of the parameters of each kernel."""
    bits = {"first": "u64", "second": "u64", "last": "u64"}
    yield "checksum", checksum, {"words": "*u64", **_FLAT, **bits, "found": "*u64"}
    for width, kind in WIDTHS.items():
        view = {"base": f"*{kind}", **_VIEW, **_FLAT}
        yield f"fill_{width}", fill, {**view, "value": "u64"}
        yield f"unlike_{width}", unlike, {**view, "value": "u64", "found": "*i64"}
        yield f"gather_{width}", gather, {**view, "numbers": "*i64", "values": "*u64"}
    noise = dict.fromkeys(("mean", "std", "low", "high"), "fp64")
    for name, kind in FLOATS.items():
        pair = {"mine": f"*{kind}", "theirs": f"*{kind}", **_VIEW, **_FLAT}
        limits = {"share": "fp64", "floor": "fp64", "found": "*i64"}
        yield f"beyond_{name}", beyond, {**pair, **limits}
        yield f"draw_{name}", draw, {"base": f"*{kind}", **_FLAT, "seed": "i64", **noise}


def ptx() -> str:
    """Return the PTX of each kernel, after a line with its name and what its launch needs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile  # noqa: A004

    target = GPUTarget("cuda", _ARCHITECTURE, 32)
    options = {"num_warps": _WARPS, "ptx_version": _PTX_VERSION}
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    parts = [f"//! triton {triton.__version__} source {digest}\n"]
    for name, function, signature in _kernels():
        divisible = {"checksum": {(0,): [["tt.divisibility", 16]]}}.get(name, {})
        block = LONG_BLOCK if name == "checksum" else BLOCK
        types = {**signature, "BLOCK": "constexpr"}
        source = ASTSource(function, types, {(len(signature),): block}, divisible)
        made = compile(source, target=target, options=options)
        text = made.asm["ptx"].replace(made.metadata.name, name)
        count = len(re.findall(rf"\.param .*{name}_param_", text.partition(".reqntid")[0]))
        lines = [line.partition("//")[0].strip() for line in text.splitlines()]
        header = f"//! {name} parameters={count} shared={made.metadata.shared} block={block}"
        parts.append("\n".join([header, *filter(None, lines)]) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    (Path(sys.argv[1]) if sys.argv[1:] else PTX).write_text(ptx())
