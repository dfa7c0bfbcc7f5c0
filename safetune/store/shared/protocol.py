"""What a store is that several nodes share.

A backend does plain, blocking I/O and raises; that it is never in the way of a run, whatever it
does, is the business of `shared_layer`, which calls it from a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from safetune.errors import StoreError
from safetune.store.records import StoredChoice
from safetune.store.shared.record import Name


class Unwritable(StoreError):
    """The shared store can be read, and not be written: read-only, or full."""


class Lease(Protocol):
    """The right to tune one key, until it is released or its holder is not heard of any more."""

    #: Seconds within which it must be renewed.
    expires_after_s: float

    def renew(self) -> bool:
        """Say that the holder lives; False if somebody else has the lease by now."""

    def release(self, published: bool = True) -> None:
        """Let the next one have it; all of them at once where nothing was published.

        What is not shared has to be tuned by every node, and then one after the other is worst.
        """


class SharedStore(Protocol):
    """Choices of many nodes. The first valid record of a name is the choice.

    Every method may block, and raises `StoreError`. What is stored but is no valid record is
    treated as absent.
    """

    #: How to call it in a message: without a password.
    place: str

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace."""

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names, in any order.

        The store may be closed between two of them, and goes on.
        """

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation for a key and a config list."""

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is stored under their names now.

        Raises:
            Unwritable: nothing more can be written.
        """

    def lease(self, key: str) -> Lease | None:
        """Take the lease for a key; None while another node has it.

        Raises:
            Unwritable: it cannot be taken by this reader.
        """

    def close(self) -> None:
        """Let go of what it holds between calls."""


class NoLease:
    """Where a store has no leases, everybody gets one: tunings may then coincide."""

    expires_after_s = float("inf")

    def renew(self) -> bool:
        """Return True: nobody else takes it."""
        return True

    def release(self, published: bool = True) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Claim:
    """What came of wanting to tune a key.

    Attributes:
        lease: the right to tune it; None while another node has it.
        stored: what another node has chosen meanwhile.
        problem: why nothing can be written.
    """

    lease: Lease | None = None
    stored: StoredChoice | None = None
    problem: Unwritable | None = None
