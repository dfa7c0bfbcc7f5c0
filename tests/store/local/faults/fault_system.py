"""What the system does to a process that writes: kills, failing calls, no rights."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sqlite_utils  # noqa: F401 - imported before the forks
from tally import NotHere, Tally, choice, fault, filled, run, trial

from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.store import Store

_KILL = "signal=SIGKILL"
_NO_SPACE, _BROKEN, _TOO_MANY, _READ_ONLY = (
    f"error={name}" for name in ("ENOSPC", "EIO", "EMFILE", "EROFS")
)

#: The calls with which SQLite and safetune reach the files, and how each of them may end.
_EFFECTS = {
    "pwrite64": (_NO_SPACE, _BROKEN, _READ_ONLY, _KILL),
    "fdatasync": (_NO_SPACE, _BROKEN, _KILL),
    "fsync": (_NO_SPACE, _BROKEN, _KILL),
    "ftruncate": (_NO_SPACE, _BROKEN, _READ_ONLY, _KILL),
    "openat": (_NO_SPACE, _BROKEN, _TOO_MANY, _READ_ONLY, _KILL),
    "mkdir": (_NO_SPACE, _BROKEN, _READ_ONLY, _KILL),
    "unlink": (_BROKEN, _READ_ONLY, _KILL),
    "fchown": (_BROKEN, _READ_ONLY),
    "pread64": (_BROKEN,),
    "newfstatat": (_BROKEN,),
    "statfs": (_BROKEN,),
    "fcntl": (_BROKEN,),
    "mmap": (_BROKEN,),
    "access": (_BROKEN,),
    "close": (_BROKEN,),
}

#: A run in a process of its own: argv is the directory; prints what it was told is stored.
_WRITER = f"""
import json, sys, warnings, logging
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from tally import *
directory = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as caught, heard() as log:
    warnings.simplefilter("always", UserWarning)
    store = lookup.open_lookup(settings(directory)).store
    before = sum(store.choice(f"key-{{n}}") == choice(n) for n in range(40))
    told = []
    for number in range(100, 103):
        store.put_key(key(number))
        store.put_trial(trial(number, "x" * 3000))
        put = store.put_choice(choice(number))
        if put != choice(number) or store.choice(f"key-{{number}}") != put:
            raise SystemExit(f"a choice of this run is not found: {{number}}")
        if store.lost is None and store.path is not None:
            told.append(number)
    memory = store.path is None or store.lost is not None
