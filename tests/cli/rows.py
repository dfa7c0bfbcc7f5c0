"""Rows of a store, as a tuning on a card would have left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetune.config import config_digest, config_record
from safetune.keys import tuning_key
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.records import KeyRecord, TrialRecord


def tuner_in(file: str, text: str) -> Any:
    """The one kernel of a file that is written to the working directory."""
    from safetune.cli.targets import kernels_of

    Path(file).write_text(text, encoding="utf-8")
    (kernel,) = kernels_of([file], with_workload=False)
    return kernel.tuner


def key_record(kernel: Any, card: str, **values: object) -> KeyRecord:
    """A key of a kernel with the identity that a launch on the card would compute."""
    call = {"values": [*map(list, values.items())], "dtypes": [["x", "float16"]], "options": []}
    device = {"name": card, "capability": "90", "sm_count": 1, "shared_memory_bytes": 1}
    toolchain = {"triton": "3.9.0", "backend": "b", "target": "cuda:90:32", "environment": {}}
    digest = tuning_key.key_digest(kernel.name, kernel.digest, call, device, toolchain)
    of_device = (tuning_key.Device(**device).digest, device)  # type: ignore[arg-type]
    return KeyRecord(digest, kernel.name, kernel.digest, "", 0, *of_device, toolchain, call)


def trial(key: KeyRecord, config: Any, ms: float) -> TrialRecord:
    """A config of the key that ran in this time."""
    outcome = Outcome(Verdict.OK, Timing(ms, ms, ms, 3, "screen"))
    return TrialRecord(key.digest, config_digest(config), config_record(config), 1, outcome, 1.0)
