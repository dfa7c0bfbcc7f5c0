"""Opens the shared store of a URL.

Each kind's package is imported here, so that a run without a shared store imports none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from safetune.errors import InvalidSetting
from safetune.settings import SharedKind, display_url, shared_kind

if TYPE_CHECKING:
    from safetune.store.shared.protocol import SharedStore


def open_shared(url: str) -> SharedStore:
    """Return the store that a URL names, not yet connected.

    Raises `InvalidSetting` if a package is missing, or if fsspec does not know the scheme.
    """
    from safetune.store.shared import files

    kind = shared_kind(url)
    if kind is SharedKind.DIRECTORY:
        return files.Directory(Path(unquote(url.partition("://")[2])))
    try:
        if kind is SharedKind.POSTGRES:
            from safetune.store.shared.postgres import Postgres

            return Postgres(url)
        _check_protocols(url)
    except ImportError as error:
        install = "pip install 'safetune[postgres]'"
        if kind is SharedKind.OBJECTS:  # fsspec says "Install s3fs to access S3"
            named = re.search(r"Install (?:the )?([a-z][\w\[\]-]*) ", str(error), re.IGNORECASE)
            install = f"pip install {named[1]}" if named else "pip install 'safetune[shared]'"
        missing = InvalidSetting(
            f"SAFETUNE_SHARED={display_url(url)!r} cannot be opened: {error}; {install}"
        )
        raise missing.with_fix(install) from error
    return files.Objects(url)


def _check_protocols(url: str) -> None:
    """Raise `ImportError` or `InvalidSetting` unless fsspec can open every protocol of a URL."""
    import fsspec

    for protocol in url.partition("://")[0].split("::"):
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            unknown = InvalidSetting(
                f"SAFETUNE_SHARED={display_url(url)!r} cannot be opened: fsspec has no protocol "
                f"{protocol}; it has s3, gs, abfs and others"
            )
            raise unknown.with_fix("correct the part of the URL before ://") from error
