"""The tables of the store: how a record becomes a row with a checksum, and a row a record again.

On the way in, a value that SQLite would change or refuse raises `RecordError`, or is made harmless:
a NaN would become NULL, and an integer over 64 bit or a lone surrogate is an error of the driver.
On the way out a row counts only if its checksum, over table, key and content, matches and every
column has its type and range (`CorruptRowError`). The checksum is against bit rot, not against
writers. A verdict or a mark that only a newer version knows is not corrupt: see `outcome`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

from safetune.errors import StoreError
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.records import ChoiceRecord, KeyRecord, RecordedCall, TrialRecord

if TYPE_CHECKING:
    import sqlite3

Scalar = str | int | float | None

#: The least value of a column. No count or time comes near `MOST`, and counting up from a larger
#: number would never end.
_LEAST = {"generation": 1, "median_ms": 0, "count": 0, "measured": 0, "judged": 0}
MOST = 10**12

_VERDICTS = {each.value: each for each in Verdict}
_TIMING = tuple(each.name for each in fields(Timing))


class RecordError(StoreError):
    """A record with a value that the store does not keep, e.g. a NaN; the store itself is fine."""


class CorruptRowError(Exception):
    """A row whose checksum, types or ranges are wrong: treated as absent."""


@dataclass(frozen=True)
class Table:
    """A table as this version reads and writes it. The history is in `opening`."""

    name: str
    primary_key: tuple[str, ...]
    #: Their types, in the order of `select`; `dict` and `tuple` (of strings) are JSON.
    columns: dict[str, type]
    build: Callable[[dict[str, Any]], Any] = dict  # makes the record out of a row's values
    nullable: tuple[str, ...] = ()  # the columns that may be NULL, all of them or none
    #: The columns that older rows lack, with their value in those. That value is not part of the
    #: checksum, so older rows stay as they are.
    added: Mapping[str, Scalar] = field(default_factory=dict)
    select: str = field(init=False)
    select_one: str = field(init=False)  # by its primary key

    def __post_init__(self) -> None:
        names = ", ".join(f"{self.name}.{column}" for column in self.columns)
        select = f"SELECT {names}, {self.name}.checksum FROM {self.name}"
        same = " AND ".join(f"{self.name}.{name} = ?" for name in self.primary_key)
        object.__setattr__(self, "select", select)
        object.__setattr__(self, "select_one", f"{select} WHERE {same}")

    def seal(self, values: Mapping[str, Any]) -> dict[str, Scalar]:
        """Return the row that holds `values`; raises `RecordError` naming the bad column."""
        row: dict[str, Scalar] = {}
        for name, kind in self.columns.items():
            value = values.get(name)
            try:
                if not (value is None and name in self.nullable):
                    _check_range(name, value := _WRITERS[kind](value))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                reason = f"the store does not keep {self.name}.{name}: {error}"
                raise RecordError(reason) from error
            row[name] = value
        row["checksum"] = self.checksum(tuple(row.values()))
        return row

    def unseal(self, row: Sequence[Any]) -> Any:
        """Return the record of a row that `select` read; raises `CorruptRowError`."""
        *content, checksum = row
        try:
            if self.checksum(content) != checksum:
                raise CorruptRowError("its checksum does not match")
            values = {
                name: None if value is None and name in self.nullable else _read(name, kind, value)
                for (name, kind), value in zip(self.columns.items(), content, strict=True)
            }
        except (TypeError, ValueError, RecursionError) as error:
            raise CorruptRowError(str(error)) from error
        if len({values[name] is None for name in self.nullable}) > 1:
            raise CorruptRowError(f"it has only some of {', '.join(self.nullable)}")
        return self.build(values)

    def sound(
        self,
        found: Iterable[Sequence[Any]],
        report: Callable[[Table, Sequence[Any], CorruptRowError], None] = lambda *_: None,
    ) -> Iterator[Any]:
        """Yield the records of the sound rows; call `report` with each corrupt one."""
        for row in found:
            try:
                yield self.unseal(row)
            except CorruptRowError as error:
                report(self, row, error)

    def insert(
        self, connection: sqlite3.Connection, row: Mapping[str, Scalar], otherwise: str
    ) -> bool:
        """Write a row; where its key is taken, do `otherwise`: REPLACE or IGNORE.

        Return whether it was written.
        """
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        statement = f"INSERT OR {otherwise} INTO {self.name} ({names}) VALUES ({marks})"
        return connection.execute(statement, tuple(row.values())).rowcount > 0

    def upsert(self, connection: sqlite3.Connection, row: Mapping[str, Scalar]) -> None:
        """Write a row, over one with its key. Columns that only a newer version knows stay."""
        marks, own = ", ".join("?" * len(row)), [n for n in row if n not in self.primary_key]
        connection.execute(
            f"INSERT INTO {self.name} ({', '.join(row)}) VALUES ({marks}) "
            f"ON CONFLICT ({', '.join(self.primary_key)}) "
            f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in own)}",
            tuple(row.values()),
        )

    def put_if_absent(self, connection: sqlite3.Connection, row: Mapping[str, Scalar]) -> Any:
        """Write a row unless a sound one has its key: then return that one, else None."""
        if self.insert(connection, row, "IGNORE"):
            return None
        sound = self.find(connection, *(row[name] for name in self.primary_key))
        if sound is None:
            self.insert(connection, row, "REPLACE")
        return sound

    def find(self, connection: sqlite3.Connection, *identity: Scalar) -> Any:
        """Return the record with this primary key; None without a sound one."""
        return next(self.sound(connection.execute(self.select_one, identity).fetchall()), None)

    def checksum(self, content: Sequence[Any]) -> str:
        """Return the checksum of a row with these values."""
        named = zip(self.columns, content, strict=True)
        kept = [v for name, v in named if name not in self.added or v != self.added[name]]
        return encoding.digest([self.name, *kept])


def _trial(values: dict[str, Any]) -> TrialRecord:
    timing = [values.pop(name) for name in _TIMING]
    outcome = {each.name: values.pop(each.name) for each in fields(Outcome) if each.name in values}
    verdict = outcome["verdict"]
    outcome["verdict"] = _VERDICTS.get(verdict) or Verdict.read(verdict)
    outcome["timing"] = None if None in timing else Timing(*timing)
    return TrialRecord(outcome=Outcome(**outcome), **values)


KERNEL = Table(
    "kernel", ("digest",), {"digest": str, "name": str, "source": str, "file": str, "line": int}
)
DEVICE = Table("device", ("digest",), {"digest": str, "record": dict})
KEY = Table(
    "key",
    ("digest",),
    {"digest": str, "name": str, "kernel": str, "device": str, "toolchain": dict, "call": dict},
)
TRIAL = Table(
    "trial",
    ("key", "generation", "config_digest"),
    {"key": str, "generation": int, "config_digest": str, "config": dict}
    | {"verdict": str, "detail": str, "message": str, "stderr": str}
    | {"median_ms": float, "p20_ms": float, "p80_ms": float, "count": int, "stage": str}
    | {"gpu_uuid": str, "marks": tuple, "created": float, "judged": int},
    _trial,
    nullable=_TIMING,
    added={"judged": 0},
)
CHOICE = Table(
    "choice",
    ("key", "declared", "generation"),
    {"key": str, "generation": int, "config_digest": str, "config": dict, "declared": str}
    | {"median_ms": float, "measured": int, "created": float, "marks": tuple},
    lambda values: ChoiceRecord(**values),
    added={"marks": "[]"},
)

CALL = Table(
    "call",
    ("key",),
    {"key": str, "name": str, "place": str, "arguments": dict, "created": float},
    lambda values: RecordedCall(**values),
)

TABLES = (KERNEL, DEVICE, KEY, TRIAL, CHOICE, CALL)


#: The tables that have many rows of one key, and what is left without one.
OF_KEY = ("trial", "choice", "call")
_DELETE_UNUSED = (
    "DELETE FROM kernel WHERE digest NOT IN (SELECT kernel FROM key)",
    "DELETE FROM device WHERE digest NOT IN (SELECT device FROM key)",
)


def delete_keys(connection: sqlite3.Connection, keys: Sequence[tuple[str]]) -> None:
    """Delete some keys in the open transaction, with all that is stored of them alone."""
    for table in OF_KEY:
        connection.executemany(f"DELETE FROM {table} WHERE key = ?", keys)
    connection.executemany("DELETE FROM key WHERE digest = ?", keys)
    for statement in _DELETE_UNUSED:
        connection.execute(statement)


def key_rows(record: KeyRecord) -> tuple[tuple[Table, dict[str, Scalar]], ...]:
    """Return the rows of a key: its kernel, its device and itself; raises `RecordError`."""
    kernel = {name: getattr(record, f"kernel_{name}") for name in KERNEL.columns}
    device = {"digest": record.device_digest, "record": record.device}
    key = {"name": kernel["name"], "kernel": kernel["digest"], "device": device["digest"]}
    values = ((KERNEL, kernel), (DEVICE, device), (KEY, {**vars(record), **key}))
    return tuple((table, table.seal(of_table)) for table, of_table in values)


def key_record(
    key: Mapping[str, Any], kernel: Mapping[str, Any], device: Mapping[str, Any]
) -> KeyRecord:
    """Return the key that these three rows' values make."""
    of_kernel = {f"kernel_{name}": value for name, value in kernel.items()}
    of_kernel["kernel_name"] = key["name"]  # kernels of one source may have several
    return KeyRecord(
        digest=key["digest"],
        **of_kernel,
        device_digest=device["digest"],
        device=device["record"],
        toolchain=key["toolchain"],
        call=key["call"],
    )