print(json.dumps([before, told, memory, [str(each.message) for each in caught], log.lines]))
"""


def _write(directory: Path, *before: str, **options) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", _WRITER, str(directory)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def _check(tally: Tally, what: str, directory: Path, done, before: int) -> bool:
    """Judge a run in a process of its own; return whether it went on in memory."""
    tally.tried += 1
    if done.returncode:
        tally.wrong.append(f"{what}: exit {done.returncode}: {done.stderr.strip()[-200:]}")
        return False
    found, told, in_memory, warned, logged = json.loads(done.stdout.splitlines()[-1])
    tally.expect(len(warned) + len(logged) <= 2, f"{what}: told {warned} {logged}")
    tally.expect(not in_memory or bool(warned or logged), f"{what}: in memory without a word")
    tally.expect(found == before or bool(warned or logged), f"{what}: a miss without a word")
    after = run(directory, [*range(before), *told])
    tally.lose(before + len(told) - len(after.found), what)
    for number, record in after.found.items():
        tally.expect(record == choice(number), f"{what}: another choice")
    tally.expect(after.warnings == [], f"{what}: damaged afterwards: {after.warnings}")
    return in_memory


@fault("killed", "SIGKILL at any point of a write", "every confirmed row is found", 12, 400)
def killed(place: Path, times: int) -> Tally:
    """Forks that write rows of several pages; killed shortly after a number of acknowledgements."""
    tally, draw = Tally(), random.Random(1)
    directory = place / "store"
    acknowledged: set[int] = set()
    for number in range(times):
        tally.tried += 1
        receive, send = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(receive)
            _write_until_killed(directory, send, number * 1000)
        os.close(send)
        with os.fdopen(receive) as pipe:
            lines = [pipe.readline() for _ in range(draw.randrange(6))]
            for _ in range(draw.randrange(3000)):
                pass
            os.kill(pid, signal.SIGKILL)
            lines += pipe.read().rpartition("\n")[0].splitlines()
        os.waitpid(pid, 0)
        acknowledged |= {int(line) for line in lines}
        store = Store.open(directory)
        stored = {int(each.config_digest) for each in store.trials("key-0")}
        store.close()
        tally.lost += len(acknowledged - stored)
        tally.expect(len(stored - acknowledged) <= number + 1, "rows that no process wrote")
        acknowledged |= stored
    return tally


def _write_until_killed(directory: Path, send: int, first: int) -> None:
    import dataclasses

    store = Store.open(directory)
    for number in range(first, first + 1000):
        record = dataclasses.replace(trial(0, "x" * 5000), config_digest=str(number))
        store.put_trial(record)
        os.write(send, f"{number}\n".encode())
    os._exit(0)


@fault(
    "failing-call",
    "ENOSPC, EIO, EMFILE, EROFS or SIGKILL at the n-th system call on the store's files, every n",
    "rows survive; a warning and memory if writing fails",
    16,
    100_000,
)
def failing_call(place: Path, times: int) -> Tally:
    return _failing(place, times, filled(place / "original").parent)


@fault(
    "failing-first-call",
    "the same at the n-th call of a process that creates the store",
    "a store, or a warning and memory",
    8,
    100_000,
)
def failing_first_call(place: Path, times: int) -> Tally:
    (place / "original").mkdir(mode=0o700, parents=True)
    return _failing(place, times, place / "original")


def _failing(place: Path, times: int, original: Path) -> Tally:
    """At most this many, spread over all; each in a directory of its own, a process per core."""
    if shutil.which("strace") is None:
        raise NotHere("strace is not installed")
    tally = Tally()
    traced = _write(
        shutil.copytree(original, place / "0"),
        *("strace", "-f", "-o", str(place / "log"), *_on(place / "0")),
    )
    if traced.returncode:
        raise NotHere(f"strace does not work: {traced.stderr.strip()[-200:]}")
    text = (place / "log").read_text()
    counts = Counter(re.findall(r"^\d+ +(\w+)\(", text, re.MULTILINE))
    tally.expect(set(counts) <= set(_EFFECTS), f"nothing fails in {set(counts) - set(_EFFECTS)}")
    plan = [
        (call, effect, number)
        for call, effects in _EFFECTS.items()
        for effect in effects
        for number in range(1, counts[call] + 1)
    ]
    step = max(1, -(-len(plan) // times))
    cases = [(original, place / f"{'-'.join(map(str, case))}", *case) for case in plan[::step]]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for each in pool.imap_unordered(_injected, cases):
            tally.add(each)
    return tally


def _injected(case: tuple[Path, Path, str, str, int]) -> Tally:
    """Have one system call of a writer fail."""
    original, directory, call, effect, number = case
    tally = Tally()
    before = 40 if (original / DATABASE_NAME).exists() else 0
    shutil.copytree(original, directory)
    inject = f"inject={call}:{effect}:when={number}"
    strace = ("strace", "-f", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    try:
        done = _write(directory, *strace, *_on(directory))
    except subprocess.TimeoutExpired as error:
        return Tally(1, wrong=[f"{inject}: it takes over {error.timeout:.0f} s"])
    if effect == _KILL:
        tally.tried += 1
        after = run(directory, range(before))
        tally.lose(before - len(after.found), inject)
        tally.expect(after.goes_on and not after.warnings, f"{inject}: {after.warnings}")
    else:
        _check(tally, inject, directory, done, before)
    shutil.rmtree(directory)
    return tally


def _on(directory: Path) -> list[str]:
    paths = [directory, *(directory / f"{DATABASE_NAME}{log}" for log in ("", "-wal", "-shm"))]
    return [word for path in paths for word in ("-P", str(path))]


@fault("file-size-limit", "files cannot grow any more", "rows survive; in memory", 6, 60)
def file_size_limit(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        filled(place / str(number))
        limit = 4096 * (1 + number * 60 // times)

        def limited(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        done = _write(place / str(number), preexec_fn=limited)
        _check(tally, f"at most {limit} bytes", place / str(number), done, 40)
    return tally


@fault("no-descriptors", "files cannot be opened any more", "rows survive; in memory", 4, 40)
def no_descriptors(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        directory = place / str(number)
        filled(directory)

        def taken(number: int = number, directory: Path = directory) -> bool:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            while True:
                try:
                    last = os.open("/dev/null", os.O_RDONLY)
                except OSError:
                    break
            for spare in range(number % 4):
                os.close(last - spare)
            done = run(directory, range(40))
            return done.goes_on and (len(done.found) == 40 or bool(done.warnings or done.log))

        _in_fork(tally, f"{number % 4} descriptors left", taken)
        tally.lost += 40 - len(run(directory, range(40)).found)
    return tally


def _in_fork(tally: Tally, what: str, holds: Callable[[], bool]) -> None:
    tally.tried += 1
    if not (pid := os.fork()):
        code = 3
        try:
            code = 0 if holds() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tally.expect(status == 0, f"{what}: ended with {status}")


def _mounted(place: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands, and then a writer on $1, where mounts are its own."""
    if shutil.which("unshare") is None:
        raise NotHere("unshare is not installed")
    shell = ["unshare", "-m", "sh", "-e", "-c", f'{commands}\nexec "$2" -c "$3" "$1"', "sh"]
    done = subprocess.run(
        [*shell, str(place), sys.executable, _WRITER],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if re.search(r"unshare failed|mount: .*(permission|denied|superuser)", done.stderr):
        raise NotHere(f"a file system cannot be mounted here: {done.stderr.strip()[-100:]}")
    return done


@fault("read-only", "the directory is read-only", "its rows are used; in memory", 2, 20)
def read_only(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        directory = place / str(number)
        filled(directory)
        if os.geteuid() == 0:
            done = _mounted(directory, 'mount --bind "$1" "$1"\nmount -o remount,ro,bind "$1"')
        else:
            directory.chmod(0o500)
            done = _write(directory)
            directory.chmod(0o700)
        in_memory = _check(tally, "read-only", directory, done, 40)
        found, told = json.loads(done.stdout.splitlines()[-1])[:2] if done.stdout else (0, [])
        tally.expect(in_memory and not told, "it was written to")
        tally.expect(found == 40, f"{found} of 40 choices are used")
    return tally


@fault("no-home", "HOME is not set, or does not exist", "in memory; one warning", 2, 10)
def no_home(place: Path, times: int) -> Tally:
    """No directory `~` is made in the working directory either."""
    tally = Tally()
    for number in range(times):

        def homeless(number: int = number) -> bool:
            os.chdir(place)
            for name in ("HOME", "XDG_CACHE_HOME", "SAFETUNE_CACHE_DIR"):
                os.environ.pop(name, None)
            if number % 2 or os.geteuid():
                os.environ["HOME"] = "/proc/nowhere"
            else:
                os.setuid(54321)  # whom no password file knows
            import tally as module

            from safetune.settings import Settings

            module.settings = lambda directory: Settings.current()
            done = run(place, range(3))
            return done.goes_on and done.in_memory and len(done.warnings) == 1

        place.mkdir(exist_ok=True)
        place.chmod(0o777)
        _in_fork(tally, "no home", homeless)
        tally.expect(not (place / "~").exists(), "a directory named ~ was made")
    return tally
