"""Processes start at a miss, end with the process that needed them, and know its current state."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.isolation import fork_server

ROOT = Path(__file__).parents[2]
N = 128


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


class Tuned:
    """Tunes a key of its own at each call, and returns what a function gives in the child."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = iter(range(N, 0, -1))

    def in_child(self, look: Callable[[], Any] = os.getpid) -> Any:
        """Tune; return what `look` returned when the measuring child ran the first config."""
        path = str(self._path)
        Path(path).unlink(missing_ok=True)
        parent = os.getpid()

        def hook(arguments: dict[str, Any]) -> None:
            if os.getpid() != parent and not os.path.exists(path):
                with open(path, "w") as file:
                    json.dump(look(), file)

        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (32, 64)]
        n = next(self._keys)
        src, dst = torch.randn(n), torch.zeros(n)
        safetune(configs=configs, key=["n"])(copy_kernel)[grid](dst, src, n)
        assert torch.equal(dst, src)
        assert self._path.exists(), "nothing ran in a child"
        return json.loads(self._path.read_text())


@pytest.fixture
def tuned(tmp_path: Path) -> Tuned:
    return Tuned(tmp_path / "seen.json")


def hold_memory() -> None:
    """Give a child memory that its end takes some time to free."""
    held = sys.__dict__.setdefault("held", bytearray(512 << 20))
    held[:: mmap.PAGESIZE] = b"x" * len(held[:: mmap.PAGESIZE])


class TestTheServer:
    @pytest.mark.fault("starter-thread-ends")
    def test_outlives_the_thread_that_started_it(self, tuned: Tuned, processes: Any) -> None:
        """PR_SET_PDEATHSIG fires when a *thread* ends: neither server nor child may hang on one."""
        for server in processes.servers():
            os.kill(server, signal.SIGKILL)
        pids: list[int] = []
        thread = threading.Thread(target=lambda: pids.append(tuned.in_child()))
        thread.start()
        thread.join()
        (server,) = processes.servers()
        assert processes.children(server) == pids, "the measuring child, idle"

        # A busy machine may take longer than a child waits.
        while len(pids) < 6 and pids[-1] not in pids[:-1]:
            pids.append(tuned.in_child())

        assert processes.servers() == [server]
        assert pids[-1] == pids[-2], "the idle child is used again"

    def test_is_replaced_when_it_is_gone(self, tuned: Tuned, processes: Any) -> None:
        child = tuned.in_child()
        (server,) = processes.servers()
        os.kill(server, signal.SIGKILL)
        assert processes.gone(server, child)

        tuned.in_child()

        (other,) = processes.servers()
        assert other != server
        assert processes.zombies(os.getpid()) == []

    def test_one_that_was_just_stopped_is_replaced(self, tuned: Tuned, processes: Any) -> None:
        """Regression: its idle child, which was still ending, was taken, and nothing was tuned."""
        tuned.in_child(hold_memory)
        (stopped,) = processes.servers()
        fork_server.server.stop()

        tuned.in_child()

        (other,) = processes.servers()
        assert other != stopped

    def test_the_compilers_server_leaves_no_zombie(self, tuned: Tuned, processes: Any) -> None:
        """A kernel in the interpreter needs none, but is the next to come by."""
        fork_server.plain_server.start()
        started = fork_server.plain_server._process
        assert started is not None
        os.kill(started.pid, signal.SIGKILL)
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        assert started.pid in processes.zombies(os.getpid())

        tuned.in_child()

        assert processes.zombies(os.getpid()) == []

    def test_an_idle_child_leaves_and_the_server_stays(self, tuned: Tuned, processes: Any) -> None:
        child = tuned.in_child()
        (server,) = processes.servers()
        assert processes.children(server) == [child]

        assert processes.gone(child, within_s=10.0)

        assert processes.servers() == [server]
        assert tuned.in_child() != child
        assert processes.servers() == [server]
        assert processes.zombies(server) in ([], [child]), "at most until the next request"

    def test_sees_no_gpu_and_is_in_no_group_of_ours(self, tuned: Tuned, processes: Any) -> None:
        def look() -> list[Any]:
            return [os.getsid(0), os.getpgid(0), os.getpid(), torch.cuda.is_initialized()]

        session, group, child, initialized = tuned.in_child(look)
        assert session == group == child
        assert not initialized
        (server,) = processes.servers()
        assert len({os.getsid(0), os.getsid(server), session}) == 3


