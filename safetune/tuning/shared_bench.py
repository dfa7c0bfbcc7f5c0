"""The bench of a key whose configs several processes of a node measure, on cards of one kind.

The process that has the key's lock tunes it. Processes with nothing else to do help: they measure
some of its configs and store the outcomes. A config belongs to the process that has locked it, and
to no one once that has ended. The owner of the key launches all configs once more to judge them,
measures the finalists again, and chooses: that is done on one card.

A card may fail without its process dying. Where the last launches of a bench failed, another
process tries the card; if it fails too, their outcomes are forgotten, and this process ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from safetune.config import config_digest
from safetune.errors import DeviceUnavailable, StoreError
from safetune.isolation import elsewhere
from safetune.isolation.protocol import Budget
from safetune.messages import logger
from safetune.outcome import Group, Outcome, OutputReport
from safetune.store.local import locks
from safetune.store.local.store import Store
from safetune.tuning import requests
from safetune.tuning.bench import LaunchBench, Ready
from safetune.tuning.requests import Phases, TuningRequest

#: How often the owner looks for the last outcomes of helpers.
_LOOK_S = 0.05


class SharedBench(LaunchBench):
    """A bench that leaves out configs which another process measures, or has measured.

    A search shares none, as it decides by their outcomes.
    """

    def __init__(self, store: Store, request: TuningRequest, phases: Phases) -> None:
        self._store, self._since = store, time.time()
        self._shares = request.budget is None and not request.force
        self._failed: set[int] = set()  # by the last launches
        super().__init__(request, phases)
        #: The configs that are settled here: they are launched again without asking.
        self._settled: set[int] = set()
        self._names = [config_digest(config) for config in request.configs]

    def compiled(self, configs: Sequence[int], timeout_s: float) -> Iterator[Ready]:
        """Yield as `LaunchBench` does; a config stays claimed until the next one is asked for."""
        others = []
        for ready in super().compiled(configs, timeout_s):
            with self._claimed(ready.config) as mine:
                if mine:
                    yield self._settling(ready)
                else:
                    others.append(ready)
        if self.chooses:
            yield from self._of_others(others)

    def _settling(self, ready: Ready) -> Ready:
        """Count a config as settled; the one that does the same may be another process's."""
        self._settled.add(ready.config)
        return ready if ready.same in self._settled else ready._replace(same=None)

    @contextlib.contextmanager
    def _claimed(self, config: int) -> Iterator[bool]:
        """Yield whether this process measures a config now."""
        path, name, key = self._store.path, self._names[config], self._request.key.digest
        with contextlib.ExitStack() as held:
            mine = True
            if self._shares and config not in self._settled and path is not None:
                try:
                    if lock := locks.try_lock(path, f"{key} {name}"):
                        held.callback(lock.release)
                    known = self._store.tried(key, self._since)
                    mine = lock is not None and name not in known
                except (OSError, StoreError) as error:
                    logger.info("%s; a config may be measured twice", error)
            yield mine

    def _of_others(self, others: list[Ready]) -> Iterator[Ready]:
        """Yield the outcomes that others store, and to be launched what none of them measures."""
        latest = time.monotonic() + 2 * self._request.limits.run_timeout_s
        while others:
            stored, waiting = requests.lasting_outcomes(self._request, self._store), []
            for ready in others:
                if (outcome := stored.get(ready.config)) is not None:
                    self._settled.add(ready.config)
                    yield Ready(ready.config, outcome)
                    continue
                with self._claimed(ready.config) as mine:
                    if mine or time.monotonic() > latest:
                        yield self._settling(ready)
                    else:
                        waiting.append(ready)
            others = waiting
            if others:
                with self.phases("wait"):
                    time.sleep(_LOOK_S)

    def measure(
        self, index: int, budget: Budget | None, groups: Sequence[Group] | None = None
    ) -> tuple[Outcome, OutputReport | None]:
        """Run a config as `LaunchBench` does, and note whether that failed."""
        outcome, report = super().measure(index, budget, groups)
        self._note({index: outcome})
        return outcome, report

    def in_turn(self, budgets: Mapping[int, Budget]) -> dict[int, Outcome]:
        """Time configs as `LaunchBench` does, and note which failed."""
        outcomes = super().in_turn(budgets)
        self._note(outcomes)
        return outcomes

    def _note(self, outcomes: Mapping[int, Outcome]) -> None:
        for config, outcome in outcomes.items():
            if outcome.ok:
                self._failed.clear()
            else:
                self._failed.add(config)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        if kind is not None or not self._failed:
            return
        if reason := elsewhere.why_broken(self._request.call.index):
            names = [self._names[config] for config in self._failed]
            self._store.forget(self._request.key.digest, names)
            raise DeviceUnavailable(f"every launch fails on this device: {reason}")


class HelpersBench(SharedBench):
    """The bench of a process that helps the one which tunes the key."""

    chooses = False
