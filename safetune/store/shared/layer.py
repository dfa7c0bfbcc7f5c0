"""The shared store from a run's view: no launch waits long for it, whatever it does.

A `Puller` copies other nodes' published choices into the local store, which lookups read; a process
that may not write there keeps the copies in memory. Only a process that wants to tune a key, or has
tuned one, asks the store itself, on a thread: it waits two seconds for an answer, longer if the
server has accepted its connection. If the store fails or does not answer, it counts as away for a
minute: the run continues with the local store alone, and one warning says so. A choice that could
not be published stays in the local store, and the next pull publishes it.

A server that says that it cannot answer now is asked again: by the caller of `claim`, which also
waits for other processes, and by `publish` itself. After `SAFETUNE_WAIT` seconds of that, the store
counts as away.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from safetune import forks
from safetune.errors import StoreError, StoreWarning
from safetune.messages import logger, warn
from safetune.store.local import locks
from safetune.store.local.db_files import tries
from safetune.store.local.locks import waited
from safetune.store.local.rows import OWN
from safetune.store.shared import local_copy
from safetune.store.shared.io_thread import IOThread
from safetune.store.shared.protocol import (
    Claim,
    Lease,
    NoLease,
    SharedStore,
    TryLater,
    Unwritable,
    name_of,
)
from safetune.store.shared.puller import Puller

if TYPE_CHECKING:
    from safetune.store.local.connection import Connection
    from safetune.store.records import ChoiceRecord, StoredChoice

Result = TypeVar("Result")

#: How long a caller waits for an answer, and for one of a server that has let it in.
ANSWER_S = 2.0
CONNECTED_S = 10.0

#: How long a store that has failed is left alone.
RETRY_S = 60.0

#: How long a store may say that it cannot answer now: `SAFETUNE_WAIT`.
WAIT_S = 120.0

#: The first and the longest pause before such a store is asked again.
_LATER_S = (0.1, 2.0)

#: How long a copy waits for other processes that write to the database; then it is in memory.
_WRITE_S = 0.2

#: Copies are written in transactions of this many.
_BATCH = 200


class SharedLayer:
    """A shared store behind a local one. No method raises, but `claim` may say to ask again."""

    def __init__(
        self,
        backend: SharedStore,
        local: Connection,
        clock: Callable[[], float] = time.monotonic,
        *,
        writes: bool = True,
        wait_s: float = WAIT_S,
    ) -> None:
        """Put `backend` behind `local`.

        Args:
            writes: False to publish nothing, and to write nothing to the local database or beside
                it.
            wait_s: how long the store may say that it cannot answer now.
        """
        self._backend, self._local = backend, local
        self._name, self._origin = f"the shared store {backend.location}", backend.identity
        self._writes = writes
        self._clock = clock
        self._wait_s = wait_s
        self._asks = IOThread("safetune-shared")
        self._asked: SharedStore = backend
        self._stuck: Future[Any] | None = None
        self._memory: dict[tuple[str, str], StoredChoice] = {}
        self._pullers: dict[str, Puller] = {}
        #: The namespaces that are being pulled, as long as the store has not answered.
        self._unanswered: dict[str, SharedStore] = {}
        self._starting = forks.lock()
        self._full_since: float | None = None
        self._away_until = self._unwritable_until = 0.0
        self._warned: set[str] = set()
        forks.register("shared store", after_in_child=self._start_over, at_exit=self.flush)

    def _start_over(self) -> None:
        """Forget the parent's threads, in a forked child."""
        self._pullers, self._unanswered = {}, {}
        self._stuck, self._away_until = None, 0.0

    @property
    def is_on(self) -> bool:
        """Whether the store is in use now."""
        is_stuck = self._stuck is not None and not self._stuck.done()
        return self._clock() >= self._away_until and not is_stuck

    @property
    def _may_write(self) -> bool:
        return self._writes and self._clock() >= self._unwritable_until

    def refresh(self, space: str) -> None:
        """Pull a namespace from now on. The first miss waits for the first pull."""
        ended = self._puller(space).wait()
        pulling = self._unanswered.get(space)
        if not ended and pulling is not None and not pulling.is_connected and self.is_on:
            self._stop(f"{self._name} does not answer in time")

    def is_complete(self, space: str) -> bool:
        """Whether the first pull of a namespace is complete."""
        return self._puller(space).is_complete

    def after_first_pull(self, space: str, work: Callable[[], object]) -> None:
        """Call `work` once the first pull of a namespace is complete."""
        self._puller(space).after_first(work)

    def pull(self, space: str) -> None:
        """Update the local store from a namespace, waiting at most two seconds."""
        if self.is_on:
            self._puller(space).pull_now()

    def choice(self, key: str, declared: str) -> ChoiceRecord | None:
        """Return a pulled choice that is not in the local store."""
        stored = self._memory.get((key, declared))
        return stored.choice if stored else None

    def claim(self, space: str, key: str, declared: str, force: bool) -> Claim:
        """Ask for the right to tune a key; if the store does not answer, every node has it.

        First looks again for another node's choice. The claim says if it must be repeated.
        """
        try:
            claim = self._ask(
                lambda store: self._claim(store, space, key, declared, force), Claim(NoLease())
            )
        except TryLater as error:
            now = self._clock()
            if self._full_since is None:
                self._full_since = now
            if now - self._full_since < self._wait_s:
                return Claim(later=str(error))
            self._stop(str(error))
            return Claim(NoLease())
        self._full_since = None
        return claim

    def release(self, lease: Lease) -> None:
        """Free a lease, without waiting for the result."""
        if not isinstance(lease, NoLease):
            with contextlib.suppress(RuntimeError):
                self._asks.submit(lambda: _logged(lease.release))

    def publish(self, space: str, stored: StoredChoice) -> StoredChoice:
        """Publish a choice, and return the one that all nodes use: the first of its name.

        That is `stored` itself if no answer comes in time; it is published later.
        """
        if not self._may_write:
            return stored
        wait_s, begin = max(ANSWER_S, self._wait_s - waited.seconds), self._clock()
        for last in tries(wait_s, *_LATER_S, self._clock):
            try:
                found = self._ask(lambda store: self._deliver(store, space, [stored]), [stored])
            except TryLater as error:
                waited.add(self._clock() - begin)
                begin = self._clock()
                if last:
                    self._stop(f"{error}, for {wait_s:.0f} s")
                continue
            return found[0] if found else stored
        return stored

    def flush(self) -> None:
        """Wait at most two seconds for pending requests and releases."""
        if (last := self._asks.last) is not None and self.is_on:
            wait([last], ANSWER_S)

    def close(self) -> None:
        """Stop pulling; the store may still be asked."""
        for puller in tuple(self._pullers.values()):
            puller.stop()

    def _puller(self, space: str) -> Puller:
        with self._starting:
            if space not in self._pullers:
                database = self._local.path if self._writes else None
                name = f"{self._origin} {space}"
                self._pullers[space] = Puller(lambda: self._pull(space), database, name)
            return self._pullers[space]

    def _ask(self, work: Callable[[SharedStore], Result], otherwise: Result) -> Result:
        """Have the thread ask the store, and return `otherwise` where it is away.

        Raises `TryLater`.
        """
        if not self.is_on:
            return otherwise
        self._away_until = 0.0
        try:
            return self._answer(work)
        except TryLater:
            raise
        except Unwritable as error:
            self._stop_writing(error)
        except StoreError as error:
            self._stop(str(error))
        return otherwise

    def _answer(self, work: Callable[[SharedStore], Result]) -> Result:
        def run() -> Result:
            self._asked = self._backend.again()
            return self._checked(self._asked, work)

        try:
            task = self._asks.submit(run)
        except RuntimeError as error:
            raise StoreError(f"cannot ask {self._name}: {error}") from error
        with contextlib.suppress(FutureTimeoutError):
            return task.result(ANSWER_S)
        if self._asked.is_connected:
            with contextlib.suppress(FutureTimeoutError):
                return task.result(CONNECTED_S - ANSWER_S)
        self._stuck = task
        raise StoreError(f"{self._name} does not answer in time")

    def _checked(self, store: SharedStore, work: Callable[[SharedStore], Result]) -> Result:
        """Return the result of `work` on a store; any failure of a back end is a `StoreError`."""
        try:
            return work(store)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self._name} failed: {error!r}") from error
        finally:
            store.close()

    def _stop(self, problem: str) -> None:
        self._away_until = self._clock() + RETRY_S
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

    def _pull(self, space: str) -> bool:
        """Pull new records and publish missing ones; return whether there were any."""
        try:
            store = self._unanswered[space] = self._backend.again()
            found_news = self._checked(store, lambda store: self._copy(store, space))
        except TryLater as error:
            logger.info("%s; asking again", error)
            raise
        except StoreError as error:
            self._stop(str(error))
            raise
        finally:
            self._unanswered.pop(space, None)
        self._away_until = 0.0
        return found_news

    def _copy(self, store: SharedStore, space: str) -> bool:
        names = store.names(space)
        self._unanswered.pop(space, None)
        in_memory = {name_of(stored) for stored in tuple(self._memory.values())}
        missing = names - local_copy.copied(self._local, space, self._origin)
        news = missing - in_memory
        missing = missing if self._writes else news
        pulled = iter(store.pull(space, missing)) if missing else iter(())
        for batch in _batches(pulled):
            self._keep(batch)
        owned = local_copy.own(self._local, space) - names if self._may_write else set()
        for own in _batches(iter(owned)):
            try:
                self._deliver(store, space, local_copy.shareable(self._local, own))
            except Unwritable as error:
                self._stop_writing(error)
                break
        return bool(news or owned)

    def _claim(self, store: SharedStore, space: str, key: str, declared: str, force: bool) -> Claim:
        lease: Lease | None
        try:
            lease = store.lease(key, locks.node_id(self._local.path))
        except Unwritable as error:
            self._stop_writing(error)
            lease = NoLease()
        stored = store.get(space, key, declared)  # also with force: its generation is the next one
        if stored is not None and not stored.unknown:
            self._keep([stored])
        if stored is None or stored.unknown or force:
            return Claim(lease)
        if lease is not None:
            lease.release()
        return Claim(stored=stored)

    def _deliver(
        self, store: SharedStore, space: str, records: Sequence[StoredChoice]
    ) -> list[StoredChoice]:
        """Publish records, and copy those that others had published under the same names."""
        records = [record for record in records if local_copy.is_sound(record)]
        stored = store.publish(space, records) if records else []
        pairs = list(zip(records, stored, strict=True))
        self._keep([other for own, other in pairs if own.choice != other.choice])
        self._keep([other for own, other in pairs if own.choice == other.choice], OWN)
        return [own if other.unknown else other for own, other in pairs]

    def _keep(self, records: Sequence[StoredChoice], whose: str = "") -> None:
        """Write copies to the local store, or keep them in memory where it is not written to."""
        records = [record for record in records if not record.unknown]
        if not records:
            return
        try:
            if not self._writes:
                raise StoreError("the local store is read-only")
            local_copy.adopt(self._local, records, _WRITE_S, f"{whose}{self._origin}")
        except StoreError as error:
            logger.info("%s; the pulled choices are kept in memory", error)
            for each in sorted(records, key=lambda each: each.choice.generation):
                self._memory[each.choice.key, each.choice.declared] = each


def _batches(items: Iterator[Result]) -> Iterator[list[Result]]:
    while batch := list(itertools.islice(items, _BATCH)):
        yield batch


def _logged(work: Callable[[], object]) -> None:
    try:
        work()
    except StoreError as error:
        logger.info("%s", error)
