"""Opens the shared store that a URL names. Each kind is imported only where it is used."""

from __future__ import annotations

from pathlib import Path

from safetune.errors import InvalidSetting
from safetune.settings import SharedKind, display_url, shared_kind
from safetune.store.shared.protocol import SharedStore


def open_shared(url: str) -> SharedStore:
    """Return the store that a URL names. Does not connect yet.

    Raises:
        InvalidSetting: a package is missing, or fsspec does not know the scheme.
    """
    openers = {
        SharedKind.DIRECTORY: _directory,
        SharedKind.POSTGRES: _postgres,
        SharedKind.OBJECTS: _objects,
    }
    return openers[shared_kind(url)](url)


def _directory(url: str) -> SharedStore:
    from urllib.parse import unquote

    from safetune.store.shared.directory import Directory

    return Directory(Path(unquote(url.partition("://")[2])))


def _postgres(url: str) -> SharedStore:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={display_url(url)!r} needs psycopg ({error}): "
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
            f"SAFETUNE_SHARED={display_url(url)!r} cannot be opened: {error}; "
            "pip install 'safetune[shared]' installs fsspec, which may need a package of its own "
            "for this scheme"
        ) from error
    from safetune.store.shared.objects import Objects

    return Objects(url)
