"""What a tuning is asked for and the grids of its call, what it reports, and what it ends with; and
which outcomes of earlier ones still count.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune import forks
from safetune.config import config_digest, config_text
from safetune.errors import InvalidSetting, from_signal_handler
from safetune.frozen import dataclass
from safetune.inputs.call import Call, grid_of
from safetune.keys.kernel_digest import inner_heuristics
from safetune.keys.tuning_key import TuningKey
from safetune.outcome import OF_THE_CALL, TRANSIENT, Mark, Outcome, Verdict
from safetune.store.records import ChoiceRecord, TrialRecord

if TYPE_CHECKING:
    from safetune.store.local.store import Store
    from safetune.tuning.search import Proposer


@dataclass(frozen=True)
class Limits:
    """How long a child may take, and what it may use."""

    compile_timeout_s: float = 300.0  # for the compilation of one config
    run_timeout_s: float = 30.0  # for one round of launches of one config
    fresh_process: bool = False  # whether every config gets a new measuring child
    #: What a compile child, and each process that it starts, may allocate.
    compile_memory_bytes: int = 8 << 30

    def of(self, verdict: Verdict) -> float | None:
        """Return the seconds that a config with this verdict took longer than; None for others."""
        limits = {
            Verdict.TIMEOUT: self.run_timeout_s,
            Verdict.COMPILE_TIMEOUT: self.compile_timeout_s,
        }
        return limits.get(verdict)


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SearchBudget:
    """What the search for one key may take: a number of configs in all, or seconds at a time."""

    configs: int | None = None
    seconds: float = math.inf

    @classmethod
    def parse(cls, owner: str, budget: object) -> SearchBudget | None:
        """Return a budget as it is written: `200` configs, or a time as `90s`, `5m` and `1h`.

        None, for all configs, stays None.

        Raises:
            InvalidSetting: it is neither.
        """
        if budget is None or isinstance(budget, cls):
            return budget
        text = "" if isinstance(budget, bool) else str(budget).strip()
        match = re.fullmatch(r"(\d+|\d*\.\d+)([smh]?)", text)
        number = float(match[1]) if match else 0.0
        if match and match[2] and 0 < number < math.inf:
            return cls(seconds=number * _UNITS_S[match[2]])
        if match and number >= 1 and number.is_integer():
            return cls(configs=int(number))
        raise InvalidSetting(
            f"budget={budget!r} of {owner} is neither a number of configs, e.g. 200, nor a time, "
            "e.g. '90s', '5m' or '1h'"
        )

    def remaining(self, tried: int, new: int, elapsed_s: float) -> int:
        """Return how many configs more may be measured; of seconds, as fast as until now.

        Args:
            tried, new: the configs with an outcome, and those of them tried in `elapsed_s`.
        """
        if self.configs is not None:
            return self.configs - tried
        return int((self.seconds - elapsed_s) * new / elapsed_s) if new else sys.maxsize


@dataclass(frozen=True)
class Grids:
    """The launch grids of a call."""

    #: For each config; without numbers where a config has no grid.
    sizes: tuple[tuple[int, ...], ...]
    #: The outcome of each config that cannot be launched on its grid.
    failures: Mapping[int, Outcome]
    reads: frozenset[str]  # the dropped names that the grid function reads

    @property
    def launch_something(self) -> bool:
        """Whether the grid of some config has programs, or is not known."""
        return not all(map(_is_empty, self.sizes))


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
    goes_on: bool = False  # with the configs that an earlier search of this key has left out
    bench: Callable[..., Any] | None = None  # of the request and phases, in place of `LaunchBench`
    #: What later tunings of the kernel compile, done while cores are free: see `CompilePool`.
    ahead: deque[bytes] = field(default_factory=deque)

    @forks.cached_property
    def grids(self) -> Grids:
        """The grids of the configs. Code of the caller computes them, which may launch another
        kernel and have it tuned: ask before any lock is taken.
        """
        return grids_of(self.call, self.configs)

    @forks.cached_property
    def by_digest(self) -> dict[str, Config]:
        """The configs by their digests."""
        return {config_digest(config): config for config in self.configs}

    @property
    def most_shared(self) -> int:
        """The shared memory that a launch may have; 0, no limit, with a post hook: that expects
        the exception of the launch.
        """
        return self.key.device.shared_memory_bytes if self.call.hooks.post_hook is None else 0

    @property
    def has_work(self) -> bool:
        """Whether a launch of the call does anything, so that it can be measured and checked."""
        return self.call.may_touch_memory() and self.grids.launch_something


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
        """What the tuning does, or did last, as text."""
        return f"{'measures' if self.stage == 'screen' else 'compares'} {self.text}"


class Phases:
    """Where the time of a tuning goes. One phase is open at every moment, so that all add up to the
    whole.

    `lookup` is until the choice was found to be missing. `wait`: for another tuning, also of other
    processes. `transfer`: packing and copying the call. `resolve`: what to compile. `compile`,
    `start`: waiting for a compiled config, and for the measuring child. `search`: which configs to
    measure within a budget. `measure`, `finals`: the
    first launches of each config, and those of the best. `store`: outcomes, votes, the choice.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._seconds = clock, dict[str, float]()
        #: The phase that is open now, and how many were opened.
        self.name, self.entered = name, 0
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
        """Open a phase in place of the one that is open now, and return the name of that."""
        outer, now = self.name, self._clock()
        self._seconds[outer] = self._seconds.get(outer, 0.0) + now - self._since
        self.name, self._since, self.entered = name, now, self.entered + 1
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

    @property
    def seconds(self) -> float:
        """The whole time."""
        return sum(self.phases.values())


