"""A call without a config in memory: look its choice up, else tune, else use the fallback."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Config

from safetune import triton_internals
from safetune.config import (
    check_conflicts,
    config_record,
    config_text,
    declared_digest,
)
from safetune.errors import (
    KernelNotTransferable,
    NoWorkingConfig,
    TuningWarning,
    WorkerUnavailable,
    from_signal_handler,
)
from safetune.inputs.call import Call
from safetune.isolation import backend
from safetune.keys import encoding, text_facts
from safetune.keys.kernel_digest import base_function, is_interpreted
from safetune.keys.tuning_key import (
    TuningKey,
    active_driver,
    current_index,
    readable_key,
    tuning_key,
)
from safetune.launch import call_shape
from safetune.launch.key_state import Asked, Reason
from safetune.messages import logger, warn_once
from safetune.miss import reporting
from safetune.outcome import TRANSIENT
from safetune.settings import Mode, Settings
from safetune.store.local.store import Store
from safetune.store.lookup import Lookup, open_lookup
from safetune.tuning import requests
from safetune.tuning.requests import Phases, TuningRequest

if TYPE_CHECKING:
    from safetune.launch.key_state import KeyState
    from safetune.miss.tuner import Tuner
    from safetune.outcome import Outcome
    from safetune.store.records import TrialRecord
    from safetune.tuning.requests import TuningResult

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Miss:
    """A call without a config in memory; `index` is its device where its tensors do not name it."""

    def __init__(
        self, tuner: Tuner, args: Args, kwargs: Mapping[str, Any], index: int | None = None
    ) -> None:
        self.phases = Phases("lookup")
        self.tuner = tuner
        self._kwargs = kwargs
        passed = {n: v for n, v in kwargs.items() if n not in call_shape.LAUNCH_KEYWORDS}
        named = call_shape.named_arguments(tuner.arg_names, args, passed)
        shape = tuner.shapes.of(args, kwargs)
        self.call = Call(
            kernel=tuner.fn,
            arg_names=tuple(tuner.arg_names),
            args=args,
            kwargs=passed,
            grid=kwargs.get("grid"),
            pins={n: call_shape.PIN for n in shape.pins if shape.pinnable(n, named[n])},
            hooks=tuner.hooks,
            index=_device_index(tuner.fn, named, index),
        )

    def configs(self) -> tuple[Config, ...]:
        """Return the configs that pruning leaves for the call."""
        positional = call_shape.named_arguments(self.tuner.arg_names, self.call.args)
        return tuple(call_shape.pruned_configs(self.tuner, positional, self._kwargs))

    def request(self, force: bool = False) -> TuningRequest:
        """Return the request for a tuning; raises `NoDevice`, and exceptions of prune functions."""
        tuner, configs, named = self.tuner, self.configs(), self.call.named()
        for config in configs:
            check_conflicts(tuner.base_fn.__name__, config, named)
        return TuningRequest(
            key=self.key(),
            call=self.call,
            configs=configs,
            declared=declared_digest(tuner.configs),
            readable_key=readable_key(tuner.keys, tuner.arg_names, named),
            limits=tuner.limits,
            force=force,
            budget=tuner.budget,
            proposer=tuner.proposer,
        )

    def key(self) -> TuningKey:
        """Return the tuning key of the call; raises `NoDevice`."""
        tuner, call = self.tuner, self.call
        return tuning_key(tuner.identity, tuner.keys, tuner.arg_names, call.named(), call.index)


def _device_index(kernel: Any, named: Mapping[str, Any], given: int | None) -> int:
    if is_interpreted(kernel):
        return -1
    if given is not None:
        return given
    index = call_shape.device_index((), named)
    return index if index >= 0 else current_index()


def resolve(tuner: Tuner, state: KeyState, args: Args, kwargs: Kwargs, capture: int = 0) -> Config:
    """Return the config to launch a call with: stored, or tuned now, or the fallback.

    A config that later calls launch too is kept in `state`.

    Args:
        capture: the number of the CUDA graph capture under way, in which nothing is tuned.

    Raises:
        NoWorkingConfig: every config failed.
        NoDevice: there is neither a GPU nor the interpreter to run the kernel.
        CaptureMiss: there is no choice under capture, and the policy is `error`.
    """
    settings = Settings.current()
    known = state.decision(capture)
    if known is None or not (capture or known.retry is None or not known.retry.due(settings)):
        try:
            return _find(tuner, state, args, kwargs, settings, capture)
        except KeyboardInterrupt as error:  # at which line of safetune says nothing to the user
            raise error.with_traceback(None) from None
    return known.config


def _find(
    tuner: Tuner, state: KeyState, args: Args, kwargs: Kwargs, settings: Settings, capture: int
) -> Config:
    if kwargs.get("warmup"):
        return tuner.configs[0]
    if settings.mode is Mode.OFF:
        named = call_shape.named_arguments(tuner.arg_names, args)
        pruned = call_shape.pruned_configs(tuner, named, kwargs)
        return state.set_fallback(next(iter(pruned), tuner.configs[0]))
    tunes = settings.mode not in (Mode.FROZEN, Mode.RECORD)
    inline = tunes and tuner.isolation == "inline"
    if inline and not capture:
        return _inline(tuner, state, args, kwargs)
    miss = Miss(tuner, args, kwargs)
    if not miss.call.interpreted:
        triton_internals.files_hash.begin(text_facts.triton_hash)  # Triton's cache is asked
    reason = why_not_isolated(miss.call) if tunes and not inline else ""
    if reason and not capture:
        return _inline(tuner, state, args, kwargs, reason)
    request = miss.request()
    if len(request.configs) == 1 and request.has_work:
        return state.set_choice(request.configs[0])
    state.asked = Asked(request.key, request.declared, request.by_digest)
    lookup = None if inline or reason else open_lookup(settings)
    choice, trials = stored(tuner, request, lookup) if lookup else (None, [])
    if lookup and settings.mode is Mode.RECORD and request.has_work and not capture:
        _record(request, lookup.store)
    if lookup and choice:
        if capture:
            return state.set_choice(choice)
        tunes_again = settings.mode is Mode.TUNE and request.has_work
        if not (tunes_again and requests.is_due(request, lookup.store, trials)):
            return _adopt(state, choice, settings)
        lookup.forget(request.key.digest, request.declared)
    if not request.has_work:
        return for_no_work(state, request)
    if capture or lookup is None:
        from safetune.miss import under_capture

        return under_capture.fall_back(tuner, state, request, lookup, settings, capture)
    reporting.warn_of_grid(tuner, request.grids.reads)
    if not tunes:
        from safetune.miss import candidates

        return state.set_fallback(candidates.best_known(request, lookup))
    if settings.mode is Mode.BACKGROUND and not _waiting:
        from safetune.miss.background import tune_meanwhile

        return tune_meanwhile(state, request, lookup.store, settings, partial(report_result, tuner))
    return _tune(miss, state, request, lookup.store, settings, choice)


def _record(request: TuningRequest, store: Store) -> None:
    from safetune.miss import record  # imports torch

    record.remember(request, store)


def _inline(tuner: Tuner, state: KeyState, args: Args, kwargs: Kwargs, reason: str = "") -> Config:
    if reason:
        warn_once(f"{reason}; kernels are tuned as triton.autotune does", TuningWarning)
    try:
        request = Miss(tuner, args, kwargs).request()
        state.asked = Asked(request.key, request.declared, request.by_digest)
        if not request.has_work:
            return for_no_work(state, request)
    except Exception as error:  # the tuning raises what matters
        if from_signal_handler(error):
            raise
    from safetune.miss import inline

    start = time.perf_counter()
    best, timings = inline.tune(tuner, args, kwargs)
    if timings:
        named = call_shape.named_arguments(tuner.arg_names, args, kwargs)
        key = readable_key(tuner.keys, tuner.arg_names, named)
        report(tuner, key, best, timings, {"measure": time.perf_counter() - start})
    return state.set_choice(best)


def for_no_work(state: KeyState, request: TuningRequest) -> Config:
    """Return the config for a call with nothing to do, which leaves its key as it is.

    Such a call says nothing of a config: it can be neither measured nor checked.
    """
    known = state.decision(capture=None)
    return known.config if known is not None else request.configs[0]


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Make every miss of this process wait for its tuning, also in the mode `background`."""
    _waiting.append(None)
    try:
        yield
    finally:
        _waiting.pop()


