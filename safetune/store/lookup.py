"""Where a choice is looked for, in which order, and the rule that the store is never in the way.

The order is `Lookup.find`. The rule is `open_store` and `GuardedStore`: a store that cannot be
opened costs one warning, one that fails later costs one line in the log, and the run goes on in
memory.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetune.errors import LeaseLost, StoreError
from safetune.store.connection import Connection
from safetune.store.recovery import Damaged
from safetune.store.rows import RecordError
from safetune.store.sqlite import Store

if TYPE_CHECKING:
    from safetune.settings import Settings
    from safetune.store.lease import Lease
    from safetune.store.records import ChoiceRecord, KeyRecord, KinChoice, TrialRecord
    from safetune.store.shared import SharedStore

logger = logging.getLogger("safetune")

Answer = TypeVar("Answer")

_lookups: dict[tuple[Path, str], Lookup] = {}
_opening = threading.Lock()


class GuardedStore(Store):
    """A store whose tuning methods never raise.

    When one fails to write, this and all later records go to memory; what is already stored is
    still read. When one fails to read, only memory is left. Each is logged once. A record that no
    store would keep is logged and dropped. The methods for people (`choices`, `trials_of`,
    `kernels`, `clear`) raise as they do in `Store`.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._spare: Store | None = None
        self._unreadable = False

    def put_key(self, record: KeyRecord) -> None:
        """Write a key, here or in memory."""
        self._write(Store.put_key, record)

    def put_trial(self, record: TrialRecord, lease: Lease | None = None) -> None:
        """Write an outcome, here or in memory; raises `LeaseLost`."""
        self._write(Store.put_trial, record, lease)

    def put_choice(self, record: ChoiceRecord, lease: Lease | None = None) -> ChoiceRecord:
        """Write a choice, here or in memory, and return the one to use; raises `LeaseLost`."""
        return self._write(Store.put_choice, record, lease) or record

    def trials(self, key: str, generation: int | None = None) -> list[TrialRecord]:
        """Return the outcomes of a key or one generation, those in memory over those stored."""
        answers = self._read(Store.trials, key, generation)
        merged = {
            (trial.generation, trial.config_digest): trial for answer in answers for trial in answer
        }
        return sorted(merged.values(), key=lambda trial: trial.generation)

    def choice(self, key: str, declared: str | None = None) -> ChoiceRecord | None:
        """Return the choice of the highest generation, stored or in memory."""
        found = [choice for choice in self._read(Store.choice, key, declared) if choice is not None]
        return max(found, key=lambda choice: choice.generation, default=None)

    def generation(self, key: str) -> int:
        """Return the highest generation, stored or in memory; 0 if none."""
        return max(self._read(Store.generation, key), default=0)

    def kin(self, kernel_digest: str, device_digest: str) -> list[KinChoice]:
        """Return the choices of a kernel's keys on a device, stored and in memory."""
        answers = self._read(Store.kin, kernel_digest, device_digest)
        return [kin for answer in answers for kin in answer]

    def _write(
        self, method: Callable[..., Answer], record: Any, *lease: Lease | None
    ) -> Answer | None:
        try:
            if self._spare is None:
                try:
                    return self._tried(Damaged, method, record, *lease)
                except (RecordError, LeaseLost):
                    raise
                except StoreError as error:
                    logger.warning("%s; going on in memory", error)
                    self._spare = Store.in_memory()
            return method(self._spare, record)
        except LeaseLost:
            raise
        except StoreError as error:
            logger.warning("a record is not kept: %s", error)
            return None

    def _tried(
        self, again: type[StoreError], method: Callable[..., Answer], *arguments: Any
    ) -> Answer:
        """Once more after some errors: damage is mended or moved aside by opening it again."""
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
                logger.warning("%s; going on without what it holds", error)
                self._unreadable = True
        if self._spare is not None:
            try:
                answers.append(method(self._spare, *arguments))
            except StoreError as error:
                logger.warning("%s", error)
        return answers


class Lookup:
    """The choices of this process, and where the missing ones come from.

    What a process has launched stays in its memory: another process's newer generation is never
    picked up in the middle of a run.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._memory: dict[tuple[str, str], ChoiceRecord] = {}

    def find(self, key: str, declared: str, space: str = "") -> ChoiceRecord | None:
        """Return the choice for a key's digest from a config list: from the first layer with one.

        The caller validates it against the declared configs, and says so with `adopt`.

        Args:
            space: the key's namespace in the shared store. It is read by bringing the local store
                up to date with all of the namespace, at most once a minute, before either is asked.
        """
        remembered = self._memory.get((key, declared))
        if remembered is not None:
            return remembered
        if self.store.shared is not None and space:
            self.store.shared.refresh(space)
        for layer in (self.store.choice, self._in_shared):
            choice = layer(key, declared)
            if choice is not None:
                return choice
        return None

    def adopt(self, choice: ChoiceRecord) -> None:
        """Keep a valid choice in memory, over the one that was there."""
        self._memory[choice.key, choice.declared] = choice

    def forget(self, key: str, declared: str) -> None:
        """Drop a choice from memory; the store keeps it."""
        self._memory.pop((key, declared), None)

    def _in_shared(self, key: str, declared: str) -> ChoiceRecord | None:
        """What was pulled, and the local store could not keep."""
        shared = self.store.shared
        return None if shared is None else shared.choice(key, declared)


def open_lookup(settings: Settings) -> Lookup:
    """Return this process's `Lookup` for the settings' directory and shared store.

    Raises:
        InvalidSetting: nothing here can open SAFETUNE_SHARED. Never `StoreError`.
    """
    directory = settings.cache_dir
    if not directory.parts[0].startswith("~"):  # there is no home, which opening it says
        directory = Path(os.path.abspath(directory))
    with _opening:
        if (directory, settings.shared) in _lookups:
            return _lookups[directory, settings.shared]
        backend = _backend(settings.shared)
        try:
            store, problem = GuardedStore.open(directory), None
        except StoreError as error:
            store, problem = GuardedStore.in_memory(), error
        if backend is not None:
            from safetune.store.shared_layer import SharedLayer

            store.shared = SharedLayer(backend, store.connection)
        lookup = _lookups[directory, settings.shared] = Lookup(store)
    if problem is not None:
        warnings.warn(
            f"safetune: {problem}; choices are kept in memory, for this process only",
            stacklevel=2,
        )
    if not settings.shared and settings.world_size > settings.local_world_size:
        warnings.warn(
            f"safetune: {settings.world_size} processes, {settings.local_world_size} of them on "
            "this node, and no SAFETUNE_SHARED: each node tunes for itself, and they may launch "
            "different configs until safetune.sync()",
            stacklevel=2,
        )
    return lookup


def _backend(url: str) -> SharedStore | None:
    if not url:
        return None
    from safetune.store.opening import open_shared

    return open_shared(url)


def open_store(settings: Settings) -> Store:
    """Return this process's store for the settings' directory.

    One object per process and directory, usable after a fork. Where the database cannot be opened
    there is one warning, once per process and path, and the store is in memory. Its tuning methods
    never raise (`GuardedStore`).
    """
    return open_lookup(settings).store


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
