"""From a miss to a choice: compile all, measure each, race the best, store every outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triton.runtime.autotuner import Config

from safetune.config import config_digest, config_record, config_text
from safetune.errors import NoWorkingConfig
from safetune.outcome import TRANSIENT, Outcome, Timing, Verdict
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord
from safetune.store.sqlite import Store
from safetune.tuning import choose
from safetune.tuning.bench import LaunchBench, device_lock
from safetune.tuning.jobs import TuningRequest
from safetune.tuning.measure import Budget


@dataclass(frozen=True)
class Progress:
    """One step of a tuning, for progress bars and verbose output.

    Attributes:
        stage: `compile`, `screen`, `final`.
        outcome: None when the config is about to run, else what became of it.
        done, total: configs screened, and to be screened, in this tuning.
    """

    kernel: str
    stage: str
    config: Config
    outcome: Outcome | None
    done: int
    total: int


@dataclass(frozen=True)
class TuningResult:
    """A finished tuning.

    Attributes:
        choice: the config to launch.
        outcomes: for every config in the request, in order; from this tuning or an earlier one.
        measured: how many configs were compiled or launched in this tuning.
        seconds: wall time.
    """

    choice: Config
    outcomes: tuple[tuple[Config, Outcome], ...]
    measured: int
    seconds: float


Observer = Callable[[Progress], None]


def tune(
    request: TuningRequest,
    store: Store,
    observe: Observer = lambda progress: None,
    on_grid_read: Callable[[set[str]], None] = lambda names: None,
    bench: LaunchBench | None = None,
) -> TuningResult:
    """Measure what has not been measured for this key, choose, and store both.

    Args:
        bench: made from the request earlier, while the caller's tensors were what they were.

    Raises:
        NoWorkingConfig: every config failed; no choice is stored.
        KernelNotTransferable: the call cannot be rebuilt in a child.
        WorkerUnavailable: no child can be started.
    """
    return _Tuning(request, store, observe, on_grid_read, bench).run()


class _Tuning:
    """The state of one tuning. Configs go by their number in the request."""

    def __init__(
        self,
        request: TuningRequest,
        store: Store,
        observe: Observer,
        on_grid_read: Callable[[set[str]], None],
        bench: LaunchBench | None,
    ) -> None:
        self._request = request
        self._bench = bench
        self._store = store
        self._observe = observe
        self._on_grid_read = on_grid_read
        self._configs = request.configs
        self._digests = [config_digest(config) for config in request.configs]
        self._outcomes: dict[int, Outcome] = {}
        self._measured: set[int] = set()
        self._total = 0

    def run(self) -> TuningResult:
        start = time.perf_counter()
        incumbent = self._recall()
        new = [index for index in range(len(self._configs)) if index not in self._outcomes]
        self._total = len(new)
        self._store.put_key(key_record(self._request))
        if new:
            self._measure_new(new, incumbent)
        best = self._best(incumbent, new)
        self._store_choice(best)
        return TuningResult(
            choice=self._configs[best],
            outcomes=tuple(
                (config, self._outcomes[index]) for index, config in enumerate(self._configs)
            ),
            measured=len(self._measured),
            seconds=time.perf_counter() - start,
        )

    def _recall(self) -> int | None:
        """Take over what the store knows of this key; return the config chosen last, if any."""
        request, key = self._request, self._request.key.digest
        last = self._store.choice(key)
        self._generation = 1 if last is None else last.generation
        if request.force:
            self._generation = self._store.generation(key) + 1
        elif last is not None and last.declared != request.declared:
            self._generation += 1
        first = self._generation if request.force else 1
        for generation in range(first, self._store.generation(key) + 1):
            for trial in self._store.trials(key, generation):
                lasting = trial.outcome.verdict not in TRANSIENT
                if lasting and trial.config_digest in self._digests:
                    self._outcomes[self._digests.index(trial.config_digest)] = trial.outcome
        if last is None or self._request.force or last.config_digest not in self._digests:
            return None
        incumbent = self._digests.index(last.config_digest)
        known = self._outcomes.get(incumbent)
        return incumbent if known is not None and known.ok else None

    def _measure_new(self, new: Sequence[int], incumbent: int | None) -> None:
        device = self._request.call.index
        with (
            device_lock(device),
            self._bench or LaunchBench(self._request, self._on_grid_read) as bench,
        ):
            for index, failure in bench.compiled(new, self._request.limits.compile_timeout_s):
                self._announce(index, "screen")
                self._settle(index, failure or bench.measure(index, self._budget()))
            self._race(bench, new, incumbent)

    def _race(self, bench: LaunchBench, new: Sequence[int], incumbent: int | None) -> None:
        """Run the near-best in turns, so that drift of the clock hits all alike."""
        racers = choose.finalists(self._timings(), new, incumbent)
        if len(racers) < 2:
            return
        if bench.interpreted:
            budget = Budget(estimate_launches=3, time_ms=0)
        else:
            budget = Budget(estimate_launches=choose.ROUND_LAUNCHES, time_ms=0)
        timings: dict[int, list[Timing]] = {index: [] for index in racers}
        marks: dict[int, dict[str, None]] = {index: {} for index in racers}
        if incumbent is not None and incumbent not in new:
            timeout_s = self._request.limits.compile_timeout_s
            for index, failure in bench.compiled([incumbent], timeout_s):
                if failure is not None:
                    self._settle(index, failure)
                    racers.remove(index)
        for turn in range(choose.MAX_ROUNDS):
            for index in choose.rotated(racers, turn):
                self._announce(index, "final")
                outcome = bench.measure(index, budget)
                self._measured.add(index)
                if outcome.timing is None:
                    self._settle(index, outcome)
                    racers.remove(index)
                else:
                    timings[index].append(outcome.timing)
                    marks[index].update(dict.fromkeys(outcome.marks))
            if choose.clear({index: timings[index] for index in racers}):
                break
        for index in racers:
            final = choose.combine(timings[index])
            uuid = self._outcomes[index].gpu_uuid
            outcome = Outcome(Verdict.OK, final, gpu_uuid=uuid, marks=tuple(marks[index]))
            self._settle(index, outcome, stage="final")

    def _settle(self, index: int, outcome: Outcome, stage: str = "screen") -> None:
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

    def _store_choice(self, best: int) -> None:
        timing = self._outcomes[best].timing
        assert timing is not None
        self._store.put_choice(
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


def key_record(request: TuningRequest) -> KeyRecord:
    """Return the row that a request's trials and choice point at."""
    key = request.key
    return KeyRecord(
        digest=key.digest,
        kernel_name=key.kernel.name,
        kernel_digest=key.kernel.digest,
        kernel_source=key.kernel.source,
        kernel_file=key.kernel.file,
        kernel_line=key.kernel.line,
        device_digest=key.device.digest,
        device=key.device.record(),
        toolchain=key.toolchain.record(),
        call=key.record(),
    )