_waiting: list[None] = []


def stored(
    tuner: Tuner, request: TuningRequest, lookup: Lookup
) -> tuple[Config | None, list[TrialRecord]]:
    """Return the stored choice, if it was made from the list that the decorator declares now, and
    the trials of its key.
    """
    configs = request.by_digest
    choice = lookup.find(request.key, request.declared, configs)
    if choice is None:
        return None, []
    config, kernel = configs[choice.config_digest], request.key.kernel.name
    if encoding.dumps(choice.config) != encoding.dumps(config_record(config)):
        logger.warning(
            "ignoring a stored choice of %s for %s: its values are not those of the config "
            "with its digest",
            kernel,
            request.key,
        )
        return None, []
    lookup.remember(choice)
    if choice.marks:
        reporting.warn_of_dispute(request.key, choice.dispute)
    logger.info("%s has a choice for %s: %s", kernel, request.key, config_text(config))
    trials = lookup.store.trials(request.key.digest)
    lasting = [trial for trial in trials if trial.outcome.verdict not in TRANSIENT]
    latest = {trial.config_digest: trial.outcome for trial in lasting}
    known = [(configs[digest], latest[digest]) for digest in latest if digest in configs]
    report(tuner, request.readable_key, config, _timings_of(known))
    return config, trials


