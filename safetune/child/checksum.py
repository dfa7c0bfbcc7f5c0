"""Has a run of bytes changed? Sums weighted by position, computed where the bytes are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

#: Words of 8 bytes that are weighted at once: the product takes as much memory again.
_CHUNK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C1 | 1


def checksums(runs: Sequence[torch.Tensor]) -> list[int]:
    """Return one number for each run of bytes (`uint8`, one dimension, any device).

    A run that has changed in any place gets another number, but for one chance in 2^32 or less; a
    permutation of its values is a change, too.
    """
    return gathered([_checksum(run) for run in runs])


def gathered(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """Return what scalar tensors on any devices hold, with one wait for each device."""
    found: dict[int, Any] = {}
    for device in {number.device for number in numbers}:
        here = [index for index, number in enumerate(numbers) if number.device == device]
        values = torch.stack([numbers[index] for index in here]).tolist()
        found.update(zip(here, values, strict=True))
    return [found[index] for index in range(len(numbers))]


def _checksum(run: torch.Tensor) -> torch.Tensor:
    head = min(-(run.storage_offset()) % 8, run.numel())
    words = (run.numel() - head) // 8 * 8
    total = _weighted(run[:head].long()) + 3 * _weighted(run[head + words :].long())
    body = run[head : head + words]
    for chunk in body.view(torch.int64).split(_CHUNK) if words else ():
        total = total * _MULTIPLIER + _weighted(chunk)
    return total


def _weighted(words: torch.Tensor) -> torch.Tensor:
    return (words * _weights(words.device)[: words.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, so that no change of a single word is lost to an overflow."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator) * 2 + 1).to(device)
