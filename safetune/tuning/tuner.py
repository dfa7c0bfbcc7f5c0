"""From a miss to a choice: compile and measure each config, judge, race the best, store everything.

`tune` is the whole tuning. The functions below it are its phases, in order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from triton.runtime.autotuner import Config
from triton.runtime.cache import CacheManager, get_cache_manager

from safetune.both.protocol import Budget
from safetune.config import config_digest, config_record, config_text
from safetune.errors import NothingToMeasure, NoWorkingConfig, StoreWarning
from safetune.frozen import dataclass
from safetune.isolation.fork_server import system_errors
from safetune.keys import encoding
from safetune.launch.call_shape import constexpr_names
from safetune.messages import logger, warn_once
from safetune.outcome import BUSY, Mark, Outcome, OutputReport, Timing, Verdict
from safetune.settings import MeasurePolicy
from safetune.store.local import in_flight
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord
from safetune.tuning import race, requests, search, single_flight
from safetune.tuning.bench import LaunchBench, device_lock
from safetune.tuning.judge import Judgement, Votes, judge
from safetune.tuning.requests import Observer, Phases, Plan, Progress, TuningRequest, TuningResult
from safetune.tuning.single_flight import Election, WaitBudget

#: The name of a note in Triton's disk cache.
_SLOW = "safetune_slow_compiles"

#: By less than this a config is not said to be faster: first times vary.
_FASTER = 1.05

_UNKNOWN_ELSEWHERE = (
    "choices of {kernel} are not stored: no other process could recognise its value of {name}. "
    "Pass a plain value, an enum, a function, a dataclass or another object that holds only such "
    "values; an open file, a generator, a lock or a tensor in it has no identity"
)

#: A choice counts as made beside other work where that was there in more than this share of the
#: rounds of its final: a few do not change the medians.
_BUSY_SHARE = 1 / 3

#: The mark of a choice that was raced once more, and again while other work was on the device.
BUSY_AGAIN = f"{BUSY}, twice"

#: Why a result cannot be compared to the bit.
_UNKNOWN_BITS = "the kernel uses atomics, assembly or a clock, or its text could not be read"
_OTHER_BITS = "that config gives other bits at each launch, or fails on random inputs"

_NO_SCIKIT_LEARN = (
    "scikit-learn is not installed, so the configs within the budget were drawn at random; install "
    "safetune[search] for a search that finds better ones"
)

_VARIES = (
    "its result depends on the tile, which random numbers, program ids and ties can cause; every "
    "config counts as right"
)


def tune(
    request: TuningRequest,
    store: Store,
    observe: Observer = lambda progress: None,
    bench: LaunchBench | None = None,
    wait_budget: WaitBudget | None = None,
    phases: Phases | None = None,
    key_budget: WaitBudget | None = None,
) -> TuningResult:
    """Measure the configs that have not been measured for this key, choose, and store both.

    If another process is tuning this key, wait for its choice.

    Args:
        bench: made from the request earlier, while the caller's tensors still held their inputs.
        wait_budget: how long to wait for other processes; forever if None.
        phases: the first one has begun.
        key_budget: how long to wait for the process that tunes this key; `wait_budget` if None.

    Raises:
        NothingToMeasure: the call has nothing to do.
        NoWorkingConfig: every config failed; no choice is stored.
        KernelNotTransferable: the call cannot be rebuilt in a child.
        WorkerUnavailable: no child can be started; `Busy` if another process is still tuning.
    """
    if bench is None and not request.has_work:  # its grids may launch kernels: no lock is held yet
        raise NothingToMeasure(request.key.kernel.name, str(request.key))
    budget = wait_budget or WaitBudget()
    if name := request.without_identity:
        kernel = request.key.kernel.name
        warn_once(_UNKNOWN_ELSEWHERE.format(kernel=kernel, name=name), StoreWarning)
        store = Store.in_memory()
    phases = phases or (Phases("wait") if bench is None else bench.phases)
    phases.enter("wait")
    with single_flight.elect(request, store, key_budget or budget) as election:
        phases.enter("store")
        tuning = recall(election.plan, store, observe, phases)
        store.put_key(KeyRecord.of(request.key))  # also where its row was cleared or damaged
        if election.choice is not None:  # another process or machine has tuned meanwhile
            return replace(tuning.result(election.choice), adopted=True)
        # Also those that an earlier tuning has timed and not judged, or that have never met.
        unmet = tuning.standing is None and (request.same_bits or len(tuning.finalists()) > 1)
        if tuning.new or unmet or election.plan.races_again:
            measure(tuning, bench, budget)
        if tuning.new and (standing := tuning.unchanged()) is not None:
            return tuning.result(standing, tuning.incumbent)
        best = _best(tuning)
        choice = _store_choice(tuning, best, election)
        return tuning.result(choice, best)


@dataclass(frozen=True)
class _Tuning:
    """One tuning. A config is its index in the request."""

    request: TuningRequest
    store: Store
    observe: Observer
    digests: tuple[str, ...]  # of each config
    generation: int  # of the choice to be made
    incumbent: int | None  # the config chosen last for this key, if it still counts as ok
    #: The choice of it, if that was from the same list: another one opens a generation.
    standing: ChoiceRecord | None
    #: The configs without an outcome that counts, and those that were not judged.
    new: tuple[int, ...]
    #: Of each other config that is ok the size of the group in which it was judged.
    judged: Mapping[int, int]
    #: Of each config that has one; it grows while the phases run, as do the others.
    outcomes: dict[int, Outcome]
    total: int  # how many configs are to be measured
    phases: Phases
    #: The configs with the result that is taken for right; all until that is known.
    candidates: set[int] = field(default_factory=set)
    #: Of each config whose launch is that of another one, which was run for both, that one.
    same: dict[int, int] = field(default_factory=dict)
    votes: Votes = field(default_factory=Votes)
    #: The first time of each config in this tuning, in milliseconds, whatever became of it.
    screened: dict[int, float] = field(default_factory=dict)
    contenders: set[int] = field(default_factory=set)  # those that its final leaves, see `race`
    given_up: list[int] = field(default_factory=list)  # those that compiled for too long
    #: When each config ended that was compiled or launched in this tuning. Their rows keep it, so
    #: that stored trials say how long a sweep took.
    ended: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # see `TuningResult`
    name: str = field(default_factory=lambda: os.urandom(6).hex())  # see `Outcome.tunings`

    def compile_of(self, config: int) -> str:
        """What decides how long a config takes to compile."""
        key, constants = self.request.key, constexpr_names(self.request.call.kernel)
        values = [pair for pair in key.values if pair[0] in constants]
        known = [key.kernel.digest, key.dtypes, key.options, values, self.digests[config]]
        return encoding.dumps(known)

    def unchanged(self) -> ChoiceRecord | None:
        """Return the choice that the key has already, if no new config works beside it."""
        works = any(self.outcomes[config].ok for config in self.new if config in self.outcomes)
        before = self.standing
        if works or before is None or BUSY in before.marks:
            return None
        return None if Mark.SEARCHED.reason_in(before.marks) else before

    def right(self) -> dict[int, Outcome]:
        """Return the outcomes of the configs that are ok and have the right result, in order."""
        working = {i: o for i, o in sorted(self.outcomes.items()) if o.ok and o.timing is not None}
        return {i: o for i, o in working.items() if not self.candidates or i in self.candidates}

    def working(self) -> dict[int, Outcome]:
        """Return the outcomes of the configs that are ok and may be chosen, in order."""
        some = self.right()
        return {i: o for i, o in some.items() if not o.marked(Mark.NOT_REPEATABLE)} or some

    def timings(self) -> dict[int, Timing]:
        """Return the times of the configs that are ok and may be chosen, in order."""
        return {i: o.timing for i, o in self.working().items() if o.timing is not None}

    def finalists(self) -> list[list[int]]:
        """Return the configs that may be the fastest, by tuning: see `race.finalists`.

        A config whose launch is that of another one, which runs for both, is not among them.
        """
        own = {i: o for i, o in self.working().items() if i not in self.same}
        return race.finalists(own, self.way)

    @property
    def way(self) -> str:
        """How the final of the configs that work is timed, if all of them can be timed so."""
        if self.request.call.hooks.do_bench is not None:
            return "events"
        policy = self.request.measure or MeasurePolicy.GRAPH
        fastest_ms = min((t.undisturbed_ms for t in self.timings().values()), default=math.inf)
        return policy.value if fastest_ms < race.SHORT_MS else "events"

    def judgement(self, bench: LaunchBench) -> Judgement:
        """Judge the configs that work and have been examined."""
        reports = {c: r for c, r in self.votes.reports.items() if self.outcomes[c].ok}
        waiting = sum(c not in reports and self.outcomes[c].ok for c in self.judged)
        every = (config.all_kwargs() for config in self.request.configs)
        options = [{name: repr(value) for name, value in each.items()} for each in every]
        draws = bench.effects.draws
        return judge(reports, bench.grids, options, draws, self.judged, waiting)

    def settle(
        self, config: int, outcome: Outcome, stage: str = "screen", limit_s: float | None = None
    ) -> None:
        """Store and report the outcome of a config, which replaces an earlier one.

        Args:
            limit_s: for its launch, if that is not the one of the request.
        """
        whole_s = self.request.limits.of(outcome.verdict)
        if whole_s is not None:
            limit_s = limit_s if outcome.verdict is Verdict.TIMEOUT and limit_s else whole_s
            outcome = replace(outcome, detail=f"{limit_s:g} s")
        if outcome.timing is not None and not (stage == "final" and outcome.final is not None):
            self.screened.setdefault(config, outcome.timing.median_ms)
            outcome = outcome.timed_in(self.name)
        self.ended[config] = time.time()
        self.keep({config: outcome})
        self.announce(config, stage, outcome)
        if stage == "final":
            for twin in [each for each, same in self.same.items() if same == config]:
                self.settle_as(twin, config, stage)

    def settle_as(self, config: int, same: int, stage: str = "screen") -> None:
        """Settle a config whose launch is that of another one, to the last bit."""
        self.same[config] = same
        if (report := self.votes.reports.get(same)) is not None:
            self.votes.add(config, replace(report, new_group=None))
        mark = Mark.SAME_AS.of(config_text(self.request.configs[same]))
        self.settle(config, self.outcomes[same].with_marks([mark]), stage)

    def keep(self, outcomes: Mapping[int, Outcome], durable: bool = False) -> None:
        """Store the outcomes that a child has answered; none is ok there before it was judged."""
        self.outcomes.update(outcomes)
        in_caller = self.request.grids.failures
        if trials := [self._trial(c, o) for c, o in outcomes.items() if c not in in_caller]:
            self.store.put_trial(*trials, durable=durable)

    @contextlib.contextmanager
    def launching(self, config: int) -> Iterator[None]:
        """Launch a config for the first time within: if the machine goes down, its row says so.

        The outcomes before it are on the disk then, so that no other config is suspect.
        """
        flight = in_flight.here() if self.store.outlives_machine else ""
        if not flight:
            yield
            return
        trial = self._trial(config, Outcome(Verdict.DIED, detail="machine"))
        trial = replace(trial, flight=flight)
        self.store.put_trial(trial, durable=True)
        try:
            yield
        except BaseException:  # there will be no outcome
            self.store.drop_in_flight(trial)
            raise

    def _trial(self, config: int, outcome: Outcome) -> TrialRecord:
        outcome = outcome.unmarked(Mark.FIRST).with_marks([Mark.FIRST.value] * (config == 0))
        if outcome.ok and not outcome.judged:
            outcome = replace(outcome, verdict=Verdict.NOT_JUDGED)
        outcome = replace(outcome, scope=self.request.scopes.of[config])
        key, record = self.request.key.digest, config_record(self.request.configs[config])
        created = self.ended.get(config) or time.time()
        return TrialRecord(
            key, self.digests[config], record, self.generation, outcome, created=created
        )

    def announce(self, config: int, stage: str, outcome: Outcome | None = None) -> None:
        """Report that a config is about to run or, with an outcome, how it ended."""
        kernel, chosen = self.request.key.kernel.name, self.request.configs[config]
        self.observe(Progress(kernel, stage, chosen, outcome, len(self.ended), self.total))

    def result(self, choice: ChoiceRecord, best: int | None = None) -> TuningResult:
        """Return what the caller gets, where `best` was chosen here."""
        configs = self.request.configs
        if best is None or self.digests[best] != choice.config_digest:  # another process's
            best = self.digests.index(choice.config_digest)
        return TuningResult(
            choice=configs[best],
            stored=choice,
            outcomes=tuple((configs[i], self.outcomes[i]) for i in sorted(self.outcomes)),
            measured=len(self.ended),
            notes=tuple(self.notes),
            phases=self.phases.seconds(),
            left_out=self.left_out(best),
        )

    def left_out(self, best: int) -> dict[Config, float]:
        """Return the configs that would have been faster than the best one, but for their results,
        and how many times as fast each was when both had their first times.
        """
        best_ms = self.screened.get(best, 0.0)
        wrong = {
            config
            for config, outcome in self.outcomes.items()
            if outcome.verdict is Verdict.WRONG_RESULT or outcome.marked(Mark.OUTVOTED)
        }
        ratios = {c: best_ms / ms for c, ms in self.screened.items() if c in wrong and ms > 0}
        configs = self.request.configs
        return {configs[c]: ratio for c, ratio in ratios.items() if ratio > _FASTER}


def recall(plan: Plan, store: Store, observe: Observer, phases: Phases) -> _Tuning:
    """Return a tuning with the outcomes that still count."""
    request, key = plan.request, plan.request.key.digest
    digests = tuple(config_digest(config) for config in request.configs)
    last = plan.choice or store.choice(key, request.declared) or store.choice(key)
    outcomes = dict(plan.outcomes)
    works = {digests[config]: config for config, outcome in outcomes.items() if outcome.ok}
    incumbent = None if last is None else works.get(last.config_digest)
    generation = 1 if last is None else last.generation
    judged = {c: o.judged for c, o in outcomes.items() if o.ok and o.judged}
    unjudged = [config for config, outcome in outcomes.items() if outcome.ok and not outcome.judged]
    listed = plan.listed
    left = [config for config in plan.left if config not in listed]
    tuning = _Tuning(
        request,
        store,
        observe,
        digests,
        generation=store.generation(key) + 1 if request.force else generation,
        incumbent=incumbent,
        standing=plan.choice if incumbent is not None else None,
        new=tuple(sorted(left + unjudged)),
        judged=judged,
        total=len(left),
        outcomes=outcomes,
        phases=phases,
    )
    tuning.keep(listed)
    return tuning


def measure(tuning: _Tuning, made: LaunchBench | None, budget: WaitBudget) -> None:
    """Measure each new config."""
    call, phases = tuning.request.call, tuning.phases
    with system_errors(), contextlib.ExitStack() as compiling, contextlib.ExitStack() as device:
        with phases("wait"):
            if not call.interpreted:  # before anything is started or copied
                compiling.enter_context(single_flight.compiling(tuning.store, budget))
            device.enter_context(device_lock(call.index))
        with made or LaunchBench(tuning.request, phases) as bench:
            request, outcomes = tuning.request, tuning.outcomes
            batches = _batches if request.budget is None else _proposed
            for configs in batches(tuning):
                _screen(tuning, bench, configs)
                if not request.limits.to_answer(outcomes.values()):
                    _give_up(tuning)
                    break
            no_memory = [i for i, o in outcomes.items() if o.verdict is Verdict.NO_MEMORY]
            if no_memory:  # the memory of the other configs is free now
                bench.replace()
                _screen(tuning, bench, no_memory)
            if tuning.unchanged() is not None:
                return
            _judge(tuning, bench)
            if request.same_bits:
                _keep_same_bits(tuning, bench)
            compiling.close()
            _race(tuning, bench, budget)
            for _ in range(race.MAX_FINALISTS):
                if _repeats(tuning, bench):
                    break
                if not tuning.contenders & tuning.timings().keys():
                    _race(tuning, bench, budget)


def _batches(tuning: _Tuning) -> Iterator[Sequence[int]]:
    """Yield the new configs; if one works, without those that were given up before."""
    new = [i for i in tuning.new if i not in tuning.outcomes]
    known = set[str]() if tuning.request.compiles_all else _slow_compiles(tuning)
    slow = [i for i in new if i > 0 and tuning.compile_of(i) in known]
    yield [config for config in new if config not in slow]
    if tuning.working():
        tuning.given_up.extend(slow)
    else:
        yield slow


def _slow_compiles(tuning: _Tuning) -> set[str]:
    """Return what was given up while compiling, here or in an earlier process.

    The note is in Triton's disk cache, and is gone when that is emptied.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if file := _slow_note(tuning).get_file(_SLOW):
            return set(json.loads(Path(file).read_text(encoding="utf-8")))
    return set()


