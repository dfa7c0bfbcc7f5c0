"""What is recorded of integer tensors, and tensors with that content.

Their values may be users' data: token numbers, lengths of documents. Of offsets, such as the
`cu_seqlens` of sequences behind one another, a histogram of the lengths is enough to do as much
work; of others the values themselves, where `SAFETUNE_RECORD_VALUES=1` allows that.
"""

from __future__ import annotations

import base64
import ctypes
import random
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from safetune.inputs.spans import FLOATS, dtype_name, reading

#: No offsets are looked for in larger tensors, and the values of a call take no more text.
_MOST_OFFSETS = 1 << 20
_MOST_TEXT = 1 << 19


def contents_of(tensors: Sequence[torch.Tensor], values: bool) -> list[list[Any]]:
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
    if tensor.is_meta or dtype_name(tensor) in FLOATS or tensor.is_complex():
        return None
    may_be_offsets = tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)
    if not values and not (may_be_offsets and 2 <= tensor.numel() <= _MOST_OFFSETS):
        return None
    with reading(tensor.device):
        found = tensor.detach().cpu().contiguous()
    if not values:
        return _lengths(found)
    data = zlib.compress(ctypes.string_at(found.data_ptr(), found.nbytes))
    text = base64.b85encode(data).decode()
    return {"values": text} if len(text) <= room else None


def fill(tensor: torch.Tensor, content: dict[str, Any]) -> None:
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
