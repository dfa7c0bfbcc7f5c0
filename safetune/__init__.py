"""safetune: an autotuner for Triton kernels whose candidates run in subprocesses.

Importing it imports neither torch nor triton; each name below does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetune.agreement import sync
    from safetune.autotuner import Autotuner
    from safetune.decorator import autotune, safetune
    from safetune.errors import (
        CaptureError,
        CaptureMiss,
        InvalidConfig,
        InvalidSetting,
        KernelNotTransferable,
        NoDevice,
        NoMemory,
        NotReproducible,
        NoWorkingConfig,
        PhantomKey,
        SafetuneError,
        StoreError,
        TargetError,
        WorkerUnavailable,
        WorkloadError,
    )
    from safetune.integrations.graph import graph
    from safetune.integrations.prepare import prepare
    from safetune.outcome import Outcome, Timing, Verdict
    from safetune.scratch import scratch_allocator
    from safetune.workload import Workload

__all__ = [
    "Autotuner",
    "CaptureError",
    "CaptureMiss",
    "InvalidConfig",
    "InvalidSetting",
    "KernelNotTransferable",
    "NoDevice",
    "NoMemory",
    "NoWorkingConfig",
    "NotReproducible",
    "Outcome",
    "PhantomKey",
    "SafetuneError",
    "StoreError",
    "TargetError",
    "Timing",
    "Verdict",
    "WorkerUnavailable",
    "Workload",
    "WorkloadError",
    "__version__",
    "autotune",
    "graph",
    "prepare",
    "safetune",
    "scratch_allocator",
    "sync",
]

_MODULES = {
    "agreement": ("sync",),
    "autotuner": ("Autotuner",),
    "decorator": ("autotune", "safetune"),
    "integrations.graph": ("graph",),
    "integrations.prepare": ("prepare",),
    "outcome": ("Outcome", "Timing", "Verdict"),
    "scratch": ("scratch_allocator",),
    "workload": ("Workload",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("safetune")
    if name not in __all__:
        raise AttributeError(f"module 'safetune' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"safetune.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
