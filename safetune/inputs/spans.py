"""The bytes behind the caller's tensors: where they are, and how to read them unnoticed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from safetune.errors import KernelNotTransferable
from safetune.inputs.specs import TensorSpec
from safetune.isolation import backend


@dataclass(frozen=True, order=True)
class Span:
    """A range of addresses on one device."""

    device: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.end - self.start


def span_of(tensor: torch.Tensor) -> Span:
    """Return where a tensor's storage is.

    Raises:
        KernelNotTransferable: it has no plain storage (sparse, fake, a wrapper subclass).
    """
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise _not_plain(tensor) from error
    if tensor.device.type != "cpu" and tensor.device.type != _device_type():
        raise _not_plain(tensor)
    return Span(str(tensor.device), start, start + storage.nbytes())


def _device_type() -> str | None:
    found = backend.current()
    return None if found is None else found.torch_type


def merged_spans(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Return the storages of some tensors, those that overlap as one."""
    merged: list[Span] = []
    for span in sorted({span_of(tensor) for tensor in tensors}):
        last = merged[-1] if merged else None
        if last is not None and last.device == span.device and span.start < last.end:
            merged[-1] = Span(last.device, last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def block_of(span: Span, merged: Sequence[Span]) -> int:
    """Return which of the merged spans this one lies in."""
    return next(
        index
        for index, block in enumerate(merged)
        if block.device == span.device and block.start <= span.start and span.end <= block.end
    )


def tensor_spec(tensor: torch.Tensor, merged: Sequence[Span]) -> TensorSpec:
    """Return a tensor as a view of the merged span that it lies in."""
    span = span_of(tensor)
    block = block_of(span, merged)
    begin = span.start + tensor.storage_offset() * tensor.element_size()
    return TensorSpec(
        block=block,
        byte_offset=begin - merged[block].start,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage behind a tensor, as bytes; no copy."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


@contextlib.contextmanager
def reading(device: torch.device) -> Iterator[None]:
    """Copy from `device` to the host in here, beside a graph that another thread captures.

    What the current stream has queued is waited for; nothing is put on that stream.
    """
    if device.type == "cpu":
        yield
        return
    with backend.required().reading(device.index):
        yield


def _not_plain(tensor: torch.Tensor) -> KernelNotTransferable:
    return KernelNotTransferable(
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} on {tensor.device} has no plain "
        'storage to copy; pass its plain tensor, or tune this kernel with isolation="inline"'
    )
