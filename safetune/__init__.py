"""safetune: an autotuner for Triton kernels whose candidates run in subprocesses.

Importing it imports neither torch nor triton; the names below do so when they are first used.
"""

# ruff: noqa: F405
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetune.config import space
    from safetune.errors import *  # noqa: F403
    from safetune.frontend.autotuner import Autotuner
    from safetune.frontend.decorator import autotune, safetune
    from safetune.inputs.workload import Workload
    from safetune.integrations.graph import graph
    from safetune.integrations.install import install
    from safetune.integrations.prepare import prepare
    from safetune.launch.scratch_memory import scratch_allocator
    from safetune.miss.sync import sync
    from safetune.offline.warm import preload
    from safetune.outcome import Outcome, Timing, Verdict
    from safetune.settings import configure
    from safetune.tuning.search import History, Neighbour, Proposer, Trial

__all__ = [
    "Autotuner",
    "CaptureError",
    "CaptureWarning",
    "DisputeWarning",
    "History",
    "InvalidConfig",
    "InvalidOperand",
    "InvalidSetting",
    "KernelNotTransferable",
    "MissError",
    "MissingChoice",
    "Neighbour",
    "NoDevice",
    "NoMemory",
    "NoWorkingConfig",
    "NotInterpretable",
    "NotReproducible",
    "Outcome",
    "PhantomKey",
    "PhantomKeyWarning",
    "Proposer",
    "SafetuneError",
    "SafetuneWarning",
    "SettingWarning",
    "StoreError",
    "StoreWarning",
    "TargetError",
    "Timing",
    "TracingError",
    "Trial",
    "TuningWarning",
    "Verdict",
    "WorkerUnavailable",
    "Workload",
    "WorkloadError",
    "__version__",
    "autotune",
    "configure",
    "graph",
    "install",
    "preload",
    "prepare",
    "safetune",
    "scratch_allocator",
    "space",
    "sync",
]

#: Where the names are that `errors` does not have.
_HOMES = {
    "Autotuner": "frontend.autotuner",
    "History": "tuning.search",
    "Neighbour": "tuning.search",
    "Outcome": "outcome",
    "Proposer": "tuning.search",
    "Timing": "outcome",
    "Trial": "tuning.search",
    "Verdict": "outcome",
    "Workload": "inputs.workload",
    "autotune": "frontend.decorator",
    "configure": "settings",
    "graph": "integrations.graph",
    "install": "integrations.install",
    "preload": "offline.warm",
    "prepare": "integrations.prepare",
    "safetune": "frontend.decorator",
    "scratch_allocator": "launch.scratch_memory",
    "space": "config",
    "sync": "miss.sync",
}


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


def _install_if_asked() -> None:
    import importlib

    from safetune.errors import InvalidSetting
    from safetune.settings import installs

    try:
        asked = installs()
    except InvalidSetting:
        if _is_the_command():
            return  # the command reports it itself, on one line
        raise
    if asked:
        importlib.import_module("safetune.integrations.install").when_triton_is_imported()


def _is_the_command() -> bool:
    import os
    import sys

    program = sys.orig_argv[-len(sys.argv) :][:1]  # the script, or the name after -m
    return [os.path.basename(name) for name in program] in (["safetune"], ["-msafetune"])


def __dir__() -> list[str]:
    return sorted(__all__)


_install_if_asked()
