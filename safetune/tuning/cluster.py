"""Single flight across nodes: of all nodes that miss a key one tunes it; all launch its choice.

Begins where the single flight of a node (`flight`) has elected a process, and waits under the same
bound. Nodes that share nothing but a directory have no leases: they may tune a key at the same
time, and still launch the choice that was published first.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safetune.errors import LeaseLost, NoWorkingConfig, StoreError, WorkerUnavailable
from safetune.outcome import Outcome
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, StoredChoice
from safetune.store.shared.local_copy import shareable
from safetune.store.shared.record import space_of
from safetune.tuning import single_flight
from safetune.tuning.requests import TuningRequest, key_record
from safetune.tuning.single_flight import Patience

if TYPE_CHECKING:
    from safetune.store.shared.layer import SharedLayer
    from safetune.store.shared.protocol import Lease

logger = logging.getLogger("safetune")

#: A node that waits asks again after so long: one connection of some milliseconds each time.
_POLL_S = 0.1
_MAX_POLL_S = 2.0


@dataclass
class Lead:
    """One node's turn to tune a key; every node's where there is no shared store.

    Attributes:
        choice: what another node has chosen; then there is nothing to tune.
    """

    request: TuningRequest
    shared: SharedLayer | None = None
    choice: ChoiceRecord | None = None
    lease: Lease | None = None
    published: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def agreed(self, choice: ChoiceRecord, outcome: Outcome) -> ChoiceRecord:
        """Publish a choice that may be shared; return the one that every node launches."""
        if self.shared is None or not shareable(outcome):
            return choice
        stored = StoredChoice(key_record(self.request.key), choice)
        found = self.shared.publish(space_of(self.request.key), stored)
        self.published = True
        return found.choice


@contextlib.contextmanager
def lead(request: TuningRequest, store: Store, patience: Patience) -> Iterator[Lead]:
    """Yield when this node may tune a key, or another has.

    Raises:
        Busy: another node is still tuning it, and no more waiting is allowed.
    """
    leading = Lead(request, store.shared)
    if leading.shared is None:
        yield leading
        return
    _wait(leading, leading.shared, patience)
    lease = leading.lease
    if lease is None:
        yield leading
        return
    _start_heartbeat(lease, leading.ended)
    interrupted = False  # where it is, the next node takes over; else each finds what this one has
    try:
        yield leading
    except BaseException as error:
        interrupted = _may_pass(error)
        raise
    finally:
        leading.ended.set()
        leading.shared.release(lease, leading.published or interrupted)


def _may_pass(error: BaseException) -> bool:
    """Whether what ended a tuning says nothing of how another node would fare."""
    if isinstance(error, NoWorkingConfig):
        return error.transient
    return isinstance(error, (WorkerUnavailable, LeaseLost)) or not isinstance(error, Exception)


def _wait(leading: Lead, shared: SharedLayer, patience: Patience) -> None:
    """Wait until this node has the lease or another one's choice is there."""
    request = leading.request
    wanted = (space_of(request.key), request.key.digest, request.declared, request.force)
    pause_s = _POLL_S
    while True:
        begin = time.monotonic()
        claim = shared.claim(*wanted)
        if claim.stored is not None and single_flight.is_usable(request, claim.stored.choice):
            leading.choice = claim.stored.choice
            return
        leading.lease = claim.lease
        if claim.lease is not None or claim.stored is not None:
            return
        if pause_s == _POLL_S:
            logger.info("waiting for another node: %s", request.key.kernel.name)
        single_flight.pause(random.uniform(pause_s / 2, pause_s), patience, begin)
        pause_s = min(2 * pause_s, _MAX_POLL_S)


def _start_heartbeat(lease: Lease, ended: threading.Event) -> None:
    every_s = lease.expires_after_s / 3

    def beat() -> None:
        while not ended.wait(every_s):
            with contextlib.suppress(StoreError):
                if not lease.renew():
                    return  # what another node publishes then is adopted

    if every_s < float("inf"):
        with contextlib.suppress(RuntimeError):  # no thread to be had: no heartbeats either
            threading.Thread(target=beat, name="safetune-shared-lease", daemon=True).start()
