"""Shared by several nodes: records, their names, and the interface of their store.

A record is a pack of one choice (`schema`) as canonical JSON, with a checksum, and never changes
after it is written. It counts only if the checksum matches and every field is valid, and even then
it can only select a config that the decorator declares. The checksum protects against broken
copies, not against writers. A back end does plain, blocking I/O and raises; `layer` calls it from a
separate thread, so that a run never waits long for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple, Protocol

from safetune.errors import PackError, StoreError
from safetune.keys import encoding
from safetune.store import schema
from safetune.store.local.rows import RecordError
from safetune.store.records import FORMAT as FORMAT
from safetune.store.records import StoredChoice
from safetune.store.records import namespace as namespace

#: A record has about 1 KB; more than this is not a choice.
MAX_BYTES = 64 << 10


class Name(NamedTuple):
    """The name of a record. Each name has one record, the first."""

    key: str
    declared: str
    generation: int


def name_of(stored: StoredChoice) -> Name:
    """Return the name of a choice's record."""
    return Name(stored.choice.key, stored.choice.declared, stored.choice.generation)


def encode(stored: StoredChoice) -> str:
    """Return a choice as text; a decoded choice gives the same text again. Raises `RecordError`."""
    content = schema.content(stored)
    try:
        text = encoding.dumps({**content, "checksum": encoding.digest(content)})
        decode(text)
    except (PackError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"the choice for {stored.key.kernel_name} is not shared: {error}"
        ) from error
    return text


def decode(text: str | bytes) -> StoredChoice:
    """Return the choice in a record; raises `PackError`."""
    if len(text) > MAX_BYTES:
        raise PackError(f"it is over {MAX_BYTES} bytes")
    content = schema.parsed(text)
    found = schema.entries(content)
    if "checksum" not in content:
        raise PackError("it has no checksum")
    if len(found) != 1:
        raise PackError(f"it has {len(found)} choices, not 1")
    return found[0]


def decoded(text: str | bytes, space: str, name: Name | None = None) -> StoredChoice | None:
    """Return the choice in a record; None if it is not a record of this namespace and name."""
    try:
        found = decode(text)
    except PackError:
        return None
    there = namespace(found.key.device, found.key.toolchain)
    return found if there == space and name in (None, name_of(found)) else None


class Unwritable(StoreError):
    """The shared store can be read but not written: read-only, or full."""


class Lease(Protocol):
    """One node's right to tune a key, until it is released or expires."""

    #: It must be renewed within this many seconds.
    expires_after_s: float

    def renew(self) -> bool:
        """Extend it; False if another node has it by now."""

    def release(self) -> None:
        """Release it, so that another node can take it."""


class NoLease:
    """The lease of a store without leases: every node gets one, and several may tune at once."""

    expires_after_s = float("inf")

    def renew(self) -> bool:
        """Return True: it does not expire."""
        return True

    def release(self) -> None:
        """Do nothing."""


class Claim(NamedTuple):
    """The right to tune a key, or another node's choice; neither while another node tunes it."""

    lease: Lease | None = None
    stored: StoredChoice | None = None


class SharedStore(Protocol):
    """Choices of many nodes. The first valid record of a name is the choice.

    Every method may block, and raises `StoreError`. `publish` and `lease` raise `Unwritable` if the
    store is read-only. Stored data that is not a valid record is treated as absent.
    """

    #: Its URL for messages, without a password.
    location: str

    @property
    def identity(self) -> str:
        """Return a text unique to this store, without a password."""

    def again(self) -> SharedStore:
        """Return an object for the same store, for use in another thread."""

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace."""

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[list[StoredChoice]]:
        """Yield the records with these names, in any order, some hundred at a time."""

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation for a key and a config list."""

    def namespaces(self) -> list[str]:
        """Return the namespaces that have records. For commands: a run knows its own."""

    def forget(self, namespace: str, names: Set[Name]) -> None:
        """Delete the records with these names."""

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return the records stored under their names."""

    def lease(self, key: str, node: str) -> Lease | None:
        """Take the lease of a key; None while another node has it.

        A node that already has it gets it again: only the holder of the key's lock asks, so the
        node's earlier holder has ended.
        """

    def close(self) -> None:
        """Close everything kept open between calls."""
