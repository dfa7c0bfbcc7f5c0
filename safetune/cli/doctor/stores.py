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

from rich.filesize import decimal

from safetune.cli.doctor.remedies import remedy
from safetune.cli.doctor.report import Check, check
from safetune.cli.output import counted
from safetune.cli.stored import check_writable, counts, located, open_store
from safetune.errors import InvalidSetting, SafetuneError, StoreError
from safetune.settings import Mode, Settings, display_url

#: A store of many kernels has some 10 MiB; Triton's cache has GiBs.
_LITTLE_SPACE = 1 << 30

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
        fix = "correct the variable's name, or unset it"
        yield check("settings", str(warning.message), warn=fix)
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
    if (aside := db_files.aside(where.database)).exists():
        words = f"safetune could not use an earlier database, and renamed it to {aside}"
        yield check("database set aside", words, warn="delete it when you no longer need it")
    if where.database.exists():
        yield from _database(where.database)
        yield _permissions(where.directory)
        yield _space("space for the database", where.directory, "SAFETUNE_CACHE_DIR")
    else:
        words = f"{where.database} does not exist yet, "
        yield _space("database", where.directory, "SAFETUNE_CACHE_DIR", words)


def _database(database: Path) -> Iterator[Check]:
    try:
        check_writable()
    except StoreError as error:
        fix = remedy(error, database.parent, "set SAFETUNE_CACHE_DIR to another directory")
        yield check("database", str(error), fail=fix)
        return
    store = open_store()
    rows = counts(store)
    nouns = {"key": "key", "trial": "trial", "choice": "choice", "call": "recorded call"}
    parts = [counted(rows.get(table, 0), noun) for table, noun in nouns.items()]
    words = f"{database}, {decimal(database.stat().st_size)}: {', '.join(parts)}"
    yield check("database", f"{words}; it can be written")
    if damaged := store.corrupt_rows():
        found = f"{counted(damaged, 'damaged row')}, which safetune ignores and measures again"
        yield check("damaged rows", found, warn="look for disk errors in dmesg")


def _permissions(directory: Path) -> Check:
    mode = stat.S_IMODE(directory.stat().st_mode)
    is_open = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
    words = f"mode {mode:o}" + ": other users can replace the choices" * is_open
    return check("permissions", words, warn=f"chmod 700 {directory}" * is_open)


def _space(name: str, directory: Path, variable: str, words: str = "") -> Check:
    """Whether files can be made in a directory, or where it would be made, and how much fits."""
    there = next(each for each in (directory, *directory.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        fix = remedy(error, there, f"set {variable} to a directory that you can write to")
        return check(name, f"cannot write to {there}: {error.strerror}", fail=fix)
    free = shutil.disk_usage(there).free
    words = f"{words}{decimal(free)} free in {directory}"
    return check(name, words, warn="free some space" * (free < _LITTLE_SPACE))


def triton_cache() -> Iterator[Check]:
    """The directory of compiled kernels, which tuning processes fill."""
    from safetune.store.local import db_files

    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    if network := db_files.network_of(directory):
        fix = "set TRITON_CACHE_DIR to a directory on a local disk of each node"
        yield check("Triton's cache", f"{directory} is on {network}, which is slow", warn=fix)
    yield _space("Triton's cache", directory, "TRITON_CACHE_DIR")


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
        fix = remedy(
            error, words.removeprefix("file://"), "check the URL, the network and the credentials"
        )
        found = f"{words}: {error}; until it is corrected each node tunes for itself"
        yield check("shared store", found, fail=fix)
        return
    words += f", answers in {seconds * 1e3:.3g} ms"
    slow = "use a store that is closer: each kernel's first launch waits for a request"
    yield check("shared store", words, warn=slow * (seconds > _SLOW_S))


def packs() -> Iterator[Check]:
    """The packs of SAFETUNE_PACKS, each read whole."""
    from safetune.store.packs import exchange

    for directory in Settings.current().packs:
        try:
            found = exchange.collect(directory)
        except (SafetuneError, OSError) as error:
            fix = "export it again, or remove it from SAFETUNE_PACKS"
            yield check("packs", str(error), fail=fix)
        else:
            yield check("packs", f"{directory}: {counted(len(found.entries), 'choice')}")
