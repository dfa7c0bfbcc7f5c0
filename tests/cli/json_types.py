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
    """A kernel, workload and dtype. `choice` is null if no config works, `disputed` a reason or
    empty, `measured` the number of configs that ran now.
    """

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
    """A config of a tuning; `judged` is the number of configs with this result."""

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
    """A tuning of a plan; `share` is its share of the recorded time, if there is any."""

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
    """A recorded call, where its choice was `found`, and the `problem` with its kernel."""

    kernel: str
    call: Call
    key: str
    found: str
    calls: int
    captured: int
    time_ms: float
    problem: str


class Coverage(_Strict):
    """What `coverage` prints; `lost` has a line for each way in which calls were lost."""

    by_calls: dict[str, float]
    by_time: dict[str, float]
    calls: list[CoveredCall]
    lost: list[str]


class Check(_Strict):
    """A check of `doctor`; `state` is ok, warn or fail, and `fix` the remedy."""

    name: str
    state: str
    found: str
    fix: str


class Checks(_Strict):
    """What `doctor` prints."""

    ok: bool
    checks: list[Check]


class Pinned(_Strict):
    """What `pin` prints; `pinned` is the number of keys."""

    kernel: str
    config: Values
    pinned: int


class Cleared(_Strict):
    """What `clear` prints: the keys that it deleted, and those that the shared store still has."""

    kernel: str | None
    cleared: int
    left_shared: int


class ClearedFailures(_Strict):
    """What `clear --failures` prints: the number of outcomes that it deleted."""

    kernel: str | None
    failures: int


class WrittenChoices(_Strict):
    """A file, and the number of choices in it."""

    path: str
    choices: int


class Exported(_Strict):
    """What `export` prints."""

    written: list[WrittenChoices]


class WrittenFailures(_Strict):
    """A file, and the number of failures in it."""

    path: str
    failures: int


class ExportedFailures(_Strict):
    """What `export --failures` prints."""

    written: list[WrittenFailures]


class Imported(_Strict):
    """What `import` prints: the numbers of new choices and of those that the store has (`known`).
    Not imported: the store has another of the same generation (`kept`) or of a later one (`older`),
    or only a newer safetune knows all their fields (`unknown`).
    """

    new: int
    known: int
    kept: int
    older: int
    unknown: int


class LintFinding(_Strict):
    """A finding of `lint`; lines and columns begin at 1."""

    rule: str
    path: str
    line: int
    column: int
    kernel: str
    message: str


class Won(_Strict):
    """A key on which a dropped config was the fastest, and the share by which it is slower now."""

    call: Call
    words: str
    device: str
    slower: float


class DroppedConfig(_Strict):
    """A config that `prune` drops."""

    config: Values
    won: list[Won]


class Cost(_Strict):
    """The times with a list, as ratios to the best config of each of `keys`: geometric mean, mean
    weighted by recorded time, and worst. In `failed` of the keys no config of the list works.
    """

    keys: int
    failed: int
    mean: float
    weighted: float
    worst: float


class LongerList(_Strict):
    """A list of `keep` configs, and its cost on keys that were left out on purpose."""

    keep: int
    held_out: Cost


class Pruned(_Strict):
    """What `prune` prints; `cost` is on the stored keys, `held_out` on keys left out on purpose,
    null with one key.
    """

    kernel: str
    within: float
    declared: int
    kept: list[Values]
    dropped: list[DroppedConfig]
    not_declared: int
    never_tried: list[Values]
    keys: int
    devices: list[str]
    cost: Cost
    held_out: Cost | None
    longer: list[LongerList]


class Place(_Strict):
    """An element of a finding, the programs that access it, and lines of the kernel."""

    index: list[int]
    where: str
    programs: list[list[int]]
    lines: list[str]


class OverlapFinding(_Strict):
    """A finding of `verify` about an argument."""

    kind: str
    argument: str
    elements: int
    rows: int
    places: list[Place]
    access: str
    most_programs: int


class WrittenArgument(_Strict):
    """An argument, and how many of its elements were written."""

    argument: str
    elements: int
    written: int


class OverlapReport(_Strict):
    """The report of one launch."""

    ok: bool
    kernel: str
    config: str
    grid: list[int]
    findings: list[OverlapFinding]
    written: list[WrittenArgument]
    idle_programs: list[list[int]]
    allowed: list[OverlapFinding]


class VerifiedLaunch(_Strict):
    """A launch. `verdict` is ok, the kinds of its findings, or "not checked" with an `error` and no
    `report`.
    """

    kernel: str
    shape: str
    dtype: str
    config: str
    verdict: str
    error: str
    report: OverlapReport | None


class SkippedWorkload(_Strict):
    """A workload with more elements than --max-elements."""

    kernel: str
    shape: str
    dtype: str
    elements: int


class Verified(_Strict):
    """What `verify` prints; `no_workload` names kernels that declare none."""

    ok: bool
    launches: list[VerifiedLaunch]
    skipped: list[SkippedWorkload]
    no_workload: list[str]


class CompiledCall(_Strict):
    """A call on a device, its config, and its binary: made now, there before, or an `error`."""

    kernel: str
    call: str
    device: str
    key: str
    config: str
    origin: str
    was_there: bool
    error: str


class Warmed(_Strict):
    """What `warm` prints; `not_reached` counts stored choices that were not compiled, by reason."""

    compiled: list[CompiledCall]
    left_out: list[LeftOut]
    not_reached: dict[str, int]


class Message(_Strict):
    """The class and the text of an error."""

    type: str
    message: str


class Error(_Strict):
    """What a command prints that fails."""

    error: Message


#: What each command prints.
OUTPUTS: dict[str, Any] = {
    "list": list[Choice],
    "show": list[Shown],
    "tune": Tuned,
    "tune --dry-run": Plan,
    "coverage": Coverage,
    "doctor": Checks,
    "pin": Pinned,
    "clear": Cleared,
    "clear --failures": ClearedFailures,
    "export": Exported,
    "export --failures": ExportedFailures,
    "import": Imported,
    "lint": list[LintFinding],
    "prune": Pruned,
    "verify": Verified,
    "warm": Warmed,
    "error": Error,
}


def check(name: str, data: Any) -> None:
    """Raise unless data is of the type of an output, and has no other field."""
    msgspec.convert(data, OUTPUTS[name], strict=True)


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
