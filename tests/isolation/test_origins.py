"""Kernels, hooks and grids from anywhere: nothing of the caller's runs a second time in a child."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.isolation import child_handle
from safetune.miss import reporting

N = 100
ROOT = Path(__file__).parents[2]


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def blocks(*sizes: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def copies(kernel: Any, grid: Any = grid, n: int = N) -> bool:
    src, dst = torch.randn(n), torch.zeros(n)
    kernel[grid](dst, src, n)
    return torch.equal(dst, src)


@pytest.fixture(autouse=True)
def _no_warning(request: pytest.FixtureRequest) -> None:
    """A kernel that cannot be tuned is a warning: fail where none is expected."""
    request.node.add_marker(pytest.mark.filterwarnings("error"))


SCRIPT = """
import os, sys
with open(sys.argv[1], "a") as journal:
    journal.write("the body ran\\n")
import torch, triton, triton.language as tl
from dataclasses import dataclass
from safetune import safetune

FACTOR = tl.constexpr(3.0)
PIDS = sys.argv[1] + ".pids"

@dataclass
class Size:
    n: int
    def __eq__(self, other):
        return self.n == other.n

@triton.jit
def scaled(value):
    return value * FACTOR

def noted(arguments):
    with open(PIDS, "a") as pids:
        pids.write(f"{os.getpid()}\\n")
    assert arguments["size"] == Size(100)

@safetune(
    configs=[triton.Config({"BLOCK": b}, pre_hook=noted) for b in (16, 32, 64)], key=["n"]
)
@triton.heuristics({"EVEN": lambda arguments: arguments["size"].n % arguments["BLOCK"] == 0})
@triton.jit
def kernel(dst, src, n, size: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(dst + offset, scaled(tl.load(src + offset, mask=mask)), mask=mask)

src, dst = torch.randn(100), torch.zeros(100)
kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](dst, src, 100, Size(100))
print("right" if torch.equal(dst, src * 3.0) else "wrong", os.getpid())
"""


class TestMain:
    def test_a_script_without_a_main_guard(
        self, fresh_process: Any, tmp_path: Path, records: Any
    ) -> None:
        """Its body runs once; its functions, classes and constants are those of the child, too."""
        script, journal = tmp_path / "script.py", tmp_path / "journal"
        script.write_text(SCRIPT)

        result = fresh_process(script, journal, env={"SAFETUNE_LOG": "quiet"})

        assert result.stderr == ""
        word, pid = result.stdout.split()
        assert word == "right"
        assert journal.read_text() == "the body ran\n"
        assert [trial.label for trial in records.trials()] == ["ok"] * 3
        pids = Path(f"{journal}.pids").read_text().split()
        assert len(set(pids)) == 2
        assert pids.count(pid) == 1, "the choice, here"

    @pytest.mark.parametrize("way", ["-c", pytest.param("-", marks=pytest.mark.full)])
    def test_a_program_that_is_not_a_file_is_tuned(
        self, way: str, tmp_path: Path, records: Any
    ) -> None:
        """There is no source to read. The interpreter needs none, and neither does tuning."""
        journal = tmp_path / "journal"
        command = [sys.executable, *(["-c", SCRIPT] if way == "-c" else ["-"]), str(journal)]
        result = subprocess.run(
            command,
            input=SCRIPT if way == "-" else None,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SAFETUNE_LOG": "quiet"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.stderr == ""
        assert result.stdout.startswith("right")
        assert journal.read_text() == "the body ran\n"
        assert [trial.label for trial in records.trials()] == ["ok"] * 3


NOTEBOOK = '''
import json, os, sys, warnings
os.environ["IPYTHONDIR"] = sys.argv[1]
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.history_manager.enabled = False

def cell(source):
    result = shell.run_cell(source, store_history=True)
    result.raise_error()

cell("""
import os, torch, triton, triton.language as tl
from safetune import safetune
pids = []
def noted(arguments):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\\\n")
""")
shell.user_ns["path"] = sys.argv[2]
KERNEL = """
@triton.jit
def helper(value):
    return value * {factor}

