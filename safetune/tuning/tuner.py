"""From a miss to a choice: compile and measure each config, judge, race the best, store all of it.

`tune` is the whole of it. The functions below it are the phases, in the order in which they run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

from safetune.config import config_digest, config_record, config_text
from safetune.errors import NothingToMeasure, NoWorkingConfig
from safetune.frozen import dataclass
from safetune.isolation.fork_server import system_errors
from safetune.isolation.protocol import Budget
from safetune.outcome import Mark, Outcome, OutputReport, Timing, Verdict
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord
from safetune.tuning import budget as budgets
from safetune.tuning import race, requests, single_flight
from safetune.tuning.bench import LaunchBench, device_lock
from safetune.tuning.judge import Judgement, Votes, judge
from safetune.tuning.requests import Observer, Phases, Progress, TuningRequest, TuningResult
from safetune.tuning.single_flight import Election, WaitBudget


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

    If another process is tuning this key, its choice is waited for.

    Args:
        bench: made from the request earlier, while the caller's tensors still held their inputs.
        wait_budget: how long to wait for other processes; without end if None.
        phases: of which the first has begun.
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
    phases = phases or (Phases("wait") if bench is None else bench.phases)
    phases.enter("wait")
    with single_flight.elect(request, store, key_budget or budget) as election:
        phases.enter("store")
        tuning = recall(request, store, observe, phases)
        store.put_key(KeyRecord.of(request.key))  # also where its row was cleared or damaged
        if election.choice is not None:  # another process or machine has tuned meanwhile
            return replace(tuning.result(election.choice), adopted=True)
        if tuning.new:  # also those that an earlier tuning has timed and not judged
            measure(tuning, bench, budget)
        choice = _store_choice(tuning, _best(tuning), election)
        return tuning.result(choice)


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
    #: The configs that were compiled or launched in this tuning.
    measured: set[int] = field(default_factory=set)
    contenders: set[int] = field(default_factory=set)  # those that its final leaves, see `race`
    #: When each of them ended. Their rows keep it, so that stored trials say how long a sweep took.
    ended: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # see `TuningResult`

    def timings(self) -> dict[int, Timing]:
        """Return the times of the configs that are ok and may be chosen, in order."""
        outcomes = sorted(self.outcomes.items())
        timings = {i: o.timing for i, o in outcomes if o.ok and o.timing is not None}
        return {i: t for i, t in timings.items() if not self.candidates or i in self.candidates}

    def judgement(self, grids: Sequence[tuple[int, ...]]) -> Judgement:
        """Judge the configs that work and have been examined."""
        reports = {c: r for c, r in self.votes.reports.items() if self.outcomes[c].ok}
        waiting = sum(c not in reports and self.outcomes[c].ok for c in self.judged)
        return judge(reports, dict(enumerate(grids)), self.judged, waiting)

    def settle(self, config: int, outcome: Outcome, stage: str = "screen") -> None:
        """Store and report the outcome of a config, which replaces an earlier one."""
        limit_s = self.request.limits.of(outcome.verdict)
        if limit_s is not None:
            outcome = replace(outcome, detail=f"{limit_s:g} s")
        self.measured.add(config)
        self.ended[config] = time.time()
        self.keep({config: outcome})
        self.announce(config, stage, outcome)

    def settle_as(self, config: int, same: int, stage: str = "screen") -> None:
        """Settle a config whose launch is that of another one, to the last bit."""
        self.same[config] = same
        if (report := self.votes.reports.get(same)) is not None:
            self.votes.add(config, replace(report, new_group=None))
        mark = Mark.SAME_AS.of(config_text(self.request.configs[same]))
        self.settle(config, self.outcomes[same].with_marks([mark]), stage)

    def keep(self, outcomes: Mapping[int, Outcome]) -> None:
        """Store the outcomes of configs; none is ok there before it has been judged."""
        self.outcomes.update(outcomes)
        if outcomes:
            self.store.put_trial(*itertools.starmap(self._trial, outcomes.items()))

    def _trial(self, config: int, outcome: Outcome) -> TrialRecord:
        outcome = outcome.unmarked(Mark.FIRST).with_marks([Mark.FIRST.value] * (config == 0))
        if outcome.ok and not outcome.judged:
            outcome = replace(outcome, verdict=Verdict.NOT_JUDGED)
        key, record = self.request.key.digest, config_record(self.request.configs[config])
        created = self.ended.get(config) or time.time()
        return TrialRecord(
            key, self.digests[config], record, self.generation, outcome, created=created
        )

    def announce(self, config: int, stage: str, outcome: Outcome | None = None) -> None:
        """Report that a config is about to run or, with an outcome, how it ended."""
        self.observe(
            Progress(
                kernel=self.request.key.kernel.name,
                stage=stage,
                config=self.request.configs[config],
                outcome=outcome,
                done=len(self.measured),
                total=self.total,
            )
        )

    def result(self, choice: ChoiceRecord) -> TuningResult:
        """Return what the caller gets."""
        configs = self.request.configs
        return TuningResult(
            choice=configs[self.digests.index(choice.config_digest)],
            stored=choice,
            outcomes=tuple((configs[i], self.outcomes[i]) for i in sorted(self.outcomes)),
            measured=len(self.measured),
            notes=tuple(self.notes),
            phases=self.phases.seconds(),
        )


def recall(request: TuningRequest, store: Store, observe: Observer, phases: Phases) -> _Tuning:
    """Return a tuning with the outcomes in the store that still count."""
    key = request.key.digest
    digests = tuple(config_digest(config) for config in request.configs)
    chosen = requests.usable_choice(request, store)
    last = chosen or store.choice(key, request.declared) or store.choice(key)
    outcomes = {} if request.force else requests.lasting_outcomes(request, store)
    works = {digests[config]: config for config, outcome in outcomes.items() if outcome.ok}
    incumbent = None if last is None else works.get(last.config_digest)
    generation = 1 if last is None else last.generation
    judged = {c: o.judged for c, o in outcomes.items() if o.ok and o.judged}
    unmeasured = [config for config in range(len(digests)) if config not in outcomes]
    unjudged = [config for config, outcome in outcomes.items() if outcome.ok and not outcome.judged]
    return _Tuning(
        request,
        store,
        observe,
        digests,
        generation=store.generation(key) + 1 if request.force else generation,
        incumbent=incumbent,
        standing=chosen if incumbent is not None else None,
        new=tuple(sorted(unmeasured + unjudged)),
        judged=judged,
        total=len(unmeasured),
        outcomes=outcomes,
        phases=phases,
    )


def measure(tuning: _Tuning, made: LaunchBench | None, budget: WaitBudget) -> None:
    """Find the outcome of each new config."""
    call, phases = tuning.request.call, tuning.phases
    with system_errors(), contextlib.ExitStack() as compiling, contextlib.ExitStack() as device:
        with phases("wait"):
            if not call.interpreted:  # before anything is started or copied
                compiling.enter_context(single_flight.compiling(tuning.store, budget))
            device.enter_context(device_lock(call.index))
        with made or (tuning.request.bench or LaunchBench)(tuning.request, phases) as bench:
            tuning.notes.extend(bench.notes)
            request, outcomes = tuning.request, tuning.outcomes
            batches: Iterable[Sequence[int]] = [[i for i in tuning.new if i not in outcomes]]
            if request.budget is not None:
                known = (request, request.budget, tuning.store, outcomes)
                batches = budgets.batches(*known, tuning.notes, phases)
            elif len(tuning.new) > budgets.MANY_CONFIGS:
                budgets.name_budget(request.key.kernel.name, len(request.configs))
            for configs in batches:
                _screen(tuning, bench, configs)
            if not bench.chooses:
                return
            no_memory = [i for i, o in outcomes.items() if o.verdict is Verdict.NO_MEMORY]
            if no_memory:  # the memory of the other configs is free now
                bench.replace()
                _screen(tuning, bench, no_memory)
            _judge(tuning, bench)
            compiling.close()
            _race(tuning, bench)


def _screen(tuning: _Tuning, bench: LaunchBench, configs: Sequence[int]) -> None:
    """Run each config once it is compiled: its outputs are checked, and it gets a first time."""
    timeout_s = tuning.request.limits.compile_timeout_s
    best_ms = min((timing.median_ms for timing in tuning.timings().values()), default=None)
    for config, failure, same in bench.compiled(configs, timeout_s):
        tuning.announce(config, "screen")
        if failure is not None:
            tuning.settle(config, failure)
            continue
        if same is not None:
            tuning.settle_as(config, same)
            continue
        outcome, report = bench.measure(config, Budget(best_ms=best_ms), tuning.votes.groups())
        if report is not None:
            outcome = _voted(tuning, config, outcome, report)
        tuning.settle(config, outcome)
        if outcome.timing is not None:
            best_ms = min(outcome.timing.median_ms, best_ms or math.inf)


def _voted(tuning: _Tuning, config: int, outcome: Outcome, report: OutputReport) -> Outcome:
    """Count a config's report; return its outcome with what the report says."""
    tuning.votes.add(config, report)
    return outcome.with_marks(Mark.UNOWNED.of(name) for name in report.unowned)