def _note_slow_compiles(tuning: _Tuning, configs: Sequence[int]) -> None:
    known = _slow_compiles(tuning).union(map(tuning.compile_of, configs))
    with contextlib.suppress(OSError, RuntimeError):
        _slow_note(tuning).put(json.dumps(sorted(known)), _SLOW, binary=False)


def _slow_note(tuning: _Tuning) -> CacheManager:
    key = tuning.request.key
    rests_on = [key.kernel.digest, key.device.record(), key.toolchain.record()]
    return get_cache_manager(encoding.digest([_SLOW, rests_on]))


def _proposed(tuning: _Tuning) -> Iterator[Sequence[int]]:
    """Yield the configs that a search proposes until the budget ends, and then until one works."""
    request, outcomes, phases = tuning.request, tuning.outcomes, tuning.phases
    budget = request.budget
    assert budget is not None
    start, before = time.perf_counter(), len(outcomes)
    asked = set[int]()  # one that compiles for too long gets no outcome
    if request.same_bits:  # the others are compared with the first one that works
        for config in range(len(request.configs)):
            if config not in outcomes:
                yield [config]
            if config in outcomes and outcomes[config].ok:
                break
    with phases("search"):
        searching = search.Search(_history_of(tuning), _proposer_of(tuning))
    while True:
        known = {i: o.timing.median_ms if o.ok and o.timing else None for i, o in outcomes.items()}
        times = known | dict.fromkeys(asked - known.keys())
        elapsed_s = time.perf_counter() - start
        remaining = budget.remaining(len(times), len(times) - before, elapsed_s)
        works = any(time_ms is not None for time_ms in times.values())
        if remaining < 1 and works:
            return
        with phases("search"):
            batch = searching.ask(times, remaining if remaining > 0 else search.BATCH)
        if not batch:
            return
        if budget.configs is None:  # the time is looked at after each batch
            batch = batch[: search.BATCH]
        asked.update(batch)
        yield batch


