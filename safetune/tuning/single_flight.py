"""Single flight: of all processes that miss a key, one tunes it and the others wait for its choice.

On one machine a process that tunes holds the key's lock (`store.local.locks`), which the kernel
frees when the process ends. Where nodes share a store, it then asks that store for its lease, so
that one node tunes. Nodes that share a directory have no leases: two may tune a key at once, and
all launch the choice that was published first.

Waits are bounded, all waits of a process together: ranks that wait for one another inside a
collective would otherwise never meet. A process that has waited that long launches the fallback.
Nothing here waits for another process while it holds something that the other one wants first: the
lock of a key comes before the lock for compiling.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetune import forks
from safetune.errors import (
    Busy,
    NotExclusive,
    NoWorkingConfig,
    StoreError,
    StoreWarning,
    WorkerUnavailable,
    from_signal_handler,
)
from safetune.messages import logger, warn_once
from safetune.outcome import Outcome
from safetune.store.local import locks
from safetune.store.local.db_files import pauses
from safetune.store.local.locks import Waited, waited
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice
from safetune.tuning import requests
from safetune.tuning.requests import TuningRequest

if TYPE_CHECKING:
    from safetune.store.shared.layer import SharedLayer
    from safetune.store.shared.protocol import Lease

#: The first and the longest pause between two tries: here two indexed reads each, and across nodes
#: one connection of some milliseconds.
_PAUSES_S = (0.02, 0.25)
_NODE_PAUSES_S = (0.1, 2.0)


class _OfThread(threading.local):
    """The names that a thread tunes or has locked."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_of_thread = _OfThread()


@dataclass(frozen=True)
class WaitBudget:
    """How long to wait for other processes."""

    seconds: float = math.inf  # of all waits of this process together
    check: Callable[[], None] = lambda: None  # called while waiting; what it raises ends the wait
    waited: Waited = waited  # counts against `seconds`: the waits of this process
    #: Tune a key only where no other node can tune it at the same time; else raise `NotExclusive`.
    exclusive: bool = False
    #: Told which process is waited for, again at each try, and "" at the end.
    tell: Callable[[str], None] = lambda process: None

    def tries(self, process: Callable[[], str], first_s: float, most_s: float) -> Iterator[None]:
        """Yield for each try to get what another process has, and wait between; raises `Busy`."""
        try:
            for number, pause_s in enumerate(pauses(first_s, most_s)):
                begin = time.monotonic()
                yield
                self.tell(other := process())
                if number == 0:
                    logger.info("waiting for %s", other)
                self.check()
                pause_s = min(pause_s, self.seconds - self.waited.seconds)
                if pause_s <= 0:
                    raise Busy(
                        "another process is still tuning, and this one has waited "
                        f"{self.waited.seconds:.0f} s for others (SAFETUNE_WAIT): {other}"
                    )
                time.sleep(pause_s)
                if self.seconds < math.inf:
                    self.waited.add(time.monotonic() - begin)
        finally:
            self.tell("")


@dataclass
class Election:
    """What came of asking to tune a key."""

    request: TuningRequest
    shared: SharedLayer | None = None
    #: Made by another process or node, so that there is nothing to tune. None where this process
    #: tunes.
    choice: ChoiceRecord | None = None
    #: This node's right to tune it, where nodes share a store that gives any.
    lease: Lease | None = None
    published: bool = False

    def publish(self, choice: ChoiceRecord, outcome: Outcome) -> ChoiceRecord:
        """Publish a choice that may be shared; return the one that every node launches."""
        if self.shared is None or not outcome.shareable:
            return choice
        from safetune.store.shared.protocol import space_of

        stored = StoredChoice(KeyRecord.of(self.request.key), choice)
        self.published = True
        return self.shared.publish(space_of(self.request.key), stored).choice

    def keep(self, choice: ChoiceRecord, store: Store, outcome: Outcome) -> ChoiceRecord:
        """Publish a choice, and then store the one that every node launches; return it.

        In this order: another process of the node launches a stored choice at once. A stored one of
        the same generation stays.
        """
        known = store.choice(choice.key, choice.declared)
        if known is not None and known.generation == choice.generation:
            choice = known
        if choice.config_digest in self.request.by_digest:
            choice = self.publish(choice, outcome)
        return store.put_choice(choice)


@contextlib.contextmanager
def elect(request: TuningRequest, store: Store, budget: WaitBudget) -> Iterator[Election]:
    """Yield when this process may tune a key, or with the choice of another; raises `Busy`.

    Where there are no locks, every process may tune.
    """
    name = request.key.digest
    if name in _of_thread.names:
        raise Busy("its tuning has launched it again with the same key")
    doing = f"tunes {request.key.kernel.name} for {request.key}"
    with _locked(store, name, doing, budget, lambda: final_choice(request, store)) as choice:
        if choice is not None:
            yield Election(request, choice=choice)
            return
        with elect_cluster(request, store, budget) as election:
            yield election


@contextlib.contextmanager
def compiling(store: Store, budget: WaitBudget) -> Iterator[None]:
    """Be the only process that compiles on the cores that it may use; raises `Busy`."""
    name = compiling_name()
    if name in _of_thread.names:  # a tuning within a tuning
        yield
        return
    with _locked(store, name, "compiles", budget, lambda: None):
        yield


def compiling_name() -> str:
    """Return the name of the lock for compiling.

    Compilers use every core that they may: one process at a time compiles on the same ones.
    """
    return f"compile pool {sorted(os.sched_getaffinity(0))}"


