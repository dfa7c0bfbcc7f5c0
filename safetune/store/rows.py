"""Records as rows and back, checked on both ways.

On the way in, what SQLite would change or choke on is refused (`RecordError`) or made harmless:
NaN would become NULL, an int over 64 bit or a lone surrogate would raise from the driver. On the
way out a row counts only if its checksum, over table, key and content, matches and each column has
its type (`CorruptRowError`). The checksum is against bit rot, not against writers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetune import canonical
from safetune.errors import StoreError
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

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

    def _value(self, name: str, kind: type, value: Any) -> Any:
        if value is None and name in self.nullable:
            return None
        data = value if kind in (str, int, float) else json.loads(value)
        if kind is tuple and isinstance(data, list) and all(type(item) is str for item in data):
            return tuple(data)
        if type(data) is not kind:
            raise CorruptRowError(f"{name} is no {kind.__name__}")
        return data

    def _checksum(self, content: Sequence[Any]) -> str:
        return canonical.digest([self.name, *content])


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
    return canonical.dumps(value)


def _texts(values: tuple[str, ...]) -> str:
    return canonical.dumps([text(value) for value in values])


_WRITERS: dict[type, Any] = {
    str: text,
    int: _integer,
    float: _real,
    dict: _json,
    tuple: _texts,
}

_TIMING = ("median_ms", "p20_ms", "p80_ms", "count", "stage")

KERNEL = Table(
    "kernel",
    ("digest",),
    (("digest", str), ("name", str), ("source", str), ("file", str), ("line", int)),
)
DEVICE = Table("device", ("digest",), (("digest", str), ("record", dict)))
KEY = Table(
    "key",
    ("digest",),
    (
        ("digest", str),
        ("name", str),
        ("kernel", str),
        ("device", str),
        ("toolchain", dict),
        ("call", dict),
    ),
)
TRIAL = Table(
    "trial",
    ("key", "generation", "config_digest"),
    (
        ("key", str),
        ("generation", int),
        ("config_digest", str),
        ("config", dict),
        ("verdict", str),
        ("detail", str),
        ("message", str),
        ("stderr", str),
        ("median_ms", float),
        ("p20_ms", float),
        ("p80_ms", float),
        ("count", int),
        ("stage", str),
        ("gpu_uuid", str),
        ("marks", tuple),
        ("created", float),
    ),
    nullable=frozenset(_TIMING),
)
CHOICE = Table(
    "choice",
    ("key", "declared", "generation"),
    (
        ("key", str),
        ("generation", int),
        ("config_digest", str),
        ("config", dict),
        ("declared", str),
        ("median_ms", float),
        ("measured", int),
        ("created", float),
    ),
)

TABLES = (KERNEL, DEVICE, KEY, TRIAL, CHOICE)


def key_rows(record: KeyRecord) -> tuple[tuple[Table, dict[str, Scalar]], ...]:
    """Return the rows of a key: its kernel, its device and itself; raises `RecordError`."""
    kernel = {
        "digest": record.kernel_digest,
        "name": record.kernel_name,
        "source": record.kernel_source,
        "file": record.kernel_file,
        "line": record.kernel_line,
    }
    device = {"digest": record.device_digest, "record": record.device}
    key = {
        "digest": record.digest,
        "name": record.kernel_name,
        "kernel": record.kernel_digest,
        "device": record.device_digest,
        "toolchain": record.toolchain,
        "call": record.call,
    }
    return (KERNEL, KERNEL.seal(kernel)), (DEVICE, DEVICE.seal(device)), (KEY, KEY.seal(key))


def key_record(
    key: Mapping[str, Any], kernel: Mapping[str, Any], device: Mapping[str, Any]
) -> KeyRecord:
    """Return the key that these three rows' values make."""
    return KeyRecord(
        digest=key["digest"],
        kernel_name=key["name"],
        kernel_digest=kernel["digest"],
        kernel_source=kernel["source"],
        kernel_file=kernel["file"],
        kernel_line=kernel["line"],
        device_digest=device["digest"],
        device=device["record"],
        toolchain=key["toolchain"],
        call=key["call"],
    )


def trial_row(record: TrialRecord) -> dict[str, Scalar]:
    """Return a trial as a row; raises `RecordError`."""
    outcome = record.outcome
    values = {
        "key": record.key,
        "generation": record.generation,
        "config_digest": record.config_digest,
        "config": record.config,
        "verdict": outcome.verdict.value,
        "detail": outcome.detail,
        "message": outcome.message,
        "stderr": outcome.stderr,
        "gpu_uuid": outcome.gpu_uuid,
        "marks": outcome.marks,
        "created": record.created,
    }
    timing = {name: getattr(outcome.timing, name, None) for name in _TIMING}
    return _in_range(TRIAL.seal(values | timing), RecordError)


def trial_record(row: Sequence[Any]) -> TrialRecord:
    """Return the trial that `TRIAL.select` read; raises `CorruptRowError`."""
    values = _in_range(TRIAL.unseal(row))
    try:
        verdict = Verdict(values["verdict"])
    except ValueError as error:
        raise CorruptRowError(str(error)) from error
    timing = tuple(values[name] for name in _TIMING)
    if None in timing and set(timing) != {None}:
        raise CorruptRowError("half a timing")
    return TrialRecord(
        key=values["key"],
        config_digest=values["config_digest"],
        config=values["config"],
        generation=values["generation"],
        outcome=Outcome(
            verdict=verdict,
            timing=None if None in timing else Timing(*timing),
            detail=values["detail"],
            message=values["message"],
            stderr=values["stderr"],
            gpu_uuid=values["gpu_uuid"],
            marks=values["marks"],
        ),
        created=values["created"],
    )


def choice_row(record: ChoiceRecord) -> dict[str, Scalar]:
    """Return a choice as a row; raises `RecordError`."""
    values = {name: getattr(record, name) for name, _ in CHOICE.columns}
    return _in_range(CHOICE.seal(values), RecordError)


def choice_record(row: Sequence[Any]) -> ChoiceRecord:
    """Return the choice that `CHOICE.select` read; raises `CorruptRowError`."""
    return ChoiceRecord(**_in_range(CHOICE.unseal(row)))


def _in_range(values: dict[str, Any], error: type[Exception] = CorruptRowError) -> dict[str, Any]:
    """Refuse what no tuning writes: whoever counts up from such a number would never end."""
    for name, least in (("generation", 1), ("median_ms", 0), ("count", 0), ("measured", 0)):
        value = values.get(name)
        if value is not None and not least <= value <= 10**12:
            raise error(f"{name} is {value}")
    return values
