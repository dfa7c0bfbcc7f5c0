"""Addresses among a call's arguments, which are meaningless in another process.

A grouped kernel gets an int64 tensor of addresses, other kernels an address as an integer. Most
large numbers are not addresses, so each is checked with the driver or, without a driver, in the
memory map.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from safetune.both import backend
from safetune.errors import NotReproducible
from safetune.inputs.call import HIGHEST_ADDRESS, LOWEST_ADDRESS

#: The most distinct values of a tensor that are looked up, and the most plausible ones among which
#: they are chosen.
_ASKED, _LOOKED_AT = 1024, 1 << 20


def check(name: str, numbers: Iterable[int], interpreted: bool) -> None:
    """Raise `NotReproducible` if one of an argument's plausible numbers is an address."""
    live = functools.cache(is_live)  # the memory map is read for the first number
    for number in numbers:
        if live(interpreted)(number):
            raise not_reproducible(name, number)


def plausible(values: torch.Tensor) -> list[int]:
    """Return the distinct values of a CPU tensor that could be addresses; a sample if there are
    many.
    """
    if values.dtype not in (torch.int64, torch.uint64) or values.numel() == 0:
        return []
    signed = values.view(torch.int64)
    if int(signed.max()) < LOWEST_ADDRESS:
        return []
    large = signed[(signed >= LOWEST_ADDRESS) & (signed < HIGHEST_ADDRESS)]
    distinct = large[:: large.numel() // _LOOKED_AT + 1].unique()
    return [int(value) for value in distinct[:: distinct.numel() // _ASKED + 1]]


def is_live(interpreted: bool) -> Callable[[int], bool]:
    """Return a function that tells whether this process has an address mapped now."""
    if not interpreted:
        return backend.required().is_known_pointer
    found = backend.current()
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    regions = sorted(
        tuple(int(bound, 16) for bound in region.split("-"))
        for region, permissions, *_ in lines
        if "w" in permissions
    )

    def known(address: int) -> bool:
        index = bisect.bisect_right(regions, (address, 1 << 64)) - 1
        if index >= 0 and address < regions[index][1]:
            return True
        return found is not None and found.is_known_pointer(address)

    return known


def not_reproducible(name: str, address: int) -> NotReproducible:
    """Return the error for an argument that contains an address."""
    return NotReproducible(
        f"{name} holds an address of this process ({address:#x}), which is invalid in a tuning "
        "process: make such values there with `inputs=`, or tune this kernel with "
        'isolation="inline"'
    )