class TestSurroundings:
    RANKS = {  # noqa: RUF012
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node17",
        "MASTER_PORT": "29500",
        "SLURM_PROCID": "3",
        "OMPI_COMM_WORLD_RANK": "3",
        "PMI_RANK": "3",
        "TORCHELASTIC_RUN_ID": "x",
    }
    OTHERS = {  # noqa: RUF012
        "RANKING": "first",
        "MASTER_PLAN": "none",
        "MY_WORLD_SIZE": "1",
        "LANGUAGE": "tlh",
        "EMPTY": "",
    }

    @pytest.mark.fault("rank-variables")
    def test_a_child_does_not_have_the_variables_of_a_rank(
        self, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In Python's view of the environment and in the C library's, which NCCL and MPI read."""
        for name, value in (self.RANKS | self.OTHERS).items():
            monkeypatch.setenv(name, value)
        names = [*self.RANKS, *self.OTHERS]

        def look() -> list[dict[str, Any]]:
            libc = ctypes.CDLL(None)
            libc.getenv.restype = ctypes.c_char_p
            in_c = {name: libc.getenv(name.encode()) for name in names}
            return [
                dict(os.environ),
                {name: value.decode() for name, value in in_c.items() if value is not None},
            ]

        in_python, in_c = tuned.in_child(look)

        assert in_c == self.OTHERS
        assert in_python["CUDA_VISIBLE_DEVICES"] == "", "the interpreter needs no GPU"
        expected = {name: value for name, value in os.environ.items() if name not in self.RANKS}
        assert in_python["SAFETUNE_MODE"] == "frozen", "a kernel that a hook launches is not tuned"
        own = ("SAFETUNE_MODE", "CUDA_VISIBLE_DEVICES")
        assert {n: v for n, v in in_python.items() if n not in own} == {
            n: v for n, v in expected.items() if n not in own
        }

    def test_changes_after_the_first_tuning_reach_the_next(
        self, tuned: Tuned, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Into a child that is used again, and into a new one."""
        from triton import knobs

        def look() -> dict[str, Any]:
            from triton import knobs

            return {
                "pid": os.getpid(),
                "SAFETUNE_X": os.environ.get("SAFETUNE_X"),
                "gone": os.environ.get("SAFETUNE_GONE"),
                "cache": knobs.cache.dir,
                "path": sys.path,
                "directory": os.getcwd(),
                "knob": knobs.compilation.always_compile,
            }

        monkeypatch.setenv("SAFETUNE_GONE", "still here")
        first = tuned.in_child(look)
        assert first["gone"] == "still here"
        (server,) = processes.servers()
        monkeypatch.delenv("SAFETUNE_GONE")
        monkeypatch.setenv("SAFETUNE_X", "changed")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
        monkeypatch.syspath_prepend(str(tmp_path / "modules"))
        monkeypatch.chdir(tmp_path)
        expected = {
            "SAFETUNE_X": "changed",
            "gone": None,
            "cache": str(tmp_path / "elsewhere"),
            "path": sys.path,
            "directory": str(tmp_path),
            "knob": True,
        }

        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            again = tuned.in_child(look)
            assert processes.gone(again["pid"])
            fresh = tuned.in_child(look)

        assert again["pid"] == first["pid"]
        assert fresh["pid"] != again["pid"]
        assert processes.servers() == [server]
        for seen in (again, fresh):
            assert {name: seen[name] for name in expected} == expected

    def test_a_reused_child_loses_a_knob_that_was_unset(self, tuned: Tuned) -> None:
        from triton import knobs

        def look() -> list[Any]:
            from triton import knobs

            return [os.getpid(), knobs.compilation.disable_line_info]

        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            first = tuned.in_child(look)
        second = tuned.in_child(look)
        assert first[0] == second[0]
        assert (first[1], second[1]) == (True, False)


class TestNoProcess:
    WARM = """
import torch, triton, importlib.util, json, os, subprocess, sys
started = []
for name in ("fork", "forkpty", "posix_spawn"):
    def noting(*args, _call=getattr(os, name), **kwargs):
        started.append(_call.__name__)
        return _call(*args, **kwargs)
    setattr(os, name, noting)
real = subprocess.Popen.__init__
def popen(self, *args, **kwargs):
    started.append("Popen")
    real(self, *args, **kwargs)
subprocess.Popen.__init__ = popen
spec = importlib.util.spec_from_file_location("warm_module", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sizes = list(map(int, sys.argv[2:]))
right, chosen = [], []
for n in sizes:
    right.append(module.call(n))
    chosen.append(module.kernel.best_config.kwargs)
tasks = os.listdir("/proc/self/task")
children = [open(f"/proc/self/task/{task}/children").read().split() for task in tasks]
print(json.dumps({
    "right": right,
    "started": started,
    "children": sum(children, []),
    "server": "safetune.isolation.fork_server" in sys.modules,
    "chosen": chosen,
}))
"""
    MODULE = """
import torch, triton, triton.language as tl
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32, 64)], key=["n"])
@triton.jit
def kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

def call(n):
    src, dst = torch.randn(n), torch.zeros(n)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
    return torch.equal(dst, src)
"""

    def test_a_process_whose_choices_are_stored_starts_none(
        self, fresh_process: Any, tmp_path: Path, records: Any
    ) -> None:
        path = tmp_path / "warm_module.py"
        path.write_text(self.MODULE)
        spec = importlib.util.spec_from_file_location("warm_module_here", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        chosen = []
        for n in (100, 50):
            assert module.call(n)
            chosen.append(module.kernel.best_config.kwargs)
        stored = records.trials()
        assert len(stored) == 6

        result = fresh_process(self.WARM, path, 100, 50, warm=True)

        assert json.loads(result.stdout) == {
            "right": [True, True],
            "chosen": chosen,
            "started": [],
            "children": [],
            "server": False,
        }
        assert records.trials() == stored

        # The observer observes: a key that is not stored starts something.
        result = fresh_process(self.WARM, path, 60, warm=True)
        seen = json.loads(result.stdout)
        assert seen["right"] == [True]
        assert seen["started"]
        assert seen["children"]
        assert seen["server"]
        assert len(records.trials()) == 9
