"""safetune: an autotuner for Triton kernels whose candidates run in subprocesses.

Importing it imports neither torch nor triton; the names below do so when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetune import errors

#: The public names that are not of `errors`, and the modules that define them.
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

_classes = [each for each in vars(errors).values() if isinstance(each, type)]
_errors = [each.__name__ for each in _classes if each.__module__ == errors.__name__]
_OWN = "BackendError Busy DeviceUnavailable NoConfigs NothingToMeasure PackError TooMuchPinned"
_NAMES = sorted({*_HOMES, *_errors, "__version__"} - {*_OWN.split()})

if TYPE_CHECKING:
    from safetune.config import space as space
    from safetune.errors import *  # noqa: F403
    from safetune.frontend.autotuner import Autotuner as Autotuner
    from safetune.frontend.decorator import autotune as autotune
    from safetune.frontend.decorator import safetune as safetune
    from safetune.inputs.workload import Workload as Workload
    from safetune.integrations.graph import graph as graph
    from safetune.integrations.install import install as install
    from safetune.integrations.prepare import prepare as prepare
    from safetune.launch.scratch_memory import scratch_allocator as scratch_allocator
    from safetune.miss.sync import sync as sync
    from safetune.offline.warm import preload as preload
    from safetune.outcome import Outcome as Outcome
    from safetune.outcome import Timing as Timing
    from safetune.outcome import Verdict as Verdict
    from safetune.settings import configure as configure
    from safetune.tuning.search import History as History
    from safetune.tuning.search import Neighbour as Neighbour
    from safetune.tuning.search import Proposer as Proposer
    from safetune.tuning.search import Trial as Trial
else:
    __all__ = _NAMES


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("safetune")
    if name not in _NAMES:
        raise AttributeError(f"module 'safetune' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"safetune.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def _install_if_asked() -> None:
    import importlib

    from safetune.settings import installs

    try:
        asked = installs()
    except errors.InvalidSetting as error:  # the command would end with a traceback
        from safetune.messages import warn

        asked = False
        warn(f"{error}. Triton tunes as before", errors.SettingWarning)
    if asked:
        importlib.import_module("safetune.integrations.install").when_triton_is_imported()


def __dir__() -> list[str]:
    return _NAMES


_install_if_asked()
