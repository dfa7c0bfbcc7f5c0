"""A pack: the choices of one kernel on one kind of device, as JSON that people review.

`schema` says what is in it and checks it. Its text is a function of its content: sorted, one line
per fact, so that a diff shows the facts that changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from safetune.errors import PackError, StoreError
from safetune.keys import encoding
from safetune.store import schema
from safetune.store.records import StoredChoice

#: A pack of 10,000 choices has 5 MB.
MAX_BYTES = 64 << 20


def load(data: bytes) -> list[StoredChoice]:
    """Return the choices in a pack's bytes; raises `PackError`, which names the bad field."""
    if len(data) > MAX_BYTES:
        raise PackError(f"it has over {MAX_BYTES >> 20} MiB, too much for a pack")
    return schema.entries(schema.parsed(data))


def checked(entry: StoredChoice) -> StoredChoice:
    """Return a stored choice as a pack gives it back; raises `PackError` if no pack may have it.

    Facts about one machine, such as the kernel's file, are left out, and digits of the time that
    carry no information. A choice that came out of a pack stays as it is.
    """
    if entry.source is not None:
        return entry
    try:
        choice = dict(schema.choice_object(entry))
    except StoreError as error:
        raise PackError(str(error)) from error
    choice["median_ms"] = float(f"{choice['median_ms']:.5g}")
    choice["created"] = schema.time_text(choice["created"])
    return schema.entries(schema.content(entry, choice))[0]


def dump(entries: Iterable[StoredChoice]) -> str:
    """Return the pack of these choices, all of one kernel and device, as text.

    Raises `PackError`.
    """
    listed = [checked(entry) for entry in entries]
    key = listed[0].key
    groups: dict[str, list[StoredChoice]] = {}
    for entry in listed:
        group = encoding.dumps([entry.key.toolchain, entry.choice.declared])
        groups.setdefault(group, []).append(entry)
    tunings = ",\n".join(_tuning_text(group) for _, group in sorted(groups.items()))
    return (
        f'{{\n  "safetune_pack": {schema.FORMAT},\n'
        f'  "kernel": {{"name": {_line(key.kernel_name)}, "digest": {_line(key.kernel_digest)}}},\n'
        f'  "device": {_line(key.device)},\n'
        f'  "tunings": [\n{tunings}\n  ]\n}}\n'
    )


def _tuning_text(entries: Sequence[StoredChoice]) -> str:
    first = entries[0]
    ordered = sorted(entries, key=lambda entry: _natural(entry.key.call))
    choices = ",\n".join(map(_choice_text, ordered))
    return (
        f'    {{\n      "toolchain": {_line(first.key.toolchain)},\n'
        f'      "declared": {_line(first.choice.declared)},\n'
        f'      "choices": [\n{choices}\n      ]\n    }}'
    )


def _choice_text(entry: StoredChoice) -> str:
    choice = schema.choice_object(entry)
    names = (*schema.Choice.__struct_fields__, *entry.unknown)
    lines = ",\n".join(f'          "{name}": {_line(choice[name])}' for name in names)
    return f"        {{\n{lines}\n        }}"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _natural(call: dict[str, Any]) -> list[Any]:
    """A total order in which 256 comes before 1024."""
    pairs = [pair for name in schema.CALL for pair in call[name]]
    return [*((str(name), _rank(value)) for name, value in pairs), ("", (9, encoding.dumps(call)))]


def _rank(value: Any) -> tuple[int, Any]:
    kinds = {type(None): 0, bool: 1, int: 2, float: 2, str: 3}
    kind = kinds.get(type(value), 4)
    return kind, encoding.dumps(value) if kind in (0, 4) else value