def _history_of(tuning: _Tuning) -> search.History:
    """Return the known facts about a key before its search, except its own trials."""
    request, store = tuning.request, tuning.store
    key, last = request.key, store.choice(request.key.digest)
    call = key.record()
    return search.History(
        kernel=key.kernel.name,
        values=dict(call["values"]),
        dtypes=dict(call["dtypes"]),
        device=key.device.record(),
        configs=request.configs,
        neighbours=tuple(search.neighbours_of(key, request.by_digest, store)),
        incumbent=None if last is None else request.by_digest.get(last.config_digest),
    )


def _proposer_of(tuning: _Tuning) -> search.Proposer:
    """Return who proposes: the user's own, a Gaussian process, or chance without scikit-learn."""
    request = tuning.request
    if request.proposer is not None:
        return request.proposer
    seed = int(request.key.digest[:8], 16)
    try:
        from safetune.tuning.gaussian import GaussianProcess
    except ImportError:
        tuning.notes.append(_NO_SCIKIT_LEARN)
        return search.RandomProposer(seed)
    return GaussianProcess(seed)


def _screen(tuning: _Tuning, bench: LaunchBench, configs: Sequence[int]) -> None:
    """Run each config once it is compiled: its outputs are checked, and it gets a first time."""
    timeout_s = tuning.request.limits.compile_timeout_s
    times = [outcome.times().get(tuning.name) for outcome in tuning.working().values()]
    best_ms = min((time for time in times if time is not None), default=None)
    last: int | None = None

    def may_give_up(config: int) -> bool:
        """Not the one that Triton would launch untuned, and none before another one works."""
        return not tuning.request.compiles_all and config > 0 and best_ms is not None

    for config, failure, same in bench.compiled(configs, timeout_s, may_give_up):
        tuning.announce(config, "screen")
        if failure is not None:
            tuning.settle(config, failure)
            continue
        if same is not None:
            tuning.settle_as(config, same)
            continue
        limit_s = tuning.request.limits.to_answer(tuning.outcomes.values())
        if not limit_s:
            return
        budget, groups = Budget(best_ms=best_ms), tuning.votes.groups()
        with tuning.launching(config):
            if limit_s < tuning.request.limits.run_timeout_s:  # for the first launches alone
                outcome, report = bench.measure(config, None, groups, limit_s)
                outcome = bench.measure(config, budget)[0] if outcome.ok else outcome
            else:
                outcome, report = bench.measure(config, budget, groups)
        if report is not None and outcome.ok:
            outcome = _voted(tuning, config, outcome, report)
        tuning.settle(config, outcome, limit_s=limit_s)
        last = config
        if outcome.timing is not None:
            best_ms = min(outcome.timing.median_ms, best_ms or math.inf)
    left = [config for config in configs if config not in tuning.outcomes]
    if left:
        tuning.given_up.extend(left)
        _note_slow_compiles(tuning, left)
    if last is not None and tuning.store.outlives_machine:  # it is not suspect in the final
        tuning.keep({last: tuning.outcomes[last]}, durable=True)


