"""Processes come at a miss and go with whoever needed them; what they are told is up to date."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
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


# What scripts of fresh processes begin with.
PRELUDE = """
import ctypes, json, os, resource, sys, warnings
import torch, triton, triton.language as tl
from safetune import safetune

@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)

def tuner(*hooks, **options):
    configs = [triton.Config({"BLOCK": 16 << i}, pre_hook=hook) for i, hook in enumerate(hooks)]
    return safetune(configs=configs, key=["n"], **options)(copy_kernel)

def run(kernel, n):
    src, dst = torch.randn(n), torch.zeros(n)
    kernel[grid](dst, src, n)
    return torch.equal(dst, src)

def children(pid="self"):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found
"""


class TestTheParentEnds:
    HANGS = """
fifo, how = sys.argv[1:]
def hang(arguments):
    with open(fifo, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    if how == "gil":
        ctypes.PyDLL(None).sleep(1000)
    while True:
        pass
kernel = tuner(None, hang, run_timeout_s=1000.0)
try:
    run(kernel, 100)
except KeyboardInterrupt:
    print("interrupted", len(children(children()[0])), "children of the fork server")
    print("then", run(tuner(None, None), 99))
"""

    @pytest.mark.parametrize("how", ["python", "gil"])
    def test_killed_in_the_middle_of_a_tuning(
        self, how: str, start: Any, fifo: Any, tmp_path: Path, processes: Any, records: Any
    ) -> None:
        """SIGKILL, with a config that hangs: neither it nor the fork server outlives the parent."""
        script = tmp_path / "hangs.py"
        script.write_text(PRELUDE + self.HANGS)
        parent = start(script, fifo.path, how)
        child, server = map(int, fifo.line().split())
        assert processes.servers(parent.pid) == [server]
        assert child in processes.children(server)

        parent.kill()

        assert processes.gone(server, child)
        assert records.labels() == {16: "ok"}, "what was measured is kept"

    def test_interrupted_in_the_middle_of_a_tuning(
        self, start: Any, fifo: Any, tmp_path: Path, processes: Any
    ) -> None:
        """Ctrl-C reaches the whole foreground group; the server is not in it, and is used again."""
        script = tmp_path / "hangs.py"
        script.write_text(PRELUDE + self.HANGS)
        parent = start(script, fifo.path, "python")
        child, server = map(int, fifo.line().split())
        assert os.getpgid(server) != parent.pid

        os.killpg(parent.pid, signal.SIGINT)

        stdout, stderr = parent.communicate(timeout=60)
        assert stdout.splitlines() == [
            "interrupted 0 children of the fork server",
            "then True",
        ], stderr
        assert parent.returncode == 0
        assert processes.gone(child, server)

    def test_ends_by_itself(self, start: Any, fifo: Any, tmp_path: Path, processes: Any) -> None:
        """No process is left behind, and leaving does not wait for the idle child."""
        script = tmp_path / "ends.py"
        script.write_text(
            PRELUDE + "fifo = sys.argv[1]\n"
            "def tell(arguments):\n"
            "    if os.getpid() != parent:\n"
            "        with open(fifo, 'w') as file:\n"
            "            file.write(f'{os.getpid()} {os.getppid()}\\n')\n"
            "parent = os.getpid()\n"
            "run(tuner(tell, None), 100)\n"
        )
        parent = start(script, fifo.path)
        child, server = map(int, fifo.line().split())
        stdout, stderr = parent.communicate(timeout=60)
        assert (parent.returncode, stdout, stderr) == (0, "", "")
        assert not processes.exists(server), "the parent has waited for it"
        assert processes.gone(child)


class TestTheServer:
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

        pids.append(tuned.in_child())

        assert processes.servers() == [server]
        assert pids[1] == pids[0], "the idle child is used again"

    def test_is_replaced_when_it_is_gone(self, tuned: Tuned, processes: Any) -> None:
        child = tuned.in_child()
        (server,) = processes.servers()
        os.kill(server, signal.SIGKILL)
        assert processes.gone(server, child)

        tuned.in_child()

        (other,) = processes.servers()
        assert other != server
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


class TestAForkOfTheParent:
    SCRIPT = """
import multiprocessing

def tuned_by(n):
    path = os.path.join(sys.argv[1], str(n))
    def hook(arguments):
        if os.getpid() != parent and not os.path.exists(path):
            with open(path, "w") as file:
                file.write(f"{os.getpid()} {os.getppid()}")
    parent = os.getpid()
    right = run(tuner(hook, None), n)
    with open(path) as file:
        return [right, *map(int, file.read().split()), os.getpid()]

def work(pipe, n):
    pipe.send(tuned_by(n))
    pipe.close()

kernel = tuner(None, None)
if __name__ == "__main__":
    torch.set_num_threads(1)  # torch's threads do not survive a fork
    seen = {"before": tuned_by(100)}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(tuned_by(99)).encode())
        sys.exit()  # with all that is registered with atexit
    os.close(writer)
    seen["fork"] = json.loads(os.read(reader, 10000))
    os.waitpid(pid, 0)
    seen["between"] = tuned_by(98)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, 97))
    process.start()
    assert ours.poll(60)
    seen["multiprocessing"] = ours.recv()
    process.join()
    seen["exit code"] = process.exitcode
    seen["after"] = tuned_by(96)
    seen["children"] = children()
    print(json.dumps(seen))
