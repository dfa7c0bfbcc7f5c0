"""A store that never makes a run fail: records that it cannot write stay in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from safetune.errors import StoreError
from safetune.store.local.connection import Connection
from safetune.store.local.db_files import Damaged
from safetune.store.local.rows import RecordError
from safetune.store.local.store import Store
from safetune.store.records import precedence

if TYPE_CHECKING:
    from safetune.store.records import ChoiceRecord, KeyRecord, RelatedChoice, TrialRecord

logger = logging.getLogger("safetune")

Answer = TypeVar("Answer")


class GuardedStore(Store):
    """A store whose tuning methods never raise.

    When a write fails, this and all later records go to memory; stored records are still read. When
    a read fails, only memory is left. Each is logged once. A record that no store would keep is
    logged and dropped. The methods of the command line (`choices`, `trials_of`, `kernels`, `clear`)
    raise as they do in `Store`.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._spare: Store | None = None
        self._unreadable = False

    def put_key(self, record: KeyRecord) -> None:
        """Write a key, here or in memory."""
        self._write(Store.put_key, record)

    def put_trial(self, record: TrialRecord) -> None:
        """Write an outcome, here or in memory."""
        self._write(Store.put_trial, record)

    def put_choice(self, record: ChoiceRecord) -> ChoiceRecord:
        """Write a choice, here or in memory, and return the choice to use."""
        return self._write(Store.put_choice, record) or record

    def trials(self, key: str, generation: int | None = None) -> list[TrialRecord]:
        """Return the outcomes of a key or a generation; one in memory replaces the stored one."""
        answers = self._read(Store.trials, key, generation)
        merged = {
            (trial.generation, trial.config_digest): trial for answer in answers for trial in answer
        }
        return sorted(merged.values(), key=lambda trial: trial.generation)

    def choice(self, key: str, declared: str | None = None) -> ChoiceRecord | None:
        """Return the choice of the highest generation, stored or in memory."""
        found = [choice for choice in self._read(Store.choice, key, declared) if choice is not None]
        return min(found, key=precedence, default=None)

    def generation(self, key: str) -> int:
        """Return the highest generation, stored or in memory; 0 if none."""
        return max(self._read(Store.generation, key), default=0)

    def related(self, kernel_digest: str, device_digest: str) -> list[RelatedChoice]:
        """Return the choices of a kernel's keys on a device, stored and in memory."""
        answers = self._read(Store.related, kernel_digest, device_digest)
        return [related for answer in answers for related in answer]

    def _write(self, method: Callable[..., Answer], record: Any) -> Answer | None:
        try:
            if self._spare is None:
                try:
                    return self._tried(Damaged, method, record)
                except RecordError:
                    raise
                except StoreError as error:
                    logger.warning("%s; continuing in memory", error)
                    self._spare = Store.in_memory()
            return method(self._spare, record)
        except StoreError as error:
            logger.warning("a record is not stored: %s", error)
            return None

    def _tried(
        self, again: type[StoreError], method: Callable[..., Answer], *arguments: Any
    ) -> Answer:
        """Try once more after some errors: opening it again repairs damage or moves it aside."""
        try:
            return method(self, *arguments)
        except again:
            return method(self, *arguments)

    def _read(self, method: Callable[..., Answer], *arguments: Any) -> list[Answer]:
        answers = []
        if not self._unreadable:
            try:
                answers.append(self._tried(StoreError, method, *arguments))
            except StoreError as error:
                logger.warning("%s; continuing without its choices", error)
                self._unreadable = True
        if self._spare is not None:
            try:
                answers.append(method(self._spare, *arguments))
            except StoreError as error:
                logger.warning("%s", error)
        return answers
