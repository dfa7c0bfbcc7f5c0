"""What every test gets: a store and a compile cache of its own, and a check for left processes.

Runs before any test module is imported, so it decides whether kernels run on a GPU or in Triton's
interpreter: Triton reads TRITON_INTERPRET when a kernel is decorated.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import IO, Any

import pytest

from tests import selection
from tests.ready import is_ready
from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[1]

#: How long a fresh process may take unless a test says otherwise. Importing torch and Triton takes
#: 5 s with a cold page cache, and more while the other test process does the same.
FRESH_PROCESS_TIMEOUT_S = 120.0

#: How long children may take to be gone after the last test; an idle measuring child takes 2 s.
LEAVING_TIMEOUT_S = 10.0

#: In the environment of everything that this test process starts, so that an orphan is known too.
LEAK_TAG = f"{os.getpid()}-{uuid.uuid4().hex}"

#: Asks the driver, as CUDA_VISIBLE_DEVICES, containers and WSL (which has no /dev/nvidia0) all have
#: their say in it.
_COUNT_DEVICES = """
import ctypes, os, sys
count = ctypes.c_int(0)
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit("no CUDA driver (libcuda.so.1) on this machine")
if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
    sys.exit("the CUDA driver shows no device")
"""


def _why_no_gpu() -> str:
    """Return why tests cannot use a GPU here, or nothing when they can.

    The driver is asked by another process: after cuInit, no fork of this one could use CUDA. Torch
    is not asked at all: importing it takes seconds, and imports Triton.
    """
    probe = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _COUNT_DEVICES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines()
        return lines[-1] if lines else f"asking the CUDA driver ended with {probe.returncode}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set; `make test-gpu` runs these"
    return ""


NO_GPU_REASON = _why_no_gpu()
if NO_GPU_REASON:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["PYTEST_LEAK_TAG"] = LEAK_TAG

# Inductor's pool of compile workers lives as long as its process: it would be one of those left.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Two test processes on two cores: threads that wait for the next operation only take them away.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

# A shell has its background jobs ignore SIGINT, and so would do all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # the environment of `make test-internals` may lack it
    import hypothesis

    # Two test processes on two cores: how long one example took says nothing about the code.
    hypothesis.settings.register_profile("safetune", deadline=None)
    hypothesis.settings.load_profile("safetune")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the full suite runs; the longest files come first."""
    config.stash[selection.COLLECTED] = list(items)
    runs, left_out = selection.select(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = selection.longest_first(runs)
    _skip_without_gpus(items)


def _skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say why there is none."""
    if NO_GPU_REASON:
        skip = pytest.mark.skip(reason=f"needs a GPU: {NO_GPU_REASON}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
        return
    for item in items:
        if item.get_closest_marker("two_gpus") and _cuda_devices() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def device() -> str:
    """The torch device on which kernels of this session run."""
    return "cpu" if NO_GPU_REASON else "cuda"


@pytest.fixture(scope="session", autouse=True)
def triton_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compile cache per test process: what is in the user's own cannot hide a compile."""
    directory = tmp_path_factory.mktemp("triton-cache")
    os.environ["TRITON_CACHE_DIR"] = str(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def _interpreter_looks_for_builtins_once() -> None:
    """At each launch and each call of a device function, Triton's interpreter goes through all
    members of its language for those to replace: a third of what an interpreted test takes.
    """
    if "triton" not in sys.modules:
        return
    import inspect
    import types

    import triton.language as tl
    from triton.runtime import interpreter

    descriptors = getattr(tl.core, "tensor_descriptor_base", tl.tensor)
    places = (tl, tl.core, tl.math, tl.tensor, descriptors)
    builtins = {
        id(place): [name for name, found in inspect.getmembers(place) if tl.core.is_builtin(found)]
        for place in places
    }

    def getmembers(place: Any, *predicate: Any) -> list[tuple[str, Any]]:
        if id(place) in builtins and not predicate:
            return [(name, getattr(place, name)) for name in builtins[id(place)]]
        return inspect.getmembers(place, *predicate)

    interpreter.inspect = types.SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test's SAFETUNE_CACHE_DIR, not made yet; every other SAFETUNE_* variable is unset."""
    for name in [name for name in os.environ if name.startswith("SAFETUNE_")]:
        monkeypatch.delenv(name)
    directory = tmp_path_factory.mktemp("cache") / "safetune"
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _no_launch_is_counted_after_its_test() -> Iterator[None]:
    yield
    if counts := sys.modules.get("safetune.frontend.call_counts"):
        counts.end()


@pytest.fixture
def harmless(cache_dir: Path, device: str) -> Any:
    """What holds after every fault: `tests/faults/harmless.py`."""
    name = "safetune_tests_harmless"
    if name not in sys.modules:
        spec = spec_from_file_location(name, ROOT / "tests/faults/harmless.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name].Harmless(cache_dir, device)


FreshProcess = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fresh_process(cache_dir: Path) -> FreshProcess:
    """A function that runs Python code, or a script, in a fresh interpreter and returns the result.

    The environment is this process's, so the store and the compile cache are the test's; `env` adds
    to it, and a value of None takes a name out. The working directory is `cwd`, or one that holds
    nothing. Code finds the safetune that this process would import.

    A process that outlives `timeout_s`, or ends otherwise than with `ends` (None: any), fails the
    test, with what it printed; everything it started in its session is killed.

    `warm` is for a program that would import torch and Triton first anyway, and of which the test
    does not ask how they are imported: it is forked off a process that has them already.
    """

    def run(
        code_or_script: str | Path, *args: object, cwd: Path | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        if cwd is None:
            cwd = cache_dir.parent / "cwd"
            cwd.mkdir(exist_ok=True)
        return run_python(code_or_script, *args, cwd=cwd, **options)

    return run


def run_python(
    code_or_script: str | Path,
    *args: object,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = FRESH_PROCESS_TIMEOUT_S,
    warm: bool = False,
    ends: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Do what `fresh_process` says; for a fixture of the session, which has no `cache_dir`."""
    what = [str(code_or_script)] if isinstance(code_or_script, Path) else ["-c", code_or_script]
    program = [*what, *map(str, args)]
    start = _start_warm if warm and NO_GPU_REASON else _start_fresh
    done = _run(start, program, _environment(env), cwd, timeout_s)
    assert ends in (None, done.returncode), f"{done.stdout}\n{done.stderr}"
    return done


#: Starts a program with an environment, a directory, and files for its output.
_Start = Callable[
    [list[str], dict[str, str], Path, IO[bytes], IO[bytes]], tuple[int, Callable[[float], int]]
]


def _start_fresh(
    program: list[str], env: dict[str, str], cwd: Path, stdout: IO[bytes], stderr: IO[bytes]
) -> tuple[int, Callable[[float], int]]:
    process = subprocess.Popen(
        [sys.executable, *program],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    return process.pid, process.wait


_warm: dict[str | None, WarmPython] = {}


def _start_warm(
    program: list[str], env: dict[str, str], cwd: Path, stdout: IO[bytes], stderr: IO[bytes]
) -> tuple[int, Callable[[float], int]]:
    interpret = env.get("TRITON_INTERPRET")
    if interpret not in _warm:
        _warm[interpret] = WarmPython(env)
    warm = _warm[interpret]
    return warm.start(program, env, cwd, stdout, stderr), warm.wait


def _stop_warm() -> None:
    while _warm:
        _warm.popitem()[1].close()


def _run(
    start: _Start, program: list[str], env: dict[str, str], cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    # Files and not pipes: a grandchild that keeps a pipe open would keep the reader waiting.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid, wait = start(program, env, cwd, stdout, stderr)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                code = wait(timeout_s)
        finally:
            if code is None:
                os.killpg(pid, signal.SIGKILL)
                wait(FRESH_PROCESS_TIMEOUT_S)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if code is None:
        pytest.fail(
            f"a fresh process did not end within {timeout_s:g} s: {program}\n"
            f"--- its stdout\n{texts[0]}\n--- its stderr\n{texts[1]}"
        )
    return subprocess.CompletedProcess(program, code, *texts)


def _environment(changes: Mapping[str, str | None] | None) -> dict[str, str]:
    env = dict(os.environ)
    spec = find_spec("safetune")
    if spec is not None and spec.submodule_search_locations:
        package_parent = str(Path(spec.submodule_search_locations[0]).parent)
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [package_parent, env.get("PYTHONPATH", "")])
        )
    for name, value in (changes or {}).items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


@dataclass(frozen=True)
class Running:
    """A process that the tests started, itself or through others."""

    pid: int
    parent: int
    command: str

    @property
    def stays_on_purpose(self) -> bool:
        """Python's own helper, or the fork server, which waits for the next miss."""
        if "multiprocessing.resource_tracker" in self.command:
            return True
        return self.parent == os.getpid() and "safetune.child.server_main" in self.command


def stop_servers() -> None:
    """End this process's fork servers, if it has any, and with them every child."""
    if fork_server := sys.modules.get("safetune.isolation.fork_server"):
        fork_server.plain_server.stop()
        fork_server.server.stop()


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left(triton_cache_dir: Path) -> Iterator[None]:
    """Fail after the last test when something that the tests started is still running."""
    yield
    if sys.platform != "linux":
        return
    _stop_warm()
    left = _end_of([process for process in _running() if not process.stays_on_purpose])
    stop_servers()
    left += _end_of(
        [process for process in _running() if "resource_tracker" not in process.command]
    )
    if left:
        listing = "\n".join(f"  {process.pid}: {process.command}" for process in left)
        pytest.fail(f"running {LEAVING_TIMEOUT_S:g} s after the last test, now killed:\n{listing}")


def _running() -> list[Running]:
    """Return this process's running descendants, and orphans among those that it started."""
    tag = f"PYTEST_LEAK_TAG={LEAK_TAG}".encode()
    found: dict[int, Running] = {}
    tagged: set[int] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        try:
            state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (
                (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            environment = (directory / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if state not in "ZX":
            found[pid] = Running(pid, int(parent), command.strip())
            if tag in environment:
                tagged.add(pid)
    return [
        process
        for pid, process in found.items()
        if pid != os.getpid() and (pid in tagged or os.getpid() in _ancestors(pid, found))
    ]


def _ancestors(pid: int, processes: Mapping[int, Running]) -> Iterator[int]:
    while pid in processes:
        pid = processes[pid].parent
        yield pid


def ended(*pids: int, within_s: float = 20.0) -> bool:
    """Wait until these processes have ended; False when one has not in that time."""
    deadline = time.monotonic() + within_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not is_ready(handle, max(0.0, deadline - time.monotonic())):
                return False
        finally:
            os.close(handle)
    return True


def _end_of(processes: list[Running]) -> list[Running]:
    """Wait for these to end, on the ends themselves; kill and return those that do not."""
    watched: dict[int, Running] = {}
    poller = select.poll()
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            watched[descriptor] = process
            poller.register(descriptor, select.POLLIN)
    left = dict(watched)
    deadline = time.monotonic() + LEAVING_TIMEOUT_S
    while left and (remaining_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(remaining_s * 1000):
            poller.unregister(descriptor)
            del left[descriptor]
    for descriptor in watched:
        if descriptor in left:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
    return list(left.values())
