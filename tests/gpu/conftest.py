"""What the GPU tests share: the kernels, what the store says, and what this process compiled."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import stored_rows

HERE = Path(__file__).resolve().parent

#: The name under which a test records what it has seen, where it makes no claim.
SEEN = "seen"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what tests have recorded as seen, whether they passed or not."""
    lines = [
        f"{report.nodeid}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == SEEN
    ]
    if lines:
        terminalreporter.section("seen, without a claim")
        for line in lines:
            terminalreporter.write_line(line)


def load_module(name: str, path: Path) -> ModuleType:
    """Import a file under a name of our own, as `import` would."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def import_file() -> Callable[[str, Path], ModuleType]:
    """A function that imports a file under a name of the test's own."""
    return load_module


@pytest.fixture(scope="session", autouse=True)
def driver() -> Any:
    """Triton's driver, made beforehand: a launch that has it made prepares for no later launch."""
    from triton.runtime import driver

    return driver.active


@pytest.fixture
def kernels() -> ModuleType:
    """The module `kernels.py` beside this file, imported anew: no kernel has been compiled yet."""
    return load_module("gpu_test_kernels", HERE / "kernels.py")


@pytest.fixture(scope="session")
def raw_graph() -> Any:
    """The class `RawGraph` of `raw_graph.py` beside this file."""
    return load_module("gpu_raw_graph", HERE / "raw_graph.py").RawGraph


@pytest.fixture(scope="session")
def scripts() -> Path:
    """The folder of programs that tests run in fresh processes."""
    return HERE / "scripts"


@pytest.fixture(autouse=True)
def _unaffected_by_other_tests(device: str) -> Iterator[None]:
    """No test's captures see the garbage of another, or what is left where one could not end."""
    if device == "cpu":
        yield
        return
    import torch

    gc.collect()  # a graph that is destroyed during a capture makes that one invalid
    torch.cuda.init()
    stream, generator = torch.cuda.current_stream(), torch.cuda.default_generators[0]
    yield
    # A capture that could not be ended leaves torch's stream and random numbers in it.
    torch.cuda.set_stream(stream)
    generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
    gc.collect()
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Trial:
    """One row of the trial table, as far as these tests read it."""

    key: str
    config: str
    verdict: str
    detail: str
    message: str
    created: float

    @property
    def label(self) -> str:
        return f"{self.verdict}({self.detail})" if self.verdict == "died" else self.verdict


@pytest.fixture
def trials(cache_dir: Path) -> Callable[[], list[Trial]]:
    """A function that returns every trial in the test's store, oldest first."""

    def read() -> list[Trial]:
        columns = "key, config, verdict, detail, message, created"
        return [Trial(*row) for row in _query(cache_dir, f"SELECT {columns} FROM trial")]

    return read


@pytest.fixture
def choices(cache_dir: Path) -> Callable[[], list[tuple[str, int]]]:
    """A function that returns (key, configs measured) of every choice in the test's store."""
    return lambda: _query(cache_dir, "SELECT key, measured FROM choice")


def _query(cache_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = stored_rows.connected(cache_dir / "safetune.db")
    with contextlib.closing(connection):
        return connection.execute(f"{statement} ORDER BY rowid").fetchall()


@dataclass
class Parent:
    """What Triton has done in this process since the test began.

    Attributes:
        compiled: a line for each kernel that Triton made here, from its disk cache or anew.
        loaded: the name of each binary that was loaded onto a device here.
        binaries_before: what was in the disk cache just before each of those compilations.
    """

    cache: Path
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    binaries_before: list[set[str]] = field(default_factory=list)

    def binaries(self) -> set[str]:
        """Return the cubins in Triton's disk cache now."""
        return {str(path.relative_to(self.cache)) for path in self.cache.glob("*/*.cubin")}

    def before_compile(self, **_: Any) -> None:
        self.binaries_before.append(self.binaries())

    def after_compile(self, **event: Any) -> None:
        self.compiled.append(event["repr"])

    def on_load(self, module: Any, function: Any, name: str, group: Any, digest: str) -> None:
        self.loaded.append(name)


@pytest.fixture
def parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, triton_cache_dir: Path
) -> Iterator[Parent]:
    """This process's compilations and loads, by Triton's hooks, with a compile cache of its own."""
    from triton import knobs

    seen = Parent(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(seen.cache))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", seen.before_compile)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", seen.after_compile)
    knobs.runtime.kernel_load_start_hook.add(seen.on_load)
    yield seen
    knobs.runtime.kernel_load_start_hook.remove(seen.on_load)


@pytest.fixture
def tunings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """A function that returns the kernels tuned since its last call, one name per tuning.

    By what TRITON_PRINT_AUTOTUNING prints; a call that finds its choice prints nothing.
    """
    from triton import knobs

    monkeypatch.setattr(knobs.autotuning, "print", True)
    before = "Triton autotuning for function "

    def since() -> list[str]:
        lines = capfd.readouterr().out.splitlines()
        return [line.removeprefix(before).rstrip(",") for line in lines if line.startswith(before)]

    return since


def synchronize() -> None:
    """Wait for the GPU; nothing to wait for in the interpreter."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture
def context_answers(device: str) -> Callable[[], None]:
    """A function that fails unless this process's CUDA context still works."""

    def check() -> None:
        import torch

        synchronize()
        assert torch.arange(1000, device=device).sum().item() == 499500
        assert torch.cuda.is_available() == (device == "cuda")

    return check


@dataclass(frozen=True)
class TuningProcess:
    """The fork server, or a child that it forked."""

    pid: int
    parent: int


def tuning_processes() -> list[TuningProcess]:
    """Return what of safetune runs below this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if (
                state not in "ZX"
                and b"safetune.child.server_main" in (folder / "cmdline").read_bytes()
            ):
                found.append(TuningProcess(int(folder.name), int(parent)))
    servers = {process.pid for process in found if process.parent == os.getpid()}
    return [process for process in found if process.pid in servers or process.parent in servers]


@pytest.fixture
def children_end() -> Callable[[float], list[int]]:
    """A function that waits for the forked children's ends; returns those still alive after a time.

    The fork server itself stays: it has no CUDA context, and the next miss needs it.
    """

    def wait(seconds: float) -> list[int]:
        poller = select.poll()
        handles = {}
        for process in tuning_processes():
            if process.parent != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    handle = os.pidfd_open(process.pid)
                    handles[handle] = process.pid
                    poller.register(handle, select.POLLIN)
        alive = dict(handles)
        deadline = time.monotonic() + seconds
        while alive and (remaining := deadline - time.monotonic()) > 0:
            for handle, _ in poller.poll(remaining * 1000):
                poller.unregister(handle)
                del alive[handle]
        for handle in handles:
            os.close(handle)
        return list(alive.values())

    return wait
