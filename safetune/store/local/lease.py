"""Leases: who does a piece of work that others would do again, and who goes on when it dies.

A lease is a row with a token that only grows, its owner, and a count of heartbeats. No clock is in
it, so none that is set back, or that another machine has, can mislead. An owner of this boot and
PID namespace is seen to be dead at once; of any other, and of one that hangs, the lease is free
once its row has not changed for two heartbeats of the observer's own monotonic clock. Whoever takes
it over changes the token, in one transaction, and what the former owner writes after that is
refused (`check`, in the transaction of the write).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetune.errors import LeaseLost, StoreError

if TYPE_CHECKING:
    import sqlite3

    from safetune.store.local.connection import Connection

#: How often an owner shows that it lives. Long enough for a thread that cannot have the GIL.
HEARTBEAT_S = 5.0

_FIND = "SELECT token, owner, beats FROM lease WHERE name = ?"
_DELETE = "DELETE FROM lease WHERE name = ?"
_INSERT = "INSERT INTO lease (name, owner, beats) VALUES (?, ?, 0)"
_RELEASE = "DELETE FROM lease WHERE token = ?"
_BEAT = "UPDATE lease SET beats = beats + 1 WHERE token = ?"
_HOLDS = "SELECT 1 FROM lease WHERE token = ?"


def expiry_s() -> float:
    """Return for how long a row may stay as it is before its owner counts as gone."""
    return 2 * HEARTBEAT_S


class Lease:
    """A lease that this process holds until `release`, or until another takes it for dead."""

    def __init__(self, connection: Connection, token: int) -> None:
        self.token = token
        self._connection = connection
        self._pid = os.getpid()
        self._ended = threading.Event()
        with contextlib.suppress(RuntimeError):  # no thread to be had: no heartbeats either
            threading.Thread(target=self._beat, name="safetune-lease", daemon=True).start()

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise `LeaseLost` unless this process has it still; inside the transaction of a write."""
        found = connection.execute(_HOLDS, (self.token,)).fetchone()
        if found is None or self._pid != os.getpid():
            raise LeaseLost("another process has taken this one for dead and goes on in its place")

    def release(self) -> None:
        """Let another have it. Never raises: a lease that stays expires."""
        self._ended.set()
        if self._pid == os.getpid():
            with contextlib.suppress(StoreError), self._connection.transaction() as connection:
                connection.execute(_RELEASE, (self.token,))

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(StoreError), self._connection.transaction() as connection:
                if not connection.execute(_BEAT, (self.token,)).rowcount:
                    return


def check(lease: Lease | None, connection: sqlite3.Connection) -> None:
    """Raise `LeaseLost` if there is a lease and it is lost; inside the transaction of a write."""
    if lease is not None:
        lease.check(connection)


class Contender:
    """One that wants a lease, and remembers what it saw of the one who has it."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = (name,)
        self._seen: Sequence[Any] | None = None
        self._since = 0.0

    def attempt(self) -> Lease | None:
        """Return the lease if nobody has it, or whoever had it is gone; raises `StoreError`."""
        with self._connection.reading() as connection:
            found = connection.execute(_FIND, self._name).fetchone()
        if found is not None and not self._is_gone(found):
            return None
        with self._connection.transaction() as connection:
            if connection.execute(_FIND, self._name).fetchone() != found:
                return None
            connection.execute(_DELETE, self._name)
            token = connection.execute(_INSERT, (*self._name, _me(os.getpid()))).lastrowid
        assert token is not None
        return Lease(self._connection, token)

    def _is_gone(self, row: Sequence[Any]) -> bool:
        if is_dead(row[1]):
            return True
        now = time.monotonic()
        if row != self._seen:
            self._seen, self._since = row, now
        return now - self._since > expiry_s()


def is_dead(owner: Any) -> bool:
    """Whether the process that an owner's text names is known to have ended.

    False for one of another machine, boot or PID namespace, and for what is no such text.
    """
    try:
        boot, namespace, pid, start = json.loads(owner)
        if [boot, namespace] != list(_node()) or not boot or not isinstance(pid, int):
            return False
        return _start_of(pid) != start
    except (OSError, TypeError, ValueError, RecursionError):
        return False


@functools.lru_cache(maxsize=1)
def _me(pid: int) -> str:
    try:
        return json.dumps([*_node(), pid, _start_of(pid)])
    except OSError:  # then only heartbeats tell that it lives
        return json.dumps(["", 0, pid, ""])


def _node() -> tuple[str, int]:
    """What two processes share that can see each other by PID; nothing where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", 0


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; nothing if it has ended.

    Raises:
        OSError: that cannot be told.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]