"""
    IN_THE_MIDDLE = """
import signal, threading, time

fifo, gate = sys.argv[1:]

def waits(arguments):
    if os.getppid() != grandparent and not os.path.exists(gate):
        with open(fifo, "w") as file:
            file.write("here\\n")
        while not os.path.exists(gate):
            time.sleep(0.001)

grandparent = os.getppid()
torch.set_num_threads(1)
kernel = tuner(None, waits, run_timeout_s=1000.0)
thread = threading.Thread(target=run, args=(kernel, 100))
thread.start()
with open(fifo) as file:
    assert file.readline() == "here\\n"
pid = os.fork()
if pid == 0:
    signal.alarm(15)
    open(gate, "w").close()
    os._exit(0 if run(kernel, 100) else 1)
_, status = os.waitpid(pid, 0)
open(gate, "w").close()
thread.join()
print(status, run(kernel, 100))
"""

    def test_tunes_by_itself_and_leaves_our_server_alone(
        self, fresh_process: Any, tmp_path: Path, processes: Any
    ) -> None:
        script = tmp_path / "forks.py"
        script.write_text(PRELUDE + self.SCRIPT)
        result = fresh_process(script, tmp_path)
        assert result.returncode == 0, result.stderr
        assert "not tuned" not in result.stderr
        seen = json.loads(result.stdout)
        assert seen["exit code"] == 0
        names = ("before", "fork", "between", "multiprocessing", "after")
        rights, children, servers, callers = zip(*(seen[name] for name in names), strict=True)
        assert all(rights)
        ours = servers[0]
        assert servers == (ours, servers[1], ours, servers[3], ours)
        assert len({*servers}) == 3, "each fork has a server of its own"
        assert len({*callers}) == 3
        assert seen["children"] == [ours]
        assert processes.gone(*servers, *children)

    def test_in_the_middle_of_a_tuning_waits_for_no_thread_that_it_has_not(
        self, fresh_process: Any, tmp_path: Path
    ) -> None:
        """The fork wants the very key that a thread of the parent is tuning."""
        script = tmp_path / "forks.py"
        script.write_text(PRELUDE + self.IN_THE_MIDDLE)
        os.mkfifo(tmp_path / "fifo")
        result = fresh_process(script, tmp_path / "fifo", tmp_path / "gate")
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["0", "True"]


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

    def test_a_child_is_nobody_s_rank(self, tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
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
        blind = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        assert {n: v for n, v in in_python.items() if n not in blind} == {
            n: v for n, v in expected.items() if n not in blind
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

    def test_a_knob_that_is_no_longer_set_is_not_set_in_a_child_used_again(
        self, tuned: Tuned
    ) -> None:
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
    "server": "safetune.tuning.fork_server" in sys.modules,
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

        result = fresh_process(self.WARM, path, 100, 50)

        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == {
            "right": [True, True],
            "chosen": chosen,
            "started": [],
            "children": [],
            "server": False,
        }
        assert records.trials() == stored

        # The observer observes: a key that is not stored starts something.
        result = fresh_process(self.WARM, path, 60)
        seen = json.loads(result.stdout)
        assert seen["right"] == [True]
        assert seen["started"]
        assert seen["children"]
        assert seen["server"]
        assert len(records.trials()) == 9


class TestNoProcessCanBeHad:
    """RLIMIT_NPROC reached. Root is above that limit, so root runs this as nobody."""

    SCRIPT = """
