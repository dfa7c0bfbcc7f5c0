"""The tables of the store, and their records as rows and back, checked on both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local.table import CorruptRowError, RecordError, Scalar, Table
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

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

#: Calls that were recorded to be tuned offline; see `calls`.
CALL = Table(
    "call",
    ("key",),
    (("key", str), ("name", str), ("place", str), ("arguments", dict), ("created", float)),
)

TABLES = (KERNEL, DEVICE, KEY, TRIAL, CHOICE, CALL)


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
