"""Stored trials as T4 files, the results of a tuning as Kernel Tuner and others exchange them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from safetune.keys.tuning_key import readable
from safetune.outcome import Verdict
from safetune.store import schema
from safetune.store.packs.packs import file_name
from safetune.store.records import KeyRecord, TrialRecord

_VERSION = "1.0.0"

_INVALIDITY = {
    Verdict.OK: "correct",
    Verdict.COMPILE_ERROR: "compile",
    Verdict.COMPILE_CRASH: "compile",
    Verdict.COMPILE_TIMEOUT: "timeout",
    Verdict.TIMEOUT: "timeout",
    Verdict.WRONG_RESULT: "correctness",
    Verdict.OUT_OF_BOUNDS: "correctness",
    Verdict.ORDER_DEPENDENT: "correctness",
}


def t4_files(
    stored: Iterable[tuple[KeyRecord, Sequence[TrialRecord]]],
) -> dict[str, dict[str, Any]]:
    """Return a T4 document for each key that has trials, by the name of its file."""
    return {
        file_name(key.kernel_name, key.digest, str(key.device["name"]), ""): {
            "schema_version": _VERSION,
            "metadata": {
                "timeunit": "milliseconds",
                "kernel": key.kernel_name,
                "call": key.call,
                "device": key.device,
                "toolchain": key.toolchain,
            },
            "results": [_result(trial) for trial in trials],
        }
        for key, trials in stored
        if trials
    }


def _result(trial: TrialRecord) -> dict[str, Any]:
    outcome, timing = trial.outcome, trial.outcome.timing
    times = (
        {}
        if timing is None
        else {"time": timing.median_ms, "time_p20": timing.p20_ms, "time_p80": timing.p80_ms}
    )
    return {
        "timestamp": schema.time_text(trial.created),
        "configuration": {name: readable(value) for name, value in trial.config.items()},
        "times": {"runtimes": [] if timing is None else [timing.median_ms]},
        "invalidity": _INVALIDITY.get(outcome.verdict, "runtime"),
        "correctness": 1 if outcome.ok else 0,
        "measurements": [{"name": n, "value": ms, "unit": "ms"} for n, ms in times.items()],
        "objectives": ["time"],
    }
