"""Checks of the settings, the places of choices, and the cache of compiled kernels."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from safetune.cli.doctor.remedies import remedy, shared_path
from safetune.cli.doctor.report import Check, check
from safetune.cli.output import counted
from safetune.cli.stored import check_writable, counts, located, open_store
from safetune.errors import InvalidSetting, SafetuneError, StoreError
from safetune.settings import Mode, Settings, display_url
from safetune.show.words import size

#: A store of many kernels has some 10 MiB; Triton's cache has GiBs.
_LITTLE_SPACE = 1 << 30
_NO_SPACE = 16 << 20

#: A lookup that takes longer is felt at each first launch.
_SLOW_S = 0.5


def settings() -> Iterator[Check]:
    """The SAFETUNE_* variables."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mode = Settings.current().mode
        except InvalidSetting as error:
            yield check("settings", str(error), fail="correct the variable, or unset it")
            return
    for warning in caught:
        yield check(
            "settings", str(warning.message), warn="correct the variable's name, or unset it"
        )
    given = sorted(name for name in os.environ if name.startswith("SAFETUNE_"))
    words = f"mode {mode.value}" + (f"; set: {', '.join(given)}" if given else "")
    fix = "launches do not tune in this mode; unset SAFETUNE_MODE to tune"
    yield check("settings", words, warn=fix * (mode not in (Mode.TUNE, Mode.BACKGROUND)))


def cache_directory() -> Iterator[Check]:
    """The database: its file system, permissions and free space, and whether it is writable."""
    from safetune.store.local import db_files

    current = Settings.current()
    where = located()
    found = where.warning(current) if where.network else str(current.cache_dir)
    fix = "to keep choices on a local disk, set SAFETUNE_CACHE_DIR to a directory on one"
    yield check("cache directory", found, warn=fix * bool(where.network))
    yield from _writable(where.directory)
    if where.directory.exists():
        yield _permissions(where.directory)
        if (aside := db_files.aside(where.database)).exists():
            words = f"safetune could not use an earlier database, and renamed it to {aside}"
            yield check("database set aside", words, warn="delete it when you no longer need it")
    yield _space("space for the database", where.directory)


def _writable(directory: Path) -> Iterator[Check]:
    """Nothing is made where there is no database yet."""
    from safetune.store.local import db_files

    database = directory / db_files.DATABASE_NAME
    if database.exists():
        try:
            check_writable()
        except StoreError as error:
            fix = remedy(error, directory, "set SAFETUNE_CACHE_DIR to another directory")
            yield check("database", str(error), fail=fix)
            return
        store = open_store()
        rows = counts(store)
        nouns = {"key": "key", "trial": "trial", "choice": "choice", "call": "recorded call"}
        parts = [counted(rows.get(table, 0), noun) for table, noun in nouns.items()]
        words = f"{database}, {size(database.stat().st_size)}: {', '.join(parts)}"
        yield check("database", f"{words}; it can be written")
        if damaged := store.corrupt_rows():
            found = f"{counted(damaged, 'damaged row')}, which safetune ignores and measures again"
            yield check("damaged rows", found, warn="look for disk errors in dmesg")
        return
    parent = _existing(directory)
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        fix = remedy(error, parent, "set SAFETUNE_CACHE_DIR to a directory that you can write to")
        yield check("database", f"cannot write to {parent}: {error.strerror}", fail=fix)
    else:
        yield check("database", f"{database} does not exist yet, and can be created")


def _permissions(directory: Path) -> Check:
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        words = f"{directory} has mode {mode:o}: other users can replace the choices"
        return check("permissions", words, warn=f"chmod 700 {directory}")
    return check("permissions", f"mode {mode:o}")


def _space(name: str, directory: Path) -> Check:
    free = shutil.disk_usage(_existing(directory)).free
    words = f"{size(free)} free in {directory}"
    full = "free some space: too little is left to store anything" * (free < _NO_SPACE)
    return check(name, words, fail=full, warn="free some space" * (free < _LITTLE_SPACE))


def triton_cache() -> Iterator[Check]:
    """The directory of compiled kernels, which tuning processes fill."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    parent = _existing(directory)
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        fix = remedy(error, parent, "set TRITON_CACHE_DIR to a directory that you can write to")
        yield check("Triton's cache", f"cannot write to {parent}: {error.strerror}", fail=fix)
        return
    from safetune.store.local import db_files

    if network := db_files.network_of(directory):
        fix = "set TRITON_CACHE_DIR to a directory on a local disk of each node"
        yield check("Triton's cache", f"{directory} is on {network}, which is slow", warn=fix)
    yield _space("Triton's cache", directory)


def shared_store() -> Iterator[Check]:
    """The shared store: whether it answers and is writable, and its latency."""
    from safetune.store.shared.opening import open_shared
    from safetune.store.shared.protocol import Unwritable

    url = located().shared(Settings.current())
    if not url:
        yield check("shared store", "none; set SAFETUNE_SHARED to share choices between nodes")
        return
    words = display_url(url)
    try:
        with contextlib.closing(open_shared(url)) as store:
            store.names("safetune-doctor")
            start = time.perf_counter()
            store.names("safetune-doctor")
            seconds = time.perf_counter() - start
            lease = store.lease("safetune-doctor", socket.gethostname())
            if lease is not None:
                lease.release()
    except Unwritable as error:
        fix = "let this user write there; until then this node does not share its choices"
        yield check("shared store", f"{words}: {error}", warn=fix)
        return
    except SafetuneError as error:
        fix = remedy(error, shared_path(url), "check the URL, the network and the credentials")
        found = f"{words}: {error}; until it is corrected each node tunes for itself"
        yield check("shared store", found, fail=fix)
        return
    words += f", answers in {seconds * 1e3:.3g} ms"
    slow = "use a store that is closer: each kernel's first launch waits for a request"
    yield check("shared store", words, warn=slow * (seconds > _SLOW_S))


def packs() -> Iterator[Check]:
    """The packs of SAFETUNE_PACKS, each read whole, and those of safetune itself."""
    from safetune.store.packs import exchange
    from safetune.store.packs.packs import shipped

    for directory in Settings.current().packs:
        try:
            found = exchange.collect(directory)
        except (SafetuneError, OSError) as error:
            yield check(
                "packs", str(error), fail="export it again, or remove it from SAFETUNE_PACKS"
            )
            continue
        choices = counted(len(found.entries), "choice")
        yield check("packs", f"{directory}: {choices} in {_packs_in(directory)}")
    own = shipped()
    yield check("shipped packs", "none" if own is None else _packs_in(own))


def _packs_in(directory: Path) -> str:
    return counted(len(list(directory.glob("*.json"))), "file")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())
