"""Opens the shared store that a URL names. Each kind is imported only where it is used."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from safetune.errors import InvalidSetting
from safetune.settings import SharedKind, display_url, shared_kind
from safetune.store.shared.protocol import SharedStore


def open_shared(url: str) -> SharedStore:
    """Return the store that a URL names. Does not connect yet.

    Raises:
        InvalidSetting: a package is missing, or fsspec does not know the scheme.
    """
    kind = shared_kind(url)
    if kind is SharedKind.DIRECTORY:
        from safetune.store.shared.directory import Directory

        return Directory(Path(unquote(url.partition("://")[2])))
    try:
        if kind is SharedKind.POSTGRES:
            from safetune.store.shared.postgres import Postgres

            return Postgres(url)
        import fsspec

        for protocol in url.partition("://")[0].split("::"):
            fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        install = "pip install 'safetune[postgres]'"
        if kind is SharedKind.OBJECTS:
            install = (
                "pip install 'safetune[shared]' installs fsspec, which may need a package of its "
                "own for this scheme"
            )
        raise InvalidSetting(
            f"SAFETUNE_SHARED={display_url(url)!r} cannot be opened: {error}; {install}"
        ) from error
    from safetune.store.shared.objects import Objects

    return Objects(url)
