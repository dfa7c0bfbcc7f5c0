"""A call without a config in memory: look its choice up, else tune, else use the fallback."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Autotuner, Config

from safetune import forks, triton_internals
from safetune.both import backend
from safetune.config import (
    check_conflicts,
    config_digest,
    config_record,
    config_text,
    declared_digest,
    distinct,
)
from safetune.errors import (
    KernelNotTransferable,
    NoWorkingConfig,
    StoreError,
    TooMuchPinned,
    TuningWarning,
    WorkerUnavailable,
)
from safetune.inputs.call import Call
from safetune.keys import encoding, left_kernels, text_facts
from safetune.keys.identity import is_interpreted
from safetune.keys.tuning_key import TuningKey, active_driver, current_index, triton_key, tuning_key
from safetune.launch import call_shape, scratch_memory
from safetune.launch.key_state import Asked, Reason, without_frames
from safetune.messages import logger, warn, warn_once
from safetune.miss import reporting
from safetune.outcome import Outcome, Verdict
from safetune.settings import Mode, SearchBudget, Settings
from safetune.store.local import db_files, in_flight
from safetune.store.local.store import Store
from safetune.store.lookup import GuardedStore, Lookup, open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord
from safetune.tuning.requests import Phases, Plan, TuningRequest

if TYPE_CHECKING:
    from safetune.launch.call_shape import Tuner
    from safetune.launch.key_state import KeyState

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Miss:
    """A call without a config in memory; `index` is its device if its tensors do not name one."""

    def __init__(
        self, tuner: Tuner, args: Args, kwargs: Mapping[str, Any], index: int | None = None
    ) -> None:
        self.phases = Phases("lookup")
        self.tuner = tuner
        self.kwargs = kwargs
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
        return distinct(call_shape.pruned_configs(self.tuner, positional, self.kwargs))

    def request(self, force: bool = False) -> TuningRequest:
        """Return the request for a tuning; raises `NoDevice`, and exceptions of prune functions."""
        tuner, configs, named = self.tuner, self.configs(), self.call.named()
        settings = Settings.current()
        same_bits = settings.same_bits_of(tuner.same_bits)
        for config in configs:
            check_conflicts(tuner.base_fn.__name__, config, named)
        return TuningRequest(
            key=self.key(),
            call=self.call,
            configs=configs,
            declared=declared_digest(tuner.configs, same_bits),
            readable_key=triton_key(tuner.keys, tuner.arg_names, named),
            limits=tuner.limits,
            force=force,
            budget=tuner.budget or _budget_for(configs, settings.budget),
            proposer=tuner.proposer,
            measure=tuner.measure or settings.measure,
            same_bits=same_bits,
        )

    def key(self) -> TuningKey:
        """Return the tuning key of the call; raises `NoDevice`."""
        tuner, call = self.tuner, self.call
        return tuning_key(
            *(tuner.identity, tuner.key_names, tuner.arg_names, call.named(), call.index),
            tuner.measure or Settings.current().measure,
        )


def _budget_for(configs: tuple[Config, ...], asked: SearchBudget | None) -> SearchBudget | None:
    """Return SAFETUNE_BUDGET, or None for all configs if it allows that many."""
    allowed = asked is not None and asked.configs is not None and asked.configs >= len(configs)
    return None if allowed else asked


def _device_index(kernel: Any, named: Mapping[str, Any], given: int | None) -> int:
    if is_interpreted(kernel):
        return -1
    if given is not None:
        return given
    index = call_shape.device_index((), named)
    return index if index >= 0 else current_index()


def resolve(tuner: Tuner, state: KeyState, args: Args, kwargs: Kwargs, capture: int = 0) -> Config:
    """Return the config to launch a call with: stored, tuned now, or the fallback.

    `state` keeps a config that later calls launch too.

    Args:
        capture: the number of the CUDA graph capture under way, in which nothing is tuned.

    Raises:
        NoWorkingConfig: every config failed.
        NoDevice: there is neither a GPU nor the interpreter to run the kernel.
        MissError: there is no choice, and `on_miss` is `error`.
    """
    settings = Settings.current()
    known = state.decision(capture)
    if known is not None:
        retry = known.retry
        if retry is None or retry.holds(args, kwargs, settings, capture):
            return known.config
    try:
        case = _Case(tuner, state, args, kwargs, settings, capture)
        config = _find(case)
        case.look_again_after_pull()
        return config
    except KeyboardInterrupt as error:  # at which line of safetune says nothing to the user
        raise error.with_traceback(None) from None


class _Case:
    """A call without a config in memory; its properties are computed when a rule reads them."""

    def __init__(
        self,
        tuner: Tuner,
        state: KeyState,
        args: Args,
        kwargs: Kwargs,
        settings: Settings,
        capture: int,
    ) -> None:
        self.tuner, self.state, self.args, self.kwargs = tuner, state, args, kwargs
        self.settings, self.capture = settings, capture
        self.pulled = True  # whether all choices of other nodes were here when this looked
        asked = settings.leave or left_kernels.installed
        self.left = bool(asked) and left_kernels.is_left(tuner.fn, settings)  # to Triton
        self.tunes = self.left or settings.tunes(tuner.on_miss)

    @forks.cached_property
    def miss(self) -> Miss:
        """The call and its tuner."""
        miss = Miss(self.tuner, self.args, self.kwargs)
        if not miss.call.interpreted:
            triton_internals.files_hash.begin(text_facts.triton_hash)  # Triton's cache is asked
        return miss

    @forks.cached_property
    def why_inline(self) -> str | None:
        """Why configs are tried in this process (empty: the user asked for it); None if not."""
        if not self.tunes:
            return None
        if self.left or self.tuner.isolation == "inline":
            return ""
        return why_not_isolated(self.miss.call) or None

    @forks.cached_property
    def request(self) -> TuningRequest:
        """The request for a tuning."""
        return self.miss.request()

    @forks.cached_property
    def lookup(self) -> Lookup | None:
        """The lookup of choices; None without a store."""
        return open_lookup(self.settings) if self.why_inline is None else None

    @forks.cached_property
    def plan(self) -> Plan:
        """The stored plan of the key. The mode `record` also notes the call."""
        request, lookup = self.request, self.lookup
        self.state.asked = Asked(request.key, request.declared, request.by_digest)
        if lookup is None:
            return Plan(request, None, ())
        self.pulled = lookup.is_pulled(request.key)
        if self.settings.mode is Mode.RECORD and request.has_work:
            from safetune.miss import record  # imports torch

            record.remember(request, lookup.store, captured=bool(self.capture))
        plan = stored(self.tuner, request, lookup)
        if plan.choice is None:
            lookup.tell_unused(request.key, request.declared, request.by_digest, self.tunes)
        return plan

    @property
    def store(self) -> Store:
        """The store of the key."""
        assert self.lookup is not None
        return self.lookup.store

    def look_again_after_pull(self) -> None:
        """Look the key up again if it got a fallback before its choice could be found."""
        if not self.pulled and self.lookup is not None:
            self.lookup.after_pull(self.request.key, self.state.look_again)

    def is_settled(self) -> bool:
        """Whether the key has a choice and is not to be tuned again."""
        again = self.tunes and self.settings.mode is Mode.TUNE and not self.capture
        plan = self.plan
        return plan.choice is not None and not (again and self.request.has_work and plan.due)


class Flights:
    """Stores the config that runs in this process, in case the process or the machine goes down.

    Does nothing without a store or a request.

    Attributes:
        skipped: the configs that are not tried, and why.
    """

    def __init__(self, request: TuningRequest | None, settings: Settings) -> None:
        self._store: GuardedStore | None = None
        self._tried = set[Config]()
        self.skipped: dict[Config, Outcome] = {}
        path = db_files.locate(settings, writes=False).database
        if request is None or request.without_identity or not db_files.outlives_machine(path):
            return
        with contextlib.suppress(StoreError):
            self._store = GuardedStore.open(path.parent, settings.wait_s)
        if self._store is None:
            return
        self._key = request.key
        self._store.put_key(KeyRecord.of(request.key))
        plan, configs = Plan.read(request, self._store), request.configs
        self._tried = {configs[index] for index in plan.latest}
        skipped = {**plan.took_down, **plan.listed}
        self.skipped = {configs[index]: outcome for index, outcome in skipped.items()}

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def check_some(self, configs: Sequence[Config]) -> None:
        """Raise `NoWorkingConfig` if none of these configs may be tried."""
        if self.skipped and self.skipped.keys() >= {*configs}:
            outcomes = [(config_text(config), outcome) for config, outcome in self.skipped.items()]
            raise NoWorkingConfig(self._key.kernel.name, str(self._key), outcomes, measured=0)

    @contextlib.contextmanager
    def launching(self, config: Config) -> Iterator[None]:
        """Launch a config in the body."""
        flight = in_flight.here(inline=True)
        if self._store is None or not flight or config in self._tried:
            yield
            return
        key, digest, record = self._key.digest, config_digest(config), config_record(config)
        died = Outcome(Verdict.DIED, detail="process")
        trial = TrialRecord(key, digest, record, 1, died, created=time.time(), flight=flight)
        self._store.put_trial(trial, durable=True)
        try:
            yield
        finally:
            self._store.drop_in_flight(trial)


def _first_pruned(case: _Case) -> Config:
    named = call_shape.named_arguments(case.tuner.arg_names, case.args)
    pruned = call_shape.pruned_configs(case.tuner, named, case.kwargs)
    return case.state.set_fallback(next(iter(pruned), case.tuner.configs[0]))


def _inline(case: _Case, reason: str = "") -> Config:
    """Measure configs in this process, as `triton.autotune` does; nothing is stored."""
    tuner, state, args, kwargs = case.tuner, case.state, case.args, case.kwargs
    if not case.left and case.settings.same_bits_of(tuner.same_bits):
        warn_once(
            f"{tuner.base_fn.__name__}: same_bits is refused, because its configs would be tried "
            "in this process. safetune launches the first config",
            TuningWarning,
        )
        return _first_pruned(case)
    if reason := reason or case.why_inline or "":
        text = f"{reason}; safetune tunes in this process instead, as triton.autotune does"
        warn_once(text, TuningWarning)
    request: TuningRequest | None = None
    with contextlib.suppress(Exception):  # the tuning raises the important errors
        request = case.request
        state.asked = Asked(request.key, request.declared, request.by_digest)
        if not request.has_work:
            return for_no_work(state, request)
    if case.left:  # it is Triton's
        request = None
    if request is not None:
        reporting.check_policy(tuner, request, case.settings)
    start = time.perf_counter()
    with contextlib.closing(Flights(request, case.settings)) as flights:
        best, timings = _timed_here(tuner, args, kwargs, flights)
    if request is not None:
        reporting.tell_of_skipped(request.key, flights.skipped)
    if timings:
        named = call_shape.named_arguments(tuner.arg_names, args, kwargs)
        key = triton_key(tuner.keys, tuner.arg_names, named)
        tuner.report(key, best, timings, {"measure": time.perf_counter() - start})
    return state.set_choice(best)


def _timed_here(
    tuner: Tuner, args: Args, kwargs: Kwargs, flights: Flights
) -> tuple[Config, dict[Config, list[float]]]:
    """Return the fastest config that pruning leaves, and all times; a single one is not timed."""
    view: Any = copy.copy(tuner)
    view.nargs = named = call_shape.named_arguments(tuner.arg_names, args)
    configs = view.prune_configs(kwargs)
    if len(configs) == 1:
        return configs[0], {}
    if tuner.hooks.do_bench is None and is_interpreted(tuner.fn):
        view.do_bench = _wall_clock
    reporting.tunings.begun += 1
    bench = Autotuner._bench  # of Triton: times in this process
    flights.check_some(configs)
    timings: dict[Config, list[float]] = {}
    with scratch_memory.scratch_allocator():
        for config in configs:
            if config not in flights.skipped:
                with flights.launching(config):
                    timings[config] = bench(view, *args, config=config, **kwargs)
    best = min(timings, key=lambda config: timings[config])
    view.pre_hook({**named, **kwargs, **best.all_kwargs()}, reset_only=True)
    return best, timings


def _wall_clock(launch: Callable[[], object], quantiles: object) -> list[float]:
    """Replace Triton's `do_bench` in its interpreter, where it finds no device."""
    from safetune.both.protocol import Budget
    from safetune.both.timing import Timer, measure

    timing = measure(launch, lambda: None, lambda: None, Timer(), Budget())
    return [timing.median_ms, timing.p20_ms, timing.p80_ms]


