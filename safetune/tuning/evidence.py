"""What a measuring child tells of a config's result; the parent compares configs by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetune.isolation.protocol import ProtocolError

#: Results that are kept for comparison, the first of each kind.
MAX_GROUPS = 8


@dataclass(frozen=True)
class Group:
    """Configs whose results agree. The first of them left its result in the witness file.

    Attributes:
        number: its place in the file, and the order in which groups were founded.
        blocks: the storages that it has written.
        rms, spread: for each compared tensor, see `compare.Scale`.
    """

    number: int
    blocks: tuple[int, ...]
    rms: tuple[float, ...]
    spread: tuple[float, ...]


@dataclass(frozen=True)
class Evidence:
    """What one config's first launches have shown.

    Attributes:
        group: the number of the group that it agrees with; None where too many were there.
        founded: the group, when this config is its first.
        stale: whether its result changes with what its outputs held before the launch.
        reach: for each compared tensor, a number for which elements it writes; empty where that is
            not known, as with atomics and for integers.
        unowned: names of arguments beside whose elements it wrote, in bytes that no argument has.
        difference: how it differs from the first group, in words; empty if it does not.
    """

    group: int | None
    founded: Group | None = None
    stale: bool = False
    reach: tuple[int, ...] = ()
    unowned: tuple[str, ...] = ()
    difference: str = ""


def evidence_of(data: Any) -> Evidence:
    """Return the evidence in plain JSON data; raises `ProtocolError` for anything else."""
    try:
        founded = data["founded"]
        return Evidence(
            group=None if data["group"] is None else int(data["group"]),
            founded=None if founded is None else group_of(founded),
            stale=bool(data["stale"]),
            reach=tuple(int(number) for number in data["reach"]),
            unowned=tuple(str(name) for name in data["unowned"]),
            difference=str(data["difference"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not evidence: {str(data)[:80]}") from error


def group_of(data: Any) -> Group:
    """Return the group in plain JSON data; raises what a missing or wrong field raises."""
    return Group(
        number=int(data["number"]),
        blocks=tuple(int(block) for block in data["blocks"]),
        rms=tuple(float(value) for value in data["rms"]),
        spread=tuple(float(value) for value in data["spread"]),
    )
