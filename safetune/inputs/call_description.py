"""A call's arguments as plain JSON data, without what their tensors hold, and tensors like them.

The layout of the tensors is kept as exactly as for a child (`spans`): shape, strides, offset,
alignment, and which tensors share memory. Floats are drawn at random, as inputs too large to copy
are (`random_inputs`).

Integers are as recorded, else zeros, which are in range as an index. Their values may be users'
data: token numbers, lengths of documents. Of offsets, such as the `cu_seqlens` of sequences behind
one another, a histogram of the lengths is enough to do as much work; of others the values
themselves, where `SAFETUNE_RECORD_VALUES=1` allows that.
"""

from __future__ import annotations

import base64
import ctypes
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton.language as tl

from safetune.errors import KernelNotTransferable
from safetune.inputs import pointers, random_inputs, spans
from safetune.inputs.call import Call, may_be_address
from safetune.inputs.spans import ALIGNMENT, FLOATS, BlockSpec, Noise, TensorSpec
from safetune.isolation import backend
from safetune.launch.call_shape import named_arguments

#: No offsets are looked for in larger tensors, and the values of a call take no more text.
_MOST_OFFSETS = 1 << 20
_MOST_TEXT = 1 << 19


def describe(call: Call, values: bool = False, read: bool = True) -> dict[str, Any]:
    """Return the positional and keyword arguments of a call.

    A meta tensor, such as an array without data yet, is described as one in memory of its own.

    Args:
        values: whether the values of integer tensors may be recorded.
        read: whether tensors can be read now, which waits for their device.

    Raises:
        KernelNotTransferable: an argument is an address, or of a type that JSON cannot describe.
    """
    tensors: list[torch.Tensor] = []
    names = named_arguments(call.arg_names, call.args)
    args = [_encode(value, name, tensors, call) for name, value in names.items()]
    kwargs = {name: _encode(value, name, tensors, call) for name, value in call.kwargs.items()}
    device = "cpu" if call.interpreted else backend.required().torch_type
    blocks, views = _laid_out(tensors, device)
    return {
        "args": args,
        "kwargs": kwargs,
        "blocks": [asdict(block) for block in blocks],
        "tensors": [asdict(view) for view in views],
        "integers": _contents_of_all(tensors, values) if read else [],
    }


def _laid_out(
    tensors: Sequence[torch.Tensor], device: str
) -> tuple[list[BlockSpec], list[TensorSpec]]:
    """Return the layout of tensors; meta tensors get memory on `device`."""
    merged = spans.merged_spans([tensor for tensor in tensors if not tensor.is_meta])
    blocks = [BlockSpec(s.device, 0, s.size, s.start % ALIGNMENT) for s in merged]
    views = []
    for tensor in tensors:
        if not tensor.is_meta:
            views.append(spans.tensor_spec(tensor, merged))
            continue
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        views.append(TensorSpec(len(blocks), 0, spans.dtype_name(tensor), shape, stride))
        blocks.append(BlockSpec(device, 0, tensor.untyped_storage().nbytes(), 0))
    return blocks, views


