"""One shared choice as text: what a directory, an object store and PostgreSQL all keep.

A record is a pack of one choice (`schema`) as canonical JSON, with a checksum, and never changes
once it is written. It counts only where the checksum matches and every field is right, and then it
can only select a config that the decorator declares. The checksum is against broken copies, not
against writers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.store import schema
from safetune.store.local.rows import RecordError
from safetune.store.records import StoredChoice

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey

#: The layout that is written, and the only one that is read; it is in every namespace.
FORMAT = 2

#: A record has about 1 KB; more than this is not a choice.
MAX_BYTES = 64 << 10


class Name(NamedTuple):
    """The name of a record. There is one record of a name, the first."""

    key: str
    declared: str
    generation: int


def name_of(stored: StoredChoice) -> Name:
    """Return the name of a choice's record."""
    return Name(stored.choice.key, stored.choice.declared, stored.choice.generation)


def namespace(device: Mapping[str, Any], toolchain: Mapping[str, Any]) -> str:
    """Return what keys must share for one node to need them all: the device and the toolchain."""
    return encoding.digest([FORMAT, dict(device), dict(toolchain)])


def space_of(key: TuningKey) -> str:
    """Return the namespace of a key."""
    return namespace(key.device.record(), key.toolchain.record())


def encode(stored: StoredChoice) -> str:
    """Return a choice as text, a decoded one as the same text again; raises `RecordError`."""
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
        raise PackError(f"it has over {MAX_BYTES} bytes")
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
