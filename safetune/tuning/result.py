"""What a tuning says while it runs, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from triton.runtime.autotuner import Config

from safetune.outcome import Outcome


@dataclass(frozen=True)
class Progress:
    """One step of a tuning, for progress bars and verbose output.

    Attributes:
        stage: `screen` or `final`.
        outcome: None when the config is about to run, else what became of it.
        done, total: configs screened, and to be screened, in this tuning.
    """

    kernel: str
    stage: str
    config: Config
    outcome: Outcome | None
    done: int
    total: int


@dataclass(frozen=True)
class TuningResult:
    """A finished tuning.

    Attributes:
        choice: the config to launch.
        outcomes: for every config in the request, in order; from this tuning or an earlier one.
        measured: how many configs were compiled or launched in this tuning.
        seconds: wall time.
        notes: what the user should hear of, a sentence each.
        phases: where the time went, in seconds; they overlap.
    """

    choice: Config
    outcomes: tuple[tuple[Config, Outcome], ...]
    measured: int
    seconds: float
    notes: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)


Observer = Callable[[Progress], None]
