"""The layers in which a choice is looked for: memory, the local store, the shared store, packs.

A store that cannot be opened costs one warning, and a store that fails later one line in the log
(`GuardedStore`); the run goes on in memory, and writes again once that is possible.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
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
from safetune.store.local.store import Store
from safetune.store.records import precedence

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.settings import Settings
    from safetune.store.packs.packs import Packs
    from safetune.store.records import ChoiceRecord, RelatedChoice, TrialRecord

Method = TypeVar("Method", bound=Callable[..., Any])

_lookups: dict[tuple[Path, str, tuple[Path, ...], bool], Lookup] = {}
_opening = forks.lock()


def _guarded_write(method: Method) -> Method:
    @functools.wraps(method)
    def write(self: GuardedStore, *records: Any) -> Any:
        try:
            self.write_unsent()
            stored = _tried(Damaged, method, self, *records)
            self._reported.discard(("write",))
            return stored
        except RecordError as error:
            for record in records if len(records) > 1 else ():
                write(self, record)  # the others are stored
            if len(records) == 1:
                logger.warning("a record is not stored: %s", error)
            return records[0]
        except StoreError as error:
            self._report("write", "%s; continuing in memory", error)
        try:
            stored = method(self.spare(), *records)
        except StoreError as error:
            logger.warning("a record is not stored: %s", error)
            return records[0]
        self._unsent.append(functools.partial(method, self, *records))
        return stored

    return cast("Method", write)


def _guarded_read(method: Method, merged: Callable[[list[Any]], Any]) -> Method:
    """`merged` makes one answer of what is stored and what is in memory, or of neither."""

    @functools.wraps(method)
    def read(self: GuardedStore, *arguments: Any) -> Any:
        answers = []
        self._try_to_write_unsent()
        try:
            answers.append(_tried(StoreError, method, self, *arguments))
            self._reported.discard(("read",))
        except StoreError as error:
            self._report("read", "%s; continuing without its choices", error)
        spare = self._spare  # another thread may have written all of it meanwhile
        if spare is not None:
            try:
                answers.append(method(spare, *arguments))
            except StoreError as error:
                logger.warning("%s", error)
        return answers[0] if len(answers) == 1 else merged(answers)

    return cast("Method", read)


def _tried(again: type[StoreError], method: Callable[..., Any], *arguments: Any) -> Any:
    """Try once more after some errors: opening it again repairs damage or moves it aside."""
    with contextlib.suppress(again):
        return method(*arguments)
    return method(*arguments)


def _trials(answers: list[list[TrialRecord]]) -> list[TrialRecord]:
    trials = itertools.chain(*answers)  # one in memory replaces the stored one
    merged = {(trial.generation, trial.config_digest): trial for trial in trials}
    return sorted(merged.values(), key=lambda trial: trial.generation)


def _choice(answers: list[ChoiceRecord | None]) -> ChoiceRecord | None:
    return min(filter(None, answers), key=precedence, default=None)


class GuardedStore(Store):
    """A store whose tuning methods never raise; those of the command line raise as in `Store`.

    What cannot be written goes to memory, and is written as soon as that is possible again; where
    the database cannot be read, only memory is left. Each is logged once. A record that no store
    would keep is logged and dropped.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._spare: Store | None = None
        self._unsent: deque[Callable[[], object]] = deque()

    def spare(self) -> Store:
        """Return the store in memory that holds what could not be written."""
        spare = self._spare
        if spare is None:
            forks.register("database", at_exit=self._try_to_write_unsent)
            spare = self._spare = Store.in_memory()
        return spare

    def write_unsent(self) -> None:
        """Write what could not be written before; raises `StoreError`."""
        with contextlib.suppress(IndexError):  # also where another thread has taken the last one
            while True:
                write = self._unsent.popleft()
                try:
                    write()
                except StoreError:
                    self._unsent.appendleft(write)
                    raise
        if self._spare is not None:
            self._spare = None
            logger.info("the store %s is written to again", self.path)

    def _try_to_write_unsent(self) -> None:
        with contextlib.suppress(StoreError):
            self.write_unsent()

    def _report(self, what: str, text: str, error: StoreError) -> None:
        """Log an error, once until this works again."""
        if (what,) not in self._reported:
            self._reported.add((what,))
            logger.warning(text, error)

    put_key = _guarded_write(Store.put_key)
    put_trial = _guarded_write(Store.put_trial)
    put_choice = _guarded_write(Store.put_choice)
    put_call = _guarded_write(Store.put_call)
    count_calls = _guarded_write(Store.count_calls)
    trials = _guarded_read(Store.trials, _trials)
    choice = _guarded_read(Store.choice, _choice)
    related = _guarded_read(Store.related, lambda answers: list(itertools.chain(*answers)))