def _keep_choice(case: _Case) -> Config:
    if case.capture and case.plan.config is not None:
        return case.state.set_choice(case.plan.config)
    return _adopt(case, case.plan)


def _captured(case: _Case) -> Config:
    from safetune.miss import under_capture

    tuner, state, request = case.tuner, case.state, case.request
    return under_capture.fall_back(
        tuner, state, request, case.lookup, case.settings, case.capture, case.tunes
    )


def _best_known(case: _Case) -> Config:
    from safetune.miss import candidates

    assert case.lookup is not None
    reporting.warn_of_grid(case.tuner, case.request.grids.reads)
    return case.state.set_fallback(candidates.best_known(case.request, case.lookup))


def _tune_meanwhile(case: _Case) -> Config:
    from safetune.miss.background import tune_meanwhile

    reporting.warn_of_grid(case.tuner, case.request.grids.reads)
    return tune_meanwhile(case.tuner, case.state, case.request, case.store, case.settings)


def for_no_work(state: KeyState, request: TuningRequest) -> Config:
    """Return the config for a call with nothing to do, without changing its key's state.

    Such a call can neither measure nor check a config.
    """
    known = state.decision(capture=None)
    return known.config if known is not None else request.configs[0]


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Make every miss of this process wait for its tuning, even in the mode `background`."""
    _waiting.append(None)
    try:
        yield
    finally:
        _waiting.pop()


_waiting: list[None] = []


def stored(tuner: Tuner, request: TuningRequest, lookup: Lookup) -> Plan:
    """Return the stored plan of a key: its trials, and its choice if that was made from the config
    list that the decorator declares now.
    """
    choice = stored_choice(request, lookup)
    if choice is None:
        return Plan(request, None, ())
    config = request.by_digest[choice.config_digest]
    lookup.remember(choice)
    if choice.marks:
        reporting.warn_of_dispute(request.key, choice.dispute)
    name = request.key.kernel.name
    logger.info("%s has a choice for %s: %s", name, request.key, config_text(config))
    plan = Plan(request, choice, lookup.store.trials(request.key.digest))
    tuner.report(request.readable_key, config, plan.timings)
    return plan


def stored_choice(request: TuningRequest, lookup: Lookup) -> ChoiceRecord | None:
    """Return the choice for a launch from the stores and packs; None without one."""
    configs, kernel = request.by_digest, request.key.kernel.name
    choice = lookup.find(request.key, request.declared, configs)
    if choice is None:
        return None
    config = configs[choice.config_digest]
    if encoding.dumps(choice.config) != encoding.dumps(config_record(config)):
        logger.warning(
            "ignoring a stored choice of %s for %s: its values differ from the declared config "
            "with the same digest",
            kernel,
            request.key,
        )
        return None
    return choice


def _tune_now(case: _Case) -> Config:
    """Tune a key; if that is not possible, launch its present choice, or a fallback."""
    from safetune.isolation import child_handle, fork_server

    miss, state, request, store = case.miss, case.state, case.request, case.store
    choice = case.plan.config
    if choice is not None and case.lookup is not None:
        case.lookup.forget(request.key.digest, request.declared)
    reporting.warn_of_grid(case.tuner, request.grids.reads)
    if not miss.call.interpreted:
        with contextlib.suppress(WorkerUnavailable):  # raised again below
            child_handle.check_device(miss.call.index)
            fork_server.start_servers(compiling=True, with_torch=False)
    # These take as long to import as a server to start.
    from safetune.miss import candidates, failures
    from safetune.tuning.single_flight import WaitBudget
    from safetune.tuning.tuner import tune

    hopeless = None if choice is not None or _waiting else state.hopeless
    if hopeless is not None and (error_before := hopeless.error_for(request)):
        raise error_before
    try:
        with reporting.observing(request, store, miss.phases) as tally:
            budget = WaitBudget(case.settings.wait_s, tell=tally.wait_for)
            result = tune(request, store, tally, wait_budget=budget, phases=miss.phases)
    except (KernelNotTransferable, WorkerUnavailable, NoWorkingConfig) as error:
        if choice is not None:
            name = request.key.kernel.name
            logger.info("%s keeps its choice for %s: %s", name, request.key, error)
            return _adopt(case, replace(case.plan, trials=store.trials(request.key.digest)))
        if isinstance(error, TooMuchPinned) and not _waiting:
            return _inline(case, str(error))
        if isinstance(error, NoWorkingConfig) and not error.transient:
            return failures.none_works(state, request, error, must_raise=bool(_waiting))
        return failures.fall_back(state, request, candidates.fallback(request, store), error)
    config = _set_choice(state, result.choice, case.settings)  # first: a warning may be an error
    reporting.report_result(case.tuner, request, result)
    return config


def _set_choice(state: KeyState, choice: Config, settings: Settings) -> Config:
    """Launch a choice; a rank that launches a fallback keeps it until all ranks call `sync`."""
    launched = state.decision()
    if settings.world_size > 1 and launched is not None and launched.reason is Reason.FALLBACK:
        state.hold(choice)
        return launched.config
    return state.set_choice(choice)


def _adopt(case: _Case, plan: Plan) -> Config:
    """Use a stored choice; calls with which it is known to fail get the next-best config."""
    assert plan.config is not None
    config = _set_choice(case.state, plan.config, case.settings)
    if plan.fails(config):
        from safetune.miss import candidates

        candidates.replace_failed(case.state, case.request, case.store, config)
    return config


#: The calls that are no miss, and the config of each: the first row that applies.
_NO_MISS: tuple[tuple[Callable[[_Case], object], Callable[[_Case], Config]], ...] = (
    (lambda case: case.kwargs.get("warmup"), lambda case: case.tuner.configs[0]),
    (lambda case: case.settings.mode is Mode.OFF, _first_pruned),
    (lambda case: case.why_inline is not None and not case.capture, _inline),
    (
        lambda case: len(case.request.configs) == 1 and case.request.has_work,
        lambda case: case.state.set_choice(case.request.configs[0]),
    ),
    (_Case.is_settled, _keep_choice),
    (lambda case: not case.request.has_work, lambda case: for_no_work(case.state, case.request)),
)

#: What a miss does, where `on_miss` is no error.
_MISSES: tuple[tuple[Callable[[_Case], object], Callable[[_Case], Config]], ...] = (
    (lambda case: case.capture, _captured),
    (lambda case: not case.tunes, _best_known),
    (lambda case: case.settings.mode is Mode.BACKGROUND and not _waiting, _tune_meanwhile),
    (lambda case: True, _tune_now),
)


def _find(case: _Case) -> Config:
    for applies, config_of in _NO_MISS:
        if applies(case):
            return config_of(case)
    if case.plan.choice is None:  # not of a key that is only tuned again
        reporting.check_policy(case.tuner, case.request, case.settings, case.capture)
    return next(config_of(case) for applies, config_of in _MISSES if applies(case))


def why_not_isolated(call: Call) -> str:
    """Return why configs of this call cannot be tried in a child; empty if they can."""
    if not hasattr(os, "memfd_create"):
        return f"safetune cannot isolate configs on {sys.platform} yet"
    if call.interpreted:
        return ""
    name = triton_internals.target_name() or active_driver().get_current_target().backend
    return backend.why_missing(name)


def next_best(
    tuner: Tuner,
    state: KeyState,
    args: Args,
    kwargs: Kwargs,
    special: Any,
    config: Config,
    error: Exception,
) -> Any:
    """Launch a call with the next-best config after `config` could not be launched.

    A choice is tuned per key, but Triton compiles again for each specialisation: constexpr values,
    alignment, an integer that is 1. So a config that works for one call of a key may need too much
    shared memory for the next. Raises the last error if no config can be launched.

    Args:
        special: the values that decide which binary the call needs: `call_shape.specialisation`.
    """
    settings = Settings.current()
    if settings.mode is Mode.OFF:
        raise error
    rejected = state.reject(special, config)
    reason = _text(error)
    for other in _candidates(_Case(tuner, state, args, kwargs, settings, capture=0)):
        if other in rejected:
            continue
        try:
            result = tuner.shapes.of(args, kwargs).launch(other, args, kwargs).result
        except call_shape.CLEAN_FAILURES as next_error:
            state.reject(special, other)
            error = next_error
            continue
        state.substitute(special, other)
        warn(
            f"{tuner.base_fn.__name__}: {config_text(config)} cannot be launched with these "
            f"arguments ({reason}); {config_text(other)} is used for them instead",
            TuningWarning,
        )
        return result
    state.substitute(special, without_frames(error))
    raise error


def _candidates(case: _Case) -> Iterator[Config]:
    """Return the configs to try instead, best first."""
    from safetune.miss import candidates

    if case.lookup is None:
        return iter(case.miss.configs())
    return candidates.best_first(case.request, case.store, measured_first=True)


def _text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
