"""A call's arguments as plain JSON data without the contents of tensors, and tensors like them.

The layout of the tensors is kept as exactly as for a child (`spans`): shape, strides, offset,
alignment, shared memory, and arguments that are the same tensor. Floats are drawn at random, like
inputs too large to copy (`random_inputs`).

Integer values may be users' data: token numbers, document lengths. For offsets, such as the
`cu_seqlens` of concatenated sequences, a histogram of the lengths reproduces the work. For other
integers the range is recorded and values are drawn from it, sorted if the array never decreases.

Classes and enum members are recorded by module and name, provided that the name resolves to them.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
import triton.language as tl

from safetune.both import backend
from safetune.errors import KernelNotTransferable
from safetune.inputs import pointers, random_inputs, spans
from safetune.inputs.call import Call, may_be_address
from safetune.inputs.spans import ALIGNMENT, FLOATS, BlockSpec, Noise, TensorSpec
from safetune.launch.call_shape import named_arguments

#: No offsets are looked for in larger tensors.
_MOST_OFFSETS = 1 << 20

#: The integers that torch compares on every device.
_ORDERED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HIGHEST = (1 << 63) - 2


def describe(call: Call, read: bool = True) -> dict[str, Any]:
    """Return the positional and keyword arguments of a call.

    A meta tensor, such as an array without data yet, is described as if it had its own memory.

    Args:
        read: whether tensors may be read now, which waits for their device.

    Raises:
        KernelNotTransferable: an argument is an address, or cannot be rebuilt from JSON data.
    """
    tensors: list[torch.Tensor] = []
    names = named_arguments(call.arg_names, call.args)
    args = [_Encoder(name, tensors, call).encode(value) for name, value in names.items()]
    kwargs = {n: _Encoder(n, tensors, call).encode(value) for n, value in call.kwargs.items()}
    device = "cpu" if call.interpreted else backend.required().torch_type
    blocks, views = _laid_out(tensors, device)
    contents = enumerate(map(_content_of, tensors if read else ()))
    return {
        "args": args,
        "kwargs": kwargs,
        "blocks": [asdict(block) for block in blocks],
        "tensors": [asdict(view) for view in views],
        "integers": [[n, content] for n, content in contents if content is not None],
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
    data: dict[str, Any],
    device: str,
    filled: bool = True,
    main: dict[str, Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as described; tensors that were on a GPU are created on `device`.

    Args:
        filled: whether the tensors' contents will be read.
        main: the names in the script that was `__main__` when the call was recorded.

    Raises `LookupError` if a class is missing or has changed.
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
    main = main or {}
    args = tuple(_decode(value, tensors, main) for value in data["args"])
    return args, {name: _decode(value, tensors, main) for name, value in data["kwargs"].items()}


def drawn(data: dict[str, Any], arg_names: Sequence[str]) -> list[str]:
    """Return the described arguments that have tensors without recorded values."""
    ranges = [(number, content.get("range")) for number, content in data.get("integers", ())]
    exact = {number for number, found in ranges if found and found[0] == found[1]}
    return _with_tensors(data, arg_names, set(range(len(data["tensors"]))) - exact)


def unknown(data: dict[str, Any], arg_names: Sequence[str]) -> list[str]:
    """Return the described arguments that have integers without a recorded range."""
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


class _Encoder:
    """Makes plain JSON data of an argument; one of its own kind is an object with one name."""

    def __init__(self, name: str, tensors: list[torch.Tensor], call: Call) -> None:
        self._name, self._tensors, self._call = name, tensors, call

    def encode(self, value: Any) -> Any:
        """Return the data; raises `KernelNotTransferable` for values that cannot be made again."""
        if isinstance(value, torch.Tensor):
            return {"tensor": self._number(value)}
        if type(value) in (tuple, list, torch.Size):
            return {type(value).__name__: [self.encode(item) for item in value]}
        if isinstance(value, tl.constexpr):
            return {"constexpr": self.encode(value.value)}
        if isinstance(value, torch.dtype):
            return {"torch": str(value).removeprefix("torch.")}
        if type(value) is tl.dtype:
            return {"triton": str(value)}
        if type(value) is float and not math.isfinite(value):
            return {"float": repr(value)}
        if type(value) in (type(None), bool, int, float, str):
            if may_be_address(value) and pointers.is_live(self._call.interpreted)(value):
                raise pointers.not_reproducible(self._name, value)
            return value
        return self._by_name(value)

    def _by_name(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return {"enum": [self._place(type(value)), value.name]}
        names = None if isinstance(value, type) else _names_of(type(value))
        if names is not None:
            content = {name: getattr(value, name) for name in names}
            extra = sorted({*getattr(value, "__dict__", ())} - content.keys())
            if extra:
                raise self._refused(value, f"it has attributes beside its fields: {extra[0]}")
            items = {name: self.encode(item) for name, item in content.items()}
            return {"fields": [self._place(type(value)), items]}
        raise self._refused(value)

    def _number(self, tensor: torch.Tensor) -> int:
        for number, known in enumerate(self._tensors):
            if known is tensor:
                return number
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _place(self, cls: type) -> str:
        """Return `module:qualname` of a class, which leads to it."""
        place = f"{cls.__module__}:{cls.__qualname__}"
        with contextlib.suppress(LookupError):
            if _at(place, {}) is cls:
                return place
        raise self._refused(cls, f"{place} does not lead to it")

    def _refused(self, value: Any, reason: str = "") -> KernelNotTransferable:
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        return KernelNotTransferable(
            f"{self._name} has a {kind}, which cannot be recorded{reason and ': '}{reason}"
        )


def _names_of(cls: Any) -> list[str] | None:
    """Return the names of the fields of a named tuple or a dataclass; None of another class."""
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        return None if names is None else [*names]
    return [field.name for field in fields(cls)] if is_dataclass(cls) else None


def _at(place: str, main: dict[str, Any]) -> Any:
    """Return the object `module:qualname` of an imported module; raises `LookupError`."""
    module, _, path = place.partition(":")
    first, *rest = path.split(".")
    names = main if main and module == "__main__" else vars(sys.modules.get(module, object))
    try:
        found = names[first]
        for name in rest:
            found = vars(found)[name]
    except (KeyError, TypeError):
        raise LookupError(f"{place} is no longer defined") from None
    return found


def modules(data: dict[str, Any]) -> set[str]:
    """Return the modules that define the classes of described arguments."""
    places = _places([*data.get("args", ()), *data.get("kwargs", {}).values()])
    return {place.partition(":")[0] for place in places} - {"__main__"}


def _places(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for kind, content in value.items():
            if kind in ("enum", "fields"):
                yield content[0]
            yield from _places(content)
    elif isinstance(value, list):
        for item in value:
            yield from _places(item)


def _decode(value: Any, tensors: Sequence[torch.Tensor], main: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("tuple", "list", "Size"):
        items = [_decode(item, tensors, main) for item in content]
        return {"tuple": tuple, "list": list, "Size": torch.Size}[kind](items)
    if kind == "constexpr":
        return tl.constexpr(_decode(content, tensors, main))
    if kind == "enum":
        return _class_at(content[0], main, Enum)[content[1]]  # type: ignore[index]
    if kind == "fields":
        named = {name: _decode(item, tensors, main) for name, item in content[1].items()}
        return _made(_class_at(content[0], main, object), named)
    makers = {"torch": lambda name: getattr(torch, name), "triton": tl.dtype, "float": float}
    return makers[kind](content)


def _class_at(place: str, main: dict[str, Any], base: type) -> type:
    found = _at(place, main)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise LookupError(f"{place} is now a different class")
    return found


def _made(cls: Any, items: dict[str, Any]) -> Any:
    """Return an object with these fields. No code of the class runs: a record is not trusted."""
    names = _names_of(cls)
    if names is None or {*names} != items.keys():
        raise LookupError(f"{cls.__module__}:{cls.__qualname__} now has different fields")
    if issubclass(cls, tuple):
        return tuple.__new__(cls, [items[name] for name in names])
    made = object.__new__(cls)
    for name, item in items.items():
        object.__setattr__(made, name, item)
    return made


def _numbers(value: Any) -> list[int]:
    """Return the numbers of the tensors in an encoded value."""
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, dict):
        return [value["tensor"]] if "tensor" in value else _numbers(list(value.values()))
    return []


def _content_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return what is recorded of a tensor's content, as JSON data; None of floats."""
    is_real = spans.dtype_name(tensor) in FLOATS
    if is_real or tensor.is_meta or tensor.is_complex() or not tensor.numel():
        return None
    flat = tensor.dim() == 1 and 2 <= tensor.numel() <= _MOST_OFFSETS
    with spans.reading(tensor.device):
        values = tensor.detach()
        if flat:
            values = values.cpu()
        values = values if values.dtype in _ORDERED else values.to(torch.int64)
        low, high = int(values.amin()), int(values.amax())
    if flat and tensor.dtype in (torch.int32, torch.int64) and (lengths := _lengths(values)):
        return lengths
    rising = flat and low < high and bool((values[1:] >= values[:-1]).all())
    return {"range": [low, high], **({"rising": True} if rising else {})}


def _fill(tensor: torch.Tensor, content: dict[str, Any]) -> None:
    """Fill a tensor with values of a recorded range, or with offsets as far apart as recorded."""
    if "lengths" in content:
        made = torch.tensor(_offsets(content["lengths"]))
    else:
        low, high = content["range"]
        generator = torch.Generator().manual_seed(0)
        # A range of 64 bits has no upper end that `randint` takes.
        made = torch.randint(low, min(high, _HIGHEST) + 1, (tensor.numel(),), generator=generator)
        if content.get("rising"):
            made, _ = made.sort()
    tensor.copy_(made.to(tensor.dtype).reshape(tensor.shape))


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
