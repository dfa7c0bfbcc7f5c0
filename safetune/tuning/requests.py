"""The request, grids, progress and result of a tuning, and which earlier outcomes still count."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config, Heuristics

from safetune import forks
from safetune.config import config_digest, config_text, without_identity
from safetune.frozen import dataclass
from safetune.inputs.call import (
    Call,
    Scopes,
    can_travel,
    grid_of,
    heuristics_of,
    of_the_user,
    passed_twice,
    scopes_of,
)
from safetune.keys.identity import in_process, inner_heuristics
from safetune.keys.tuning_key import TuningKey
from safetune.launch.call_shape import own_heuristics
from safetune.outcome import BUSY, OF_SCOPE, TRANSIENT, Mark, Outcome, Verdict
from safetune.settings import MeasurePolicy, SearchBudget, Settings
from safetune.store.records import PINNED_LIST, ChoiceRecord, Failure, TrialRecord

if TYPE_CHECKING:
    from safetune.store.local.store import Store
    from safetune.tuning.search import Proposer


#: What a config has at least to answer, however many have hung.
_LEAST_S = 1.0


@dataclass(frozen=True)
class Limits:
    """The time limits and the memory limits of a child."""

    compile_timeout_s: float = 300.0  # for the compilation of one config
    run_timeout_s: float = 30.0  # for one round of launches of one config
    fresh_process: bool = False  # whether every config gets a new measuring child
    #: What a compile child, and each process that it starts, may allocate.
    compile_memory_bytes: int = 8 << 30

    def of(self, verdict: Verdict) -> float | None:
        """Return the seconds that a config with this verdict exceeded; None for other verdicts."""
        if verdict is Verdict.TIMEOUT:
            return self.run_timeout_s
        return self.compile_timeout_s if verdict is Verdict.COMPILE_TIMEOUT else None

    def to_answer(self, outcomes: Iterable[Outcome]) -> float:
        """Return how long the next config may take to answer, after others; 0 to try no more.

        After a hang, and until a config works, that is short: all configs may be waiting for
        something that no child has. The search for one that answers ends after twice the limit in
        total.
        """
        tried = [*outcomes]
        spent_s = sum(_limit_of(o) for o in tried if o.verdict is Verdict.TIMEOUT)
        if not spent_s or any(outcome.ok for outcome in tried):
            return self.run_timeout_s
        share_s = min(self.run_timeout_s, max(_LEAST_S, self.run_timeout_s / 10))
        return share_s if spent_s + share_s <= 2 * self.run_timeout_s else 0.0


@dataclass(frozen=True)
class Grids:
    """The launch grids of a call."""

    #: For each config; without numbers where a config has no grid.
    sizes: tuple[tuple[int, ...], ...]
    #: The outcome of each config that cannot be launched on its grid.
    failures: Mapping[int, Outcome]
    reads: frozenset[str]  # the dropped names that the grid function reads
    #: What heuristics set for each config; None where one raises.
    heuristics: tuple[Mapping[str, Any] | None, ...] = ()
    sent: tuple[Mapping[str, Any] | None, ...] = ()  # as `Call.heuristics`

    @classmethod
    def unknown(cls, configs: int) -> Grids:
        """Return the grids of a call without arguments."""
        return cls(((),) * configs, {}, frozenset(), (None,) * configs, (None,) * configs)


@dataclass(frozen=True)
class TuningRequest:
    """A call whose key has no choice, and the configs to choose from."""

    key: TuningKey
    call: Call
    configs: tuple[Config, ...]  # those left after pruning, in the order they were declared
    declared: str  # digest over the whole declared list; a choice made from another is not final
    #: The key as Triton writes it, for its listener and its messages.
    readable_key: tuple[Any, ...] = ()
    limits: Limits = Limits()
    force: bool = False  # measure everything again, and open the next generation
    marks: tuple[str, ...] = ()  # for every outcome
    budget: SearchBudget | None = None  # measure some configs, not all
    proposer: Proposer | None = None  # who names them; None for the default
    measure: MeasurePolicy | None = None  # if it was given
    #: Choose among those with the bits of the first declared config that works.
    same_bits: bool = False
    #: Made offline: it goes on with the configs that an earlier search of this key left out, and
    #: believes an earlier process that none works for its call.
    goes_on: bool = False
    #: Those of a call whose arguments are gone, or were never there.
    known: tuple[Grids, Scopes | None] | None = None

    @forks.cached_property
    def grids(self) -> Grids:
        """The grids of the configs. Caller code computes them, and may launch and tune another
        kernel: use this before taking any lock.
        """
        return self.known[0] if self.known else grids_of(self.call, self.configs)

    @property
    def has_hooks(self) -> bool:
        """Whether a user function runs before or after a launch."""
        hooks = (self.call.hooks.pre_hook, self.call.hooks.post_hook)
        return any(hook is not None for hook in hooks) or any(map(_is_hooked, self.configs))

    @forks.cached_property
    def scopes(self) -> Scopes:
        """The calls for which the outcomes of the configs hold."""
        known = self.known and self.known[1]
        return known or scopes_of(self.call, self.grids.sizes, self.grids.heuristics)

    @property
    def without_arguments(self) -> TuningRequest:
        """This request without the caller's tensors, for a tuning that is queued or planned."""
        call = replace(self.call, args=(), kwargs={}, grid=None)
        return replace(self, call=call, known=(self.grids, self.scopes))

    @forks.cached_property
    def by_digest(self) -> dict[str, Config]:
        """The configs by their digests."""
        return {config_digest(config): config for config in self.configs}

    @property
    def compiles_all(self) -> bool:
        """Whether the tuning waits for every compile, even a slow one."""
        return self.goes_on or self.same_bits

    @property
    def without_identity(self) -> str:
        """The name of a value that has no identity in other processes; empty if there is none."""
        in_key = (name for name, value in self.key.values if in_process(value))
        return next(in_key, "") or without_identity(self.configs)

    @property
    def most_shared(self) -> int:
        """The most shared memory for a launch; 0, no limit, with a post hook, which expects the
        launch's exception.
        """
        return self.key.device.shared_memory_bytes if self.call.hooks.post_hook is None else 0

    @property
    def has_work(self) -> bool:
        """Whether a launch of the call does any work, so that it can be measured and checked."""
        return self.call.may_touch_memory() and not all(map(_is_empty, self.grids.sizes))


