"""Single flight: of all processes that miss a key, one tunes it and the others wait for its choice.

On one machine, the tuning process holds the key's lock (`store.local.locks`), which the kernel
frees when the process ends. If nodes share a store, the process then asks that store for the right
to tune: a PostgreSQL server leases each key to one node. Nodes that share files may tune a key at
once. All launch the choice that was published first.

The total wait of a process is bounded: otherwise ranks that wait for one another inside a
collective would never meet. A process that has waited that long launches the fallback. Nothing here
waits for another process while holding something that the other needs first: the lock of a key
comes before the lock for compiling.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetune import forks
from safetune.errors import Busy, StoreError, StoreWarning
from safetune.messages import logger, warn_once
from safetune.outcome import Outcome
from safetune.store.local import locks
from safetune.store.local.db_files import pauses
from safetune.store.local.locks import Waited, waited
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice, space_of
from safetune.tuning.requests import Plan, TuningRequest

if TYPE_CHECKING:
    from safetune.store.shared.layer import SharedLayer
    from safetune.store.shared.protocol import Lease

#: The first and the longest pause between two tries: here two indexed reads each, and across nodes
#: one connection of some milliseconds.
_PAUSES_S = (0.02, 0.25)
_NODE_PAUSES_S = (0.1, 2.0)

#: How long a final waits for those of other processes: each takes a second or two.
_MOST_FOR_TURN_S = 60.0


#: The names that each thread tunes or has locked, with the thread's number.
_held: set[tuple[int, str]] = set()


@dataclass(frozen=True)
class WaitBudget:
    """How long to wait for other processes."""

    seconds: float = math.inf  # of all waits of this process together
    check: Callable[[], None] = lambda: None  # called while waiting; its exception ends the wait
    waited: Waited = waited  # counts against `seconds`: the waits of this process
    #: Told which process is waited for, again at each try, and "" at the end.
    tell: Callable[[str], None] = lambda process: None

    def tries(self, process: Callable[[], str], first_s: float, most_s: float) -> Iterator[None]:
        """Yield before each attempt to get another's result; wait between; raises `Busy`."""
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


@dataclass(frozen=True)
class Election:
    """The result of asking to tune a key."""

    plan: Plan  # as it was when this process could tune the key
    shared: SharedLayer | None = None
    #: Made by another process or node, so that there is nothing to tune. None where this process
    #: tunes.
    choice: ChoiceRecord | None = None
    #: This node's right to tune it, where nodes share a store that gives any.
    lease: Lease | None = None

    def publish(self, choice: ChoiceRecord, outcome: Outcome) -> ChoiceRecord:
        """Publish a shareable choice; return the one that every node launches."""
        if self.shared is None or not outcome.shareable:
            return choice
        key = self.plan.request.key
        return self.shared.publish(space_of(key), StoredChoice(KeyRecord.of(key), choice)).choice

    def keep(self, choice: ChoiceRecord, store: Store, outcome: Outcome) -> ChoiceRecord:
        """Publish a choice, and then store the one that every node launches; return it.

        The order matters: another process of the node launches a stored choice at once. A stored
        choice of the same generation stays.
        """
        known = store.choice(choice.key, choice.declared)
        if known is not None and known.generation == choice.generation:
            choice = known
        if choice.config_digest in self.plan.request.by_digest:
            choice = self.publish(choice, outcome)
        return store.put_choice(choice)


@contextlib.contextmanager
def elect(request: TuningRequest, store: Store, budget: WaitBudget) -> Iterator[Election]:
    """Yield when this process may tune a key, or with another's choice; raises `Busy`.

    Without locks, every process may tune.
    """
    name = request.key.digest
    if (threading.get_ident(), name) in _held:
        raise Busy("its own tuning launched it again with the same key")
    doing = f"tunes {request.key.kernel.name} for {request.key}"
    since = 0.0 if request.goes_on else time.time()

    def chosen() -> Plan | None:
        plan = Plan.read(request, store, since)
        return None if plan.final is None else plan

    with _locked(store, name, doing, budget, chosen) as found:
        # The last owner may have chosen just before it let go.
        plan = found or Plan.read(request, store, since)
        if plan.final is not None:
            yield Election(plan, choice=plan.final)
            return
        with elect_cluster(plan, store, budget) as election:
            yield election


@contextlib.contextmanager
def compiling(store: Store, budget: WaitBudget) -> Iterator[None]:
    """Be the only process that compiles on its usable cores; raises `Busy`."""
    with _locked(store, compiling_name(), "compiles", budget):
        yield