limit = resource.RLIMIT_NPROC
_, hard = resource.getrlimit(limit)
torch.set_num_threads(1)
seen = {}

def observed(name, kernel, n):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right = run(kernel, n)
    texts = [[warning.category.__name__, str(warning.message)] for warning in caught]
    seen[name] = [right, kernel.best_config.kwargs["BLOCK"], texts, children()]

def slow(arguments):
    if os.getpid() != parent:
        import time
        time.sleep(0.001)

def dies(arguments):
    if os.getpid() != parent:
        resource.prlimit(os.getppid(), limit, (1, hard))
        os.abort()
    seen["the config that died runs here"] = True

parent = os.getpid()
kernel = tuner(slow, None, isolation="config")  # a new process for every config
resource.setrlimit(limit, (1, hard))
observed("no server", kernel, 100)
observed("hit", kernel, 100)
resource.setrlimit(limit, (hard, hard))
observed("again", kernel, 99)
server, = children()
resource.prlimit(server, limit, (1, hard))
observed("no child", kernel, 98)
resource.prlimit(server, limit, (hard, hard))
observed("child again", kernel, 97)
observed("in the middle", tuner(dies, None, slow), 96)
print(json.dumps(seen))
"""

    #: Nobody, who may read this environment wherever it is installed.
    AS_NOBODY = """
import os, sys
caps = "+dac_override,+dac_read_search"
rights = ["--reuid=65534", "--regid=65534", "--clear-groups"]
rights += [f"--inh-caps={caps}", f"--ambient-caps={caps}"]
command = ["setpriv", *rights] if os.getuid() == 0 else []
command += [sys.executable, *sys.argv[1:]]
os.execvp(command[0], command)
"""

    @staticmethod
    def told(warnings: list[list[str]]) -> list[str]:
        return [text for kind, text in warnings if kind == "UserWarning"]

    def test_costs_a_warning_and_the_choice(self, seen: dict[str, Any]) -> None:
        for name in ("no server", "no child"):
            right, block, texts, children = seen[name]
            assert right
            assert block == 16, "the first config"
            (text,) = self.told(texts)
            assert "copy_kernel is not tuned for n=" in text
            assert "first config" in text
            assert "Resource temporarily unavailable" in text
            assert len(children) == (name == "no child")
        assert seen["hit"][:3] == [True, 16, []], "it warns once for a key"
        for name in ("again", "child again"):
            right, _, texts, children = seen[name]
            assert right
            assert self.told(texts) == []
            assert len(children) == 1, "tuned: the fork server"

    def test_leaves_nothing_open(self, seen: dict[str, Any]) -> None:
        assert not [
            text
            for _, _, warnings, _ in (seen[name] for name in ("no server", "again", "no child"))
            for kind, text in warnings
            if kind == "ResourceWarning"
        ]

    def test_in_the_middle_of_a_tuning(self, seen: dict[str, Any]) -> None:
        """The config that is known to kill its process is not what the caller is given."""
        right, block, texts, _ = seen["in the middle"]
        assert right
        assert len(self.told(texts)) == 1
        assert "the config that died runs here" not in seen
        assert block != 16


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, when run as root")
    directory = tmp_path_factory.mktemp("nobody")
    script = directory / "no_process.py"
    script.write_text(PRELUDE + TestNoProcessCanBeHad.SCRIPT)
    caches = {name: str(directory / name) for name in ("SAFETUNE_CACHE_DIR", "TRITON_CACHE_DIR")}
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    result = subprocess.run(
        [sys.executable, "-c", TestNoProcessCanBeHad.AS_NOBODY, str(script)],
        env={**os.environ, **caches, **dict.fromkeys(threads, "1"), "HOME": str(directory)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