def _give_up(tuning: _Tuning) -> None:
    """Settle the configs that are not tried, as none has answered for as long as one may wait."""
    limit_s = 2 * tuning.request.limits.run_timeout_s
    untried = Outcome(
        Verdict.TIMEOUT, detail="0 s", message=f"not tried: no config answered within {limit_s:g} s"
    )
    tuning.keep({config: untried for config in tuning.new if config not in tuning.outcomes})


def _voted(tuning: _Tuning, config: int, outcome: Outcome, report: OutputReport) -> Outcome:
    """Count a config's report; return its outcome with what the report says."""
    tuning.votes.add(config, report)
    return outcome.with_marks(Mark.UNOWNED.of(name) for name in report.unowned)


def _examine(tuning: _Tuning, bench: LaunchBench, configs: Sequence[int]) -> None:
    """Run configs that are timed already once more, to compare what they compute."""
    for config, failure, _ in bench.compiled(configs, tuning.request.limits.compile_timeout_s):
        outcome, report = failure, None
        if outcome is None:
            outcome, report = bench.measure(config, None, tuning.votes.groups())
        if report is None:
            tuning.settle(config, outcome)
            continue
        tuning.outcomes[config] = _voted(tuning, config, tuning.outcomes[config], report)


def _judge(tuning: _Tuning, bench: LaunchBench) -> None:
    """Settle which configs compute the right result, and so which may be chosen.

    New configs are compared with those that earlier tunings have judged and that race them. Only
    where results differ are the others of those tunings run again: all vote.
    """
    timings = tuning.timings()
    rivals = [c for c in itertools.chain(*tuning.finalists()) if c in tuning.judged]
    unseen = [config for config in tuning.new if config in timings]
    unseen = [config for config in unseen if config not in tuning.votes.reports]
    _examine(tuning, bench, [*unseen, *rivals])
    judgement = tuning.judgement(bench)
    if not (judgement.clear and judgement.candidates.issuperset(rivals)):
        _examine(tuning, bench, sorted(tuning.judged.keys() - rivals))
        judgement = tuning.judgement(bench)
    _apply(tuning, judgement, rivals)
    tuning.notes.extend(tuning.votes.notes())
    if judgement.varies:
        tuning.notes.append(_VARIES)


