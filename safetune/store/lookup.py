"""Where a choice is looked for, and in which order: memory, the local store, the shared one, packs.

A store that cannot be opened costs one warning, one that fails later one line in the log
(`GuardedStore`), and the run goes on in memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetune import forks
from safetune.errors import StoreError
from safetune.settings import Mode
from safetune.store.local import db_files
from safetune.store.local.fail_safe import GuardedStore
from safetune.store.local.store import DATABASE_NAME, Store

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.settings import Settings
    from safetune.store.packs.packs import Packs
    from safetune.store.records import ChoiceRecord, RelatedChoice
    from safetune.store.shared.protocol import SharedStore

Layer = Callable[["TuningKey", str], "ChoiceRecord | None"]

_lookups: dict[tuple[Path, str, tuple[Path, ...], bool], Lookup] = {}
_opening = threading.Lock()


class Lookup:
    """The choices of this process, and where the missing ones come from.

    What a process has launched stays in its memory: another process's newer generation is never
    picked up in the middle of a run.
    """

    def __init__(self, store: Store, directories: Sequence[Path] | None = None) -> None:
        """Look in this store, and in the packs of these directories and of safetune itself.

        Args:
            directories: None for no packs at all.
        """
        self.store = store
        self._directories = directories
        self._memory: dict[tuple[str, str], ChoiceRecord] = {}
        self._layers: tuple[Layer, ...] = (
            self._in_memory,
            self._in_store,
            self._in_shared,
            self._in_packs,
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

    def related(self, key: TuningKey) -> list[RelatedChoice]:
        """Return the choices for the key's kernel and device, whatever else they are for."""
        return [
            *self.store.related(key.kernel.digest, key.device.digest),
            *self._packs.related(key),
        ]

    def adopt(self, choice: ChoiceRecord) -> None:
        """Keep a valid choice in memory, over the one that was there."""
        self._memory[choice.key, choice.declared] = choice

    def forget(self, key: str, declared: str) -> None:
        """Drop a choice from memory; the layers below keep it."""
        self._memory.pop((key, declared), None)

    def _in_memory(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        return self._memory.get((key.digest, declared))

    def _in_store(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        """The local store, brought up to date with the shared one, at most once a minute."""
        if self.store.shared is not None:
            self.store.shared.refresh(_space_of(key))
        return self.store.choice(key.digest, declared)

    def _in_shared(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        """What the local store could not keep of the shared one, or does not have of it yet."""
        shared = self.store.shared
        return None if shared is None else shared.choice(_space_of(key), key.digest, declared)

    def _in_packs(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        return self._packs.find(key, declared)

    @functools.cached_property
    def _packs(self) -> Packs:
        from safetune.store.packs.packs import Packs, shipped  # not where the store has all

        if self._directories is None:
            return Packs(())
        last = shipped()
        return Packs(self._directories if last is None else (*self._directories, last))


def open_lookup(settings: Settings) -> Lookup:
    """Return this process's `Lookup` for the settings.

    One object per process, directory of the store, shared store, packs, and whether the store is
    only read, as it is under `Mode.FROZEN`; usable after a fork. Where the database cannot be
    opened there is one warning, and its store is in memory. That store's tuning methods never raise
    (`GuardedStore`).

    Raises:
        InvalidSetting: nothing here can open SAFETUNE_SHARED. Never `StoreError`.
    """
    directory = settings.cache_dir
    if not directory.parts[0].startswith("~"):  # there is no home, which opening it says
        directory = Path(os.path.abspath(directory))
    frozen = settings.mode is Mode.FROZEN
    identity = (directory, settings.shared, settings.packs, frozen)
    with _opening:
        if identity in _lookups:
            return _lookups[identity]
        backend = _backend(settings.shared)
        try:
            store, problem = (_read_only if frozen else GuardedStore.open)(directory), None
        except StoreError as error:
            store, problem = GuardedStore.in_memory(), error
        if backend is not None:
            from safetune.store.shared.layer import SharedLayer

            store.shared = SharedLayer(backend, store.connection, writes=not frozen)
        lookup = _lookups[identity] = Lookup(store, settings.packs)
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


def _space_of(key: TuningKey) -> str:
    from safetune.store.shared.record import space_of

    return space_of(key)


def _backend(url: str) -> SharedStore | None:
    if not url:
        return None
    from safetune.store.shared.url import open_shared

    return open_shared(url)


def _read_only(directory: Path) -> GuardedStore:
    """The store of a process that writes nothing; where there is none yet, an empty one."""
    from safetune.store.local.read_only import open_read_only

    path = directory / DATABASE_NAME
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return GuardedStore.in_memory()
    except OSError:
        pass  # opening it says what is wrong
    with contextlib.suppress(OSError):
        db_files.check(path)
    return open_read_only(path, GuardedStore)


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


forks.register("database", after_in_child=_after_fork_in_child)
