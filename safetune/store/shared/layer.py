"""The shared store as a run sees it: a call costs two seconds at most, whatever the store does.

All I/O happens on one thread. Callers wait for it two seconds in total, which come back over a
minute. When they are spent, and whenever the store fails, the layer is off for a minute: the run
goes on with the local store alone, and one warning says so. A choice that could not be published is
in the local store, and is published by the next process, or by the next refresh of this one.

A server that says that it cannot answer now, or that has let this process in and is slow, is there:
it is asked again. The caller of `claim` does that, which has other processes to wait for, too; a
choice waits here to be published. After `SAFETUNE_WAIT` seconds of that the layer is off as above.

Where a store has more choices than can be pulled in that time, the thread pulls the rest in slices
while the run goes on; until it has all, a missing choice is looked up by its key. A process that
ends before that keeps what it has, and the next one pulls the rest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from safetune import forks
from safetune.errors import StoreError, StoreWarning
from safetune.messages import logger, warn
from safetune.store.local import locks
from safetune.store.local.db_files import tries
from safetune.store.local.locks import waited
from safetune.store.records import precedence
from safetune.store.shared import local_copy, once_per_node
from safetune.store.shared.io_thread import IOThread, TimedOut
from safetune.store.shared.once_per_node import Turn
from safetune.store.shared.patience import Budget, PutOff
from safetune.store.shared.protocol import Claim, Lease, NoLease, SharedStore, TryLater, Unwritable

if TYPE_CHECKING:
    from safetune.store.local.connection import Connection
    from safetune.store.records import ChoiceRecord, StoredChoice

Result = TypeVar("Result")

#: How long callers wait for the store in total, and after how long all of that is back.
BUDGET_S = 2.0
RETRY_S = 60.0

#: How long a store may say that it cannot answer now: `SAFETUNE_WAIT` of a run, and of a sweep,
#: where nothing else waits for a process.
WAIT_S = 120.0
SWEEP_WAIT_S = 600.0

#: The first and the longest pause before such a store is asked again.
_LATER_S = (0.1, 2.0)

#: How old the local copy may be when a key is missed in it.
REFRESH_S = 60.0

#: The thread pulls for this long before it looks for another task, and waits this long for other
#: processes that write to the database before it keeps the choices in memory.
_SLICE_S = 0.2


class SharedLayer:
    """A shared store behind a local one. No method raises, and none waits for long."""

    def __init__(
        self,
        backend: SharedStore,
        local: Connection,
        clock: Callable[[], float] = time.monotonic,
        *,
        writes: bool = True,
        thread: IOThread | None = None,
        batch: int = 200,
        budget_s: float | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """Put `backend` behind `local`.

        Args:
            writes: False to publish nothing and make no file beside the local database.
            thread: runs what `backend` does; one of its own if None.
            batch: pulled choices are written in transactions of this many.
            budget_s: how long callers wait in total; `BUDGET_S` if None.
            wait_s: how long the store may say that it cannot answer now.
        """
        self._backend = backend
        self._name, self._origin = f"the shared store {backend.location}", backend.identity
        self._writes = writes
        self._local = local
        self._batch = batch
        self._thread = thread or IOThread("safetune-shared")
        self._clock = clock
        self._budget = Budget(clock, BUDGET_S if budget_s is None else budget_s, RETRY_S)
        self._look = Budget(clock, BUDGET_S, RETRY_S).spend
        self._wait_s = wait_s
        self._put_off = PutOff(2 * RETRY_S)
        self._is_there = False
        self._off_until = self._unwritable_until = 0.0
        self._warned: set[str] = set()
        self._refreshed: dict[str, float] = {}
        self._partial: set[str] = set()
        self._unkept: dict[tuple[str, str], StoredChoice] = {}
        forks.register("shared store", after_in_child=self._budget.refill, at_exit=self.flush)

    @property
    def is_on(self) -> bool:
        """Whether the store is used now."""
        return self._clock() >= self._off_until and (self._is_there or not self._thread.is_stuck)

    @property
    def _may_write(self) -> bool:
        return self._writes and self._clock() >= self._unwritable_until

    def refresh(self, space: str, since: float | None = None) -> None:
        """Bring the local store up to date with a namespace, unless that was done since `since`.

        That is in seconds since the epoch; a minute ago if None. One process of a node does it, and
        publishes this node's own choices at the end. It has half of the budget that is left; the
        rest goes on without the caller.
        """
        now = self._clock()
        last = self._refreshed.get(space)
        if not self.is_on or (since is None and last is not None and now - last < REFRESH_S):
            return
        self._refreshed[space] = now
        oldest = time.time() - REFRESH_S if since is None else since
        self._partial.add(space)

        def pull() -> bool:
            seconds = self._budget.spend() / 2
            self._go_on(space, self._pull(space, oldest, seconds), seconds)
            return True

        if self._patiently(pull, True, self._look(), self._look) is None:
            self._refreshed.pop(space)

    def choice(self, space: str, key: str, declared: str) -> ChoiceRecord | None:
        """Return a choice that the local store could not keep, or that is not pulled yet."""
        stored = self._unkept.get((key, declared))
        if stored is None and space in self._partial:
            get = functools.partial(self._get, space, key, declared)
            stored = self._patiently(get, None, self._look(), self._look)
        return stored.choice if stored else None

    def claim(self, space: str, key: str, declared: str, force: bool) -> Claim:
        """Ask for the right to tune a key, which every node has where the store does not answer.

        Looks once more for the choice of another node. The claim says where it is to be made again.
        """
        try:
            return self._call(lambda: self._claim(space, key, declared, force), Claim(NoLease()))
        except TryLater as error:
            return Claim(later=str(error))

    def release(self, lease: Lease, published: bool) -> None:
        """Free a lease, without waiting for that."""
        if not isinstance(lease, NoLease):
            with contextlib.suppress(TimedOut):
                self._thread.submit(lambda: lease.release(published))

    def publish(self, space: str, stored: StoredChoice) -> StoredChoice:
        """Publish a choice, and return the one that all nodes use: the first of its name.

        That is `stored` itself where no answer comes in time; it is published later.
        """
        if not (self.is_on and self._may_write):
            return stored
        wait_s = max(BUDGET_S, self._wait_s - waited.seconds)
        deliver = functools.partial(self._deliver, space, [stored])
        found = self._patiently(deliver, [stored], wait_s, waited.add)
        if found is None:
            self._stop(f"{self._name} has not taken a choice for {wait_s:.0f} s")
        return found[0] if found else stored

    def flush(self) -> None:
        """Wait for two seconds at most until all tasks are done."""
        if self.is_on:
            with contextlib.suppress(TimedOut):
                self._thread.call(lambda: self._keep([]), BUDGET_S)

    def write_unkept(self, wait_s: float | None = None) -> None:
        """Write what the local store could not keep to it, where another process locked it.

        Raises `StoreError`.
        """
        if unkept := dict(self._unkept):  # the thread may add some
            local_copy.adopt(self._local, unkept.values(), wait_s, self._origin)
            for name, written in unkept.items():
                if self._unkept.get(name) is written:
                    self._unkept.pop(name, None)  # the thread may write them, too

    def _patiently(
        self,
        work: Callable[[], Result],
        otherwise: Result,
        for_s: float,
        count: Callable[[float], object],
    ) -> Result | None:
        """As `_call`, again for `for_s` seconds, which are counted; then return None."""
        begin = self._clock()
        for _ in tries(for_s, *_LATER_S, self._clock):
            try:
                return self._call(work, otherwise)
            except TryLater as error:
                logger.info("%s; asking again", error)
                count(self._clock() - begin)
                begin = self._clock()
        return None

    def _call(self, work: Callable[[], Result], otherwise: Result) -> Result:
        """Have the thread do some work, and return `otherwise` where the store is off.

        Raises `TryLater`, for `self._wait_s` at most.
        """
        if not self.is_on:
            return otherwise
        if self._off_until:
            self._off_until = 0.0
            self._budget.refill()
        begin, found = self._clock(), otherwise
        try:
            found = self._answer(work)
        except TryLater as error:
            if self._put_off.seconds(begin) < self._wait_s:
                raise
            self._stop(str(error))
            return found
        except Unwritable as error:
            self._stop_writing(error)
        except StoreError as error:
            self._stop(str(error))
        self._budget.spend(self._clock() - begin)
        self._put_off.end()
        return found

    def _answer(self, work: Callable[[], Result]) -> Result:
        """Have the thread do some work; a server that has let it in may be asked again."""
        slow = f"{self._name} does not answer in time"
        if self._thread.is_stuck:
            raise TryLater(slow)
        try:
            return self._thread.call(lambda: self._run(work), self._budget.spend())
        except TimedOut:
            self._is_there = self._backend.is_connected
            raise (TryLater if self._is_there else StoreError)(slow) from None

    def _run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread; any failure of a back end becomes a `StoreError`."""
        try:
            return work()
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self._name} failed: {error!r}") from error
        finally:
            self._backend.close()

    def _stop(self, problem: str) -> None:
        self._off_until = self._clock() + RETRY_S
        self._warn("off", f"{problem}; continuing without it, and trying again in {RETRY_S:.0f} s")

    def _stop_writing(self, problem: Unwritable) -> None:
        self._unwritable_until = self._clock() + RETRY_S
        self._warn("unwritable", f"{problem}; choices of this node are not shared for now")

    def _warn(self, subject: str, text: str) -> None:
        if subject in self._warned:
            logger.info("%s", text)
        else:
            self._warned.add(subject)
            warn(text, StoreWarning)

    def _go_on(self, space: str, pull: Iterator[bool], seconds: float) -> None:
        """Pull for `seconds`, and leave the rest to a task of its own, behind those that wait."""
        end = self._clock() + seconds
        for complete in pull:
            if complete:
                self._partial.discard(space)
            elif self._clock() >= end:
                rest = functools.partial(self._go_on, space, pull, _SLICE_S)
                self._thread.submit(functools.partial(self._run, rest))
                return

    def _pull(self, space: str, since: float, wait_s: float) -> Iterator[bool]:
        """Copy what is new here and publish what is missing there; yield whether all is here."""
        connection, backend = self._local, self._backend
        database = connection.path if self._writes else None
        with once_per_node.turn(database, space, self._origin, since, wait_s) as turn:
            if turn is Turn.MINE:
                names = backend.names(space)
                missing = names - local_copy.copied(connection, space, self._origin)
                pulled = iter(backend.pull(space, missing)) if missing else iter(())
                for batch in _batches(pulled, self._batch):
                    self._keep(batch)
                    yield False
                owned = local_copy.own(connection, space) - names
                for own in _batches(iter(owned), self._batch):
                    if self._may_write:
                        try:
                            self._deliver(space, local_copy.shareable(connection, own))
                        except Unwritable as error:
                            self._stop_writing(error)
                        yield False
        yield turn is not Turn.BUSY

    def _claim(self, space: str, key: str, declared: str, force: bool) -> Claim:
        lease: Lease | None
        try:
            lease = self._backend.lease(key, locks.node_id(self._local.path))
        except Unwritable as error:
            self._stop_writing(error)
            lease = NoLease()
        stored = self._get(space, key, declared)  # also with force: its generation is the next one
        if stored is None or force:
            return Claim(lease)
        if lease is not None:
            lease.release()
        return Claim(stored=stored)

    def _get(self, space: str, key: str, declared: str) -> StoredChoice | None:
        stored = self._backend.get(space, key, declared)
        if stored is None or stored.unknown:
            return None
        self._keep([stored])
        return stored

    def _deliver(self, space: str, records: Sequence[StoredChoice]) -> list[StoredChoice]:
        """Publish records, and copy those that others had published under the same names."""
        records = [record for record in records if local_copy.is_sound(record)]
        stored = self._backend.publish(space, records) if records else []
        pairs = list(zip(records, stored, strict=True))
        self._keep([other for _, other in pairs])
        return [own if other.unknown else other for own, other in pairs]

    def _keep(self, records: Sequence[StoredChoice]) -> None:
        records = [record for record in records if not record.unknown]
        try:
            if records:
                local_copy.adopt(self._local, records, _SLICE_S, self._origin)
                records = []
            self.write_unkept(_SLICE_S)
        except StoreError as error:
            logger.info("%s; the pulled choices are kept in memory", error)
            for each in sorted(records, key=lambda each: precedence(each.choice), reverse=True):
                self._unkept[each.choice.key, each.choice.declared] = each


def _batches(items: Iterator[Result], most: int) -> Iterator[list[Result]]:
    while batch := list(itertools.islice(items, most)):
        yield batch
