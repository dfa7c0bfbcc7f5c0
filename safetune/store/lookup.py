"""The layers that a lookup searches for a choice: memory, the local store, the shared store, packs.

A store that cannot be opened costs one warning, and a later failure one line in the log
(`GuardedStore`); the run continues with the choices in its memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from safetune import forks
from safetune.errors import StoreError, StoreWarning
from safetune.messages import logger, warn
from safetune.settings import Mode
from safetune.store.local import db_files
from safetune.store.local.connection import Connection, ReadOnlyConnection
from safetune.store.local.db_files import Damaged, Locked
from safetune.store.local.rows import RecordError
from safetune.store.local.store import IMPORTED, Store
from safetune.store.records import ChoiceRecord, precedence, space_of

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.settings import Settings
    from safetune.store.packs.packs import Packs
    from safetune.store.records import RelatedChoice

Method = TypeVar("Method", bound=Callable[..., Any])

_lookups: dict[tuple[Path, str, tuple[Path, ...], bool], Lookup] = {}
_opening = forks.lock()


def _guarded_write(method: Method) -> Method:
    @functools.wraps(method)
    def write(self: GuardedStore, *records: Any, **how: Any) -> Any:
        try:
            return _tried(Damaged, functools.partial(method, **how), self, *records)
        except RecordError as error:
            for record in records if len(records) > 1 else ():
                write(self, record, **how)  # the others are stored
            if len(records) == 1:
                logger.warning("could not store a record: %s", error)
        except StoreError as error:
            self.lost = self.lost or error
            self._unstored.update(
                ((c.key, c.declared), c) for c in records if type(c) is ChoiceRecord
            )
            self._report("write", "%s; this process keeps its choices in memory", error)
        return records[0]

    return cast("Method", write)


def _guarded_read(method: Method, nothing: Callable[[], Any]) -> Method:
    @functools.wraps(method)
    def read(self: GuardedStore, *arguments: Any) -> Any:
        try:
            return _tried(StoreError, method, self, *arguments)
        except StoreError as error:
            self._report("read", "%s; continuing without its choices", error)
            return nothing()

    return cast("Method", read)


def _tried(again: type[StoreError], method: Callable[..., Any], *arguments: Any) -> Any:
    """Try once more after some errors: opening a damaged database again sets it aside."""
    with contextlib.suppress(again):
        return method(*arguments)
    return method(*arguments)


class GuardedStore(Store):
    """A store whose tuning methods never raise; those for the command line raise like `Store`'s.

    If it cannot be written, other and later processes lack the record, and a choice stays in
    memory. If it cannot be read, it counts as empty. The first error of each is logged.
    """

    #: Why the first of the records that could not be written is lost; None if all are stored.
    lost: StoreError | None = None

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._unstored: dict[tuple[str, str], ChoiceRecord] = {}

    def _report(self, what: str, text: str, error: StoreError) -> None:
        """Log the first error."""
        if (what,) not in self._reported:
            self._reported.add((what,))
            logger.warning(text, error)

    put_key = _guarded_write(Store.put_key)
    put_trial = _guarded_write(Store.put_trial)
    drop_in_flight = _guarded_write(Store.drop_in_flight)
    put_choice = _guarded_write(Store.put_choice)
    put_call = _guarded_write(Store.put_call)
    count_calls = _guarded_write(Store.count_calls)
    trials = _guarded_read(Store.trials, list)
    related = _guarded_read(Store.related, list)
    origin = _guarded_read(Store.origin, str)
    pinned = _guarded_read(Store.pinned, lambda: None)
    _stored_choice = _guarded_read(Store.choice, lambda: None)

    def choice(
        self, key: str, declared: str | None = None, among: Collection[str] | None = None
    ) -> ChoiceRecord | None:
        """Return the choice like `Store.choice`, including one that could not be stored."""
        stored: ChoiceRecord | None = self._stored_choice(key, declared, among)
        if not self._unstored:
            return stored
        choices = [
            choice
            for choice in self._unstored.values()
            if choice.key == key and declared in (None, choice.declared)
            if among is None or choice.config_digest in among
        ]
        return min([*choices, *filter(None, [stored])], key=precedence, default=None)


class Lookup:
    """The choices of this process, and the stores in which it looks for missing ones.

    A choice that the process has launched stays in its memory: another process's newer generation
    is never picked up in the middle of a run. `KeyState` ensures this for one tuner; this class for
    all tuners of a kernel, `torch.compile` and `resolve()`.
    """

    def __init__(self, store: GuardedStore, directories: Sequence[Path] | None = None) -> None:
        """Look in this store, and in the packs of these directories and of safetune, if any."""
        self.store = store
        self._directories = directories
        self._memory: dict[tuple[str, str], ChoiceRecord] = {}
        self._told: set[tuple[str, str]] = set()

    def find(
        self, key: TuningKey, declared: str, among: Collection[str] | None = None
    ) -> ChoiceRecord | None:
        """Return the choice from the first layer that has one; the caller checks and remembers it.

        A process's first lookup waits until the local store is up to date with the shared one.

        Args:
            declared: digest of the config list that the choice was made from.
            among: digests of the configs that pruning leaves, None for all. Pruning may read values
                outside the key, so one call may have an older choice than another.
        """
        found = self._layers(key, declared, among)
        return next((c for c in found if c and (among is None or c.config_digest in among)), None)

    def _layers(
        self, key: TuningKey, declared: str, among: Collection[str] | None
    ) -> Iterator[ChoiceRecord | None]:
        yield self._memory.get((key.digest, declared))
        if self.store.shared is None:
            yield self.store.choice(key.digest, declared, among)
        else:
            self.store.shared.refresh(space_of(key))
            # Of one generation the one that was pulled goes first: all nodes launch that.
            pulled = self.store.shared.choice(key.digest, declared)
            stored = self.store.choice(key.digest, declared, among)
            choices = filter(None, [pulled, stored])
            yield from sorted(choices, key=lambda c: (not c.pinned, -c.generation))
        if not self._may_have_packs:
            return
        try:
            found = self._packs.find(key, declared, among)
        except OSError as error:  # without a descriptor left, no module can be imported
            logger.warning("could not read packs: %s", error)
        else:
            yield found

    def tell_unused(
        self, key: TuningKey, declared: str, among: Collection[str], is_tuned: bool
    ) -> None:
        """Log, once per kernel and place, that a choice for a key was moved here without effect.

        Args:
            is_tuned: the key is tuned now; otherwise a choice from another list may be the
                fallback.
        """
        for where, choice in self._moved(key):
            if choice.declared != declared and not choice.pinned:
                why = "it was made from another list of configs or another `same_bits`" * is_tuned
            else:
                why = "its config is not declared, or pruned" * (choice.config_digest not in among)
            if why and (key.kernel.name, where) not in self._told:
                self._told.add((key.kernel.name, where))
                logger.warning(
                    "%s: the choice for %s %s is not used: %s", key.kernel.name, key, where, why
                )

    def _moved(self, key: TuningKey) -> Iterator[tuple[str, ChoiceRecord]]:
        """Yield the choices for a key that people have put here: in packs, or by an import."""
        if self._may_have_packs:
            with contextlib.suppress(OSError):
                yield from ((f"in {path}", choice) for path, choice in self._packs.of_key(key))
        if pinned := self.store.pinned(key.digest):
            yield "that is pinned in the store", pinned
        stored = self.store.choice(key.digest)
        if stored is not None and self.store.origin(stored) == IMPORTED:
            yield "that was imported into the store", stored

    def is_pulled(self, key: TuningKey) -> bool:
        """Whether the choices of the shared store, if there is one, have been pulled."""
        return self.store.shared is None or self.store.shared.puller(space_of(key)).is_complete

    def after_pull(self, key: TuningKey, work: Callable[[], object]) -> None:
        """Call `work` once they have been pulled, possibly from another thread."""
        if self.store.shared is not None:
            self.store.shared.puller(space_of(key)).after_first(work)

    def related(self, key: TuningKey) -> list[RelatedChoice]:
        """Return the choices for the key's kernel and device, of any call and toolchain."""
        stored = self.store.related(key.kernel.digest, key.device.digest)
        return [*stored, *(self._packs.related(key) if self._may_have_packs else ())]

    def remember(self, choice: ChoiceRecord) -> None:
        """Keep a valid choice in memory; it replaces an earlier one."""
        self._memory[choice.key, choice.declared] = choice

    def forget(self, key: str, declared: str) -> None:
        """Drop a choice from memory; the layers below keep it."""
        self._memory.pop((key, declared), None)

    @property
    def _may_have_packs(self) -> bool:
        """Whether SAFETUNE_PACKS is set, or kernels with installed packs are loaded."""
        return bool(self._directories) or "safetune.kernels" in sys.modules

    @forks.cached_property
    def _packs(self) -> Packs:
        from safetune.store.packs.packs import Packs, shipped  # not needed if the store has all

        return Packs(()) if self._directories is None else Packs(self._directories, shipped())