class Lookup:
    """The choices of this process, and the stores in which it looks for missing ones.

    A choice that the process has launched stays in its memory: a newer generation of another
    process is never picked up in the middle of a run. `KeyState` knows this for one tuner; here it
    holds for all tuners of a kernel, `torch.compile` and `resolve()`.
    """

    def __init__(self, store: GuardedStore, directories: Sequence[Path] | None = None) -> None:
        """Look in this store, and in the packs of these directories and of safetune, if any."""
        self.store = store
        self._directories = directories
        self._memory: dict[tuple[str, str], ChoiceRecord] = {}

    def find(
        self, key: TuningKey, declared: str, among: Collection[str] | None = None
    ) -> ChoiceRecord | None:
        """Return the choice of the first layer that has one; the caller checks and remembers it.

        The local store is first brought up to date with the shared one, at most once a minute.

        Args:
            declared: digest over the list of configs that the choice was made from.
            among: digests of the configs that pruning leaves, None for all. Pruning may read what
                is not in the key, so a call may have an older choice than another.
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
            from safetune.store.shared.protocol import space_of

            space = space_of(key)
            self.store.shared.refresh(space)
            yield self.store.choice(key.digest, declared, among)
            # Also what the local store could not keep of the shared one, or does not have yet.
            yield self.store.shared.choice(space, key.digest, declared)
        try:
            found = self._packs.find(key, declared)
        except OSError as error:  # without a descriptor left, no module can be imported
            logger.warning("packs are not read: %s", error)
        else:
            yield found

    def related(self, key: TuningKey) -> list[RelatedChoice]:
        """Return the choices for the key's kernel and device, of any call and toolchain."""
        stored = self.store.related(key.kernel.digest, key.device.digest)
        return [*stored, *self._packs.related(key)]

    def remember(self, choice: ChoiceRecord) -> None:
        """Keep a valid choice in memory, in place of an earlier one."""
        self._memory[choice.key, choice.declared] = choice

    def forget(self, key: str, declared: str) -> None:
        """Drop a choice from memory; the layers below keep it."""
        self._memory.pop((key, declared), None)

    @forks.cached_property
    def _packs(self) -> Packs:
        from safetune.store.packs.packs import Packs, shipped  # not needed if the store has all

        if self._directories is None:
            return Packs(())
        last = shipped()
        return Packs(self._directories if last is None else (*self._directories, last))


def open_lookup(settings: Settings) -> Lookup:
    """Return this process's `Lookup` for the settings, which stays usable after a fork.

    Under `Mode.FROZEN` the store is only read. Warns once if the database cannot be opened, and
    choices are kept in memory, or if it is not in the cache directory (`location`).

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

            backend = open_shared(shared, node=None if frozen else where.database)
        store, problem = _opened(where.database, frozen, settings.wait_s)
        if backend is not None:
            store.shared = SharedLayer(
                backend, store.connection, writes=not frozen, wait_s=settings.wait_s
            )
        lookup = _lookups[identity] = Lookup(store, settings.packs)
    problems = [where.warning(settings)]
    if problem is not None:
        until = ", for this process only" if store.path is None else " until it is free"
        problems.append(f"{problem}; choices are kept in memory{until}")
    if not shared and settings.world_size > settings.local_world_size:
        problems.append(
            f"{settings.world_size} processes, {settings.local_world_size} of them on "
            "this node, and no SAFETUNE_SHARED: each node tunes for itself, and they may launch "
            "different configs until safetune.sync()"
        )
    for text in filter(None, problems):
        warn(text, StoreWarning)
    return lookup


def _opened(
    path: Path | None, frozen: bool, wait_s: float
) -> tuple[GuardedStore, StoreError | None]:
    """Return the store of a database, or one in memory where it cannot be used, and why not.

    A process that is `frozen` writes nothing: where there is no database yet, it has an empty one.
    """
    if path is None:
        return GuardedStore.in_memory(), None
    if frozen:
        try:
            path.lstat()
            db_files.check(path)
        except (FileNotFoundError, NotADirectoryError):
            return GuardedStore.in_memory(), None
        except OSError:
            pass  # opening the database reports the error
        except StoreError as error:
            return GuardedStore.in_memory(), error
    store = GuardedStore((ReadOnlyConnection if frozen else Connection)(path, wait_s))
    try:
        store.connection.open()
    except Locked as error:
        store._reported |= {("read",), ("write",)}  # the warning says it
        return store, error
    except StoreError as error:
        return GuardedStore.in_memory(), error
    return store, None