@safetune(configs=[triton.Config({{"BLOCK": b}}, pre_hook=noted) for b in (32, 64)], key=["n"])
@triton.jit
def kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, helper(tl.load(src + offset, mask=offset < n)), mask=offset < n)
"""
CALL = """
src, dst = torch.randn(100), torch.zeros(100)
kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](dst, src, 100)
factors.append((dst / src).mean().round().item())
"""
shell.user_ns["factors"] = []
for factor in (2.0, 2.0, 5.0):
    cell(KERNEL.format(factor=factor))
    cell(CALL)
print(json.dumps({"factors": shell.user_ns["factors"], "pid": os.getpid()}))
'''


def test_cells_of_a_notebook(fresh_process: Any, tmp_path: Path, records: Any) -> None:
    """A cell run again unchanged finds its choice; one that was edited is another kernel."""
    pytest.importorskip("IPython")
    log = tmp_path / "pids"
    env = {"SAFETUNE_LOG": "quiet"}
    result = fresh_process(NOTEBOOK, tmp_path / "ipython", log, env=env, warm=True)
    assert result.stderr == "", result.stdout
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["factors"] == [2.0, 2.0, 5.0]
    trials = records.trials()
    assert [trial.label for trial in trials] == ["ok"] * 4
    assert len({trial.key for trial in trials}) == 2
    assert log.read_text().split().count(str(seen["pid"])) == 3, "one launch here for each call"


MODULE = """
with open({journal!r}, "a") as journal:
    journal.write("imported\\n")

import os
import torch
import triton
import triton.language as tl
from safetune import safetune

PID = os.getpid()
SEEN = {seen!r}

def note(arguments):
    if os.getpid() != PID:
        with open(SEEN, "a") as file:
            file.write(f"{{arguments['BLOCK']}}\\n")

def even(arguments):
    return arguments["n"] % arguments["BLOCK"] == 0

@triton.jit
def twice(value):
    return value + value

@safetune(
    configs=[triton.Config({{"BLOCK": b}}, pre_hook=note) for b in (16, 32)],
    key=["n"],
    post_hook=lambda arguments, exception: note(arguments),
)
@triton.heuristics({{"EVEN": even}})
@triton.jit
def kernel(dst, src, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, twice(tl.load(src + offset, mask=offset < n)), mask=offset < n)

def call(n):
    src, dst = torch.randn(n), torch.zeros(n)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
    return torch.equal(dst, src * 2)
