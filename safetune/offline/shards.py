"""Which of many processes tunes which key, without one that directs the others.

Every process has the whole list. It begins with a part of its own, goes on with keys of the others
that no process tunes, and at last helps another worker of its node. The lock of a key keeps a
second process of the node from it, and the lease of the shared store a second node. Both come free
when their holder dies, and other processes tune its keys. Where the shared store has no leases, a
shard leaves the parts of other shards.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from safetune.errors import StoreError, TargetError
from safetune.frozen import dataclass
from safetune.messages import LAUNCHERS
from safetune.store.local import locks
from safetune.store.local.db_files import pauses
from safetune.store.shared.protocol import space_of

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.store.lookup import GuardedStore

Item = TypeVar("Item")

#: The index of a job in Kubernetes, which does not tell how many there are.
_JOB_INDEX = "JOB_COMPLETION_INDEX"

#: How often to look again whether a process of this node has finished a key; the first and the
#: longest pause after a key that another node tunes, longer where more processes ask one store.
_LOOK_S = 0.1
_LOOKS_APART = 20.0  # times the seconds of one look
_PAUSES_S = (0.1, 5.0)
_MANY = 64

#: How often one process of a node copies what other nodes have published.
_REFRESH_S = 5.0


class Whose(Enum):
    """Who begins with a key: this process, another worker of its shard, or another shard."""

    OWN = "own"
    WORKERS = "workers"
    SHARDS = "shards"


class State(Enum):
    """What this node knows of a key that another process had when it was tried."""

    DONE = "done"
    LOCKED = "locked"  # by a process of this node
    FREE = "free"  # as far as this node knows


@dataclass(frozen=True)
class Turn(Generic[Item]):
    """An item that this process may try, and who begins with it.

    Where it `helps`, another process of this node has the item, and nothing else is left to try.
    """

    item: Item
    whose: Whose
    helps: bool = False

    @property
    def is_own(self) -> bool:
        """Whether this process begins with it."""
        return self.whose is Whose.OWN

    @property
    def is_of_shards(self) -> bool:
        """Whether another shard begins with it."""
        return self.whose is Whose.SHARDS


@dataclass(frozen=True)
class Shard:
    """The part of one process: a worker of a shard. Workers of a shard share a local store."""

    index: int = 0
    count: int = 1
    worker: int = 0
    workers: int = 1

    def order(self, items: Sequence[Item]) -> list[Turn[Item]]:
        """Return all items: the own ones, those of the shard's other workers, those of the others.

        Each begins at the front of its part, so this process begins at the back of the others'.
        The items of a shard do not depend on its workers: those of another node may be more.
        """
        processes, me = self.count * self.workers, self.index + self.count * self.worker

        def place(number: int) -> tuple[int, ...]:
            of_shard, shard = _dealt(number, self.count)
            row, worker = _dealt(of_shard, self.workers)
            column = shard + self.count * worker
            if column == me:
                return 0, row
            return 1 + (shard != self.index), -row, (column - me) % processes

        numbers = sorted(range(len(items)), key=place)
        return [Turn(items[n], [*Whose][place(n)[0]]) for n in numbers]


def _dealt(number: int, parts: int) -> tuple[int, int]:
    """Return the place in its part of a list's item, and the part.

    Every second row is dealt in the other direction: of a list from small to large, as of shares
    from large to small, all parts take about as long.
    """
    row, column = divmod(number, parts)
    return row, parts - 1 - column if row % 2 else column


def parse(text: str, environment: Mapping[str, str]) -> Shard:
    """Return the shard that `2/4`, `auto` or `auto/4` names; raises `TargetError`."""
    if match := re.fullmatch(r"(auto|[0-9]+)(?:/([0-9]+))?", text):
        rank, count = match[1], int(match[2] or 0)
        if rank == "auto":
            index, ranks = _rank(environment, count)
            return _checked(text, index, ranks)
        if count:
            return _checked(text, int(rank) - 1, count)
    raise TargetError(f"--shard {text!r} is not a shard; give e.g. 2/4, auto, or auto/4")


def on_node(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return which of a node's processes this is by its launcher, and their number.

    The first of one where the launcher does not say.
    """
    for launcher in LAUNCHERS:
        index = environment.get(launcher.local_rank, "")
        if index.isdecimal():  # Slurm's number of ranks is e.g. `8(x64)`
            first = re.match("[0-9]+", environment.get(launcher.local_ranks, ""))
            return int(index), max(int(first[0]) if first else 1, int(index) + 1)
    return 0, 1


def _rank(environment: Mapping[str, str], count: int) -> tuple[int, int]:
    variables = [*((each.rank, each.ranks) for each in LAUNCHERS), (_JOB_INDEX, "")]
    for rank, ranks in variables:
        index, number = environment.get(rank, ""), environment.get(ranks, "")
        if index.isdecimal() and (count or number.isdecimal()):
            return int(index), count or int(number)
        if index.isdecimal() and not ranks:
            raise TargetError(f"{rank} is set, but not the number of shards: give --shard auto/N")
    raise TargetError(
        f"--shard auto finds no rank in {', '.join(rank for rank, _ in variables)}: start it with "
        "srun, torchrun, mpirun or as an indexed job, or give the shard, e.g. --shard 2/4"
    )


