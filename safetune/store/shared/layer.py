"""The shared store from a run's view: no launch waits long for it, whatever it does.

A `Puller` copies other nodes' published choices into the local store, which lookups read; a process
that may not write there keeps the copies in memory. Only a process that wants to tune a key, or has
tuned one, asks the store itself, on a thread, and waits five seconds for an answer. If the store
fails or does not answer, it counts as away for a minute: the run continues with the local store
alone, and one warning says so. A choice that could not be published stays in the local store, and
the next pull publishes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from safetune import forks
from safetune.errors import StoreError, StoreWarning
from safetune.messages import logger, warn
from safetune.store.local import locks
from safetune.store.local.connection import Connection
from safetune.store.local.rows import OWN
from safetune.store.shared import local_copy
from safetune.store.shared.protocol import (
    Claim,
    Lease,
    NoLease,
    SharedStore,
    Unwritable,
    name_of,
)
from safetune.store.shared.puller import Puller

if TYPE_CHECKING:
    from safetune.store.records import ChoiceRecord, StoredChoice

Result = TypeVar("Result")

#: How long a caller waits for an answer.
ANSWER_S = 5.0

#: How long a store that has failed is left alone.
RETRY_S = 60.0


class SharedLayer:
    """A shared store behind a local one. No method raises."""

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
            writes: False to publish nothing, and to write nothing to the local database or beside
                it.
        """
        self._backend, self._local = backend, local
        if writes and local.path is not None:  # its waits hold up neither readers nor an answer
            self._local = Connection(local.path, wait_s=0.0)
        self._name, self._origin = f"the shared store {backend.location}", backend.identity
        self._writes = writes
        self._clock = clock
        self._memory: dict[tuple[str, str], StoredChoice] = {}
        self._pullers: dict[str, Puller] = {}
        self._starting = forks.lock()
        self._away_until = 0.0
        self._lost: Future[Any] | None = None  # a question that was not answered in time
        self._warned: set[str] = set()
        forks.register("shared store", after_in_child=self._start_over)

    def _start_over(self) -> None:
        """Forget the parent's threads, in a forked child."""
        self._pullers, self._away_until, self._lost = {}, 0.0, None

    @property
    def is_on(self) -> bool:
        """Whether the store is in use now."""
        is_lost = self._lost is not None and not self._lost.done()
        return self._clock() >= self._away_until and not is_lost

    def refresh(self, space: str) -> None:
        """Pull a namespace from now on. The first miss waits for the first pull."""
        self.puller(space).wait()

    def pull(self, space: str) -> None:
        """Update the local store from a namespace now; one that takes long may go on after."""
        self._ask(lambda store: self._copy(store, space), False, is_short=False)

    def choice(self, key: str, declared: str) -> ChoiceRecord | None:
        """Return a pulled choice that is not in the local store."""
        stored = self._memory.get((key, declared))
        return stored.choice if stored else None

    def claim(self, space: str, key: str, declared: str, force: bool) -> Claim:
        """Ask for the right to tune a key; if the store does not answer, every node has it.

        First looks again for another node's choice.
        """
        return self._ask(
            lambda store: self._claim(store, space, key, declared, force), Claim(NoLease())
        )

    def release(self, lease: Lease) -> None:
        """Free a lease."""
        if not isinstance(lease, NoLease):
            self._ask(lambda _: lease.release(), None)

    def publish(self, space: str, stored: StoredChoice) -> StoredChoice:
        """Publish a choice, and return the one that all nodes use: the first of its name.

        That is `stored` itself if no answer comes in time; it is published later.
        """
        if not self._writes:
            return stored
        found = self._ask(lambda store: self._deliver(store, space, [stored]), [stored])
        return found[0] if found else stored

    def close(self) -> None:
        """Stop pulling, and close the connection to the local store."""
        for puller in tuple(self._pullers.values()):
            puller.stop()
        self._local.close()

    def puller(self, space: str) -> Puller:
        """Return what pulls a namespace, from now on."""
        with self._starting:
            if space not in self._pullers:
                database = self._local.path if self._writes else None
                name = f"{self._origin} {space}"
                self._pullers[space] = Puller(lambda: self._pull(space), database, name)
            return self._pullers[space]

    def _ask(
        self, work: Callable[[SharedStore], Result], otherwise: Result, is_short: bool = True
    ) -> Result:
        """Have a thread ask the store, and return `otherwise` where it is away.

        A thread that never returns, for example from a dead NFS mount, is abandoned; until it does,
        the store counts as away if the question `is_short`.
        """
        if not self.is_on:
            return otherwise
        answer: Future[Result] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._checked(self._backend.again(), work))
            except BaseException as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=ask, name="safetune-shared", daemon=True).start()
        except RuntimeError as error:  # as at exit
            self._stop(f"cannot ask {self._name}: {error}")
            return otherwise
        wait([answer], ANSWER_S)
        if answer.done():
            try:
                return answer.result()
            except Unwritable as error:
                self._tell_unwritable(error)
            except StoreError as error:
                self._stop(str(error))
        elif is_short:
            self._lost = answer
            self._stop(f"{self._name} does not answer in time")
        return otherwise

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

    def _tell_unwritable(self, problem: Unwritable) -> None:
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
            found_news = self._checked(self._backend.again(), lambda s: self._copy(s, space))
        except StoreError as error:
            self._stop(str(error))
            raise
        self._away_until, self._lost = 0.0, None
        return found_news

    def _copy(self, store: SharedStore, space: str) -> bool:
        names = store.names(space)
        missing = names - local_copy.copied(self._local, space, self._origin)
        if not self._writes:
            missing -= {name_of(stored) for stored in tuple(self._memory.values())}
        for batch in store.pull(space, missing) if missing else ():
            self._keep(batch)
        own = local_copy.own(self._local, space) - names if self._writes else set()
        try:
            published = self._deliver(store, space, local_copy.shareable(self._local, own))
        except Unwritable as error:
            self._tell_unwritable(error)
            published = []
        return bool(missing or published)

    def _claim(self, store: SharedStore, space: str, key: str, declared: str, force: bool) -> Claim:
        lease: Lease | None
        try:
            lease = store.lease(key, locks.node_id(self._local.path))
        except Unwritable as error:
            self._tell_unwritable(error)
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
            local_copy.adopt(self._local, records, f"{whose}{self._origin}")
        except StoreError as error:
            logger.info("%s; the pulled choices are kept in memory", error)
            for each in sorted(records, key=lambda each: each.choice.generation):
                self._memory[each.choice.key, each.choice.declared] = each