@dataclass(frozen=True)
class Progress:
    """One step of a tuning, for progress bars and verbose output.

    Attributes:
        stage: `screen` or `final`.
        outcome: None when the config is about to run.
        done, total: configs screened, and to be screened, in this tuning.
    """

    kernel: str
    stage: str
    config: Config
    outcome: Outcome | None
    done: int
    total: int

    @property
    def text(self) -> str:
        """The config as text."""
        return config_text(self.config)

    @property
    def doing(self) -> str:
        """The current or the last step of the tuning, as text."""
        return f"{'measures' if self.stage == 'screen' else 'compares'} {self.text}"


class Phases:
    """Where the time of a tuning goes. Exactly one phase is open at any moment, so that all add up
    to the total.

    `lookup`: until the choice was found to be missing. `wait`: for another tuning, also in other
    processes. `transfer`: packing and copying the call. `resolve`: the compiler's input. `compile`,
    `start`: waiting for a compiled config, and for the measuring child. `search`: selecting configs
    within a budget. `measure`, `finals`: the first launches of each config, and those of the best.
    `store`: outcomes, votes, the choice.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._seconds = clock, dict[str, float]()
        self.name = name  # of the phase that is open now
        self._since = clock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Open a phase within the one that is open now."""
        outer = self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, name: str) -> str:
        """Open a phase, which closes the current one; return the name of the closed phase."""
        outer, now = self.name, self._clock()
        self._seconds[outer] = self._seconds.get(outer, 0.0) + now - self._since
        self.name, self._since = name, now
        return outer

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now."""
        self.enter(self.name)
        return dict(self._seconds)


@dataclass(frozen=True)
class TuningResult:
    """A finished tuning."""

    choice: Config
    stored: ChoiceRecord  # the choice as it is stored
    #: For every config in the request, in order; from this tuning or an earlier one. None for a
    #: choice that was made elsewhere.
    outcomes: tuple[tuple[Config, Outcome], ...]
    measured: int  # how many configs were compiled or launched in this tuning
    phases: Mapping[str, float]  # seconds by phase, see `Phases`
    notes: tuple[str, ...] = ()  # sentences to report to the user
    adopted: bool = False  # the choice is that of another process, which tuned meanwhile
    #: The configs that were faster, and left out for their results: how many times as fast.
    left_out: Mapping[Config, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The total time."""
        return sum(self.phases.values())

    @property
    def timings(self) -> dict[Config, list[float]]:
        """The times of the configs, in the form of Triton's tuner."""
        return {config: _as_triton(outcome) for config, outcome in self.outcomes}


