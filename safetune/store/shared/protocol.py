"""The interface of a store that several nodes share.

A back end does plain, blocking I/O and raises. `layer` calls it from a thread of its own, so that a
run never waits long for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple, Protocol

from safetune.errors import StoreError
from safetune.store.records import StoredChoice
from safetune.store.shared.record import Name


class Unwritable(StoreError):
    """The shared store can be read, and not be written: read-only, or full."""


class Lease(Protocol):
    """The right of one node to tune a key, until it is released or expires."""

    #: It must be renewed within this many seconds.
    expires_after_s: float

    def renew(self) -> bool:
        """Extend it; False if another node has it by now."""

    def release(self, published: bool = True) -> None:
        """Let another node have it; all of them at once where nothing was published.

        Then every node has to tune the key, and should not wait for the others.
        """


class NoLease:
    """The lease of a store that has none: every node gets one, and may tune at the same time."""

    expires_after_s = float("inf")

    def renew(self) -> bool:
        """Return True: it does not expire."""
        return True

    def release(self, published: bool = True) -> None:
        """Do nothing."""


class Claim(NamedTuple):
    """The right to tune a key, or the choice of another node; neither while another tunes it."""

    lease: Lease | None = None
    stored: StoredChoice | None = None


class SharedStore(Protocol):
    """Choices of many nodes. The first valid record of a name is the choice.

    Every method may block, and raises `StoreError`; `publish` and `lease` raise `Unwritable` where
    the store can only be read. Anything stored that is not a valid record is treated as absent.
    """

    #: Its URL for messages, without a password.
    location: str

    @property
    def identity(self) -> str:
        """Return a text that no other store has; without a password."""

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace."""

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names, in any order.

        The store may be closed between two of them, and goes on.
        """

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation for a key and a config list."""

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is stored under their names now."""

    def lease(self, key: str, node: str) -> Lease | None:
        """Take the lease of a key; None while another node has it.

        A node that has it already gets it again: its process that had it has ended, as only one
        process of a node asks at a time.
        """

    def close(self) -> None:
        """Close what it keeps open between calls."""
