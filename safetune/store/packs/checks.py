"""What a field of a pack must be; each function returns it, or raises `PackError` naming the place.

`where` is that place, e.g. `tunings[0].choices[3].median_ms`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.keys.device import Toolchain

#: How a pack says when; UTC.
TIME = "%Y-%m-%dT%H:%M:%SZ"

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MOST = 2**53  # integers up to here are the same in every JSON library


def parsed(data: bytes) -> Any:
    """Return JSON in which every number is finite and every name is there once in its object."""
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_constant=encoding.no_number,
            parse_float=encoding.finite,
            object_pairs_hook=_no_duplicates,
        )
    except (ValueError, RecursionError) as error:
        raise PackError(f"it is not the JSON of a pack: {error}") from error


def fields(value: Any, where: str, names: Sequence[str]) -> dict[str, Any]:
    """An object with these names and no other."""
    if not isinstance(value, dict):
        raise PackError(f"{where} is {short(value)}, not an object")
    for problem, found in (
        ("lacks", set(names) - set(value)),
        ("has what this safetune does not know:", set(value) - set(names)),
    ):
        if found:
            raise PackError(f"{where} {problem} {', '.join(sorted(map(short, found)))}")
    return value


def items(value: Any, where: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise PackError(f"{where} is {short(value)}, not a list")
    return value


def pairs(value: Any, where: str) -> list[list[Any]]:
    """A list of names with a value each."""
    for pair in items(value, where):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise PackError(f"{where} holds {short(pair)}, not a name and a value")
    return value


def config(value: Any, where: str) -> dict[str, Any]:
    """The names and values of a config, none of which is code."""
    if not isinstance(value, dict) or not value:
        raise PackError(f"{where} is {short(value)}, not the names and values of a config")
    if "ir_override" in value:
        raise PackError(f"{where} sets ir_override, which is code: no file of choices may")
    return value


def toolchain(value: Any) -> dict[str, Any]:
    """A `Toolchain.record()`."""
    record = like(Toolchain, value, "toolchain")
    environment = record["environment"]
    if not isinstance(environment, dict) or not all(
        isinstance(text, str) for text in environment.values()
    ):
        raise PackError(f"toolchain.environment is {short(environment)}, not names and texts")
    return record


def like(kind: type, value: Any, where: str) -> dict[str, Any]:
    """The record of a dataclass, with its strings and integers."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    record = fields(value, where, tuple(types))
    for name, item in record.items():
        if types[name] in ("str", "int") and type(item).__name__ != types[name]:
            raise PackError(f"{where}.{name} is {short(item)}, not of type {types[name]}")
    return record


def function_name(value: Any, where: str) -> str:
    """A name that a function may have."""
    if not (isinstance(value, str) and value.isidentifier()):
        raise PackError(f"{where} is {short(value)}, which is no function's name")
    return value


def digest(value: Any, where: str) -> str:
    """A digest as `canonical` makes them."""
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise PackError(f"{where} is {short(value)}, not 32 hexadecimal digits")
    return value


def count(value: Any, where: str, least: int = 0) -> int:
    """An integer."""
    if type(value) is not int or not least <= value <= _MOST:
        raise PackError(f"{where} is {short(value)}, not a number from {least} to {_MOST}")
    return value


def milliseconds(value: Any, where: str) -> float:
    """A time that something has taken."""
    if type(value) not in (int, float) or not 0 < value <= _MOST:
        raise PackError(f"{where} is {short(value)}, not a time in milliseconds")
    return float(value)


def moment(value: Any, where: str) -> float:
    """A `TIME`, as seconds since the epoch."""
    try:
        found = datetime.strptime(value, TIME).replace(tzinfo=timezone.utc)
        if found.strftime(TIME) == value and found.year >= 1970:
            return found.timestamp()
    except (TypeError, ValueError):
        pass
    raise PackError(f"{where} is {short(value)}, not a time such as 2026-11-21T07:30:00Z")


def short(value: Any) -> str:
    """The beginning of a value, for a message."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _no_duplicates(named: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(named)
    if len(found) < len(named):
        raise ValueError("a name is there twice in one object")
    return found