def _as_triton(outcome: Outcome) -> list[float]:
    """Return the median, 20th and 80th percentile, or infinity."""
    timing = outcome.timing
    return [math.inf] * 3 if timing is None else [timing.median_ms, timing.p20_ms, timing.p80_ms]


Observer = Callable[[Progress], None]


def grids_of(call: Call, configs: Sequence[Config]) -> Grids:
    """Return the grids of a call's launches, and the values that heuristics set for them.

    A config fails if its grid or a heuristic raises. It also fails if it launches nothing while
    another config launches something, because it would be the fastest.
    """
    sizes: list[tuple[int, ...]] = []
    failures: dict[int, Outcome] = {}
    values: list[Mapping[str, Any] | None] = []
    reads: set[str] = set()
    for index, config in enumerate(configs):
        grid: tuple[int, ...] = ()
        values.append(None)
        try:
            if wrong := _wrong(call, config):
                failures[index] = _failed(f"the call {wrong}", "TypeError")
            else:
                values[index] = _heuristics_of(call, config)
                grid, seen = grid_of(call, config, values[index])
                reads |= seen
        except Exception as error:
            kind = type(error).__name__
            message = f"its grid or a heuristic cannot be computed: {kind}: {error}"
            failures[index] = _failed(message, kind)
        sizes.append(grid)
    if not all(map(_is_empty, sizes)):
        for index, grid in enumerate(sizes):
            if _is_empty(grid):
                failures[index] = _failed(f"its grid {grid} is empty, but others are not")
    own = not isinstance(own_heuristics(call.kernel)[0], Heuristics)
    sent = tuple(
        each if own and not _is_hooked(config) and _can_travel(each) else None
        for config, each in zip(configs, values, strict=True)
    )
    return Grids(tuple(sizes), failures, frozenset(reads), tuple(values), sent)


def _is_hooked(config: Config) -> bool:
    """Whether a function of the user's runs before the heuristics, which see what it changes."""
    return of_the_user(config.pre_hook) is not None


def _can_travel(values: Mapping[str, Any] | None) -> bool:
    return values is not None and all(map(can_travel, values.values()))


def _heuristics_of(call: Call, config: Config) -> dict[str, Any] | None:
    """Return what heuristics set; None where only a hook of the config makes them work."""
    try:
        return heuristics_of(call, config)
    except Exception:
        if not _is_hooked(config):
            raise
        return None


def _wrong(call: Call, config: Config) -> str:
    """Return why no launch could bind the arguments; empty if one can."""
    if twice := passed_twice(call):
        return f"passes {', '.join(twice)} by position and by name"
    given = {*call.named(), *config.all_kwargs(), *inner_heuristics(call.kernel)}
    needed = [name for name, each in call.parameters.items() if each.default is each.empty]
    missing = ", ".join(name for name in needed if name not in given)
    return f"does not pass {missing}" if missing else ""