def _apply(tuning: _Tuning, judgement: Judgement, compared: Sequence[int]) -> None:
    """Store what was judged, and set the configs that may be chosen.

    Those that were not launched again have the result of the one that was `compared` for them.
    """
    for config, (verdict, reason) in judgement.rejected.items():
        outcome = tuning.outcomes[config]
        rejected = Outcome(verdict, message=reason, gpu_uuid=outcome.gpu_uuid, marks=outcome.marks)
        tuning.settle(config, rejected)
    judged = {}
    for config in judgement.sizes.keys() - judgement.rejected.keys():
        outcome = tuning.outcomes[config].unmarked(Mark.DISPUTED, Mark.OUTVOTED, Mark.VARIES)
        outcome = replace(outcome, judged=judgement.sizes[config])
        judged[config] = outcome.with_marks(judgement.marks(config))
    tuning.keep(judged)
    unexamined = tuning.timings().keys() - judgement.sizes.keys()
    tuning.candidates.update(judgement.candidates)
    if judgement.candidates.issuperset(compared):
        tuning.candidates.update(unexamined)


def _keep_same_bits(tuning: _Tuning, bench: LaunchBench) -> None:
    """Leave, of the configs that may be chosen, those whose results have the bits of the first
    declared one; that one alone, with a note, where it has no bits to compare with.
    """
    while right := [*tuning.right()]:
        first, alike, refusal = right[0], right[:1], _UNKNOWN_BITS
        if bench.effects.repeats:
            sums = {config: report.sums for config, report in tuning.votes.reports.items()}
            own = sums.get(first)
            near = [c for c in right if own is None or sums.get(c, own) == own]
            bits = _bits_of(tuning, bench, near)
            if first in bits:
                _repeat(tuning, bench, first)
            if not tuning.outcomes[first].ok:
                continue
            again = bench.bits(first)
            steady = not tuning.outcomes[first].marked(Mark.NOT_REPEATABLE)
            refusal = "" if steady and again and bits[first] == again else _OTHER_BITS
            alike = alike if refusal else [c for c, found in bits.items() if found == again]
        break
    else:
        return
    reason = config_text(tuning.request.configs[first])
    if refusal:
        launched = f"{reason}, the first config that works, is launched"
        tuning.notes.append(f"same_bits is refused, and {launched}: {refusal}")
        reason = f"refused: {refusal}"
    tuning.candidates.clear()
    tuning.candidates.update(alike)
    ok = {config: outcome for config, outcome in tuning.outcomes.items() if outcome.ok}
    marked = {
        config: outcome.unmarked(Mark.SAME_BITS).with_marks(
            [Mark.SAME_BITS.of(reason)] * (config in alike)
        )
        for config, outcome in ok.items()
    }
    tuning.keep({config: found for config, found in marked.items() if found != ok[config]})


