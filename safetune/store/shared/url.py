"""Which shared store a URL names. What opens it is imported only where it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetune.errors import InvalidSetting
from safetune.settings import place_of
from safetune.store.shared.protocol import SharedStore


def open_shared(url: str) -> SharedStore:
    """Return the store that a URL names. Connects to nothing yet.

    Raises:
        InvalidSetting: nothing here can open such a URL; says what to install.
    """
    scheme = url.partition("://")[0]
    openers: dict[str, Callable[[], SharedStore]] = {
        "file": lambda: _directory(url),
        "postgresql": lambda: _postgres(url),
        "postgres": lambda: _postgres(url),
    }
    return openers.get(scheme, lambda: _objects(url))()


def _directory(url: str) -> SharedStore:
    from urllib.parse import unquote

    from safetune.store.shared.directory import Directory

    return Directory(Path(unquote(url.partition("://")[2])))


def _postgres(url: str) -> SharedStore:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={place_of(url)!r} needs psycopg ({error}): "
            "pip install 'safetune[postgres]'"
        ) from error
    from safetune.store.shared.postgres import Postgres

    return Postgres(url)


def _objects(url: str) -> SharedStore:
    try:
        import fsspec

        for protocol in url.partition("://")[0].split("::"):
            fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={place_of(url)!r} cannot be opened: {error}; "
            "pip install 'safetune[shared]' has fsspec, which may ask for a package of its own"
        ) from error
    from safetune.store.shared.objects import Objects

    return Objects(url)
