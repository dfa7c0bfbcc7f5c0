"""The fixed part of a list for one of several processes, and the launchers' variables for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from safetune.errors import TargetError
from safetune.frozen import dataclass
from safetune.messages import LAUNCHERS

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` parts, from 0."""

    index: int = 0
    count: int = 1

    def of(self, items: Sequence[Item]) -> list[Item]:
        """Return this part of a list.

        Every second row is dealt in reverse, so that the parts of a list sorted by size take about
        equally long.
        """
        rows = range(0, len(items), self.count)
        columns = (self.count - 1 - self.index, self.index)
        numbers = [row + columns[row // self.count % 2 == 0] for row in rows]
        return [items[number] for number in numbers if number < len(items)]


def parse(text: str, environment: Mapping[str, str]) -> Shard:
    """Return the shard for `2/4` or `auto`; raises `TargetError`."""
    if text == "auto":
        return _of_rank(environment)
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if match is None or not int(match[2]):
        raise TargetError(f"--shard {text!r} is not a shard; give e.g. 2/4, or auto")
    index, count = int(match[1]) - 1, int(match[2])
    if not 0 <= index < count:
        raise TargetError(f"--shard {text} is out of range; give 1/{count} to {count}/{count}")
    return Shard(index, count)


def on_node(environment: Mapping[str, str]) -> Shard:
    """Return this process's shard of its node, by the launcher's variables.

    The only shard of one if the launcher sets none.
    """
    for launcher in LAUNCHERS:
        index = environment.get(launcher.local_rank, "")
        if index.isdecimal():  # Slurm's number of ranks is e.g. `8(x64)`
            first = re.match("[0-9]+", environment.get(launcher.local_ranks, ""))
            return Shard(int(index), max(int(first[0]) if first else 1, int(index) + 1))
    return Shard()


def _of_rank(environment: Mapping[str, str]) -> Shard:
    for launcher in LAUNCHERS:
        index, count = environment.get(launcher.rank, ""), environment.get(launcher.ranks, "")
        if index.isdecimal() and count.isdecimal():
            return Shard(int(index), int(count))
    raise TargetError(
        f"--shard auto finds no rank in {', '.join(each.rank for each in LAUNCHERS)}: start it "
        "with srun, torchrun or mpirun, or give the shard, e.g. --shard 2/4"
    )