def _is_empty(grid: tuple[int, ...]) -> bool:
    return any(size < 1 for size in grid)


def _failed(message: str, detail: str = "") -> Outcome:
    return Outcome(Verdict.LAUNCH_ERROR, detail=detail, message=message)


#: The calls with which no config has worked in this process, which does not try them again: the
#: digests of their key and of them.
hopeless: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Plan:
    """The stored state of a key: read at a launch, and again under the key's lock.

    Attributes:
        choice: the newest one whose config is among those that pruning leaves.
        trials: all trials of the key.
        since: a finding that no config works counts if this process has made it, or another one
            since this time.
    """

    request: TuningRequest
    choice: ChoiceRecord | None
    trials: Sequence[TrialRecord]
    since: float = 0.0

    @classmethod
    def read(cls, request: TuningRequest, store: Store, since: float = 0.0) -> Plan:
        """Read the plan of a request's key."""
        choice = store.choice(request.key.digest, request.declared, [*request.by_digest])
        return cls(request, choice, store.trials(request.key.digest), since)

    @property
    def config(self) -> Config | None:
        """The chosen config."""
        return None if self.choice is None else self.request.by_digest[self.choice.config_digest]

    @property
    def final(self) -> ChoiceRecord | None:
        """The choice, if it leaves nothing to tune."""
        return None if self.due else self.choice

    @forks.cached_property
    def latest(self) -> dict[int, TrialRecord]:
        """The latest non-transient trial of each config that has one, by index."""
        indexes = {config_digest(config): i for i, config in enumerate(self.request.configs)}
        return {
            indexes[trial.config_digest]: trial
            for trial in self.trials
            if trial.config_digest in indexes and trial.outcome.verdict not in TRANSIENT
        }

    @forks.cached_property
    def due(self) -> bool:
        """Whether a key with a choice has configs to measure, once.

        These are configs that pruning leaves only now, that were timed but not judged, that had
        less time than they have now, or that failed cleanly with other calls only. A choice made
        elsewhere has no trials, which does not mean that nothing was tried.
        """
        request, choice, latest = self.request, self.choice, self.latest
        if choice is not None and choice.declared == PINNED_LIST:
            return False
        if request.force:
            return True
        if choice is None or all(t.config_digest != choice.config_digest for t in self.trials):
            return False
        if self.races_again:
            return True
        untried = self._untried(latest)
        more = bool(untried) and _measures_more(request, len(latest), choice.marks)
        if more and not untried <= request.grids.failures.keys():
            return True
        return any(
            trial.outcome.verdict is Verdict.NOT_JUDGED
            or _had_less_time(trial.outcome, request.limits)
            or (
                trial.outcome.verdict in OF_SCOPE
                and trial.seen_with(request.scopes.of[config], True) is None
            )
            for config, trial in latest.items()
        )

    @property
    def races_again(self) -> bool:
        """Whether the finalists race again, because other work was on the device when they did.

        Processes that waited for the choice take it, because that work may be theirs.
        """
        choice = self.choice
        if choice is None or BUSY not in choice.marks:
            return False
        return not 0 < self.since < choice.created

    @forks.cached_property
    def outcomes(self) -> dict[int, Outcome]:
        """The outcomes that hold for the call and need no new measurement, by index."""
        request, limits = self.request, self.request.limits
        if request.force:
            return self.took_down
        known = self._seen(any(trial.outcome.runs for trial in self.latest.values()))
        outcomes = {config: seen.outcome for config, seen in known.items()}
        some_work = any(outcome.runs for outcome in outcomes.values())
        untried = self._untried(outcomes)
        if outcomes and not some_work and (not untried or untried <= request.grids.failures.keys()):
            latest = max(seen.created for seen in known.values())
            if latest < self.since and (request.key.digest, request.scopes.call) not in hopeless:
                return self.took_down
        # Where one had the whole limit and none works, the others had less because of that one.
        enough = not some_work and any(
            outcome.verdict is Verdict.TIMEOUT and not _had_less_time(outcome, limits)
            for outcome in outcomes.values()
        )
        return {
            config: _unsettled(outcome)
            for config, outcome in outcomes.items()
            if (enough and outcome.verdict is Verdict.TIMEOUT)
            or not _had_less_time(outcome, limits)
        }

    @property
    def took_down(self) -> dict[int, Outcome]:
        """The configs that are not tried again for a while, whatever is requested."""
        outcomes = {config: trial.outcome for config, trial in self.latest.items()}
        return {config: outcome for config, outcome in outcomes.items() if outcome.took_down}

    @property
    def listed(self) -> dict[int, Outcome]:
        """The configs without an outcome that SAFETUNE_FAILURES lists; raises `InvalidSetting`."""
        path = Settings.current().failures
        if path is None:
            return {}
        from safetune.store.packs import failures  # only where there is a list

        outcomes, key = failures.read(path), self.request.key.digest
        digests = {
            config: (key, config_digest(self.request.configs[config])) for config in self.left
        }
        return {config: outcomes[of] for config, of in digests.items() if of in outcomes}

    def _untried(self, tried: Collection[int]) -> set[int]:
        return {*range(len(self.request.configs))}.difference(tried)

    def fails(self, config: Config) -> bool:
        """Whether a config is known to fail cleanly with the call; it may work with others."""
        if not any(trial.elsewhere or trial.outcome.verdict in OF_SCOPE for trial in self.trials):
            return False
        configs = self.request.configs
        seen = self._seen(True).get(configs.index(config)) if config in configs else None
        return seen is not None and seen.outcome.clean

    @property
    def expected(self) -> dict[int, Outcome]:
        """The outcomes that can be expected for the call.

        A config that hung or crashed with another call is not launched in the caller either.
        """
        known = {config: seen.outcome for config, seen in self._seen(True).items()}
        return {**known, **self.request.grids.failures}

    def _seen(self, some_work: bool) -> dict[int, Failure | TrialRecord]:
        """Return what was seen of each config with the call, if it says something."""
        latest = self.latest
        scopes = self.request.scopes.of if latest else ()
        seen = {c: trial.seen_with(scopes[c], some_work) for c, trial in latest.items()}
        return {config: found for config, found in seen.items() if found is not None}

    @property
    def left(self) -> list[int]:
        """The configs without such an outcome."""
        return sorted(self._untried(self.outcomes))

    @property
    def timings(self) -> dict[Config, list[float]]:
        """The stored times, in the form of Triton's tuner."""
        configs = self.request.configs
        return {configs[i]: _as_triton(trial.outcome) for i, trial in self.latest.items()}


