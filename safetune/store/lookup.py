"""Where a choice is looked for, in which order, and the rule that the store is never in the way.

The order is that of `Lookup`'s layers: memory, the local store, packs. The rule is `open_store` and
`GuardedStore`: a store that cannot be opened costs one warning, one that fails later costs one line
in the log, and the run goes on in memory.
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
from safetune.settings import Mode
from safetune.store.connection import Connection
from safetune.store.packs import Packs, shipped
from safetune.store.recovery import Damaged
from safetune.store.rows import RecordError
from safetune.store.sqlite import DATABASE_NAME, Store

if TYPE_CHECKING:
    from safetune.key import TuningKey
    from safetune.settings import Settings
    from safetune.store.lease import Lease
    from safetune.store.records import ChoiceRecord, KeyRecord, KinChoice, TrialRecord

logger = logging.getLogger("safetune")

Answer = TypeVar("Answer")

Layer = Callable[["TuningKey", str], "ChoiceRecord | None"]

_lookups: dict[tuple[Path, tuple[Path, ...], bool], Lookup] = {}
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

    def __init__(self, store: Store, packs: Packs | None = None) -> None:
        self.store = store
        self._packs = Packs(()) if packs is None else packs
        self._memory: dict[tuple[str, str], ChoiceRecord] = {}
        self._layers: tuple[Layer, ...] = (
            self._in_memory,
            self._in_store,
            # A shared store comes here.
            self._packs.find,
        )

    def find(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        """Return the choice of the first layer that has one.

        Args:
            declared: digest over the list of configs; a choice made from another one does not
                count.

        The caller looks for its config among the declared ones, and says so with `adopt`.
        """
        for layer in self._layers:
            choice = layer(key, declared)
            if choice is not None:
                return choice
        return None

    def kin(self, key: TuningKey) -> list[KinChoice]:
        """Return the choices for the key's kernel and device, whatever else they are for."""
        return [*self.store.kin(key.kernel.digest, key.device.digest), *self._packs.kin(key)]

    def adopt(self, choice: ChoiceRecord) -> None:
        """Keep a valid choice in memory, over the one that was there."""
        self._memory[choice.key, choice.declared] = choice

    def forget(self, key: str, declared: str) -> None:
        """Drop a choice from memory; the layers below keep it."""
        self._memory.pop((key, declared), None)

    def _in_memory(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        return self._memory.get((key.digest, declared))

    def _in_store(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        return self.store.choice(key.digest, declared)


def open_lookup(settings: Settings) -> Lookup:
    """Return this process's `Lookup` for the settings. Never raises `StoreError`.

    One object per process, directory of the store, packs, and whether the store is only read, as it
    is under `Mode.FROZEN`; usable after a fork.
    """
    directory = settings.cache_dir
    if not directory.parts[0].startswith("~"):  # there is no home, which opening it says
        directory = Path(os.path.abspath(directory))
    frozen = settings.mode is Mode.FROZEN
    place = (directory, settings.packs, frozen)
    with _opening:
        if place in _lookups:
            return _lookups[place]
        try:
            store, problem = (_read_only if frozen else GuardedStore.open)(directory), None
        except StoreError as error:
            store, problem = GuardedStore.in_memory(), error
        last = shipped()
        packs = Packs(settings.packs if last is None else (*settings.packs, last))
        lookup = _lookups[place] = Lookup(store, packs)
    if problem is not None:
        warnings.warn(
            f"safetune: {problem}; choices are kept in memory, for this process only",
            stacklevel=2,
        )
    return lookup


def open_store(settings: Settings) -> Store:
    """Return this process's store for the settings.

    Where the database cannot be opened there is one warning, once per process and path, and the
    store is in memory. Its tuning methods never raise (`GuardedStore`).
    """
    return open_lookup(settings).store


def _read_only(directory: Path) -> GuardedStore:
    """The store of a process that writes nothing; where there is none yet, an empty one."""
    from safetune.store.read_only import open_read_only

    path = directory / DATABASE_NAME
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return GuardedStore.in_memory()
    except OSError:
        pass  # opening it says what is wrong
    return open_read_only(path, GuardedStore)


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
