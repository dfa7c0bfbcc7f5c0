"""Float tensors too large to copy: sampled in the caller, drawn at random in the child.

Random values have the mean, spread and range of the sample, so positive inputs stay positive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from safetune.inputs.spans import FLOATS, REAL, Noise, TensorSpec, reading, storage_bytes

#: The float type that the elements of each type consist of. Other types are never drawn.
_REAL = {**dict(zip(FLOATS, FLOATS, strict=True)), **REAL}

#: A sample is _RUNS runs of _RUN elements each, evenly spread.
_RUNS, _RUN = 16, 4096
#: Elements drawn at once, so that they take little memory besides the block.
_CHUNK = 1 << 24


def is_drawable(views: Iterable[TensorSpec], misalignment: int) -> bool:
    """Whether all views of a block have the same float type and are aligned to whole elements."""
    kinds = {_REAL.get(view.dtype, "") for view in views}
    if len(kinds) != 1 or "" in kinds:
        return False
    itemsize = getattr(torch, *kinds).itemsize
    return all((misalignment + view.byte_offset) % itemsize == 0 for view in views) and (
        misalignment % itemsize == 0
    )


def real_dtype(dtype: str) -> str:
    """Return the real float type behind a drawable type, such as a complex one."""
    return _REAL[dtype]


def noise_like(tensor: torch.Tensor, seed: int) -> Noise:
    """Return noise with the mean, spread and range of a sample of a tensor."""
    dtype = real_dtype(str(tensor.dtype).removeprefix("torch."))
    values = _sample(tensor).view(getattr(torch, dtype)).float().double()
    values = values[values.isfinite()]
    if values.numel() == 0:
        values = torch.zeros(1, dtype=torch.float64)
    std, mean = torch.std_mean(values, correction=0)
    low, high = values.aminmax()
    return Noise(dtype, mean.item(), std.item(), low.item(), high.item(), seed)


def draw(target: torch.Tensor, noise: Noise, device: str) -> None:
    """Fill `target`, a byte tensor, with values drawn on `device`."""
    generator = torch.Generator(device)
    generator.manual_seed(noise.seed)
    rest = target.numel() % getattr(torch, noise.dtype).itemsize
    target[target.numel() - rest :].zero_()
    for part, values in _parts(target, noise.dtype):
        values.normal_(noise.mean, noise.std, generator=generator).clamp_(noise.low, noise.high)
        part.copy_(values)


def scale(target: torch.Tensor, dtype: str, seed: int) -> None:
    """Multiply the floats in `target`, a byte tensor, by random factors from 0.5 to 1. Signs,
    infinities and zeros stay; if all floats are 0, the factors replace them.
    """
    generator = torch.Generator(target.device)
    generator.manual_seed(seed)
    is_zero = not bool(target.any())
    for part, values in _parts(target, dtype):
        values.uniform_(0.5, 1.0, generator=generator)
        part.copy_(values if is_zero else values.mul_(part.to(values.dtype)))


def _parts(target: torch.Tensor, dtype: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the floats in a byte tensor, in parts, each with memory for as many wider floats."""
    kind = getattr(torch, dtype)
    wide = torch.float64 if kind is torch.float64 else torch.float32
    used = target.numel() // kind.itemsize * kind.itemsize
    for part in target[:used].view(kind).split(_CHUNK):
        yield part, torch.empty(part.numel(), dtype=wide, device=target.device)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy some of the bytes that a tensor extends over to the host."""
    itemsize = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((length - 1) * step for length, step in steps) if tensor.numel() else 0
    begin = tensor.storage_offset() * itemsize
    extent = storage_bytes(tensor.detach())[begin : begin + count * itemsize]
    last = max(0, count - _RUN)
    starts = sorted({last * run // (_RUNS - 1) for run in range(_RUNS)})
    with reading(tensor.device):
        runs = [extent[start * itemsize : (start + _RUN) * itemsize].cpu() for start in starts]
    return torch.cat(runs)
