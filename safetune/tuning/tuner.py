"""From a miss to a choice: compile all, measure each, race the best, store every outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from safetune.child.timing import Budget
from safetune.config import config_digest, config_record, config_text
from safetune.errors import NoWorkingConfig
from safetune.outcome import OF_THE_CALL, TRANSIENT, Mark, Outcome, Timing, Verdict
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, TrialRecord
from safetune.tuning import choose, single_flight
from safetune.tuning.bench import LaunchBench, device_lock
from safetune.tuning.majority import Results, notes_of
from safetune.tuning.race import race
from safetune.tuning.requests import TuningRequest, key_record
from safetune.tuning.result import Observer, Progress, TuningResult
from safetune.tuning.single_flight import WaitBudget

_STARTED = time.time()


def tune(
    request: TuningRequest,
    store: Store,
    observe: Observer = lambda progress: None,
    on_grid_read: Callable[[set[str]], None] = lambda names: None,
    bench: LaunchBench | None = None,
    wait_budget: WaitBudget | None = None,
) -> TuningResult:
    """Measure what has not been measured for this key, choose, and store both.

    Where another process is at it already, its choice is waited for.

    Args:
        bench: made from the request earlier, when the caller's tensors were what they were.
        wait_budget: how long to wait for other processes; without end if None.

    Raises:
        NoWorkingConfig: every config failed; no choice is stored.
        KernelNotTransferable: the call cannot be rebuilt in a child.
        WorkerUnavailable: no child can be started; `Busy` if another process is still at it.
    """
    budget = wait_budget or WaitBudget()
    return _Tuning(request, store, observe, on_grid_read, bench, budget).run()


class _Tuning:
    """The state of one tuning. Configs go by their number in the request."""

    def __init__(
        self,
        request: TuningRequest,
        store: Store,
        observe: Observer,
        on_grid_read: Callable[[set[str]], None],
        bench: LaunchBench | None,
        wait_budget: WaitBudget,
    ) -> None:
        self._request = request
        self._bench = bench
        self._wait_budget = wait_budget
        self._store = store
        self._observe = observe
        self._on_grid_read = on_grid_read
        self._configs = request.configs
        self._digests = [config_digest(config) for config in request.configs]
        self._outcomes: dict[int, Outcome] = {}
        self._results = Results()
        self._notes: list[str] = []
        self._phases: dict[str, float] = {}
        self._measured: set[int] = set()
        self._marks: tuple[str, ...] = ()
        self._total = 0

    def run(self) -> TuningResult:
        start = time.perf_counter()
        wanted = (self._request, self._store, self._wait_budget)
        with single_flight.elect(*wanted) as self._election:
            choice = self._election.choice
            if choice is None:
                return self._result(self._choose(), start)
            self._recall()
            return self._result(self._digests.index(choice.config_digest), start)

    def _choose(self) -> int:
        """Measure what is new, and return the config that is the choice now."""
        incumbent = self._recall()
        new = [index for index in range(len(self._configs)) if index not in self._outcomes]
        self._total = len(new)
        self._store.put_key(key_record(self._request.key))
        if new:
            self._measure_new(new, incumbent)
        return self._store_choice(self._best(incumbent, new))

    def _result(self, choice: int, start: float) -> TuningResult:
        return TuningResult(
            choice=self._configs[choice],
            outcomes=tuple(
                (config, self._outcomes[index])
                for index, config in enumerate(self._configs)
                if index in self._outcomes
            ),
            measured=len(self._measured),
            seconds=time.perf_counter() - start,
            notes=tuple(self._notes),
            phases=dict(self._phases),
        )

    def _recall(self) -> int | None:
        """Take over what the store knows of this key; return the config chosen last, if any.

        From the same config list, or else from any.
        """
        request, key = self._request, self._request.key.digest
        last = self._store.choice(key, request.declared) or self._store.choice(key)
        self._generation = 1 if last is None else last.generation
        if request.force:
            self._generation = self._store.generation(key) + 1
            return None
        lasting: dict[int, TrialRecord] = {}
        for trial in self._store.trials(key):
            if trial.config_digest in self._digests and trial.outcome.verdict not in TRANSIENT:
                lasting[self._digests.index(trial.config_digest)] = trial
        some_work = len(lasting) < len(self._configs) or any(t.outcome.ok for t in lasting.values())
        for index, trial in lasting.items():  # where none does, the caller may have been mended
            if some_work or trial.outcome.verdict not in OF_THE_CALL or trial.created > _STARTED:
                self._outcomes[index] = trial.outcome
        if last is None or last.config_digest not in self._digests:
            return None
        incumbent = self._digests.index(last.config_digest)
        known = self._outcomes.get(incumbent)
        return incumbent if known is not None and known.ok else None

    def _measure_new(self, new: Sequence[int], incumbent: int | None) -> None:
        call = self._request.call
        with contextlib.ExitStack() as turn:
            if not call.interpreted:  # before anything is started or copied
                turn.enter_context(single_flight.compiling(self._store, self._wait_budget))
            with (
                device_lock(call.index),
                self._bench or LaunchBench(self._request, self._on_grid_read) as bench,
            ):
                self._marks = bench.marks
                self._screen(bench, new)
                no_memory = [i for i in new if self._outcomes[i].verdict is Verdict.NO_MEMORY]
                if no_memory:  # what others held is free now
                    bench.replace()
                    self._screen(bench, no_memory)
                turn.close()
                self._judge(bench, new, incumbent)
                self._race(bench, new, incumbent)
                self._phases = bench.phases

    def _screen(self, bench: LaunchBench, configs: Sequence[int]) -> None:
        """Run configs as they are compiled: each is examined and gets a first time."""
        for index, failure in bench.compiled(configs, self._request.limits.compile_timeout_s):
            self._announce(index, "screen")
            if failure is not None:
                self._settle(index, failure)
                continue
            outcome, evidence = bench.measure(index, self._budget(), self._results.groups())
            if evidence is not None:
                self._results.add(index, evidence)
                marks = tuple(Mark.UNOWNED.of(name) for name in evidence.unowned)
                outcome = replace(outcome, marks=(*outcome.marks, *marks))
            self._settle(index, outcome)

    def _judge(self, bench: LaunchBench, new: Sequence[int], incumbent: int | None) -> None:
        """Reject what a majority of configs contradicts.

        What could win but was measured earlier, by a tuning that has ended, is examined now.
        """
        racers = choose.finalists(self._timings(), new, incumbent)
        if len(racers) > 1:
            self._screen(bench, [index for index in racers if not self._results.knows(index)])
        alive = [index for index in self._timings() if self._results.knows(index)]
        judgement = self._results.judge({index: bench.grids[index] for index in alive})
        for index, (verdict, reason) in judgement.rejected.items():
            uuid = self._outcomes[index].gpu_uuid
            self._settle(index, Outcome(verdict, message=reason, gpu_uuid=uuid))
        for index, reason in judgement.disputed.items():
            outcome = self._outcomes[index]
            marks = (*outcome.marks, Mark.DISPUTED.of(reason))
            self._settle(index, replace(outcome, marks=marks))
        self._notes += notes_of(judgement, self._results.unowned())

    def _race(self, bench: LaunchBench, new: Sequence[int], incumbent: int | None) -> None:
        timings = self._timings()
        racers = choose.finalists(timings, new, incumbent)
        if len(racers) < 2:
            return

        def measure(index: int, budget: Budget) -> Outcome:
            self._announce(index, "final")
            self._measured.add(index)
            outcome, known = bench.measure(index, budget)[0], self._outcomes[index]
            marks = tuple(dict.fromkeys((*known.marks, *outcome.marks)))
            self._outcomes[index] = replace(known, marks=marks)
            return outcome

        short = bench.interpreted or self._request.call.hooks.do_bench is not None
        screened = {index: timings[index] for index in racers}
        finals, failed = race(screened, measure, short)
        for index, timing in finals.items():
            self._settle(index, replace(self._outcomes[index], timing=timing), stage="final")
        for index, outcome in failed.items():
            self._settle(index, outcome, stage="final")

    def _settle(self, index: int, outcome: Outcome, stage: str = "screen") -> None:
        outcome = replace(outcome, marks=tuple(dict.fromkeys((*outcome.marks, *self._marks))))
        self._outcomes[index] = outcome
        self._measured.add(index)
        self._store.put_trial(
            TrialRecord(
                key=self._request.key.digest,
                config_digest=self._digests[index],
                config=config_record(self._configs[index]),
                generation=self._generation,
                outcome=outcome,
                created=time.time(),
            )
        )
        self._announce(index, stage, outcome)

    def _announce(self, index: int, stage: str, outcome: Outcome | None = None) -> None:
        self._observe(
            Progress(
                kernel=self._request.key.kernel.name,
                stage=stage,
                config=self._configs[index],
                outcome=outcome,
                done=len(self._measured),
                total=self._total,
            )
        )

    def _budget(self) -> Budget:
        best = min((timing.median_ms for timing in self._timings().values()), default=None)
        return Budget(best_ms=best)

    def _timings(self) -> dict[int, Timing]:
        return {
            index: outcome.timing
            for index, outcome in sorted(self._outcomes.items())
            if outcome.ok and outcome.timing is not None
        }

    def _best(self, incumbent: int | None, new: Sequence[int]) -> int:
        timings = self._timings()
        if not timings:
            raise NoWorkingConfig(
                self._request.key.kernel.name,
                str(self._request.key),
                [(config_text(self._configs[i]), o) for i, o in sorted(self._outcomes.items())],
                measured=len(self._measured),
            )
        if incumbent is not None and incumbent in timings:
            rivals = {index: timings[index] for index in new if index in timings}
            return choose.best({**rivals, incumbent: timings[incumbent]})
        return choose.best(timings)

    def _store_choice(self, best: int) -> int:
        """Store the choice, unless its generation has one; return the one to use."""
        timing = self._outcomes[best].timing
        assert timing is not None
        stored = self._store.put_choice(
            ChoiceRecord(
                key=self._request.key.digest,
                generation=self._generation,
                config_digest=self._digests[best],
                config=config_record(self._configs[best]),
                declared=self._request.declared,
                median_ms=timing.median_ms,
                measured=len(self._measured),
                created=time.time(),
            )
        )
        if stored.config_digest in self._digests:  # else what is there is nobody's to launch
            stored = self._election.publish(stored, self._outcomes[best])
        known = stored.config_digest in self._digests
        return self._digests.index(stored.config_digest) if known else best
