"""A table of the store: how values become a row with a checksum, and a row becomes values again.

On the way in, what SQLite would change or choke on is refused (`RecordError`) or made harmless:
NaN would become NULL, an int over 64 bit or a lone surrogate would raise from the driver. On the
way out a row counts only if its checksum, over table, key and content, matches and each column has
its type (`CorruptRowError`). The checksum is against bit rot, not against writers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safetune.errors import StoreError
from safetune.keys import encoding

if TYPE_CHECKING:
    import sqlite3

Scalar = str | int | float | None


class RecordError(StoreError):
    """A record with a value that the store does not keep, e.g. a NaN; the store itself is fine."""


class CorruptRowError(Exception):
    """A row whose checksum or types are wrong: treated as absent."""


@dataclass(frozen=True)
class Table:
    """A table as this version reads and writes it. The history is in `migrations`.

    Attributes:
        columns: (name, type) in the order of `select`; `dict` and `tuple` (of strings) are JSON
            text.
        nullable: the columns of which a row may have none.
    """

    name: str
    primary_key: tuple[str, ...]
    columns: tuple[tuple[str, type], ...]
    nullable: frozenset[str] = frozenset()
    select: str = field(init=False)

    def __post_init__(self) -> None:
        names = ", ".join(f"{self.name}.{column}" for column, _ in self.columns)
        object.__setattr__(self, "select", f"SELECT {names}, {self.name}.checksum FROM {self.name}")

    def seal(self, values: Mapping[str, Any]) -> dict[str, Scalar]:
        """Return the row that holds `values`; raises `RecordError` naming the bad column."""
        row: dict[str, Scalar] = {}
        for name, kind in self.columns:
            value = values[name]
            if value is None and name in self.nullable:
                row[name] = None
                continue
            try:
                row[name] = _WRITERS[kind](value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                reason = f"the store does not keep {self.name}.{name}: {error}"
                raise RecordError(reason) from error
        row["checksum"] = self._checksum(tuple(row.values()))
        return row

    def unseal(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the values of a row that `select` read; raises `CorruptRowError`."""
        *content, checksum = row
        try:
            if self._checksum(content) != checksum:
                raise CorruptRowError("its checksum does not match")
            return {
                name: self._value(name, kind, value)
                for (name, kind), value in zip(self.columns, content, strict=True)
            }
        except (TypeError, ValueError, RecursionError) as error:
            raise CorruptRowError(str(error)) from error

    def insert(
        self, connection: sqlite3.Connection, row: Mapping[str, Scalar], otherwise: str
    ) -> None:
        """Write a row; where one with its key is there, `otherwise` is done: REPLACE or IGNORE."""
        names, places = ", ".join(row), ", ".join("?" * len(row))
        statement = f"INSERT OR {otherwise} INTO {self.name} ({names}) VALUES ({places})"
        connection.execute(statement, tuple(row.values()))

    def _value(self, name: str, kind: type, value: Any) -> Any:
        if value is None and name in self.nullable:
            return None
        data = value if kind in (str, int, float) else encoding.loads(value)
        if kind is tuple and isinstance(data, list) and all(type(item) is str for item in data):
            return tuple(data)
        if type(data) is not kind:
            raise CorruptRowError(f"{name} is no {kind.__name__}")
        return data

    def _checksum(self, content: Sequence[Any]) -> str:
        return encoding.digest([self.name, *content])


def text(value: str) -> str:
    """Return `value` as SQLite can keep it: lone surrogates become visible escapes."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value.encode("utf-8", "backslashreplace").decode()


def _integer(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer over 64 bit")
    return int(value)


def _real(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value) + 0.0  # SQLite keeps no -0.0, and the checksum would see the difference


def _json(value: dict[str, Any]) -> str:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no dict")
    return encoding.dumps(value)


def _texts(values: tuple[str, ...]) -> str:
    return encoding.dumps([text(value) for value in values])


_WRITERS: dict[type, Any] = {
    str: text,
    int: _integer,
    float: _real,
    dict: _json,
    tuple: _texts,
}