def _unsettled(outcome: Outcome) -> Outcome:
    """Return a stored outcome; one that was disputed or not judged is to be judged again."""
    if outcome.verdict is Verdict.NOT_JUDGED or (outcome.ok and outcome.marked(Mark.DISPUTED)):
        return replace(outcome, verdict=Verdict.OK, judged=0)
    return outcome


def _measures_more(request: TuningRequest, tried: int, marks: Sequence[str]) -> bool:
    """Whether configs without an outcome are measured for a key that has a choice.

    What a search has left out is measured by one that may take more configs, and without a budget.
    """
    searched = Mark.SEARCHED.reason_in(marks)
    if searched and not request.goes_on:
        return False
    if request.budget is None:
        return True
    if request.budget.configs is None:
        return not searched
    return tried < request.budget.configs


def _had_less_time(outcome: Outcome, limits: Limits) -> bool:
    """Whether a config took longer than a limit that has been raised since."""
    limit_s = limits.of(outcome.verdict)
    return limit_s is not None and _limit_of(outcome) < limit_s


def _limit_of(outcome: Outcome) -> float:
    """Return the limit that a config has exceeded, in seconds; 0 where that is not known."""
    try:
        return float(outcome.detail.removesuffix(" s"))
    except ValueError:
        return 0.0