"""


class TestModules:
    @pytest.fixture
    def module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> ModuleType:
        """A module with a side effect, imported once here."""
        path = tmp_path / "with_side_effect.py"
        journal, seen = str(tmp_path / "journal"), str(tmp_path / "seen")
        path.write_text(MODULE.format(journal=journal, seen=seen))
        spec = importlib.util.spec_from_file_location("with_side_effect", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "with_side_effect", module)
        spec.loader.exec_module(module)
        return module

    @pytest.mark.parametrize("importable", [True, False])
    def test_a_module_is_not_imported_again(
        self,
        importable: bool,
        module: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        records: Any,
    ) -> None:
        """Nor does a child need to find it: it may have come from anywhere, under any name."""
        if importable:
            monkeypatch.syspath_prepend(str(tmp_path))
        assert module.call(N)
        assert (tmp_path / "journal").read_text() == "imported\n"
        assert [trial.label for trial in records.trials()] == ["ok", "ok"]
        seen = (tmp_path / "seen").read_text().split()
        assert set(seen) == {"16", "32"}

    def test_a_module_whose_file_is_gone(
        self, module: ModuleType, tmp_path: Path, records: Any
    ) -> None:
        """A deployment may be replaced under a running process."""
        (tmp_path / "with_side_effect.py").unlink()
        assert module.call(N)
        assert [trial.label for trial in records.trials()] == ["ok", "ok"]

    def test_a_hook_may_call_functions_of_another_module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: Any, log: Any
    ) -> None:
        """That module is imported by the child, from where the caller found it."""
        (tmp_path / "library_of_hooks.py").write_text(
            "def fill(arguments):\n    arguments['dst'].fill_(7)\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        import library_of_hooks  # type: ignore[import-not-found]

        write = log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            library_of_hooks.fill(arguments)
            write(arguments["dst"].sum().item())

        try:
            assert copies(safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_kernel))
        finally:
            del sys.modules["library_of_hooks"]
        assert [trial.label for trial in records.trials()] == ["ok", "ok"]
        assert {text for _, text in log.lines()} == {str(7.0 * N)}


class TestScopes:
    def test_a_factory(self, records: Any) -> None:
        """It makes one kernel with two lists of configs: each call tunes what is new to it."""

        def make(factor: float, sizes: tuple[int, ...]) -> Any:
            @safetune(configs=blocks(*sizes), key=["n"])
            @triton.jit
            def kernel(dst, src, n, FACTOR, BLOCK: tl.constexpr):
                offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                value = tl.load(src + offset, mask=offset < n) * FACTOR
                tl.store(dst + offset, value, mask=offset < n)

            return functools.partial(kernel[grid], FACTOR=factor)

        for factor, sizes in ((2.0, (16, 32)), (3.0, (64, 128))):
            src, dst = torch.randn(N), torch.zeros(N)
            make(factor, sizes)(dst, src, N)
            assert torch.equal(dst, src * factor)
        assert records.labels() == dict.fromkeys((16, 32, 64, 128), "ok")

    def test_a_class_body(self, records: Any) -> None:
        class Copy:
            sizes = (16, 32)

            @safetune(configs=blocks(*sizes), key=["n"])
            @triton.jit
            def kernel(dst, src, n, BLOCK: tl.constexpr):  # noqa: N805
                offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

            def __call__(self) -> bool:
                return copies(self.kernel)

        assert Copy()()
        assert records.labels() == {16: "ok", 32: "ok"}

    def test_a_kernel_that_refers_to_itself_and_its_tuner(self, records: Any) -> None:
        """The name in the kernel's globals is the tuner, which must not travel with it."""
        lock = threading.Lock()
        child_handle.idle.drop()

        def prune(configs: Any, named: Any, **_: Any) -> Any:
            with lock:
                return configs

        kernel = safetune(
            configs=blocks(16, 32),
            key=["n"],
            prune_configs_by={"early_config_prune": prune},
        )(copy_kernel)
        copy_kernel.fn.__globals__["tuned_copy_kernel"] = kernel
        try:
            assert copies(kernel)
        finally:
            del copy_kernel.fn.__globals__["tuned_copy_kernel"]
        assert records.labels() == {16: "ok", 32: "ok"}

    def test_two_kernels_of_one_file_in_one_child(self, records: Any) -> None:
        """The second stands above the first and is less indented."""

        @safetune(configs=blocks(16, 32), key=["n"])
        @triton.jit
        def indented_kernel(dst, src, n, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

        assert copies(indented_kernel)
        assert copies(safetune(configs=blocks(64, 128), key=["n"])(copy_kernel))
        assert records.labels() == dict.fromkeys((16, 32, 64, 128), "ok")


class Hook:
    """A hook that is an object, with a method that is one too."""

    def __init__(self, write: Callable[[object], None]) -> None:
        self.write = write

    def __call__(self, arguments: dict[str, Any]) -> None:
        self.write("object")

    def method(self, arguments: dict[str, Any]) -> None:
        self.write("method")


def module_hook(arguments: dict[str, Any], write: Callable[[object], None]) -> None:
    write("module")


class TestHooks:
    @pytest.mark.parametrize(
        "kind", ["lambda", "closure", "nested", "partial", "object", "method", "module"]
    )
    def test_hooks_of_every_kind_run_in_the_child(self, kind: str, log: Any, records: Any) -> None:
        write = log.writer()
        hook = Hook(write)

        def closure(arguments: dict[str, Any]) -> None:
            write("closure")

        def nested(arguments: dict[str, Any]) -> None:
            def inner() -> Callable[[object], None]:
                return write

            inner()("nested")

        hooks = {
            "lambda": lambda arguments: write("lambda"),
            "closure": closure,
            "nested": nested,
            "partial": functools.partial(module_hook, write=write),
            "object": hook,
            "method": hook.method,
            "module": lambda arguments: module_hook(arguments, write),
        }
        configs = blocks(16, 32, pre_hook=hooks[kind])
        assert copies(safetune(configs=configs, key=["n"])(copy_kernel))
        assert records.labels() == {16: "ok", 32: "ok"}
        word = "module" if kind == "partial" else kind
        assert {text for _, text in log.lines()} == {word}
        here = [pid for pid, _ in log.lines() if pid == os.getpid()]
        assert len(here) == 1
        assert len(log.lines()) > 6

    def test_do_bench_is_a_closure(self, log: Any, records: Any) -> None:
        """It runs in the child, on whatever it captured; its word is the time."""
        write, scale = log.writer(), torch.full((1,), 0.5)
        current: dict[str, int] = {}

        def hook(arguments: dict[str, Any]) -> None:
            current["BLOCK"] = arguments["BLOCK"]

        def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
            launch()
            write(quantiles)
            return [scale.item() / current["BLOCK"] for _ in quantiles]

        kernel = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"], do_bench=bench)(
            copy_kernel
        )
        assert copies(kernel)
        assert records.labels() == {16: "ok", 32: "ok"}
        assert kernel.best_config.kwargs == {"BLOCK": 32}
        assert os.getpid() not in {pid for pid, _ in log.lines()}

    def test_a_heuristic_that_cannot_be_sent_is_computed_by_the_caller(self, records: Any) -> None:
        lock = threading.Lock()

        def warps(_: dict[str, Any]) -> int:
            with lock:
                return 1

        heuristic = triton.heuristics({"num_warps": warps})(copy_kernel)
        assert copies(safetune(configs=blocks(16, 32), key=["n"])(heuristic))
        assert records.labels() == {16: "ok", 32: "ok"}

    @pytest.mark.parametrize("where", ["pre_hook", "post_hook", "config", "do_bench"])
    def test_hooks_that_cannot_be_sent_cost_a_warning_and_the_choice(
        self, where: str, records: Any, processes: Any
    ) -> None:
        lock = threading.Lock()

        def hook(*_: Any, **__: Any) -> Any:
            with lock:
                return 1.0

        options: dict[str, Any] = {}
        configs = blocks(16, 32)
        if where == "config":
            configs = blocks(16, 32, pre_hook=hook)
        else:
            options[where] = hook
        tuner = safetune(configs=configs, key=["n"], **options)(copy_kernel)

        with pytest.warns(UserWarning, match="not tuned") as caught:
            assert copies(tuner)

        (text,) = (text for text in (str(each.message) for each in caught) if "not tuned" in text)
        assert "copy_kernel is not tuned for n=100" in text
        assert "runs with its first config" in text
        assert "cannot pickle '_thread.lock' object" in text
        assert "hook" in text
        assert 'isolation="inline"' in text
        assert tuner.best_config is configs[0]
        assert copies(tuner), "and no second warning"

    def test_an_argument_that_cannot_be_sent(self) -> None:
        @triton.jit
        def kernel(dst, src, n, extra: tl.constexpr, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

        tuner = safetune(configs=blocks(16, 32), key=["n"])(kernel)
        src, dst = torch.randn(N), torch.zeros(N)
        with pytest.warns(UserWarning, match="kernel is not tuned.*_thread.lock"):
            tuner[grid](dst, src, N, threading.Lock())
        assert torch.equal(dst, src)

    def test_hooks_that_cannot_be_rebuilt_cost_a_warning(self) -> None:
        """It can be sent, but raises where it is unpacked."""
        tuner = safetune(
            configs=blocks(16, 32), key=["n"], pre_hook=functools.partial(module_hook, Unfoldable())
        )(copy_kernel)
        src, dst = torch.randn(N), torch.zeros(N)
        with pytest.warns(UserWarning, match="copy_kernel is not tuned.*only at home"):
            tuner[grid](dst, src, N)
        assert tuner.best_config is tuner.configs[0]


class Unfoldable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("only at home")


class TestTensorsOfHooks:
    def test_tensors_of_hooks_are_copied(self, log: Any) -> None:
        """A hook reads the caller's values and writes to the child's."""
        write = log.writer()
        parent = os.getpid()
        table = torch.arange(10.0)
        before = table.clone()

        def hook(arguments: dict[str, Any]) -> None:
            if os.getpid() != parent:
                write(table.sum().item())
                table.fill_(-1)

        tuner = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_kernel)
        assert copies(tuner)
        assert len(tuner.configs_timings) == 2
        assert torch.equal(table, before)
        assert log.lines()[0][1] == "45.0"
        assert "-10.0" in [text for _, text in log.lines()], "between launches that are timed"
        assert [text for _, text in log.lines()].count("45.0") >= 2, "each config starts anew"

    def test_alias_the_arguments_that_they_alias_here(self, log: Any) -> None:
        write = log.writer()
        parent = os.getpid()
        src, dst = torch.randn(N), torch.zeros(N)
        half = dst[: N // 2]

        def hook(arguments: dict[str, Any]) -> None:
            if os.getpid() != parent:
                half.fill_(3.0)
                write([arguments["dst"][0].item(), arguments["dst"][N - 1].item() == 3.0])

        tuner = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_kernel)
        tuner[grid](dst, src, N)
        assert torch.equal(dst, src)
        assert len(tuner.configs_timings) == 2
        assert {text for _, text in log.lines()} == {"[3.0, False]"}