def _bits_of(
    tuning: _Tuning, bench: LaunchBench, configs: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the bits of what configs leave, of those that compile; see `LaunchBench.bits`."""
    bits: dict[int, tuple[int, ...]] = {}
    for config, failure, same in bench.compiled(configs, tuning.request.limits.compile_timeout_s):
        if failure is None:
            bits[config] = bench.bits(config) if same is None else bits[same]
        else:
            tuning.settle(config, failure)
    return bits


def _race(tuning: _Tuning, bench: LaunchBench, budget: WaitBudget) -> None:
    """Measure the finalists again, in rounds: stored ones beside new ones."""
    finalists = sorted(itertools.chain(*tuning.finalists()))
    if len(finalists) < 2:
        return
    uuid = tuning.outcomes[finalists[0]].gpu_uuid
    with contextlib.ExitStack() as turn:
        with tuning.phases("wait"):
            is_alone = turn.enter_context(single_flight.racing(tuning.store, uuid, budget))
        was_busy = _final(tuning, bench, finalists)
    is_marked = was_busy or not is_alone
    marked = {
        config: replace(outcome, marks=(*outcome.without(BUSY), *[BUSY] * is_marked))
        for config in tuning.contenders
        if (outcome := tuning.outcomes[config]).ok and (BUSY in outcome.marks) != is_marked
    }
    tuning.keep(marked)


def _final(tuning: _Tuning, bench: LaunchBench, finalists: Sequence[int]) -> bool:
    """Run a final; return whether other work was on the device for much of it."""
    timings, rounds = tuning.timings(), list[bool]()

    def run(budgets: Mapping[int, Budget]) -> Mapping[int, Outcome]:
        for config in budgets:
            tuning.announce(config, "final")
        first = next(iter(budgets))
        outcomes = bench.in_turn({**budgets, first: replace(budgets[first], watch=True)})
        rounds.append(any(BUSY in outcome.marks for outcome in outcomes.values()))
        for config, outcome in outcomes.items():
            tuning.outcomes[config] = tuning.outcomes[config].with_marks(outcome.without(BUSY))
            if way != "events" and outcome.timing is not None and outcome.timing.stage != way:
                raise _OnlyEvents(outcome.message)
        return outcomes

    short = bench.interpreted or tuning.request.call.hooks.do_bench is not None
    racers = {i: timings[i] for i in finalists}
    way = tuning.way
    try:
        finals, failed, left = race.race(racers, run, short, way)
    except _OnlyEvents as error:  # for all of them: times of two kinds are never compared
        kernel, asked, way = tuning.request.key.kernel.name, way, "events"
        logger.info("%s: timed with 'events' instead of %r: %s", kernel, asked, error)
        finals, failed, left = race.race(racers, run, short)
    outcomes = tuning.outcomes
    if way == "events":
        ended = {c: replace(outcomes[c], timing=timing, final=None) for c, timing in finals.items()}
    else:  # beside the time of the screening, which is of another kind
        ended = {c: replace(outcomes[c], final=timing) for c, timing in finals.items()}
    for config, outcome in (ended | failed).items():
        tuning.settle(config, outcome, stage="final")
    tuning.contenders.update(c for c in timings if tuning.same.get(c, c) in left)
    return sum(rounds) > _BUSY_SHARE * len(rounds)


class _OnlyEvents(Exception):
    """A config cannot be timed as replays; the text says why."""


def _repeats(tuning: _Tuning, bench: LaunchBench) -> bool:
    """Launch the fastest config a few times more; return whether it is to be chosen: it leaves the
    same bits each time, or no config that is known does.
    """
    if not tuning.timings():
        return True
    best = _best(tuning)
    _repeat(tuning, bench, best)
    return best in tuning.timings()


def _repeat(tuning: _Tuning, bench: LaunchBench, config: int) -> None:
    """Launch a config a few times more; mark those that were seen to leave other bits each time.

    A tensor of which configs write different numbers of elements does not count.
    """
    launched = tuning.same.get(config, config)
    outcome, varied = bench.repeat(launched)
    counts = [report.written for report in tuning.votes.reports.values()]
    names: dict[int, list[str]] = {}
    for config, tensor, name in varied:
        if len({written[tensor] for written in counts if written}) <= 1:
            names.setdefault(config, []).append(name)
    ok = {config: found for config, found in tuning.outcomes.items() if found.ok}
    changed = {config: names.get(tuning.same.get(config, config)) for config in ok}
    tuning.keep(
        {
            config: ok[config].with_marks([Mark.NOT_REPEATABLE.of(", ".join(found))])
            for config, found in changed.items()
            if found
        }
    )
    if not outcome.ok:
        tuning.settle(launched, outcome, stage="final")


def _best(tuning: _Tuning) -> int:
    """Return the fastest at the end of the final; without one, of those that nothing has beaten."""
    timings = tuning.timings()
    if not timings:
        key, configs = tuning.request.key, tuning.request.configs
        outcomes = [(config_text(configs[i]), o) for i, o in sorted(tuning.outcomes.items())]
        requests.hopeless.add((key.digest, tuning.request.scopes.call))
        raise NoWorkingConfig(key.kernel.name, str(key), outcomes, measured=len(tuning.ended))
    raced = timings.keys() & tuning.contenders
    near = raced or {*tuning.finalists()[0]}
    if raced:
        timings = {c: tuning.outcomes[c].final or time for c, time in timings.items()}
    return race.best({c: time for c, time in timings.items() if tuning.same.get(c, c) in near})


def _store_choice(tuning: _Tuning, best: int, election: Election) -> ChoiceRecord:
    """Store the choice, unless its generation has another; return the one to launch."""
    outcome = tuning.outcomes[best]
    timing, before = outcome.timing, tuning.standing
    assert timing is not None
    marks = _marks_of_choice(tuning, outcome)
    searched = Mark.SEARCHED.reason_in
    replaces = before is not None and (
        best != tuning.incumbent
        or BUSY in before.marks
        or searched(before.marks) != searched(marks)
    )
    choice = ChoiceRecord(
        key=tuning.request.key.digest,
        generation=tuning.generation + replaces,
        config_digest=tuning.digests[best],
        config=config_record(tuning.request.configs[best]),
        declared=tuning.request.declared,
        median_ms=timing.median_ms,
        measured=len(tuning.ended),
        created=time.time(),
        marks=marks,
    )
    stored = election.keep(choice, tuning.store, outcome)
    # One from another list of configs cannot be launched here, nor one that fails for the call.
    fails = {tuning.digests[config] for config, o in tuning.outcomes.items() if o.clean}
    return stored if stored.config_digest in {*tuning.digests} - fails else choice


def _marks_of_choice(tuning: _Tuning, outcome: Outcome) -> tuple[str, ...]:
    """Return the marks that a choice of a config with this outcome carries."""
    kinds = [Mark.DISPUTED, Mark.NOT_REPEATABLE, *[Mark.SAME_BITS] * tuning.request.same_bits]
    marks = [text for text in outcome.marks if text.partition(":")[0] in kinds]
    if BUSY in outcome.marks:
        before = tuning.standing
        marks.append(BUSY_AGAIN if before is not None and BUSY in before.marks else BUSY)
    tried, every = len(tuning.outcomes), len(tuning.digests)
    if tried < every:
        given_up = f"; {count} given up while compiling" if (count := len(tuning.given_up)) else ""
        marks.append(Mark.SEARCHED.of(f"{tried} of {every} configs{given_up}"))
    return tuple(marks)
