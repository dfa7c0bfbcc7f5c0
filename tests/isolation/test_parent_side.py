"""What befalls the caller while it tunes: it is killed, interrupted, forks, or gets no process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]

# What scripts of fresh processes begin with.
PRELUDE = f"""
import ctypes, json, os, resource, sys, warnings
{programs.COPY}"""
PRELUDE += """
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


# A compilation that does not end, with a process of the compiler's own at work, as ptxas is.
COMPILES = """
import os, signal, sys, threading
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction
from safetune.inputs import kernel_pickle as kernel_ref
from safetune.inputs.compile_spec import pack_for_compiler
from safetune.isolation.compile_pool import CompilePool

@triton.constexpr_function
def hang(fifo):
    os = __import__("os")
    grandchild = __import__("subprocess").Popen(["sleep", "1000"])
    with open(fifo, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()} {grandchild.pid}\\n")
    grandchild.wait()
    return 1

def kernel(x, FIFO: tl.constexpr):
    STEP: tl.constexpr = hang(FIFO)
    tl.store(x, STEP)

target = GPUTarget("cuda", 90, 32)
options = make_backend(target).parse_options({}).__dict__
signature = {"x": "*i32", "FIFO": "constexpr"}
spec = kernel_ref.pack((signature, {(1,): sys.argv[1]}, {}, dict(options), target), "constants")
pool = CompilePool(lambda: kernel_ref.pack(JITFunction(kernel), "kernel"), timeout_s=1000.0, size=1)
if sys.argv[2] == "interrupt":
    def interrupt():
        with open(sys.argv[1]) as file:
            file.readline()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
try:
    with pool:
        pool.add(0, spec)
        list(pool.results())
except KeyboardInterrupt:
    print("interrupted")
"""


class TestTheParentIsKilled:
    """SIGKILL: it can say nothing, and none of its processes outlives it."""

    HANGS = """
fifo, how = sys.argv[1:]
def hang(arguments):
    with open(fifo, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    if how == "gil":
        ctypes.PyDLL(None).sleep(1000)
    while True:
        pass
run(tuner(None, hang, run_timeout_s=1000.0), 100)
"""
    #: Every Python process imports this at its start; in the fork server, it says so.
    SITE = """
import os
with open("/proc/self/cmdline", "rb") as file:
    if b"safetune.child.server_main" in file.read():
        with open({fifo!r}, "w") as told:
            told.write(f"{{os.getpid()}}\\n")
"""

    @pytest.mark.fault("parent-killed")
    @pytest.mark.parametrize("how", [pytest.param("python", marks=pytest.mark.full), "gil"])
    def test_no_process_outlives_a_parent_killed_while_a_config_hangs(
        self, how: str, start: Any, fifo: Any, tmp_path: Path, processes: Any, records: Any
    ) -> None:
        script = tmp_path / "hangs.py"
        script.write_text(PRELUDE + self.HANGS)
        parent = start(script, fifo.path, how)
        child, server = map(int, fifo.line().split())
        assert processes.servers(parent.pid) == [server]
        assert child in processes.children(server)

        parent.kill()

        assert processes.gone(server, child)
        assert records.labels() == {16: "not_judged"}, "what was measured is kept"

    @pytest.mark.fault("parent-killed")
    def test_no_process_outlives_a_parent_killed_while_the_fork_server_starts(
        self, start: Any, fifo: Any, tmp_path: Path, processes: Any
    ) -> None:
        """It has not imported torch yet, and has no eye on its parent."""
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(self.SITE.format(fifo=str(fifo.path)))
        script = tmp_path / "starts.py"
        script.write_text(PRELUDE + "run(tuner(None, None), 100)\n")
        parent = start(script, env={"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"})
        server = int(fifo.line())
        assert processes.servers(parent.pid) == [server]

        parent.kill()

        assert processes.gone(server, within_s=60.0), "an import of torch and Triton later"

    @pytest.mark.fault("parent-killed")
    def test_while_a_config_compiles(
        self, start: Any, fifo: Any, tmp_path: Path, processes: Any
    ) -> None:
        script = tmp_path / "compiles.py"
        script.write_text(COMPILES)
        parent = start(script, fifo.path, "wait", env={"TRITON_INTERPRET": "0"})
        child, server, grandchild = map(int, fifo.line().split())
        assert processes.servers(parent.pid) == [server]
        assert child in processes.children(server)

        parent.kill()

        assert processes.gone(server, child, grandchild)