@contextlib.contextmanager
def elect_cluster(request: TuningRequest, store: Store, budget: WaitBudget) -> Iterator[Election]:
    """Yield when this node may tune a key, or when another has; raises as `elect` does.

    Only the process of a node that holds the key's lock comes here.
    """
    if store.shared is None:
        if budget.exclusive:
            raise NotExclusive(request.key.kernel.name)
        yield Election(request)
        return
    again = request.force or requests.is_due(request, store, store.trials(request.key.digest))
    election = _elected(request, store.shared, budget, again)
    if election.lease is None:
        yield election
        return
    ended = threading.Event()
    _start_heartbeat(election.lease, ended)
    interrupted = False
    try:
        yield election
    except BaseException as error:
        interrupted = _says_nothing_of_the_key(error)
        raise
    finally:
        ended.set()
        # Where this was interrupted, one other node tunes; else all do, and fare as this one did.
        store.shared.release(election.lease, election.published or interrupted)


@contextlib.contextmanager
def _locked(
    store: Store,
    name: str,
    doing: str,
    budget: WaitBudget,
    chosen: Callable[[], ChoiceRecord | None],
) -> Iterator[ChoiceRecord | None]:
    """Yield None with the name locked, or the choice, whichever comes first.

    Args:
        doing: what a process does that has locked it.
    """
    with contextlib.ExitStack() as held:
        choice, path = None, store.path
        if path is not None:  # other processes do not see a store in memory
            for _ in budget.tries(lambda: _holder(path, name, doing), *_PAUSES_S):
                locked, choice = _try(path, name, chosen, held)
                if locked or choice is not None:
                    break
        if choice is None:
            _of_thread.names.add(name)
            held.callback(_of_thread.names.discard, name)
        yield choice


def _holder(path: Path, name: str, doing: str) -> str:
    pid = locks.holder(path, name)
    return f"{f'process {pid}' if pid else 'another process'}, which {doing}"


def _try(
    path: Path,
    name: str,
    chosen: Callable[[], ChoiceRecord | None],
    held: contextlib.ExitStack,
) -> tuple[bool, ChoiceRecord | None]:
    """Return whether the name is locked, and the choice. Without locks it counts as locked."""
    try:
        if (choice := chosen()) is not None:
            return False, choice
        lock = locks.try_lock(path, name)
        if lock is None:
            return False, None
        held.callback(lock.release)
        return True, chosen()  # the last owner may have chosen just before it let go
    except StoreError as error:
        logger.info("%s; tuning without waiting for other processes", error)
    except OSError as error:
        if from_signal_handler(error):
            raise
        warn_once(
            f"cannot lock keys beside {path} ({error.strerror or error}); processes do not wait "
            "for one another, and each may tune the same key",
            StoreWarning,
        )
    return True, None


def _elected(
    request: TuningRequest, shared: SharedLayer, budget: WaitBudget, again: bool
) -> Election:
    """Wait until this node has the lease, or until the choice of another one is there.

    Args:
        again: tune, although there is a choice.
    """
    from safetune.store.shared.protocol import Claim, NoLease, space_of

    wanted = (space_of(request.key), request.key.digest, request.declared, again)
    claim = Claim()

    def waited_for() -> str:
        node = f"another node, which tunes {request.key.kernel.name} for {request.key}"
        return claim.later or node

    for _ in budget.tries(waited_for, *_NODE_PAUSES_S):
        claim = shared.claim(*wanted)
        lease, stored = claim.lease, claim.stored
        if (
            stored is not None and stored.choice.config_digest in request.by_digest
        ):  # left by pruning
            return Election(request, shared, stored.choice)
        if budget.exclusive and isinstance(lease, NoLease):
            raise NotExclusive(request.key.kernel.name)
        if lease is not None or stored is not None:
            return Election(request, shared, lease=lease)
    raise AssertionError("a budget's tries end with an exception")


def final_choice(request: TuningRequest, store: Store) -> ChoiceRecord | None:
    """Return the choice after which there is nothing to tune."""
    if request.force or requests.is_due(request, store, store.trials(request.key.digest)):
        return None
    return requests.usable_choice(request, store)


def _says_nothing_of_the_key(error: BaseException) -> bool:
    """Whether a tuning ended for a reason that another node may not meet."""
    if isinstance(error, NoWorkingConfig):
        return error.transient
    return isinstance(error, WorkerUnavailable) or not isinstance(error, Exception)


def _start_heartbeat(lease: Lease, ended: threading.Event) -> None:
    every_s = lease.expires_after_s / 3

    def beat() -> None:
        pause_s, sooner = every_s, pauses(*_NODE_PAUSES_S)
        while not ended.wait(pause_s):
            try:
                if not lease.renew():
                    return  # another node tunes now; the first choice that is published counts
                pause_s, sooner = every_s, pauses(*_NODE_PAUSES_S)
            except StoreError:  # before it expires, also where a server is full for a moment
                pause_s = min(next(sooner), every_s)

    if every_s < math.inf:
        with contextlib.suppress(RuntimeError):  # no thread can be started: no heartbeats
            threading.Thread(target=beat, name="safetune-shared-lease", daemon=True).start()


def _after_fork_in_child() -> None:
    """A forked child tunes nothing."""
    _of_thread.names.clear()


forks.register("tuning", after_in_child=_after_fork_in_child)
