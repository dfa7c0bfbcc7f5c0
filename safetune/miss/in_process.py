"""Records the config that runs in the caller's process, in case it takes the process or the machine
down.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from triton.runtime.autotuner import Config

from safetune.config import config_digest, config_record, config_text
from safetune.errors import NoWorkingConfig, StoreError
from safetune.outcome import Outcome, Verdict
from safetune.settings import Settings
from safetune.store.local import db_files, in_flight
from safetune.store.lookup import GuardedStore
from safetune.store.records import KeyRecord, TrialRecord
from safetune.tuning.requests import Plan

if TYPE_CHECKING:
    from safetune.tuning.requests import TuningRequest


class Flights:
    """Stores the running config before its first launch; does nothing without a store."""

    def __init__(self, request: TuningRequest | None, store: GuardedStore | None) -> None:
        self._store, self._tried = store, set[Config]()
        #: The configs that are not tried, and why.
        self.skipped: dict[Config, Outcome] = {}
        if request is None or store is None:
            return
        self._key = request.key
        store.put_key(KeyRecord.of(request.key))
        plan, configs = Plan.read(request, store), request.configs
        self._tried = {configs[index] for index in plan.latest}
        skipped = {**plan.took_down, **plan.listed}
        self.skipped = {configs[index]: outcome for index, outcome in skipped.items()}

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
        trial = TrialRecord(
            self._key.digest,
            config_digest(config),
            config_record(config),
            generation=1,
            outcome=Outcome(Verdict.DIED, detail="process"),
            created=time.time(),
            flight=flight,
        )
        self._store.put_trial(trial, durable=True)
        try:
            yield
        finally:
            self._store.drop_in_flight(trial)


@contextlib.contextmanager
def flights(request: TuningRequest | None, settings: Settings) -> Iterator[Flights]:
    """Yield the recorder for the configs of a tuning in this process; no-op without a request."""
    path, store = db_files.locate(settings, writes=False).database, None
    if request is not None and not request.without_identity and db_files.outlives_machine(path):
        with contextlib.suppress(StoreError):
            store = GuardedStore.open(path.parent, settings.wait_s)
    try:
        yield Flights(request, store)
    finally:
        if store is not None:
            store.close()
