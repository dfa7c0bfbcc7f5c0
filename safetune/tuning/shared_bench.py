"""The bench of a key whose configs several processes of a node measure, on cards of one kind.

The process that has the key's lock tunes it. Processes with nothing else to do help: they measure
some of its configs and store the outcomes. A config belongs to the process that has locked it, and
to no one once that has ended. The owner of the key launches all configs once more to judge them,
measures the finalists again, and chooses: that is done on one card.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from safetune.config import config_digest
from safetune.errors import StoreError
from safetune.messages import logger
from safetune.store.local import locks
from safetune.store.local.store import Store
from safetune.tuning import requests
from safetune.tuning.bench import LaunchBench, Ready
from safetune.tuning.requests import Phases, TuningRequest

#: How often the owner looks for the last outcomes of helpers.
_LOOK_S = 0.05


class SharedBench(LaunchBench):
    """A bench that leaves out configs which another process measures, or has measured."""

    def __init__(self, store: Store, request: TuningRequest, phases: Phases) -> None:
        self._store, self._since = store, time.time()
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
            if config not in self._settled and path is not None:
                try:
                    if lock := locks.try_lock(path, f"{key} {name}"):
                        held.callback(lock.release)
                    mine = lock is not None and name not in self._store.tried(key, self._since)
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


class HelpersBench(SharedBench):
    """The bench of a process that helps the one which tunes the key."""

    chooses = False