class TestTheParentIsInterrupted:
    """Ctrl-C reaches the whole foreground group; no process of a tuning is in it."""

    HANGS = """
import signal, threading
fifo, how = sys.argv[1:]
def hang(arguments):
    with open(fifo, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    while True:
        pass
def interrupt():
    with open(fifo) as file:
        file.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
if how == "another thread":
    threading.Thread(target=interrupt).start()
kernel = tuner(None, hang, run_timeout_s=1000.0)
if how == "uncaught":
    run(kernel, 100)
try:
    run(kernel, 100)
except KeyboardInterrupt:
    print("interrupted", len(children(children()[0])), "children of the fork server")
    print("then", run(tuner(None, None), 99))
"""
    THEN = ("interrupted 0 children of the fork server", "then True")

    @pytest.fixture
    def script(self, tmp_path: Path) -> Path:
        script = tmp_path / "hangs.py"
        script.write_text(PRELUDE + self.HANGS)
        return script

    @pytest.mark.fault("ctrl-c")
    def test_a_caller_that_catches_ctrl_c_goes_on_with_its_fork_server(
        self, script: Path, start: Any, fifo: Any, processes: Any, records: Any
    ) -> None:
        """Finished trials are kept, and the fork server is used again."""
        parent = start(script, fifo.path, "caught")
        child, server = map(int, fifo.line().split())
        assert os.getpgid(server) != parent.pid
        assert os.getpgid(child) != parent.pid

        os.killpg(parent.pid, signal.SIGINT)

        stdout, stderr = parent.communicate(timeout=60)
        assert tuple(stdout.splitlines()) == self.THEN, stderr
        assert stderr == (
            "safetune: interrupted; 1 of 2 configs of copy_kernel for n=100 (float32) are stored, "
            "and the next tuning continues from there\n"
        )
        assert parent.returncode == 0
        assert processes.gone(child, server)
        trials = records.trials()
        assert [trial.label for trial in trials] == ["not_judged", "ok", "ok"]
        assert [trial.key == trials[0].key for trial in trials] == [True, False, False]

    @pytest.mark.fault("ctrl-c")
    def test_a_caller_that_ctrl_c_ends_leaves_one_traceback_and_no_process(
        self, script: Path, start: Any, fifo: Any, processes: Any, records: Any
    ) -> None:
        """One line of what is kept, and one traceback, the caller's, with none of the tuning's own
        lines; nothing of a child's and nothing from the exit.
        """
        parent = start(script, fifo.path, "uncaught")
        child, server = map(int, fifo.line().split())

        os.killpg(parent.pid, signal.SIGINT)

        stdout, stderr = parent.communicate(timeout=60)
        assert parent.returncode == -signal.SIGINT
        assert stdout == ""
        assert stderr.startswith("safetune: interrupted; 1 of 2 configs of copy_kernel ")
        assert stderr.count("Traceback (most recent call last)") == 1, stderr
        assert stderr.count("  File ") <= 9, stderr
        assert stderr.splitlines()[-1] == "KeyboardInterrupt"
        assert "ignored" not in stderr
        assert processes.gone(child, server)
        assert records.labels() == {16: "not_judged"}

    @pytest.mark.fault("ctrl-c")
    def test_a_signal_to_another_thread_interrupts_the_tuning(
        self, script: Path, start: Any, fifo: Any
    ) -> None:
        """It came to another thread, or just before the wait began; the config has 1000 s left."""
        parent = start(script, fifo.path, "another thread")
        stdout, stderr = parent.communicate(timeout=60)
        assert tuple(stdout.splitlines()) == self.THEN, stderr

    @pytest.mark.fault("ctrl-c")
    def test_while_a_config_compiles(self, start: Any, fifo: Any, tmp_path: Path) -> None:
        script = tmp_path / "compiles.py"
        script.write_text(COMPILES)
        parent = start(script, fifo.path, "interrupt", env={"TRITON_INTERPRET": "0"})
        stdout, stderr = parent.communicate(timeout=60)
        assert stdout == "interrupted\n", stderr


def test_the_parent_ends_by_itself(start: Any, fifo: Any, tmp_path: Path, processes: Any) -> None:
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
    parent = start(script, fifo.path, env={"SAFETUNE_LOG": "quiet"})
    child, server = map(int, fifo.line().split())
    stdout, stderr = parent.communicate(timeout=60)
    assert (parent.returncode, stdout, stderr) == (0, "", "")
    assert not processes.exists(server), "the parent has waited for it"
    assert processes.gone(child)