def open_lookup(settings: Settings) -> Lookup:
    """Return this process's `Lookup` for the settings; it stays usable after a fork.

    Under `Mode.FROZEN` the store is only read. Warns once if the database cannot be opened, so that
    choices stay in memory, or if it is not in the cache directory (`location`).

    Raises:
        InvalidSetting: no kind of shared store can open SAFETUNE_SHARED. Never `StoreError`.
    """
    frozen = settings.mode is Mode.FROZEN
    identity = (settings.cache_dir, settings.shared, settings.packs, frozen)
    with _opening:
        if identity in _lookups:
            return _lookups[identity]
        backend, where = None, db_files.locate(settings, writes=not frozen)
        if shared := where.shared(settings):
            from safetune.store.shared.layer import SharedLayer
            from safetune.store.shared.opening import open_shared

            backend = open_shared(shared)
        store, problem = _opened(where.database, frozen, settings.wait_s)
        if backend is not None:
            store.shared = SharedLayer(backend, store.connection, writes=not frozen)
        lookup = _lookups[identity] = Lookup(store, settings.packs)
    problems = [where.warning(settings)]
    if problem is not None:
        until = ", for this process only" if store.path is None else " until it is free"
        problems.append(f"{problem}; choices are kept in memory{until}")
    if not shared and settings.world_size > settings.local_world_size:
        problems.append(
            f"this job has {settings.world_size} processes, {settings.local_world_size} of them on "
            "this node, but SAFETUNE_SHARED is not set: each node tunes for itself, and they may "
            "launch different configs until safetune.sync()"
        )
    for text in filter(None, problems):
        warn(text, StoreWarning)
    return lookup


def _opened(path: Path, frozen: bool, wait_s: float) -> tuple[GuardedStore, StoreError | None]:
    """Return the store of a database, or one in memory where it cannot be used, and why not.

    A process that is `frozen` writes nothing: where there is no database yet, it has an empty one.
    """
    store = GuardedStore((ReadOnlyConnection if frozen else Connection)(path, wait_s))
    try:
        if frozen:
            with contextlib.suppress(OSError):  # opening the database reports it
                db_files.check(path)
        store.connection.open()
    except Locked as error:
        store._reported |= {("read",), ("write",)}  # the warning says it
        return store, error
    except StoreError as error:
        is_missing = isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))
        return GuardedStore.in_memory(), None if frozen and is_missing else error
    return store, None
