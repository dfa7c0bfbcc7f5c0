"""Pulls a namespace of a shared store when a process first needs it, and then every few seconds.

One process per node pulls at a time, into the database that all of them read. It holds a lock
beside the database as long as it lives, and another process takes over when it ends. It holds a
second lock until its first pull is complete, which tells the others. A process that has no locks,
or may not write to the database, pulls for itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from safetune.messages import logger
from safetune.store.local import locks
from safetune.store.local.locks import KeyLock

#: How long the first miss of a process waits for the first pull.
FIRST_S = 2.0

#: The pause after a pull that found something. It doubles after each pull that found nothing, and
#: is the longest after a failure: some servers lock an account after a few wrong passwords.
PAUSES_S = 5.0, 60.0

#: How often to see whether another process has completed its first pull.
_LOOK_S = 0.05


class Puller:
    """The thread that pulls one namespace."""

    def __init__(self, pull: Callable[[], bool], database: Path | None, name: str) -> None:
        """Start pulling.

        Args:
            pull: copies what is new; returns whether anything was, or raises `StoreError`.
            database: the one beside which its processes elect the one that pulls; None to pull
                without an election.
            name: of the namespace and its store.
        """
        self._pull, self._database = pull, database
        self._leader_name, self._first_name = f"pulls {name}", f"first pull of {name}"
        self._leader: KeyLock | None = None
        self._first: KeyLock | None = None
        self._stopped = threading.Event()
        self._complete, self._ended = threading.Event(), threading.Event()
        self._changing = threading.Lock()
        self._after: set[Callable[[], object]] = set()
        self._until = time.monotonic() + FIRST_S
        with contextlib.suppress(RuntimeError):  # no thread can start: the process is ending
            threading.Thread(target=self._run, name="safetune-pull", daemon=True).start()

    @property
    def is_complete(self) -> bool:
        """Whether the first pull of the node is complete."""
        return self._complete.is_set()

    def wait(self) -> None:
        """Wait for the first pull until two seconds after its start."""
        self._ended.wait(max(0.0, self._until - time.monotonic()))

    def after_first(self, work: Callable[[], object]) -> None:
        """Call `work` once the first pull is complete; immediately if it already is."""
        with self._changing:
            if not self.is_complete:
                self._after.add(work)
                return
        work()

    def stop(self) -> None:
        """Stop pulling, and let another process pull."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            pause_s = self._take_turn(pause_s)
        self._let_go()
        if self._leader is not None:
            self._leader.release()

    def _take_turn(self, last_s: float) -> float:
        """Pull if it is this process's turn; return how long to pause, after `last_s`."""
        try:
            if not self._leads():
                return self._follow()
            found_news = self._pull()
            self._end_first()
        except Exception as error:  # also a warning that the program has made an error
            logger.info("%s", error)
            self._ended.set()
            return PAUSES_S[1]
        first_s, most_s = PAUSES_S
        return first_s if found_news else min(max(first_s, 2 * last_s), most_s)

    def _leads(self) -> bool:
        """Whether this process is the one that pulls, from now on if no other is."""
        if self._database is None or self._leader is not None:
            return True
        try:
            self._first = locks.try_lock(self._database, self._first_name)
            if self._first is not None:
                self._leader = locks.try_lock(self._database, self._leader_name)
        except OSError:  # there are no locks
            return True
        if self._leader is None:
            self._let_go()
        return self._leader is not None

    def _follow(self) -> float:
        """See how far the process is that pulls."""
        if not self.is_complete:
            if locks.locked(self._database, [self._first_name]):
                return _LOOK_S
            self._end_first()
        return PAUSES_S[0]

    def _end_first(self) -> None:
        self._let_go()
        with self._changing:
            self._complete.set()
            self._ended.set()
            after, self._after = self._after, set()
        for work in after:
            work()

    def _let_go(self) -> None:
        if self._first is not None:
            self._first.release()
            self._first = None
