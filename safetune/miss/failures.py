"""The fallbacks of keys that cannot be tuned and of calls for which no config works, and the time
of their next tuning.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.errors import KernelNotTransferable, NoWorkingConfig, TuningWarning
from safetune.inputs.call import leaves, may_be_address
from safetune.launch.call_shape import LAUNCH_KEYWORDS, own_heuristics
from safetune.launch.key_state import without_frames
from safetune.messages import warn, warn_once
from safetune.outcome import HARMLESS, Outcome, Verdict
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.launch.call_shape import Tuner
    from safetune.launch.key_state import KeyState
    from safetune.tuning.requests import TuningRequest

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: Seconds before a tuning that was not possible is tried again. Each failure doubles them, up to
#: the second number.
RETRY_S = 10.0
MAX_RETRY_S = 600.0

#: A clock that only goes forward, in seconds.
clock = time.monotonic

_syncs = 0


@dataclass
class Retry:
    """The next attempt to tune after a failure that may pass, such as a lack of memory."""

    delay_s: float = RETRY_S
    #: Of the calls that cannot be handed to a child; calls of other kinds are tuned at once.
    kinds: frozenset[Any] = frozenset()

    def __post_init__(self) -> None:
        self._from_s = clock() + self.delay_s
        self._syncs = _syncs

    def holds(self, args: Any, kwargs: Any, settings: Settings, capture: int) -> bool:
        """Whether a call launches the fallback; otherwise it looks for a config."""
        if self.kinds and kind_of(args, kwargs) not in self.kinds:
            return False
        not_synced = settings.world_size > 1 and self._syncs == _syncs
        return bool(capture) or clock() < self._from_s or not_synced

    def again(self, kinds: frozenset[Any] = frozenset()) -> Retry:
        """Return the retry after another failure."""
        delay_s = self.delay_s if kinds - self.kinds else min(2 * self.delay_s, MAX_RETRY_S)
        return Retry(delay_s, self.kinds | kinds if kinds else kinds)


def kind_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the property that decides whether a child can get a call: types, not values."""
    passed = {name: value for name, value in kwargs.items() if name not in LAUNCH_KEYWORDS}
    return tuple(map(_kind, leaves([*args, passed])))


def _kind(value: Any) -> Any:
    device = getattr(value, "device", None)
    where = getattr(device, "type", None), str(getattr(value, "layout", None))
    return type(value), where, may_be_address(value)


def fall_back(state: KeyState, request: TuningRequest, config: Config, error: Exception) -> Config:
    """Use `config` as a fallback after a failed tuning, until the next one; warn the first time.

    If a child cannot rebuild the call, only calls of its kind use the fallback. It is permanent if
    a child can rebuild no call of the kernel, or if the kernel waits for an answer. A request that
    no longer has its arguments has no kind.
    """
    before, retry, outlook = state.retried, None, ""
    kinds = frozenset[Any]()
    if isinstance(error, KernelNotTransferable) and request.known is None:
        kinds = frozenset({kind_of(request.call.args, request.call.kwargs)})
    if not nobody_answers(request, error) and (not kinds or may_be_sent(request)):
        state.retried = retry = Retry(kinds=kinds) if before is None else before.again(kinds)
        if before is not None:
            return state.set_fallback(config, retry)
        others = "calls with other kinds of arguments are tried"
        outlook = f"; {others if kinds else 'it is tried again later'}"
    state.set_fallback(config, retry)
    which = "its first config" if config is request.configs[0] else "its fallback"
    warn(
        f"{request.key.kernel.name} is not tuned for {request.key} and runs with {which} "
        f"({config_text(config)}){outlook}: {error}",
        TuningWarning,
    )
    return config


def may_be_sent(request: TuningRequest) -> bool:
    """Whether a child can get the kernel and its hooks, whatever the arguments are.

    Heuristics do not matter: the caller computes their values.
    """
    from safetune.tuning.bench import pack_call  # most processes need none

    kernel = own_heuristics(request.call.kernel)[0]
    try:
        pack_call(replace(request, call=replace(request.call, kernel=kernel, args=(), kwargs={})))
    except KernelNotTransferable:
        return False
    return True


