"""The shared store as a run sees it: never in the way, whatever it does.

All its I/O happens on one thread of its own. A caller waits for it two seconds at most, and gets
these two seconds back over a minute; then, and whenever the store fails, the layer is off for a
minute: the run goes on with the local store alone, and one warning says so. What was not published
is in the local store, and is published by the next process, or the next refresh of this one.

A store with more choices than can be pulled in that time is pulled on by the thread, a little at a
time, while the run goes on; until it has them all, a choice that is missing is asked for by its
key. A process that ends before that leaves what it has, and the next one pulls the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from safetune import forks
from safetune.errors import StoreError
from safetune.keys import encoding
from safetune.store.shared import local_copy, once_per_node
from safetune.store.shared.budget import BUDGET_S, RETRY_S, Budget
from safetune.store.shared.io_thread import Courier, Late
from safetune.store.shared.once_per_node import Turn
from safetune.store.shared.protocol import Claim, Lease, NoLease, SharedStore, Unwritable
from safetune.store.shared.record import Name, name_of

if TYPE_CHECKING:
    from safetune.store.local.connection import Connection
    from safetune.store.records import ChoiceRecord, StoredChoice

logger = logging.getLogger("safetune")

Answer = TypeVar("Answer")

#: How old the local copy may be when a key is missed in it.
REFRESH_S = 60.0

#: Pulled choices are written in transactions of so many, and for so long until another errand. So
#: long each waits for other processes that write; then what it has is kept in memory.
_BATCH = 200
_SLICE_S = 0.2

_layers: weakref.WeakSet[SharedLayer] = weakref.WeakSet()


class SharedLayer:
    """A shared store behind a local one. No method raises, and none waits for long."""

    def __init__(
        self,
        backend: SharedStore,
        local: Connection,
        clock: Callable[[], float] = time.monotonic,
        *,
        writes: bool = True,
    ) -> None:
        """Put `backend` behind `local`.

        Args:
            writes: False to publish nothing and make no file beside the local database.
        """
        self._backend = backend
        self._writes = writes
        self._local = local
        self._courier = Courier("safetune-shared")
        self._clock = clock
        self._budget = Budget(clock)
        self._off_until = self._unwritable_until = 0.0
        self._told: set[str] = set()
        self._refreshed: dict[str, float] = {}
        self._partial: set[str] = set()
        self._unsent: dict[Name, tuple[str, StoredChoice]] = {}
        self._unkept: dict[tuple[str, str], ChoiceRecord] = {}
        _layers.add(self)

    @property
    def is_on(self) -> bool:
        """Whether the store is asked at all just now."""
        return self._clock() >= self._off_until and not self._courier.is_stuck

    def refresh(self, space: str, since: float | None = None) -> None:
        """Bring the local store up to date with a namespace, unless that was done lately.

        One process of a node does it, and what this node has to give is published at the end. Half
        of the time that is left is for this; what takes longer goes on without the caller.

        Args:
            since: how long ago is lately, in seconds since the epoch; a minute ago if None.
        """
        now = self._clock()
        last = self._refreshed.get(space)
        if not self.is_on or (since is None and last is not None and now - last < REFRESH_S):
            return
        self._refreshed[space] = now
        oldest = time.time() - REFRESH_S if since is None else since
        self._partial.add(space)
        seconds = self._budget.left_s() / 2
        pull = self._pull(space, oldest, seconds)
        self._ask(lambda: self._go_on(space, pull, seconds), None)

    def choice(self, space: str, key: str, declared: str) -> ChoiceRecord | None:
        """Return what the local store could not keep, or what is not pulled yet."""
        found = self._unkept.get((key, declared))
        if found is None and space in self._partial:
            stored = self._ask(lambda: self._get(space, key, declared), None)
            found = stored.choice if stored else None
        return found

    def claim(self, space: str, key: str, declared: str, force: bool) -> Claim:
        """Ask for the right to tune a key, and look once more whether another node has.

        Where the store cannot be asked, everybody may tune.
        """
        claim = self._ask(lambda: self._claim(space, key, declared, force), Claim(NoLease()))
        if claim.problem is not None:
            self._stop_writing(claim.problem)
        return claim

    def release(self, lease: Lease, published: bool) -> None:
        """Let others have a lease, without waiting for that."""
        if not isinstance(lease, NoLease):
            with contextlib.suppress(Late):
                self._courier.send(lambda: lease.release(published))

    def publish(self, space: str, stored: StoredChoice) -> StoredChoice:
        """Publish a choice, and return the one that all nodes use: the first of its name.

        That is `stored` itself where no answer comes in time; it is published later then.
        """
        if not (self.is_on and self._writes) or self._clock() < self._unwritable_until:
            return stored
        found = self._ask(lambda: self._deliver(space, [stored]), [stored])
        return found[0] if found else stored

    def flush(self) -> None:
        """Wait, for two seconds at most, until what was to be published is."""
        if self.is_on:
            with contextlib.suppress(Late, StoreError):
                self._courier.ask(self._deliver_unsent, BUDGET_S)

    def _ask(self, work: Callable[[], Answer], otherwise: Answer) -> Answer:
        if not self.is_on:
            return otherwise
        if self._off_until:
            self._off_until = 0.0
            self._budget.refill()
        begin = self._clock()
        try:
            return self._courier.ask(lambda: self._errand(work), self._budget.left_s())
        except Unwritable as error:
            self._stop_writing(error)
        except Late:
            self._stop(f"the shared store {self._backend.place} does not answer in time")
        except StoreError as error:
            self._stop(str(error))
        finally:
            self._budget.spend(self._clock() - begin)
        return otherwise

    def _errand(self, work: Callable[[], Answer]) -> Answer:
        """What runs on the thread: any failure of a back end is one of the store."""
        try:
            return work()
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"the shared store {self._backend.place} failed: {error!r}") from error
        finally:
            self._backend.close()

    def _stop(self, problem: str) -> None:
        self._off_until = self._clock() + RETRY_S
        self._tell("off", f"{problem}; going on without it, and trying again in {RETRY_S:.0f} s")

    def _stop_writing(self, problem: Unwritable) -> None:
        self._unwritable_until = self._clock() + RETRY_S
        self._tell("unwritable", f"{problem}; what is chosen here is not shared for now")

    def _tell(self, what: str, text: str) -> None:
        if what in self._told:
            logger.info("%s", text)
            return
        self._told.add(what)
        warnings.warn(f"safetune: {text}", stacklevel=2)

    def _go_on(self, space: str, pull: Iterator[bool], seconds: float) -> None:
        """Pull for so long, and leave the rest for later, after what others ask for meanwhile."""
        end = self._clock() + seconds
        for complete in pull:
            if complete:
                self._partial.discard(space)
            elif self._clock() >= end:
                self._courier.send(lambda: self._go_on_later(space, pull))
                return

    def _go_on_later(self, space: str, pull: Iterator[bool]) -> None:
        try:
            self._errand(lambda: self._go_on(space, pull, _SLICE_S))
        except Unwritable as error:
            self._stop_writing(error)

    def _pull(self, space: str, since: float, wait_s: float) -> Iterator[bool]:
        """Take over what is new and publish what is missing; yield whether all is there."""
        connection, backend, problem = self._local, self._backend, None
        name = encoding.digest([backend.place, space])[:16]
        database = connection.path if self._writes else None
        with once_per_node.turn(database, name, since, wait_s) as turn:
            if turn is Turn.MINE:
                names = backend.names(space)
                missing = names - local_copy.adopted(connection)
                pulled = iter(backend.pull(space, missing)) if missing else iter(())
                while batch := list(itertools.islice(pulled, _BATCH)):
                    self._keep(batch)
                    yield False
                try:
                    if self._clock() >= self._unwritable_until and self._writes:
                        self._deliver(space, local_copy.unpublished(connection, space, names))
                except Unwritable as error:
                    problem = error
        yield turn is not Turn.BUSY
        if problem is not None:
            raise problem

    def _claim(self, space: str, key: str, declared: str, force: bool) -> Claim:
        lease, problem = None, None
        try:
            lease = self._backend.lease(key)
        except Unwritable as error:
            lease, problem = NoLease(), error
        stored = self._get(space, key, declared)  # also with force: its generation is the next one
        if stored is None or force:
            return Claim(lease, problem=problem)
        if lease is not None:
            lease.release()
        return Claim(None, stored, problem)

    def _get(self, space: str, key: str, declared: str) -> StoredChoice | None:
        stored = self._backend.get(space, key, declared)
        if stored is None or stored.unknown:
            return None
        self._keep([stored])
        return stored

    def _deliver(self, space: str, records: Sequence[StoredChoice]) -> list[StoredChoice]:
        """Publish records, and take over what others had published under their names."""
        records = [record for record in records if local_copy.is_sound(record)]
        self._unsent.update({name_of(record): (space, record) for record in records})
        found = self._backend.publish(space, records) if records else []
        pairs = zip(records, found, strict=True)  # a newer version's choice stays in the store
        found = [own if other.unknown else other for own, other in pairs]
        for record in records:
            self._unsent.pop(name_of(record), None)
        pairs = zip(records, found, strict=True)
        self._keep([other for record, other in pairs if other.choice != record.choice])
        return found

    def _deliver_unsent(self) -> None:
        for space, record in list(self._unsent.values()):
            self._errand(lambda space=space, record=record: self._deliver(space, [record]))  # type: ignore[misc]

    def _keep(self, records: Sequence[StoredChoice]) -> None:
        records = [record for record in records if not record.unknown]
        try:
            if records:
                local_copy.adopt(self._local, records, _SLICE_S)
        except StoreError as error:
            logger.info("%s; what was pulled is kept in memory", error)
            for stored in sorted(records, key=lambda each: each.choice.generation):
                self._unkept[stored.choice.key, stored.choice.declared] = stored.choice


def _flush_all() -> None:
    for layer in tuple(_layers):
        layer.flush()


def _after_fork_in_child() -> None:
    """What the parent has to publish is the parent's to publish."""
    for layer in tuple(_layers):
        layer._unsent.clear()
        layer._budget.start_over()


forks.register("shared store", after_in_child=_after_fork_in_child, at_exit=_flush_all)