def _tune(
    miss: Miss,
    state: KeyState,
    request: TuningRequest,
    store: Store,
    settings: Settings,
    choice: Config | None,
) -> Config:
    """Tune a key; where that is not possible, launch the choice that it has, or a fallback."""
    from safetune.isolation import child_handle, fork_server

    if not miss.call.interpreted:
        with contextlib.suppress(WorkerUnavailable):  # raised again below
            child_handle.check_device(miss.call.index)
            fork_server.start_servers(compiling=True, with_torch=False)
    # These take as long to import as a server to start.
    from safetune.miss import candidates, retry
    from safetune.tuning.single_flight import WaitBudget
    from safetune.tuning.tuner import tune

    tuner = miss.tuner
    try:
        with reporting.observing(request, store, miss.phases) as tally:
            budget = WaitBudget(settings.wait_s, tell=tally.wait_for)
            result = tune(request, store, tally, wait_budget=budget, phases=miss.phases)
    except (KernelNotTransferable, WorkerUnavailable, NoWorkingConfig) as error:
        if choice is not None:
            logger.info(
                "%s keeps its choice for %s: %s", request.key.kernel.name, request.key, error
            )
            return _adopt(state, choice, settings)
        if isinstance(error, NoWorkingConfig) and not error.transient:
            raise
        return retry.fall_back(state, request, candidates.fallback(request, store), error)
    config = _adopt(state, result.choice, settings)  # first, as a warning may be an error
    report_result(tuner, request, result)
    return config


def report_result(tuner: Tuner, request: TuningRequest, result: TuningResult) -> None:
    """Report a finished tuning: to the user, and as Triton's tuner does."""
    reporting.tell_result(request, result)
    tuner.tuning_phases = dict(result.phases)
    phases = result.phases if result.measured else None
    report(tuner, request.readable_key, result.choice, _timings_of(result.outcomes), phases)


def report(
    tuner: Tuner,
    key: tuple[Any, ...],
    choice: Config,
    timings: dict[Config, list[float]],
    phases: Mapping[str, float] | None = None,
) -> None:
    """Report a choice as Triton's tuner does: attributes, listener, TRITON_PRINT_AUTOTUNING.

    Args:
        key: as `readable_key` returns it.
        phases: the seconds of the tuning; None if the choice was known.
    """
    seconds = sum(phases.values()) if phases is not None else None
    tuner.configs_timings, tuner.bench_time = timings, seconds or 0.0
    if (listener := getattr(knobs.autotuning, "listener", None)) is not None:
        listener(
            fn=base_function(tuner.fn)[0],
            key=key,
            best_config=choice,
            configs_timings=timings,
            duration=seconds,
            cache_hit=seconds is None,
        )
    if knobs.autotuning.print and phases is not None:
        spent = ", ".join(f"{name} {part:.2f}s" for name, part in phases.items())
        sys.stdout.write(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {seconds:.2f}s,\nof which {spent},\nbest config selected: {choice};\n"
        )


def _timings_of(outcomes: Iterable[tuple[Config, Outcome]]) -> dict[Config, list[float]]:
    """Return outcomes as Triton's tuner keeps them: median, 20th, 80th percentile, or infinity."""
    return {
        config: [math.inf] * 3
        if outcome.timing is None
        else [outcome.timing.median_ms, outcome.timing.p20_ms, outcome.timing.p80_ms]
        for config, outcome in outcomes
    }


def _adopt(state: KeyState, choice: Config, settings: Settings) -> Config:
    """Launch a choice; a rank that launches a fallback keeps that until all call `sync`."""
    launched = state.decision()
    if settings.world_size > 1 and launched is not None and launched.reason is Reason.FALLBACK:
        state.hold(choice)
        return launched.config
    return state.set_choice(choice)


def why_not_isolated(call: Call) -> str:
    """Return why configs of this call cannot be tried in a child; empty if they can."""
    if not hasattr(os, "memfd_create"):
        return f"there is no isolation on {sys.platform} yet"
    if call.interpreted:
        return ""
    name = triton_internals.target_name() or active_driver().get_current_target().backend
    return backend.why_missing(name)
