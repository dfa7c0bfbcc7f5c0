"""The tables of the store: a record is a JSON document, beside the columns that queries need.

A document contains a checksum over the table and its own content. On writing, a value that would
not read back unchanged, such as a NaN, raises `RecordError`; a lone surrogate in a text becomes a
visible escape. On reading, a row counts only if the checksum matches, every field has its type, and
the document belongs to the row's primary key (`CorruptRowError`). The checksum protects against bit
rot, not against writers. An unknown verdict or mark from a newer version is not corrupt: see
`outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from msgspec import ValidationError, convert, json, to_builtins

from safetune.errors import StoreError
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.store.records import ChoiceRecord, KeyRecord, RecordedCall, TrialRecord

if TYPE_CHECKING:
    import sqlite3

#: msgspec looks at a type when it is first used, and two threads that do so at once would crash: it
#: is used here, where the module's import lock keeps the others out.
for _kind in (KeyRecord, TrialRecord, ChoiceRecord, RecordedCall):
    json.Decoder(_kind)

Scalar = str | int | float | None

#: The least value of a number. No count or time comes near `MOST`, and counting up from a larger
#: number would never end.
_LEAST = {"generation": 1, "median_ms": 0, "measured": 0}
MOST = 10**12

#: Begins the origin of a choice of this node, before the shared store that has it: `Store.origin`.
OWN = "here: "

#: The fields with values of the user's, which come back as they are.
_VALUES = ("config", "device", "toolchain", "call", "arguments")


class RecordError(StoreError):
    """A record with a value that the store does not keep, e.g. a NaN; the store itself is fine."""


class CorruptRowError(Exception):
    """A row whose checksum, types or ranges are wrong: treated as absent."""


@dataclass(frozen=True)
class Table:
    """A table of the database, which `opening.SCHEMA` makes."""

    name: str
    kind: type  # of its records
    primary_key: tuple[str, ...]
    more: tuple[str, ...] = ()  # attributes of the record that are also columns
    own: tuple[str, ...] = ()  # columns of this store alone: not of the record
    select: str = field(init=False)
    select_one: str = field(init=False)  # by its primary key

    def __post_init__(self) -> None:
        names = ", ".join(f"{self.name}.{column}" for column in ("record", *self.primary_key))
        select = f"SELECT {names} FROM {self.name}"
        same = " AND ".join(f"{self.name}.{name} = ?" for name in self.primary_key)
        object.__setattr__(self, "select", select)
        object.__setattr__(self, "select_one", f"{select} WHERE {same}")

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in order."""
        return (*self.primary_key, *self.more, *self.own, "record")

    def seal(self, record: Any) -> dict[str, Scalar]:
        """Return the row for a record; raises `RecordError`."""
        try:
            plain = to_builtins(record, builtin_types=(bytes, bytearray))
            data = {name: _as_json(name, value) for name, value in plain.items()}
            record = self._record(data)
            sealed = encoding.dumps({**data, "checksum": self.checksum(data)})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RecordError(f"the store cannot hold this {self.name}: {error}") from error
        columns = {name: getattr(record, name) for name in (*self.primary_key, *self.more)}
        return {**columns, "record": sealed}

    def unseal(self, row: Sequence[Any]) -> Any:
        """Return the record in a row that `select` read; raises `CorruptRowError`."""
        document, *identity = row
        try:
            data = encoding.loads(document)
            if data.pop("checksum", None) != self.checksum(data):
                raise CorruptRowError("its checksum does not match")
            record = self._record(data)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptRowError(str(error)) from error
        if [getattr(record, name) for name in self.primary_key] != identity:
            raise CorruptRowError("its document belongs to another row")
        return record

    def _record(self, data: Any) -> Any:
        """Return the record that plain data describes; raises `ValueError`, which names a field."""
        try:
            record: Any = convert(data, self.kind)
        except ValidationError as error:
            reason, _, path = str(error).partition(" - at `$.")
            raise ValueError(f"{path[:-1]}: {reason}" if path else reason) from error
        for name, least in _LEAST.items():
            value = getattr(record, name, least)
            if not least <= value <= MOST:
                raise ValueError(f"{name} is {value}, not a number from {least} to {MOST}")
        return record

    def sound(
        self,
        found: Iterable[Sequence[Any]],
        report: Callable[[Table, Sequence[Any], CorruptRowError], None] = lambda *_: None,
    ) -> Iterator[Any]:
        """Yield the records of the valid rows; call `report` with each corrupt one."""
        for row in found:
            try:
                yield self.unseal(row)
            except CorruptRowError as error:
                report(self, row, error)

    def insert(
        self, connection: sqlite3.Connection, row: Mapping[str, Scalar], otherwise: str
    ) -> bool:
        """Write a row; if its key exists, do `otherwise`: REPLACE or IGNORE.

        Return whether it was written.
        """
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        statement = f"INSERT OR {otherwise} INTO {self.name} ({names}) VALUES ({marks})"
        return connection.execute(statement, tuple(row.values())).rowcount > 0

    def put_if_absent(self, connection: sqlite3.Connection, row: Mapping[str, Scalar]) -> Any:
        """Write a row unless a valid one has its key; return that one's record, otherwise None."""
        if self.insert(connection, row, "IGNORE"):
            return None
        sound = self.find(connection, *(row[name] for name in self.primary_key))
        if sound is None:
            self.insert(connection, row, "REPLACE")
        return sound

    def find(self, connection: sqlite3.Connection, *identity: Scalar) -> Any:
        """Return the record with this primary key; None without a valid one."""
        return next(self.sound(connection.execute(self.select_one, identity).fetchall()), None)

    def checksum(self, data: Mapping[str, Any]) -> str:
        """Return the checksum of a document with this content."""
        return encoding.digest([self.name, data])


KEY = Table(
    "key", KeyRecord, ("digest",), ("kernel_name", "kernel_digest", "device_digest", "space")
)
TRIAL = Table("trial", TrialRecord, ("key", "generation", "config_digest"), ("verdict", "created"))
CHOICE = Table(
    "choice",
    ChoiceRecord,
    ("key", "declared", "generation"),
    ("config_digest", "created"),
    own=("origin",),
)
CALL = Table("call", RecordedCall, ("key",), ("name", "created"))

TABLES = (KEY, TRIAL, CHOICE, CALL)

#: The tables that have rows of a key.
_OF_KEY = ("trial", "choice", "call")


def delete_keys(connection: sqlite3.Connection, keys: Sequence[tuple[str]]) -> None:
    """Delete keys, and everything stored only for them, in the open transaction."""
    for table in _OF_KEY:
        connection.executemany(f"DELETE FROM {table} WHERE key = ?", keys)
    connection.executemany("DELETE FROM key WHERE digest = ?", keys)


def text(value: str) -> str:
    """Return `value` in a form that SQLite can store: lone surrogates become visible escapes."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value.encode("utf-8", "backslashreplace").decode()


def _as_json(name: str, value: Any) -> Any:
    """Return the value of a field as JSON gives it back; raises `ValueError`, which names it."""
    try:
        found = encoding.loads(encoding.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from error
    return found if name in _VALUES else _visible(found)


def _visible(data: Any) -> Any:
    if isinstance(data, dict):
        return {text(name): _visible(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_visible(value) for value in data]
    return text(data) if isinstance(data, str) else data
