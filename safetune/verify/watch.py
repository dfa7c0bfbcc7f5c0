"""The record of one interpreted launch: which program accessed which element, and in which order.

Programs run one after another, so accesses by different programs have an order here that they may
lack on a device. They also have it on a device if, in between, the first program released and the
second acquired by an atomic operation on one element that is not relaxed; locks and "last program"
counters work this way. Order is transitive. It is the order of the checked run only.

Each access has a number, its time. Each granule of memory (the smallest element size in use) has
the times of the last plain store, and of the first and the last atomic and read, so the cost of an
access does not grow with the number of programs. Two stores must be in order, so the last one
represents all. Atomics and reads need not be in order: the last may be the program's own and the
first another program's. Conflicting accesses are logged.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from enum import Enum

import numpy as np

from safetune.errors import NotInterpretable
from safetune.frozen import dataclass
from safetune.verify.interpretation import is_machinery
from safetune.verify.memory import Memory
from safetune.verify.report import Kind

#: Clashes in a region beyond this are counted, and no longer kept to name their programs.
_MAX_LOGGED = 1 << 22

#: The time of an access that never happened.
NEVER = -1

#: For some programs, the time until which their accesses come before.
Clock = dict[int, int]


class Access(Enum):
    """Kinds of accesses. A poll is a volatile or atomic read."""

    READ = "read"
    STORE = "store"
    ATOMIC = "atomic"
    POLL = "poll"


#: The findings that are pairs of accesses by two programs which need an order between them.
CLASHES = (Kind.OVERLAP, Kind.MIXED, Kind.READ_WRITE)

#: For each access, the earlier accesses (arrays of `Times`) of another program that clash with it.
_RIVALS: dict[Access, dict[Kind, tuple[str, ...]]] = {
    Access.READ: {Kind.READ_WRITE: ("stored", "first_update", "last_update")},
    Access.STORE: {
        Kind.OVERLAP: ("stored",),
        Kind.MIXED: ("first_update", "last_update"),
        Kind.READ_WRITE: ("first_read", "last_read"),
    },
    Access.ATOMIC: {
        Kind.MIXED: ("stored",),
        Kind.READ_WRITE: ("first_read", "last_read"),
    },
}

#: The arrays of `Times`.
_MOMENTS = ("stored", "first_update", "last_update", "first_read", "last_read")


class Times:
    """The times at which each granule of a region was accessed."""

    def __init__(self, nbytes: int, granule: int) -> None:
        self.granule = granule
        count = -(-nbytes // granule)
        self.stored, self.first_update, self.last_update, self.first_read, self.last_read = (
            np.full(count, NEVER, dtype=np.int32) for _ in _MOMENTS
        )
        self.clashes = {kind: np.zeros(count, dtype=bool) for kind in CLASHES}
        self.log: list[tuple[Kind, np.ndarray, np.ndarray, int]] = []
        self.logged = 0

    def indices(self, offsets: np.ndarray, itemsize: int) -> np.ndarray:
        """Return the granules of elements at byte offsets; makes granules finer if needed."""
        granule = math.gcd(self.granule, itemsize)
        if granule > 1 and (offsets % granule).any():
            granule = 1
        if granule != self.granule:
            self._refine(granule)
        first = offsets // granule
        if itemsize == granule:
            return first
        return (first[:, None] + np.arange(itemsize // granule)).ravel()

    def _refine(self, granule: int) -> None:
        ratio = self.granule // granule
        for name in _MOMENTS:
            setattr(self, name, np.repeat(getattr(self, name), ratio))
        self.clashes = {kind: np.repeat(flags, ratio) for kind, flags in self.clashes.items()}
        parts = np.arange(ratio)
        self.log = [
            (kind, (where[:, None] * ratio + parts).ravel(), np.repeat(prior, ratio), now)
            for kind, where, prior, now in self.log
        ]
        self.granule = granule


@dataclass(frozen=True)
class Stray:
    """Accesses by one instruction of one program outside all arguments' storages."""

    access: Access
    region: int  # the one closest to the address; -1 if every region is far away
    offsets: np.ndarray  # bytes from the region's start; for no region, the addresses themselves
    itemsize: int
    time: int