def trial_row(record: TrialRecord) -> dict[str, Scalar]:
    """Return a trial as a row; raises `RecordError`."""
    outcome = record.outcome
    timing = {} if outcome.timing is None else vars(outcome.timing)
    verdict = {"verdict": outcome.verdict.value}
    return TRIAL.seal({**vars(record), **vars(outcome), **timing, **verdict})


def choice_row(record: ChoiceRecord) -> dict[str, Scalar]:
    """Return a choice as a row; raises `RecordError`."""
    return CHOICE.seal(vars(record))


def text(value: str) -> str:
    """Return `value` as SQLite can keep it: lone surrogates become visible escapes."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value.encode("utf-8", "backslashreplace").decode()


def _integer(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not an integer")
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer over 64 bit")
    return int(value)


def _real(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value) + 0.0  # SQLite has no -0.0 in a column, and the checksum would differ


def _json(value: dict[str, Any]) -> str:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a dict")
    return encoding.dumps(value)


def _texts(values: tuple[str, ...]) -> str:
    return encoding.dumps([text(value) for value in values])


_WRITERS: dict[type, Any] = {str: text, int: _integer, float: _real, dict: _json, tuple: _texts}


def _read(name: str, kind: type, value: Any) -> Any:
    data = encoding.loads(value) if kind in (dict, tuple) else value
    if kind is tuple and isinstance(data, list) and all(type(item) is str for item in data):
        data = tuple(data)
    if type(data) is not kind:
        raise TypeError(f"{name} is not of type {kind.__name__}")
    _check_range(name, data)
    return data


def _check_range(name: str, value: Any) -> None:
    if name in _LEAST and not _LEAST[name] <= value <= MOST:
        raise ValueError(f"{name} is {value}, not a number from {_LEAST[name]} to {MOST}")
