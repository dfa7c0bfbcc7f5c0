"""Single flight: of all processes that miss a key, one tunes it and the others wait for its choice.

A wait is bounded, all waits of a process together: ranks that wait for one another inside a
collective would otherwise never meet. Who has waited long enough goes on with the fallback. Nothing
here waits for a thread or a process while it holds something that they want: the lease of a key
comes first, then the node's turn to compile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from safetune import forks
from safetune.config import config_digest
from safetune.errors import Busy, StoreError
from safetune.store.local.lease import Lease
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord
from safetune.tuning.requests import TuningRequest

logger = logging.getLogger("safetune")

#: Compilers use every core, so one process of a node at a time compiles.
COMPILING = "compile pool"

#: A waiting process asks again after so long; two indexed reads each time.
_POLL_S = 0.02
_MAX_POLL_S = 0.25

_holding = threading.local()


def _names() -> set[str]:
    """What this thread holds."""
    names: set[str] = _holding.__dict__.setdefault("names", set())
    return names


class _Spent:
    """What this process has waited so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.lock = threading.Lock()


_spent = _Spent()


@dataclass(frozen=True)
class Patience:
    """How long to wait for other processes.

    Attributes:
        seconds: of all waits of this process together.
        check: called while waiting; what it raises ends the wait.
    """

    seconds: float = math.inf
    check: Callable[[], None] = lambda: None


@contextlib.contextmanager
def lead(
    request: TuningRequest, store: Store, patience: Patience
) -> Iterator[ChoiceRecord | Lease | None]:
    """Yield the choice that another process has made meanwhile, or this process's lease to tune.

    None where the store has no leases to give: then every process tunes for itself.

    Raises:
        Busy: another process is still tuning the key, and no more waiting is allowed.
    """
    if request.key.digest in _names():
        raise Busy("its tuning has launched it again with the same key")
    with _held(store, request.key.digest, patience, lambda: _choice(request, store)) as found:
        yield found


@contextlib.contextmanager
def compiling(store: Store, patience: Patience) -> Iterator[None]:
    """Be the only process of this node that compiles; raises `Busy`."""
    if COMPILING in _names():  # a tuning within a tuning
        yield
        return
    with _held(store, COMPILING, patience, lambda: None):
        yield


@contextlib.contextmanager
def _held(
    store: Store,
    name: str,
    patience: Patience,
    chosen: Callable[[], ChoiceRecord | None],
) -> Iterator[ChoiceRecord | Lease | None]:
    lease = None
    if store.path is not None:  # nobody else sees what is in memory
        found = _waited(store, name, patience, chosen)
        if isinstance(found, ChoiceRecord):
            yield found
            return
        lease = found
    _names().add(name)
    try:
        yield lease
    finally:
        _names().discard(name)
        if lease is not None:
            lease.release()


def _waited(
    store: Store,
    name: str,
    patience: Patience,
    chosen: Callable[[], ChoiceRecord | None],
) -> ChoiceRecord | Lease | None:
    """Return what comes first: the lease, or the choice."""
    contender = store.contender(name)
    pause_s = _POLL_S
    while True:
        begin = time.monotonic()
        try:
            if (choice := chosen()) is not None:
                return choice
            lease = contender.attempt()
        except StoreError as error:
            logger.info("%s; tuning without regard to other processes", error)
            return None
        if lease is not None:
            # Once more: the last owner may have chosen just before it let go.
            if (choice := chosen()) is None:
                return lease
            lease.release()
            return choice
        if pause_s == _POLL_S:
            logger.info("waiting for another process: %s", name)
        pause(pause_s, patience, begin)
        pause_s = min(2 * pause_s, _MAX_POLL_S)


def pause(seconds: float, patience: Patience, begin: float) -> None:
    """Sleep, at most for what is left, and count what has passed since `begin`; raises `Busy`."""
    patience.check()
    seconds = min(seconds, patience.seconds - _spent.seconds)
    if seconds <= 0:
        raise Busy(
            f"another process is at it, and this one has waited {_spent.seconds:.0f} s for others "
            "(SAFETUNE_WAIT)"
        )
    time.sleep(seconds)
    if patience.seconds < math.inf:
        with _spent.lock:
            _spent.seconds += time.monotonic() - begin


def _choice(request: TuningRequest, store: Store) -> ChoiceRecord | None:
    if request.force:
        return None
    choice = store.choice(request.key.digest, request.declared)
    return choice if choice is not None and is_usable(request, choice) else None


def is_usable(request: TuningRequest, choice: ChoiceRecord) -> bool:
    """Whether a choice is one of the configs that pruning leaves."""
    return choice.config_digest in map(config_digest, request.configs)


def _start_over() -> None:
    """A fork is another process, and holds nothing."""
    global _spent
    _spent = _Spent()
    _holding.__dict__.clear()


forks.register("tuning", after_in_child=_start_over)