def _examine(
    tuning: _Tuning,
    bench: LaunchBench,
    configs: Sequence[int],
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Run configs that are timed already once more, to compare what they compute."""
    for config, failure, _ in bench.compiled(configs, tuning.request.limits.compile_timeout_s):
        outcome, report = failure, None
        if outcome is None:
            outcome, report = bench.measure(config, None, tuning.votes.groups())
        if report is None:
            tuning.settle(config, outcome)
            continue
        tuning.outcomes[config] = _voted(tuning, config, tuning.outcomes[config], report)
        if enough():
            return


def _judge(tuning: _Tuning, bench: LaunchBench) -> None:
    """Settle which configs compute the right result, and so which may be chosen.

    New configs are compared with one that an earlier tuning has judged. Only where results differ
    are the others of that tuning run again, until most agree.
    """
    timings = tuning.timings()
    known = sorted(tuning.judged, key=lambda config: timings[config].median_ms)
    if tuning.incumbent in known:
        known.remove(tuning.incumbent)
        known.insert(0, tuning.incumbent)
    unseen = [config for config in tuning.new if config in timings]
    unseen = [config for config in unseen if config not in tuning.votes.reports]
    _examine(tuning, bench, [*unseen, *known[:1]])
    _place_all(tuning, bench)

    def clear() -> bool:
        found = tuning.judgement(bench.grids)
        return found.clear and found.candidates.issuperset(known[:1])

    if not clear():
        _examine(tuning, bench, known[1:], enough=clear)
        _place_all(tuning, bench)
    _apply(tuning, tuning.judgement(bench.grids), known[:1])
    tuning.notes.extend(tuning.votes.notes())


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
        outcome = tuning.outcomes[config].unmarked(Mark.DISPUTED, Mark.OUTVOTED)
        outcome = replace(outcome, judged=judgement.sizes[config])
        judged[config] = outcome.with_marks(judgement.marks(config))
    tuning.keep(judged)
    unexamined = tuning.timings().keys() - judgement.sizes.keys()
    tuning.candidates.update(judgement.candidates)
    if judgement.candidates.issuperset(compared):
        tuning.candidates.update(unexamined)


def _place_all(tuning: _Tuning, bench: LaunchBench) -> None:
    """Examine configs again that agree with no result for which there was room."""
    before = math.inf
    while len(unplaced := tuning.votes.unplaced()) < before and unplaced:
        before = len(unplaced)
        _examine(tuning, bench, unplaced)


def _race(tuning: _Tuning, bench: LaunchBench) -> None:
    """Measure the finalists again, in rounds."""
    timings = tuning.timings()
    incumbent = tuning.incumbent if tuning.incumbent in timings else None
    raced = {config: timings[config] for config in timings if config not in tuning.same}
    finalists = race.finalists(raced, tuning.new, incumbent)
    if len(finalists) < 2:
        return

    def run(budgets: Mapping[int, Budget]) -> Mapping[int, Outcome]:
        for config in budgets:
            tuning.announce(config, "final")
        tuning.measured.update(budgets)
        outcomes = bench.in_turn(budgets)
        for config, outcome in outcomes.items():
            tuning.outcomes[config] = tuning.outcomes[config].with_marks(outcome.marks)
        return outcomes

    short = bench.interpreted or tuning.request.call.hooks.do_bench is not None
    finals, failed, left = race.race({i: timings[i] for i in finalists}, run, short)
    ended = {c: replace(tuning.outcomes[c], timing=timing) for c, timing in finals.items()} | failed
    for config, outcome in ended.items():
        tuning.settle(config, outcome, stage="final")
    for config, same in tuning.same.items():
        if same in ended:
            tuning.settle_as(config, same, stage="final")
    tuning.contenders.update(c for c in timings if tuning.same.get(c, c) in left)


def _best(tuning: _Tuning) -> int:
    """Return the fastest at the end of the final; else of all, or of new ones and an incumbent."""
    timings = tuning.timings()
    if not timings:
        key, configs = tuning.request.key, tuning.request.configs
        outcomes = [(config_text(configs[i]), o) for i, o in sorted(tuning.outcomes.items())]
        raise NoWorkingConfig(key.kernel.name, str(key), outcomes, measured=len(tuning.measured))
    rivals = timings.keys() & tuning.contenders
    if not rivals and tuning.incumbent in timings:
        rivals = timings.keys() & {*tuning.new, tuning.incumbent}
    return race.best({config: timings[config] for config in rivals or timings})


def _store_choice(tuning: _Tuning, best: int, election: Election) -> ChoiceRecord:
    """Store the choice, unless its generation has another; return the one to launch."""
    outcome = tuning.outcomes[best]
    timing, before = outcome.timing, tuning.standing
    assert timing is not None
    marks = requests.marks_of_choice(outcome, len(tuning.outcomes), len(tuning.digests))
    went_on = before is not None and requests.searched(before.marks) != requests.searched(marks)
    replaces = before is not None and (best != tuning.incumbent or went_on)
    choice = ChoiceRecord(
        key=tuning.request.key.digest,
        generation=tuning.generation + replaces,
        config_digest=tuning.digests[best],
        config=config_record(tuning.request.configs[best]),
        declared=tuning.request.declared,
        median_ms=timing.median_ms,
        measured=len(tuning.measured),
        created=time.time(),
        marks=marks,
    )
    stored = election.keep(choice, tuning.store, outcome)
    # A choice from another list of configs cannot be launched here.
    return stored if stored.config_digest in tuning.digests else choice