Observer = Callable[[Progress], None]


def grids_of(call: Call, configs: Sequence[Config]) -> Grids:
    """Return the grids that launches of a call would have.

    A config fails where its grid cannot be computed, and where it launches nothing while another
    config launches something: it would be the fastest.
    """
    sizes: list[tuple[int, ...]] = []
    failures: dict[int, Outcome] = {}
    reads: set[str] = set()
    for index, config in enumerate(configs):
        try:
            missing = _missing(call, config)
            grid, seen = ((), set()) if missing else grid_of(call, config)
            if missing:
                failures[index] = _failed(f"the call does not pass {missing}", "TypeError")
        except Exception as error:
            if from_signal_handler(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            failures[index] = _failed(
                f"the grid cannot be computed: {reason}", type(error).__name__
            )
            grid, seen = (), set()
        sizes.append(grid)
        reads |= seen
    if not all(map(_is_empty, sizes)):
        for index, grid in enumerate(sizes):
            if _is_empty(grid):
                failures[index] = _failed(f"its grid {grid} launches nothing; others launch work")
    return Grids(tuple(sizes), failures, frozenset(reads))


def _missing(call: Call, config: Config) -> str:
    """Return the parameters of the kernel that no launch could bind, as text."""
    given = {*call.named(), *config.all_kwargs(), *inner_heuristics(call.kernel)}
    needed = [name for name, each in call.parameters.items() if each.default is each.empty]
    return ", ".join(name for name in needed if name not in given)


def _is_empty(grid: tuple[int, ...]) -> bool:
    return any(size < 1 for size in grid)


def _failed(message: str, detail: str = "") -> Outcome:
    return Outcome(Verdict.LAUNCH_ERROR, detail=detail, message=message)


#: A choice or an outcome that was made later is of another process that runs beside this one.
_STARTED = time.time()


def lasting_outcomes(request: TuningRequest, store: Store) -> dict[int, Outcome]:
    """Return the stored outcomes that are not measured again, by the config's index."""
    indexes = {config_digest(config): index for index, config in enumerate(request.configs)}
    trials = {
        indexes[trial.config_digest]: trial
        for trial in store.trials(request.key.digest)
        if trial.config_digest in indexes and trial.outcome.verdict not in TRANSIENT
    }
    outcomes = {config: _unsettled(trial.outcome) for config, trial in trials.items()}
    some_work = len(trials) < len(indexes) or any(outcome.ok for outcome in outcomes.values())
    return {  # where no config works, the caller may have corrected its call since
        config: outcomes[config]
        for config, trial in trials.items()
        if some_work or trial.outcome.verdict not in OF_THE_CALL or trial.created > _STARTED
        if not _had_less_time(trial, request.limits)
    }


def _unsettled(outcome: Outcome) -> Outcome:
    """Return a stored outcome; one that was disputed or not judged is to be judged again."""
    if outcome.verdict is Verdict.NOT_JUDGED or (outcome.ok and outcome.marked(Mark.DISPUTED)):
        return replace(outcome, verdict=Verdict.OK, judged=0)
    return outcome


def usable_choice(request: TuningRequest, store: Store) -> ChoiceRecord | None:
    """Return the newest choice for a key whose config is one of those that pruning leaves."""
    return store.choice(request.key.digest, request.declared, [*request.by_digest])


def is_due(request: TuningRequest, store: Store, stored: Iterable[TrialRecord]) -> bool:
    """Whether a key that has a choice has configs to measure, once.

    Those that pruning has left only since, that were timed and not judged, and that had less time
    than they have now. A choice that was not made here has no trials, which says nothing of what
    was tried.

    Args:
        stored: the trials of the key.
    """
    choice = usable_choice(request, store)
    trials = {trial.config_digest: trial for trial in stored}
    if choice is None or choice.config_digest not in trials:
        return False
    found = [trials[digest] for digest in request.by_digest if digest in trials]
    if len(found) < len(request.by_digest) and _measures_more(request, len(found), choice.marks):
        return True
    return any(
        trial.outcome.verdict is Verdict.NOT_JUDGED or _had_less_time(trial, request.limits)
        for trial in found
    )


def marks_of_choice(outcome: Outcome, tried: int, every: int) -> tuple[str, ...]:
    """Return what users must know of a choice with this outcome, made among those `tried`."""
    dispute = Mark.DISPUTED.reason_in(outcome.marks)
    marks = [Mark.DISPUTED.of(dispute)] if dispute else []
    if tried < every:
        marks.append(Mark.SEARCHED.of(f"{tried} of {every} configs"))
    return tuple(marks)


def searched(marks: Sequence[str]) -> str:
    """Return among how many configs a choice with these marks was made; empty for all of them."""
    return Mark.SEARCHED.reason_in(marks)


def _measures_more(request: TuningRequest, tried: int, marks: Sequence[str]) -> bool:
    """Whether configs without an outcome are measured for a key that has a choice.

    What a search has left out is measured by one that may take more configs, and without a budget.
    """
    if searched(marks) and not request.goes_on:
        return False
    if request.budget is None:
        return True
    if request.budget.configs is None:
        return not searched(marks)
    return tried < request.budget.configs


def _had_less_time(trial: TrialRecord, limits: Limits) -> bool:
    """Whether a config took longer than a limit that has been raised since."""
    limit_s = limits.of(trial.outcome.verdict)
    if limit_s is None:
        return False
    try:
        return float(trial.outcome.detail.removesuffix(" s")) < limit_s
    except ValueError:  # an older version did not store it
        return True