def rebuild(
    data: dict[str, Any], device: str, filled: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments like those described; tensors that were on a GPU are made on `device`.

    `filled` says whether their contents will be read.
    """
    blocks = [BlockSpec(**block) for block in data["blocks"]]
    views = [TensorSpec.of(view) for view in data["tensors"]]
    memory = [
        _memory(block, [view for view in views if view.block == index], device, index, filled)
        for index, block in enumerate(blocks)
    ]
    tensors = [spans.view_of(memory[view.block], view) for view in views]
    for number, content in data.get("integers", ()) if filled else ():
        _fill(tensors[number], content)
    args = tuple(_decode(value, tensors) for value in data["args"])
    return args, {name: _decode(value, tensors) for name, value in data["kwargs"].items()}


def drawn(data: dict[str, Any], arg_names: Sequence[str]) -> list[str]:
    """Return the described arguments with tensors whose values are not recorded."""
    exact = {number for number, content in data.get("integers", ()) if "values" in content}
    return _with_tensors(data, arg_names, set(range(len(data["tensors"]))) - exact)


def unknown(data: dict[str, Any], arg_names: Sequence[str]) -> list[str]:
    """Return the described arguments with integers of which nothing is recorded."""
    known = {number for number, _ in data.get("integers", ())}
    views = enumerate(map(TensorSpec.of, data["tensors"]))
    numbers = {number for number, view in views if view.dtype not in FLOATS}
    return _with_tensors(data, arg_names, numbers - known)


def _with_tensors(data: dict[str, Any], arg_names: Sequence[str], numbers: set[int]) -> list[str]:
    named = named_arguments(arg_names, data["args"], data["kwargs"])
    return [name for name, value in named.items() if numbers & set(_numbers(value))]


def _memory(
    block: BlockSpec, views: Sequence[TensorSpec], device: str, seed: int, filled: bool
) -> torch.Tensor:
    target = "cpu" if block.device == "cpu" else device
    memory = torch.empty(block.size + ALIGNMENT, dtype=torch.uint8, device=target)
    start = (block.misalignment - memory.data_ptr()) % ALIGNMENT
    live = memory[start : start + block.size]
    if not filled or memory.is_meta:
        return live
    live.zero_()
    if views and random_inputs.is_drawable(views, block.misalignment):
        # A standard normal distribution, cut at four standard deviations.
        dtype = random_inputs.real_dtype(views[0].dtype)
        noise = Noise(dtype, mean=0.0, std=1.0, low=-4.0, high=4.0, seed=seed)
        random_inputs.draw(live, noise, target)
    return live


def _encode(value: Any, name: str, tensors: list[torch.Tensor], call: Call) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (tuple, list)):
        items = [_encode(item, name, tensors, call) for item in value]
        return {type(value).__name__ if type(value) in (tuple, list) else "tuple": items}
    if isinstance(value, tl.constexpr):
        return {"constexpr": _encode(value.value, name, tensors, call)}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, tl.dtype):
        return {"triton": str(value)}
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) not in (type(None), bool, int, float, str):
        raise KernelNotTransferable(f"{name} is a {type(value).__name__}, which cannot be recorded")
    if may_be_address(value) and pointers.is_live(call.interpreted)(value):
        raise pointers.not_reproducible(name, value)
    return value


def _decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("tuple", "list"):
        items = [_decode(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "constexpr":
        return tl.constexpr(_decode(content, tensors))
    makers = {"torch": lambda name: getattr(torch, name), "triton": tl.dtype, "float": float}
    return makers[kind](content)


def _numbers(value: Any) -> list[int]:
    """Return the numbers of the tensors in an encoded value."""
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, dict):
        return [value["tensor"]] if "tensor" in value else _numbers(list(value.values()))
    return []


def _contents_of_all(tensors: Sequence[torch.Tensor], values: bool) -> list[list[Any]]:
    """Return what is recorded of a call's tensors as JSON data, each with the tensor's number.

    Args:
        values: whether their values may be recorded.
    """
    found, room = [], _MOST_TEXT
    for number, tensor in enumerate(tensors):
        content = _content_of(tensor, values, room)
        if content is not None:
            found.append([number, content])
            room -= len(content.get("values", ""))
    return found


def _content_of(tensor: torch.Tensor, values: bool, room: int) -> dict[str, Any] | None:
    if tensor.is_meta or spans.dtype_name(tensor) in FLOATS or tensor.is_complex():
        return None
    may_be_offsets = tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)
    if not values and not (may_be_offsets and 2 <= tensor.numel() <= _MOST_OFFSETS):
        return None
    with spans.reading(tensor.device):
        found = tensor.detach().cpu().contiguous()
    if not values:
        return _lengths(found)
    data = zlib.compress(ctypes.string_at(found.data_ptr(), found.nbytes))
    text = base64.b85encode(data).decode()
    return {"values": text} if len(text) <= room else None


def _fill(tensor: torch.Tensor, content: dict[str, Any]) -> None:
    """Fill a tensor with recorded values, or with offsets of as many sequences as long."""
    if "values" in content:
        data = bytearray(zlib.decompress(base64.b85decode(content["values"])))
        made = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype) if data else tensor
    else:
        made = torch.tensor(_offsets(content["lengths"]), dtype=tensor.dtype)
    tensor.copy_(made.reshape(tensor.shape))


def _lengths(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the histogram of the lengths between offsets: how many have how many bits, and their
    sum; None for other integers.
    """
    lengths = tensor.diff()
    if int(tensor[0]) != 0 or bool((lengths < 0).any()):
        return None
    found: dict[int, list[int]] = {}
    for length in lengths.tolist():
        known = found.setdefault(length.bit_length(), [0, 0])
        known[0], known[1] = known[0] + 1, known[1] + length
    return {"lengths": [found[bits] for bits in sorted(found)]}


def _offsets(histogram: list[list[int]]) -> list[int]:
    """Return offsets with these lengths, in an order that is the same in every process."""
    lengths = []
    for count, total in histogram:
        least, more = divmod(total, count)
        lengths += [least + (number < more) for number in range(count)]
    random.Random(0).shuffle(lengths)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
