"""A key that cannot be tuned now: its fallback, a warning that says why, and when to try again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.errors import KernelNotTransferable, TuningWarning
from safetune.messages import warn
from safetune.settings import Settings
from safetune.tuning.requests import TuningRequest

if TYPE_CHECKING:
    from safetune.launch.key_state import KeyState

#: Seconds before a tuning that was not possible is tried again. Each failure doubles them, up to
#: the second number.
RETRY_S = 10.0
MAX_RETRY_S = 600.0

#: A clock that only goes forward, in seconds.
clock = time.monotonic

_syncs = 0


@dataclass
class Retry:
    """When tuning is tried again after a failure that may pass, such as a lack of memory."""

    index: int  # of the device in this process; -1 in the interpreter
    needed_bytes: int = 0  # free device memory that another attempt needs at least, if known
    delay_s: float = RETRY_S

    def __post_init__(self) -> None:
        self._from_s = clock() + self.delay_s
        self._syncs = _syncs

    def due(self, settings: Settings) -> bool:
        """Whether tuning should be tried again now."""
        if clock() < self._from_s or (settings.world_size > 1 and self._syncs == _syncs):
            return False
        if self.needed_bytes and self.index >= 0:
            from safetune.inputs import memory_budget  # imports torch

            if memory_budget.device_free(self.index) < self.needed_bytes:
                self._from_s = clock() + self.delay_s
                return False
        return True

    def again(self, needed_bytes: int) -> Retry:
        """Return the retry after another failure."""
        return Retry(self.index, needed_bytes, min(2 * self.delay_s, MAX_RETRY_S))


def fall_back(state: KeyState, request: TuningRequest, config: Config, error: Exception) -> Config:
    """Launch `config`, as a tuning has failed; warns at the first failure for a key.

    It is for good if the call cannot be rebuilt in a child, else until the next attempt.
    """
    decision, retry, outlook = state.decision(), None, ""
    if not isinstance(error, KernelNotTransferable):
        needed_bytes = getattr(error, "needed_bytes", 0)
        if decision is not None and isinstance(decision.retry, Retry):
            return state.set_fallback(config, decision.retry.again(needed_bytes))
        retry, outlook = Retry(request.call.index, needed_bytes), "; it is tried again later"
    state.set_fallback(config, retry)
    which = "its first config" if config is request.configs[0] else "its fallback"
    warn(
        f"{request.key.kernel.name} is not tuned for {request.key} and runs with {which} "
        f"({config_text(config)}){outlook}: {error}",
        TuningWarning,
    )
    return config


def count_sync() -> None:
    """Allow fallbacks from before now to be tuned again in a world of several processes."""
    global _syncs
    _syncs += 1