class TestGrids:
    def test_close_over_anything(self, records: Any) -> None:
        """They are evaluated here, so a lock, a module and a tensor are all the same to them."""
        lock, sizes, module = threading.Lock(), torch.tensor([N]), importlib.util
        calls: list[int] = []

        def closing(meta: dict[str, Any]) -> tuple[int]:
            with lock:
                assert module is importlib.util
                calls.append(os.getpid())
                return (triton.cdiv(int(sizes[0]), meta["BLOCK"]),)

        assert copies(safetune(configs=blocks(16, 32), key=["n"])(copy_kernel), closing)
        assert records.labels() == {16: "ok", 32: "ok"}
        assert set(calls) == {os.getpid()}

    def test_a_grid_that_raises_for_one_config_costs_that_config(self, records: Any) -> None:
        """For this call: a stored outcome is the answer of a child."""

        def picky(meta: dict[str, Any]) -> tuple[int]:
            if meta["BLOCK"] == 32:
                raise ArithmeticError("thirty-two does not divide")
            return grid(meta)

        kernel = safetune(configs=blocks(16, 32, 64), key=["n"])(copy_kernel)
        assert copies(kernel, picky)
        assert records.labels() == {16: "ok", 64: "ok"}
        assert len(kernel.configs_timings) == 3
        assert kernel.configs_timings[kernel.configs[1]] == [math.inf] * 3

        begun = reporting.tunings.begun
        kernel.cache.clear()
        assert copies(kernel, picky)
        assert reporting.tunings.begun == begun, "the choice is stored, and nothing is left to try"
        kernel.cache.clear()
        assert copies(kernel)
        assert reporting.tunings.begun == begun + 1, "with this grid one config is"
        assert records.labels() == {16: "ok", 32: "ok", 64: "ok"}