def _checked(text: str, index: int, count: int) -> Shard:
    if not 0 <= index < count:
        raise TargetError(f"--shard {text}: the shards of {count} are 1/{count} to {count}/{count}")
    return Shard(index, count)


class SweepStates:
    """What a store says of keys that other processes of a sweep tune.

    It is brought up to date every few seconds, in one query for all keys.

    Args:
        since: an earlier choice does not count, where all keys are tuned again.
    """

    def __init__(self, store: GuardedStore, since: float = 0.0) -> None:
        self._store = store
        self._since = since
        self._chosen: set[tuple[str, str]] = set()
        self._look_at = self._refresh_at = -math.inf

    def __call__(self, key: TuningKey, declared: str, look: bool = True) -> State:
        """Return the state of a key with this list of configs.

        Args:
            look: see whether a process of this node has the key.
        """
        self._update(key)
        if (key.digest, declared) in self._chosen or self._is_done_again(key, declared):
            return State.DONE
        locked = look and locks.locked(self._store.path, [key.digest])
        return State.LOCKED if locked else State.FREE

    def _is_done_again(self, key: TuningKey, declared: str) -> bool:
        """Whether a key was tuned again since the last look: nothing else would keep this process
        from it.
        """
        choice = self._store.choice(key.digest, declared) if self._since else None
        return choice is not None and choice.created > self._since

    def _update(self, key: TuningKey) -> None:
        begin = time.monotonic()
        if begin < self._look_at:
            return
        shared = self._store.shared
        if shared is not None and begin >= self._refresh_at:
            shared.refresh(space_of(key), since=time.time() - _REFRESH_S)
            self._refresh_at = time.monotonic() + _REFRESH_S
        with contextlib.suppress(StoreError):
            self._chosen = self._store.chosen(self._since)
        now = time.monotonic()
        self._look_at = now + max(_LOOK_S, _LOOKS_APART * (now - begin))


@dataclass(frozen=True)
class Part:
    """What one process of a sweep does, which began at a time in seconds since the epoch."""

    shard: Shard
    since: float


class Turns(Generic[Item]):
    """Yields each turn until it was tuned or is left, with pauses while others tune all of them.

    What other shards have done is not yielded.

    Args:
        state: of an item.
        again: all is tuned again, and only the state tells what other processes have done already.
            Nothing of that is yielded.
        helps: yield once what another process of this node has, where nothing else is left.
        processes: how many share the list.
    """

    def __init__(
        self,
        turns: Sequence[Turn[Item]],
        state: Callable[[Turn[Item]], State],
        sleep: Callable[[float], None] = time.sleep,
        again: bool = False,
        helps: bool = False,
        processes: int = 1,
    ) -> None:
        self.helps = helps
        self._helped: set[int] = set()
        self._untried = [*reversed(turns)]
        self._again = again
        self._busy: list[Turn[Item]] = []
        self._state = state
        self._sleep = sleep
        self._most_s = _PAUSES_S[1] * max(1.0, processes / _MANY)
        self._pauses = pauses(_PAUSES_S[0], self._most_s)
        self._random = random.SystemRandom()

    def __iter__(self) -> Iterator[Turn[Item]]:
        while self._untried:
            turn, busy = self._untried.pop(), len(self._busy)
            if not (self._may_be_over(turn) and self._state(turn) is State.DONE):
                yield turn
                if len(self._busy) == busy:
                    self._pauses = pauses(_PAUSES_S[0], self._most_s)
        while (found := self._next()) is not None:
            yield found

    @property
    def own(self) -> list[Item]:
        """The items that this process begins with and has not begun yet, in their order."""
        return [turn.item for turn in reversed(self._untried) if turn.is_own]

    def put_back(self, turn: Turn[Item]) -> None:
        """Another process tunes the item: it is yielded again when that is done, or has failed."""
        self._busy.append(replace(turn, helps=False))
        if self._state(turn) is State.FREE:
            self._pause(next(self._pauses))

    def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than there is anything left to do."""
        while seconds > 0 and any(self._state(turn) is not State.DONE for turn in self._busy):
            self._sleep(min(seconds, _PAUSES_S[1]))
            seconds -= _PAUSES_S[1]

    def _next(self) -> Turn[Item] | None:
        while True:
            found = [(turn, self._state(turn)) for turn in self._busy]
            found = [
                (turn, state)
                for turn, state in found
                if not (state is State.DONE and self._may_be_over(turn))
            ]
            self._busy = [turn for turn, _ in found]
            if not found:
                return None
            for wanted in (State.DONE, State.FREE):
                if ready := [n for n, (_, state) in enumerate(found) if state is wanted]:
                    return self._busy.pop(self._random.choice(ready))
            if turn := self._to_help():
                return turn
            self._sleep(_LOOK_S)

    def _to_help(self) -> Turn[Item] | None:
        new = [turn for turn in self._busy if self.helps and id(turn.item) not in self._helped]
        if not new:
            return None
        turn = self._random.choice(new)
        self._helped.add(id(turn.item))
        self._busy.remove(turn)
        return replace(turn, helps=True)

    def _may_be_over(self, turn: Turn[Item]) -> bool:
        """Whether there is nothing to do or to report for an item that is done."""
        return self._again or turn.is_of_shards
