"""Which shared store a URL names, and for whom it is opened.

The package that a kind needs is imported here, so that a run without a shared store imports none.
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

#: How long `safetune tune` waits for a store that many processes share, instead of `BUDGET_S`.
SWEEP_S = 60.0


def open_shared(url: str, sweep: bool = False, node: Path | None = None) -> SharedStore:
    """Return the store that a URL names, which does not connect yet.

    For a sweep of many processes a directory gives leases, as PostgreSQL always does. They last for
    a minute there. The processes that share the database `node` take turns to connect.

    Raises `InvalidSetting` if a package is missing, or if fsspec does not know the scheme.
    """
    from safetune.store.shared import files

    kind = shared_kind(url)
    if kind is SharedKind.DIRECTORY:
        root = Path(unquote(url.partition("://")[2]))
        if sweep:
            from safetune.store.shared.lease_files import LeasedDirectory

            return LeasedDirectory(root)
        return files.Directory(root)
    try:
        if kind is SharedKind.POSTGRES:
            from safetune.store.shared.postgres import Postgres

            if sweep:  # each of many ranks renews a lease: a third as often as it expires
                return Postgres(url, lease_s=SWEEP_S, connect_for_s=SWEEP_S / 2, node=node)
            return Postgres(url, node=node)
        import fsspec

        for protocol in url.partition("://")[0].split("::"):
            fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        install = "pip install 'safetune[postgres]'"
        if kind is SharedKind.OBJECTS:  # fsspec says "Install s3fs to access S3"
            named = re.search(r"Install (?:the )?([a-z][\w\[\]-]*) ", str(error), re.IGNORECASE)
            install = f"pip install {named[1]}" if named else "pip install 'safetune[shared]'"
        raise InvalidSetting(
            f"SAFETUNE_SHARED={display_url(url)!r} cannot be opened: {error}; {install}"
        ) from error
    return files.Objects(url)
