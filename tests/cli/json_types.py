"""What commands print with --json, as types: their schema is published, and tests check against it.

python -m tests.cli.json_types > docs/output.schema.json
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec

Values = dict[str, Any]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object with these fields and no others."""


class Call(_Strict):
    """A key: values, dtypes and launch options, each by name."""

    values: Values
    dtypes: dict[str, str]
    options: Values


class Timing(_Strict):
    """A time in milliseconds, over `count` launches."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    count: int
    stage: str


class Outcome(_Strict, kw_only=True):
    """What became of a config; `label` is the verdict as tables show it."""

    verdict: str
    label: str
    detail: str
    message: str
    stderr: str
    gpu_uuid: str
    timing: Timing | None
    final: Timing | None
    marks: list[str]
    judged: int
    tunings: list[str]
    scope: Any


class Choice(_Strict, kw_only=True):
    """A choice, as `list` prints it; `created` is a time in UTC (ISO 8601)."""

    kernel: str
    file: str
    line: int
    digest: str
    call: Call
    device: Values
    toolchain: Values
    config: Values
    median_ms: float
    generation: int
    marks: list[str]
    created: str
    origin: str


class Shown(_Strict, kw_only=True):
    """The last trial of a config, as `show` prints it; or a choice that has no trial here, with its
    `origin` and `median_ms` in place of a verdict and a timing.
    """

    kernel: str
    file: str
    line: int
    call: Call
    device: Values
    config: Values
    generation: int
    created: str
    chosen: bool
    marks: list[str]
    verdict: str = ""
    label: str = ""
    detail: str = ""
    message: str = ""
    stderr: str = ""
    gpu_uuid: str = ""
    timing: Timing | None = None
    final: Timing | None = None
    judged: int = 0
    tunings: list[str] = []
    scope: Any = None
    with_other_calls: list[Outcome] = []
    digest: str = ""
    toolchain: Values = {}
    median_ms: float | None = None
    origin: str = ""


class Tuning(_Strict, kw_only=True):
    """A tuning; without a choice where no config works."""

    kernel: str
    shape: str
    dtype: str
    device: str
    key: str
    measured: int
    choice: str | None
    disputed: str
    created: str | None
    phases: dict[str, float]
    config: Values | None = None
    median_ms: float | None = None
    origin: str = ""
    pinned: bool = False


class TriedConfig(Outcome, kw_only=True):
    """A config of a tuning."""

    kernel: str
    shape: str
    dtype: str
    config: str
    chosen: bool


class NotBegun(_Strict):
    """A tuning that could not begin."""

    kernel: str
    shape: str
    dtype: str
    key: str
    reason: str


class LeftOut(_Strict):
    """A recorded call that is left out."""

    call: str
    reason: str


class Tuned(_Strict):
    """What `tune` prints."""

    measured: int
    tunings: list[Tuning]
    trials: list[TriedConfig]
    not_begun: list[NotBegun]
    left_out: list[LeftOut]


class PlannedTuning(_Strict):
    """A tuning of a plan."""

    kernel: str
    shape: str
    dtype: str
    key: str
    configs: int
    stored: int
    to_measure: int
    share: float | None
    estimate_s: float | None


class Plan(_Strict):
    """What `tune --dry-run` prints."""

    tunings: list[PlannedTuning]
    to_measure: int
    configs: int
    stored: int
    estimate_s: float | None
    left_out: list[LeftOut]


class CoveredCall(_Strict):
    """A recorded call, and what it is launched with."""

    kernel: str
    call: Call
    key: str
    found: str
    calls: int
    captured: int
    time_ms: float
    problem: str


class Coverage(_Strict):
    """What `coverage` prints."""

    by_calls: dict[str, float]
    by_time: dict[str, float]
    calls: list[CoveredCall]
    lost: list[str]


class Check(_Strict):
    """A check of `doctor`."""

    name: str
    state: str
    found: str
    fix: str


class Checks(_Strict):
    """What `doctor` prints."""

    ok: bool
    checks: list[Check]


class Pinned(_Strict):
    """What `pin` prints."""

    kernel: str
    config: Values
    pinned: int


class Message(_Strict):
    """The class and the text of an error."""

    type: str
    message: str


class Error(_Strict):
    """What a command prints that fails."""

    error: Message


#: What each command prints. `clear`, `export`, `import`, `lint`, `prune`, `verify` and `warm` are
#: not among them.
OUTPUTS: dict[str, Any] = {
    "list": list[Choice],
    "show": list[Shown],
    "tune": Tuned,
    "tune --dry-run": Plan,
    "coverage": Coverage,
    "doctor": Checks,
    "pin": Pinned,
    "error": Error,
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of all of them: each under its command, and their parts."""
    outputs, parts = msgspec.json.schema_components(OUTPUTS.values(), ref_template="#/$defs/{name}")
    for part in parts.values():
        if "description" in part:  # some versions of msgspec keep a docstring's indentation
            part["description"] = inspect.cleandoc(part["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": dict(zip(OUTPUTS, outputs, strict=True)),
        "$defs": parts,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
