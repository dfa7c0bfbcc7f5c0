"""What a store is that several nodes share, and which one a URL names.

A backend does plain, blocking I/O and raises; that it is never in the way of a run, whatever it
does, is the business of `shared_layer`, which calls it from a thread of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from safetune.errors import InvalidSetting, StoreError
from safetune.store.records import StoredChoice
from safetune.store.shared_record import Name


class Unwritable(StoreError):
    """The shared store can be read, and not be written: read-only, or full."""


class Lease(Protocol):
    """The right to tune one key, until it is released or its holder is not heard of any more."""

    #: Seconds within which it must be renewed.
    expires_after_s: float

    def renew(self) -> bool:
        """Say that the holder lives; False if somebody else has the lease by now."""

    def release(self) -> None:
        """Let the next one have it."""


class SharedStore(Protocol):
    """Choices of many nodes. The first valid record of a name (key and generation) is the choice.

    Every method may block, and raises `StoreError`. What is stored but is no valid record is
    treated as absent.
    """

    #: How to call it in a message: without a password.
    place: str

    #: Whether a lease keeps other nodes from tuning the same key.
    has_leases: bool

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace."""

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names, in any order."""

    def get(self, namespace: str, key: str) -> StoredChoice | None:
        """Return the record of a key's highest generation."""

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

    def release(self) -> None:
        """Do nothing."""


def check_url(url: str) -> str:
    """Return a URL for a shared store, or the empty one; raises `InvalidSetting`.

    Only its form is looked at, so that reading the settings imports nothing.
    """
    if not url:
        return url
    problem = ""
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        problem = "it has no scheme"
    elif scheme == "file" and not rest.startswith("/"):
        problem = "a file URL is file:// and an absolute path"
    elif not rest and scheme not in ("postgresql", "postgres", "memory"):
        problem = "it names no place"
    if problem:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={place_of(url)!r} names no shared store: {problem}; give "
            "file:///directory, postgresql://host/database, or a URL that fsspec knows, such as "
            "s3://bucket/folder"
        )
    return url


def place_of(url: str) -> str:
    """Return a URL as a message may show it: without user, password and parameters."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme else parts.path


def open_shared(url: str) -> SharedStore:
    """Return the store that a URL names. Connects to nothing yet.

    Raises:
        InvalidSetting: nothing here can open such a URL; says what to install.
    """
    scheme = check_url(url).partition("://")[0]
    openers: dict[str, Callable[[], SharedStore]] = {
        "file": lambda: _directory(url),
        "postgresql": lambda: _postgres(url),
        "postgres": lambda: _postgres(url),
    }
    return openers.get(scheme, lambda: _objects(url))()


def _directory(url: str) -> SharedStore:
    from urllib.parse import unquote

    from safetune.store.directory import Directory

    return Directory(Path(unquote(url.partition("://")[2])))


def _postgres(url: str) -> SharedStore:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={place_of(url)!r} needs psycopg ({error}): "
            "pip install 'safetune[postgres]'"
        ) from error
    from safetune.store.postgres import Postgres

    return Postgres(url)


def _objects(url: str) -> SharedStore:
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={place_of(url)!r} cannot be opened: {error}; "
            "pip install 'safetune[shared]' has fsspec, which may ask for a package of its own"
        ) from error
    from safetune.store.objects import Objects

    return Objects(filesystem, root, place_of(url))