class TestAChildThatDoesNotEnd:
    """SIGKILL does not end what is stuck in a driver; here a tracer holds it at its very end."""

    SCRIPT = """
import select, threading

directory = sys.argv[1]
SEIZE, TRACE_EXIT = 0x4206, 0x40
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
let_go = threading.Event()
held = []

def hold():
    with open(f"{directory}/pid") as file:
        pid = int(file.read())
    if libc.ptrace(SEIZE, pid, None, TRACE_EXIT):
        held.append(os.strerror(ctypes.get_errno()))
    else:
        held.append(pid)
    let_go.wait()  # what a thread traces goes free with it

def hang(arguments):
    with open(f"{directory}/pid", "w") as file:
        file.write(str(os.getpid()))
    while True:
        pass

def observed(n, *hooks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = tuner(*hooks, run_timeout_s=2.0)
        right = run(kernel, n)
    texts = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    return [right, kernel.best_config.kwargs["BLOCK"], texts]

from safetune.isolation import fork_server
fork_server.server.reap_s = 1.0
os.mkfifo(f"{directory}/pid")
thread = threading.Thread(target=hold)
thread.start()
seen = {"before": observed(100, None, hang, None)}
if isinstance(held[0], str):
    let_go.set()
    print(json.dumps(held[0]))
    sys.exit()
seen["meanwhile"] = observed(99, None, None)
end = os.pidfd_open(held[0])
seen["alive"] = not select.select([end], [], [], 0)[0]
let_go.set()
thread.join()
seen["ends"] = bool(select.select([end], [], [], 30)[0])
seen["after"] = observed(98, None, None)
print(json.dumps(seen))
"""

    def test_a_child_that_does_not_end_takes_its_device_out_of_use(
        self, fresh_process: Any, tmp_path: Path, records: Any
    ) -> None:
        script = tmp_path / "stuck.py"
        script.write_text(PRELUDE + self.SCRIPT)
        result = fresh_process(script, tmp_path, warm=True)
        seen = json.loads(result.stdout)
        if isinstance(seen, str):
            pytest.skip(f"this machine lets no process trace another: {seen}")
        for name in ("before", "meanwhile"):
            right, block, (text,) = seen[name]
            assert right
            assert block == 16
            assert "was killed but has not exited" in text
        assert seen["alive"]
        assert seen["ends"]
        assert seen["after"][::2] == [True, []], "the device is in use again"
        labels = [trial.label for trial in records.trials()]
        assert labels[:2] == ["not_judged", "timeout"]
        assert set(labels[2:]) == {"ok"}, "of the last call alone"
        assert len({trial.key for trial in records.trials()}) == 2


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
import fcntl, signal, threading

fifo, gate = sys.argv[1:]

def waits(arguments):
    if os.getppid() == grandparent:
        return
    with open(gate) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(fifo, "w") as file:
                file.write("here\\n")
            fcntl.flock(lock, fcntl.LOCK_SH)

grandparent = os.getppid()
torch.set_num_threads(1)
kernel = tuner(None, waits, run_timeout_s=1000.0)
closed = open(gate, "w")
fcntl.flock(closed, fcntl.LOCK_EX)
thread = threading.Thread(target=run, args=(kernel, 100))
thread.start()
with open(fifo) as file:
    assert file.readline() == "here\\n"
pid = os.fork()
if pid == 0:
    signal.alarm(15)
    fcntl.flock(closed, fcntl.LOCK_UN)
    os._exit(0 if run(kernel, 100) else 1)
_, status = os.waitpid(pid, 0)
fcntl.flock(closed, fcntl.LOCK_UN)
thread.join()
print(status, run(kernel, 100))
"""

    @pytest.mark.fault("parent-forks")
    def test_a_fork_tunes_with_a_server_of_its_own(
        self, fresh_process: Any, tmp_path: Path, processes: Any
    ) -> None:
        script = tmp_path / "forks.py"
        script.write_text(PRELUDE + self.SCRIPT)
        result = fresh_process(script, tmp_path, warm=True)
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

    @pytest.mark.fault("parent-forks")
    def test_a_fork_does_not_wait_for_the_tuning_of_a_thread_it_lacks(
        self, fresh_process: Any, tmp_path: Path
    ) -> None:
        """The fork wants the very key that a thread of the parent is tuning."""
        script = tmp_path / "forks.py"
        script.write_text(PRELUDE + self.IN_THE_MIDDLE)
        os.mkfifo(tmp_path / "fifo")
        result = fresh_process(script, tmp_path / "fifo", tmp_path / "gate", warm=True)
        assert result.stdout.split() == ["0", "True"]


@pytest.mark.fault("process-limit")
class TestNoProcessCanBeHad:
    """RLIMIT_NPROC reached. Root is above that limit, so root runs this as the user `nobody`."""

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
        sum(range(100_000))

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

    #: The user `nobody`, who may read this environment wherever it is installed.
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
        return [text for kind, text in warnings if kind == "TuningWarning"]

    def test_a_process_limit_costs_a_warning_and_the_choice(self, seen: dict[str, Any]) -> None:
        for name in ("no server", "no child"):
            right, block, texts, children = seen[name]
            assert right
            known = 16 if name == "no server" else seen["again"][1]
            assert block == known, "the first config, later the choice of the nearest key"
            (text,) = self.told(texts)
            assert "copy_kernel is not tuned for n=" in text
            assert ("its first config" in text) == (block == 16)
            assert "Resource temporarily unavailable" in text
            assert len(children) == (name == "no child")
        right, block, texts = seen["hit"][:3]
        assert (right, block, self.told(texts)) == (True, 16, []), "it warns once for a key"
        for name in ("again", "child again"):
            right, _, texts, children = seen[name]
            assert right
            assert self.told(texts) == []
            assert len(children) == 1, "tuned: the fork server"

    def test_a_process_limit_leaves_nothing_open(self, seen: dict[str, Any]) -> None:
        assert not [
            text
            for _, _, warnings, _ in (seen[name] for name in ("no server", "again", "no child"))
            for kind, text in warnings
            if kind == "ResourceWarning"
        ]

    def test_a_config_that_killed_its_process_is_not_launched_when_no_other_can_be_had(
        self, seen: dict[str, Any]
    ) -> None:
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