def nobody_answers(request: TuningRequest, error: Exception) -> bool:
    """Whether a kernel's text waits for another program, so that it hangs in a child."""
    if not isinstance(error, NoWorkingConfig):
        return False
    verdicts = {outcome.verdict for _, outcome in error.outcomes}
    if Verdict.TIMEOUT not in verdicts or not verdicts <= HARMLESS | {Verdict.TIMEOUT}:
        return False
    from safetune.keys.waiting import waits_on_memory

    return waits_on_memory(request.call.kernel)


def count_sync() -> None:
    """Allow fallbacks from before now to be tuned again in a world of several processes."""
    global _syncs
    _syncs += 1


def first_config(request: TuningRequest, error: NoWorkingConfig) -> Config | None:
    """Return the config to launch in the caller although no config works in a child; None without
    one.

    The caller then gets Triton's own exception, and a call that fails only in a child works.
    """
    if nobody_answers(request, error):
        hung = {text for text, outcome in error.outcomes if outcome.verdict is Verdict.TIMEOUT}
        return next(config for config in request.configs if config_text(config) in hung)
    outcomes = [outcome for _, outcome in error.outcomes]
    return request.configs[0] if all(map(_is_harmless, outcomes)) else None


def _is_harmless(outcome: Outcome) -> bool:
    lacks_memory = outcome.verdict is Verdict.COMPILE_ERROR and outcome.detail == "memory"
    return outcome.verdict in HARMLESS and not lacks_memory


def none_works(
    state: KeyState, request: TuningRequest, error: NoWorkingConfig, must_raise: bool
) -> Config:
    """Raise the error of a call for which no config works, or launch a kernel that waits."""
    if not must_raise:
        error.first = first_config(request, error)
        if error.first is not None and nobody_answers(request, error):
            return fall_back(state, request, error.first, error)
    if len(request.grids.failures) < len(request.configs):  # something was measured
        before = state.hopeless
        if before is not None and before.declared != request.declared:
            before = None
        state.hopeless = Hopeless(error, request.scopes.call, request.declared, before)
    raise error


@contextlib.contextmanager
def first_for_all(tuner: Tuner, error: NoWorkingConfig) -> Iterator[None]:
    """Launch the first config in the body, although none works in a child. The children's results
    become a note on the exception that it raises, or one warning.
    """
    try:
        yield
    except Exception as raised:
        add_note(raised, f"safetune: {error}")
        raise
    if tuner.first_time(str(error).partition("\n")[0]):
        warn(
            f"{tuner.base_fn.__name__} runs with its first config ({config_text(error.first)}), "
            f"because this process can launch it: {error}",
            TuningWarning,
        )


def add_note(error: BaseException, text: str) -> None:
    """Add a text to Python's output of an exception; before Python 3.11, warn once."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        warn_once(text, TuningWarning)


class Hopeless:
    """The calls of a key for which no config of a list works: the last error, the next attempt.

    The first different call is tuned at once, because the caller may have corrected a mistake. If
    no config works for that one either, the next is tried after a while, not at each step.
    """

    def __init__(
        self, error: NoWorkingConfig, call: str, declared: str, before: Hopeless | None
    ) -> None:
        self.calls: set[str] = {call, *(before.calls if before else ())}
        self.declared = declared
        self._error = without_frames(error)
        self._delay_s: float = before._delay_s if before else 0.0
        if before and call not in before.calls:
            self._delay_s = min(max(2 * self._delay_s, RETRY_S), MAX_RETRY_S)
        self._others_s = clock() + self._delay_s
        self._same_s = clock() + RETRY_S

    def error_for(self, request: TuningRequest) -> NoWorkingConfig | None:
        """Return the error of a call that is not tried now; None to try it.

        Looks up the call's failures in the store, which may have been cleared; not at each step if
        the first config is launched anyway.
        """
        if request.declared != self.declared:
            return None  # nothing is known of this list
        error = without_frames(self._error)
        error.measured = 0
        if request.scopes.call in self.calls:
            return error if error.first is not None and clock() < self._same_s else None
        left_s = self._others_s - clock()
        if left_s <= 0:
            return None
        error.args = (f"{error}\nThat was another call; this one is tried in {left_s:.0f} s",)
        return error
