"""A call's arguments as plain JSON data, without what their tensors hold, and tensors like them.

The layout of the tensors is kept as exactly as for a child (`spans`): shape, strides, offset,
alignment, and which tensors share memory. Floats are drawn at random, as inputs too large to copy
are (`random_inputs`). Integers are as recorded (`integers`), else zeros, which are in range as an
index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton.language as tl

from safetune.errors import KernelNotTransferable
from safetune.inputs import integers, pointers, random_inputs, spans
from safetune.inputs.call import Call, may_be_address
from safetune.inputs.spans import ALIGNMENT, FLOATS, BlockSpec, Noise, TensorSpec
from safetune.isolation import backend
from safetune.launch.call_shape import named_arguments


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
        "integers": integers.contents_of(tensors, values) if read else [],
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
        integers.fill(tensors[number], content)
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