class Watch:
    """The accesses of one launch."""

    def __init__(self, memory: Memory, grid: tuple[int, int, int], timeout_s: float) -> None:
        self._memory = memory
        self._grid = grid
        self._timeout_s = timeout_s
        self._deadline = math.inf
        granules = dict.fromkeys(range(len(memory.regions)), 16)
        for view in memory.views:
            parts = (view.itemsize, view.offset, *view.strides)
            granules[view.region] = math.gcd(granules[view.region], *parts)
        self.times = [
            Times(region.nbytes, granules[number]) for number, region in enumerate(memory.regions)
        ]
        self.strays: list[Stray] = []
        #: For each time, the source line.
        self.lines: list[tuple[str, int]] = []
        #: The numbers of the programs that stored or updated anything.
        self.storing: set[int] = set()
        self._program, self._begin = NEVER, 0
        # Those that have touched anything, and when each began; NumPy reads them as they are.
        self._programs, self._begins = array("q"), array("q")
        self._seen: Clock = {}
        self._released: dict[int, Clock] = {}

    def ids(self, program: int) -> tuple[int, int, int]:
        """Return a program's ids from its number."""
        _, height, depth = self._grid
        return program // (height * depth), program // depth % height, program % depth

    def programs_at(self, times: np.ndarray) -> np.ndarray:
        """Return the numbers of the programs that were running at given times."""
        programs, begins = (np.frombuffer(a, np.int64) for a in (self._programs, self._begins))
        return programs[np.searchsorted(begins, times, side="right") - 1]

    def enter(self, ids: tuple[int, int, int]) -> None:
        """Set the program that makes the following accesses."""
        _, height, depth = self._grid
        program = (ids[0] * height + ids[1]) * depth + ids[2]
        if program != self._program:
            self._program, self._begin, self._seen = program, len(self.lines), {}
            self._programs.append(program)
            self._begins.append(self._begin)

    def check_time(self, location: tuple[object, ...]) -> None:
        """Raise `NotInterpretable` if the launch exceeds its time limit.

        The time counts from the first call, when the first program begins.
        """
        now = time.monotonic()
        self._deadline = min(self._deadline, now + self._timeout_s)
        if now > self._deadline:
            raise NotInterpretable(
                f"the launch took longer than timeout_s={self._timeout_s:g} in Triton's "
                f"interpreter, now at {':'.join(map(str, location))}: check a smaller problem. "
                "Programs run one after another, so a program that waits for a later one hangs."
            )

    def access(
        self,
        access: Access,
        addresses: np.ndarray,
        active: np.ndarray,
        itemsize: int,
        acquires: bool = False,
        releases: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record one operation; return the real addresses, and which of them may be accessed."""
        line = _kernel_line()
        self.check_time(line)
        now = len(self.lines)
        self.lines.append(line)
        alone = int(addresses.flat[0]) if addresses.size == 1 and active.all() else None
        real, allowed = np.zeros_like(addresses), np.zeros(addresses.shape, dtype=bool)
        numbers, offsets = self._memory.locate(addresses)
        for number in np.unique(numbers[active]):
            lanes = active & (numbers == number)
            inside = lanes
            if number >= 0:
                region = self._memory.regions[number]
                inside = lanes & (offsets >= 0) & (offsets + itemsize <= region.nbytes)
                real[inside] = offsets[inside].astype(np.uint64) + np.uint64(region.real)
                allowed |= inside
                self._touch(access, self.times[number], offsets[inside], itemsize, now)
                lanes = lanes & ~inside
            if lanes.any():
                places = offsets if number >= 0 else addresses
                self.strays.append(Stray(access, int(number), places[lanes], itemsize, now))
        if access in (Access.STORE, Access.ATOMIC) and active.any():
            self.storing.add(self._program)
        if acquires and alone in self._released:  # too late for this access: it may be the first
            self._seen = _joined(self._released[alone], self._seen)
        if releases and alone is not None:
            self._release(alone, now)
        return real, allowed

    def _touch(
        self, access: Access, times: Times, offsets: np.ndarray, itemsize: int, now: int
    ) -> None:
        if access is Access.POLL or not offsets.size:
            return
        where = times.indices(offsets, itemsize)
        for clash, earlier in _RIVALS[access].items():
            for name in earlier:
                self._clash(clash, times, where, getattr(times, name), now)
        if access is Access.STORE:
            times.stored[where] = now
            return
        reads = access is Access.READ
        first = times.first_read if reads else times.first_update
        first[where[first[where] == NEVER]] = now
        (times.last_read if reads else times.last_update)[where] = now

    def _clash(
        self, clash: Kind, times: Times, where: np.ndarray, earlier: np.ndarray, now: int
    ) -> None:
        """Log the granules where an earlier access was another program's, and not ordered."""
        prior = earlier[where]
        clashing = (prior != NEVER) & (prior < self._begin)
        if not clashing.any():
            return
        if self._seen:
            programs, position = np.unique(
                self.programs_at(np.maximum(prior, 0)), return_inverse=True
            )
            seen = np.array([self._seen.get(program, NEVER) for program in programs.tolist()])
            clashing &= seen[position] < prior
        where, prior = where[clashing], prior[clashing]
        times.clashes[clash][where] = True
        if times.logged < _MAX_LOGGED and where.size:
            times.logged += where.size
            times.log.append((clash, where, prior, now))

    def _release(self, address: int, now: int) -> None:
        mine = {**self._seen, self._program: now}
        before = self._released.get(address, {})
        self._released[address] = mine if before is self._seen else _joined(mine, before)


def _joined(one: Clock, other: Clock) -> Clock:
    """Return the clock of a program that has seen everything that both have seen."""
    if not other:
        return one
    latest = {program: max(moment, one.get(program, NEVER)) for program, moment in other.items()}
    return {**one, **latest}


def _kernel_line() -> tuple[str, int]:
    """Return the innermost running line of the kernel or of a function that it calls."""
    frame = sys._getframe(2)
    while is_machinery(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
