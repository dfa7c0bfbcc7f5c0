"""The tuner as the code of a miss and the compilers see it; only types are taken from here."""

from __future__ import annotations

from typing import Protocol

from triton.runtime.autotuner import Config

from safetune.inputs.call import Hooks
from safetune.inputs.workload import DeclaredWorkload
from safetune.keys.tuning_key import KernelIdentity
from safetune.launch import call_shape
from safetune.settings import CaptureMissPolicy
from safetune.tuning.requests import Limits, SearchBudget
from safetune.tuning.search import Proposer


class Tuner(call_shape.Tuner, Protocol):
    """What a tuner has beyond a launch of a known choice.

    Attributes:
        isolation: `worker`, `config` or `inline`.
        capture_miss: None for SAFETUNE_CAPTURE_MISS.
        budget: None to measure every config.
        configs_timings, bench_time, tuning_phases: of the last tuning; phases in seconds.
    """

    hooks: Hooks
    limits: Limits
    isolation: str
    capture_miss: CaptureMissPolicy | None
    budget: SearchBudget | None
    proposer: Proposer | None
    workloads: list[DeclaredWorkload]
    configs_timings: dict[Config, list[float]]
    bench_time: float
    tuning_phases: dict[str, float]

    @property
    def identity(self) -> KernelIdentity:
        """The kernel's identity, with what runs around it."""

    def first_time(self, topic: str) -> bool:
        """Whether this is the first call with this topic; for warnings that are given once."""