@contextlib.contextmanager
def racing(store: Store, gpu_uuid: str, budget: WaitBudget) -> Iterator[bool]:
    """Be the only process that runs a final on a device; yield whether it is.

    If another final does not end in time, both run at once.

    Args:
        gpu_uuid: empty in the interpreter, where the device is the machine.
    """
    most_s = min(budget.seconds, budget.waited.seconds + _MOST_FOR_TURN_S)
    turn = _locked(store, f"final on {gpu_uuid}", "times configs", replace(budget, seconds=most_s))
    with contextlib.ExitStack() as held:
        is_alone = True
        try:
            held.enter_context(turn)
        except Busy:
            is_alone = False
        yield is_alone


def compiling_name() -> str:
    """Return the name of the lock for compiling.

    Compilers use all usable cores, so one process at a time compiles on the same ones.
    """
    return f"compile pool {sorted(os.sched_getaffinity(0))}"


@contextlib.contextmanager
def elect_cluster(plan: Plan, store: Store, budget: WaitBudget) -> Iterator[Election]:
    """Yield when this node may tune a key, or when another has; raises like `elect`.

    Only the process of a node that holds the key's lock gets here.
    """
    if store.shared is None:
        yield Election(plan)
        return
    election = _elected(plan, store.shared, budget)
    with contextlib.ExitStack() as held:
        if election.lease is not None:
            held.callback(store.shared.release, election.lease)
            ended = threading.Event()
            held.callback(ended.set)
            _start_heartbeat(election.lease, ended)
        yield election


@contextlib.contextmanager
def _locked(
    store: Store,
    name: str,
    doing: str,
    budget: WaitBudget,
    chosen: Callable[[], Plan | None] = lambda: None,
) -> Iterator[Plan | None]:
    """Yield None with the name locked, or the plan that `chosen` returns.

    A tuning within one that has locked the name goes on.

    Args:
        doing: what a process does that has locked it.
        chosen: returns the plan of a key once it has a final choice.
    """
    mine = threading.get_ident(), name
    if mine in _held:
        yield None
        return
    with contextlib.ExitStack() as held:
        plan, path = None, store.path
        if path is not None:  # other processes do not see a store in memory
            for _ in budget.tries(lambda: _holder(path, name, doing), *_PAUSES_S):
                if (plan := chosen()) is not None or _lock(path, name, held):
                    break
        if plan is None:
            _held.add(mine)
            held.callback(_held.discard, mine)
        yield plan


def _holder(path: Path, name: str, doing: str) -> str:
    pid = locks.holder(path, name)
    return f"{f'process {pid}' if pid else 'another process'}, which {doing}"


def _lock(path: Path, name: str, held: contextlib.ExitStack) -> bool:
    """Lock a name; return whether it is locked. Without locks it counts as locked."""
    try:
        lock = locks.try_lock(path, name)
    except OSError as error:
        warn_once(
            f"cannot lock keys beside {path} ({error.strerror or error}); processes do not wait "
            "for one another, and each may tune the same key",
            StoreWarning,
        )
        return True
    if lock is not None:
        held.callback(lock.release)
    return lock is not None


def _elected(plan: Plan, shared: SharedLayer, budget: WaitBudget) -> Election:
    """Wait until this node has the lease, or until the choice of another one is there."""
    key, declared = plan.request.key, plan.request.declared
    left_by_pruning = plan.request.by_digest
    waited_for = f"another node, which tunes {key.kernel.name} for {key}"
    for _ in budget.tries(lambda: waited_for, *_NODE_PAUSES_S):
        claim = shared.claim(space_of(key), key.digest, declared, plan.due)
        lease, stored = claim.lease, claim.stored
        if stored is not None and stored.choice.config_digest in left_by_pruning:
            return Election(plan, shared, stored.choice)
        if lease is not None or stored is not None:
            return Election(plan, shared, lease=lease)
    raise AssertionError("a budget's tries end with an exception")


def _start_heartbeat(lease: Lease, ended: threading.Event) -> None:
    every_s = lease.expires_after_s / 3

    def beat() -> None:
        while not ended.wait(every_s):
            with contextlib.suppress(StoreError):  # it is tried again before it expires
                if not lease.renew():
                    return  # another node tunes now; the first choice that is published counts

    if every_s < math.inf:
        with contextlib.suppress(RuntimeError):  # no thread can be started: no heartbeats
            threading.Thread(target=beat, name="safetune-shared-lease", daemon=True).start()


# A forked child tunes nothing.
forks.register("tuning", after_in_child=_held.clear)
