"""One shared choice as text: what a directory, an object store and PostgreSQL all keep.

A record is canonical JSON and never changes once it is written. Nothing in it is taken on trust: it
counts only where its checksum matches, its key's digest is that of the key that it spells out, and
every field has its type (`ForeignRecord`); and then it can only select a config that the decorator
declares. The checksum is against broken copies, not against writers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from safetune.keys import encoding
from safetune.keys.tuning_key import key_digest
from safetune.store.local import rows
from safetune.store.local.rows import RecordError
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey

#: The format that is written, and the only one that is read; it is in every namespace.
FORMAT = 1

#: A record has about 1 KB; one of this size is nobody's choice.
MAX_BYTES = 64 << 10

#: A generation is counted up one by one. A writer must not be able to claim the last one there is.
MAX_GENERATION = 1_000_000

_DIGEST = re.compile(r"[0-9a-f]{32}")

#: Of one machine, and for people: the kernel's text and place are in the tuning node's own store.
_NOT_SHARED = ("kernel_source", "kernel_file", "kernel_line", "digest")


class Name(NamedTuple):
    """What a record is filed under. There is one record of a name, the first."""

    key: str
    declared: str
    generation: int


class ForeignRecord(Exception):
    """Text that is no record of this format, or is one of something else: treated as absent."""


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
    """Return the record of a choice; raises `RecordError` where no store would keep it."""
    rows.choice_row(stored.choice)
    content = {
        "safetune": FORMAT,
        "key": {n: v for n, v in asdict(stored.key).items() if n not in _NOT_SHARED},
        "choice": asdict(stored.choice),
    }
    try:
        text = encoding.dumps({**content, "checksum": encoding.digest(content)})
        decode(text)
    except (ForeignRecord, TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"the choice for {stored.key.kernel_name} is not shared: {error}"
        ) from error
    return text


def decode(text: str | bytes) -> StoredChoice:
    """Return the choice in a record; raises `ForeignRecord`."""
    if len(text) > MAX_BYTES:
        raise ForeignRecord(f"it has over {MAX_BYTES} bytes")
    try:
        content = json.loads(text)
        checksum = content.pop("checksum")
        if content["safetune"] != FORMAT:
            raise ForeignRecord(f"its format is {content['safetune']!r}, not {FORMAT}")
        if encoding.digest(content) != checksum:
            raise ForeignRecord("its checksum does not match")
        stored = StoredChoice(_key(content["key"]), ChoiceRecord(**content["choice"]))
        _check(stored)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ForeignRecord(f"it is no record: {error}") from error
    except RecordError as error:
        raise ForeignRecord(str(error)) from error
    return stored


def _key(content: dict[str, Any]) -> KeyRecord:
    parts = ("kernel_name", "kernel_digest", "call", "device", "toolchain")
    digest = key_digest(*(content[part] for part in parts))
    return KeyRecord(digest=digest, kernel_source="", kernel_file="", kernel_line=0, **content)


def _check(stored: StoredChoice) -> None:
    """Raise where a field is none that safetune itself would write."""
    key, choice = stored.key, stored.choice
    rows.key_rows(key)
    rows.choice_row(choice)
    if choice.key != key.digest:
        raise ForeignRecord("it is of another key than it says")
    if encoding.digest(key.device) != key.device_digest:
        raise ForeignRecord("it is of another device than it says")
    if not all(map(_DIGEST.fullmatch, (choice.config_digest, choice.declared, key.kernel_digest))):
        raise ForeignRecord("a digest in it is none")
    if not 1 <= choice.generation <= MAX_GENERATION:
        raise ForeignRecord(f"its generation is {choice.generation}")
