"""What a program, its machine and other processes do to a tuning: no config is blamed for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

import safetune
from safetune.errors import WorkerUnavailable
from safetune.isolation import fork_server
from safetune.isolation.fork_server import Output
from safetune.store.local.connection import Connection
from tests import programs

# What the scripts begin with; each is a program of its own.
PRELUDE = f"""
import json, multiprocessing, os, resource, signal, sqlite3, sys, threading, warnings
{programs.COPY}"""
PRELUDE += """
def run(kernel, n=100):
    src, dst = torch.randn(n), torch.zeros(n)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel[grid](dst, src, n)
    assert torch.equal(dst, src)
    return [text for text in (str(each.message) for each in caught) if "is not tuned" in text]

def trials():
    path = os.environ["SAFETUNE_CACHE_DIR"] + "/safetune.db"
    query = "SELECT verdict, json_extract(record, '$.outcome.detail') FROM trial"
    return sqlite3.connect(path).execute(query).fetchall()

caller = os.getpid()
"""


@pytest.fixture
def program(fresh_process: Any, tmp_path: Path) -> Any:
    """A function that runs a script in a directory of its own, and returns the lines it prints."""

    def run(script: str, *args: object, **options: Any) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + script)
        result = fresh_process(path, *args, **{"warm": True, **options})
        return result.stdout.splitlines()

    return run


class TestSignalHandlers:
    """What a handler raises ends the call, whatever its class: it is not a verdict of a config."""

    SCRIPT = """
kind = {"timeout": TimeoutError, "reset": ConnectionResetError, "os": OSError, "end": EOFError,
        "blocking": BlockingIOError}[sys.argv[1]]
fifo = sys.argv[2]

def deadline(number, frame):
    raise kind("the program's own")

def tell():
    with open(fifo) as file:
        file.readline()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

def hang(arguments):
    if os.getpid() != caller:
        with open(fifo, "w") as file:
            file.write("here\\n")
        while True:
            pass

signal.signal(signal.SIGUSR1, deadline)
thread = threading.Thread(target=tell, daemon=True)
thread.start()
try:
    run(tuner(None, hang, run_timeout_s=1000.0))
except kind as error:
    print(error)
print(trials(), run(tuner(None, None), 99))
"""

    @pytest.mark.full
    @pytest.mark.parametrize("kind", ["timeout", "reset", "os", "end", "blocking"])
    def test_what_a_handler_raises_is_the_programs(
        self, kind: str, program: Any, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "fifo")
        lines = program(self.SCRIPT, kind, tmp_path / "fifo")
        assert lines == ["the program's own", "[('not_judged', '')] []"], "of the first config"

    def test_a_program_that_ignores_the_end_of_its_children(self, program: Any) -> None:
        """What it ignores its server would ignore too, and could wait for no child."""
        lines = program("""
def dies(arguments):
    if os.getpid() != caller:
        os.kill(os.getpid(), signal.SIGSEGV)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(run(tuner(None, dies)), sorted(trials()))
""")
        assert lines == ["[] [('died', 'SIGSEGV'), ('ok', '')]"]

    def test_one_raises_while_the_store_is_used(self, tmp_path: Path) -> None:
        def deadline(number: int, frame: Any) -> None:
            raise OSError("the program's own")

        before = signal.signal(signal.SIGUSR1, deadline)
        try:
            with (
                pytest.raises(OSError, match="the program's own") as caught,
                Connection(tmp_path / "safetune.db").reading(),
            ):
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert type(caught.value) is OSError, "no error of the store"


# One program after another in one process, which has a hard life.
HARD_LIFE = """
import pathlib, tempfile
from triton.runtime.interpreter import GridExecutor
from safetune.inputs import memory_budget
from safetune.isolation.fork_server import server

folder = pathlib.Path(sys.argv[1])
seen = {}

def opened():
    return set(map(int, os.listdir("/proc/self/fd")))

def aborts(arguments):
    if os.getpid() != caller:
        os.abort()

def is_killed_once(arguments):
    if os.getpid() != caller and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does for want of memory

def looks_at_the_path(arguments):
    if os.getpid() != caller:
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 1 << 40
        assert all(isinstance(entry, str) for entry in sys.path) and len(sys.path) > 1500

def kills_the_server(arguments):
    if os.getpid() != caller:
        os.kill(os.getppid(), signal.SIGKILL)
        while True:
            pass

def new(told):
    rows = trials()
    seen["trials"] = len(rows)
    return [told, *rows[known:]]

tempfile.tempdir = os.environ["TMPDIR"] = "/nonexistent"
os.environ["PYTHONPATH"] += ":."
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.getrlimit(resource.RLIMIT_DATA)[1]))
sys.path[:0] = [pathlib.Path("/tmp"), None, 3]
if sys.version_info >= (3, 11):  # an older one cannot import with bytes in its path
    sys.path.insert(0, b"/tmp")
sys.path += ["/nonexistent/" + "x" * 200 + str(number) for number in range(1500)]
os.chdir(folder / "shared")
known = 0
seen["first"] = new(run(tuner(aborts, is_killed_once, looks_at_the_path)))
seen["files"] = sorted(os.listdir("."))
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
sys.path.insert(0, "")
known = len(trials())
seen["no directory"] = new(run(tuner(None, None), 99))

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
kernel = tuner(None, None)
kernel.fn[(7,)](torch.zeros(9), torch.zeros(9), 9, BLOCK=16)
seen["descriptors"] = []
for spare in (0, 2, 4, 6):
    taken = opened()
    held = [os.open("/dev/null", 0) for fd in range(max(taken)) if fd not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened()) + 1 + spare, hard))
    seen["descriptors"].append(run(kernel, 98 - spare))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for fd in held:
        os.close(fd)

links = [f"/proc/self/fd/{fd}" for fd in opened()]
files = [os.readlink(link) for link in links if os.path.lexists(link)]
seen["files of tunings"] = [name for name in files if "arguments" in name or "results" in name]

path_class, memory_budget.Path = memory_budget.Path, lambda path: pathlib.Path("/nonexistent")
seen["no proc"] = run(tuner(None, None), 90)
memory_budget.Path = path_class

module = type(sys)("module_on_no_path")
exec("def helper(arguments): pass", vars(module))
sys.modules["module_on_no_path"] = module
refers = tuner(lambda arguments: module.helper(arguments), None)
seen["not importable"] = run(refers, 87)
state, = refers.states
seen["kinds that wait"] = len(state.decision().retry.kinds)

inner = tuner(None, None)
def launches_another(arguments):
    if os.getpid() != caller:
        inner[(7,)](torch.zeros(100), torch.ones(100), 100)
known = len(trials())
seen["a kernel in a hook"] = new(run(tuner(launches_another, None), 86))

known = len(trials())
seen["server killed"] = new(run(tuner(None, kills_the_server), 89))
def late(number, frame):
    raise TimeoutError("the program's own")
def hangs(arguments):
    if os.getpid() != caller:
        os.kill(caller, signal.SIGUSR1)
        while True:
            pass
signal.signal(signal.SIGUSR1, late)
known = len(trials())
try:
    run(tuner(None, hangs, run_timeout_s=1000.0), 84)
except TimeoutError as error:
    seen["handler"] = new(str(error))

def prune(configs, arguments, **_):
    begun.set()
    return configs
def launches_the_other(meta):
    if not begun.is_set():
        start(lambda: ended.append(run(other, 83)))
        begun.wait()
        ended.append(run(other, 83))
    return grid(meta)
def start(work):
    thread = threading.Thread(target=work, daemon=True)
    threads.append(thread)
    thread.start()
one_thread, by_triton = threading.RLock(), GridExecutor.__call__
def interpreted(*args, **kwargs):
    # Triton's interpreter changes triton.language for all threads while a kernel runs.
    with one_thread:
        return by_triton(*args, **kwargs)
GridExecutor.__call__ = interpreted
begun, ended, threads = threading.Event(), [], []
other = tuner(None, None, prune_configs_by={"early_config_prune": prune})
start(lambda: ended.append(tuner(None, None)[launches_the_other](torch.ones(9), torch.ones(9), 9)))
for number in range(2):
    threads[number].join(60)
seen["threads that ended"] = len(ended)

run(tuner(None, None), 85)
server.stop()
sys.executable = "/opt/app"
multiprocessing.set_executable(sys.executable)
seen["frozen"] = run(tuner(None, None), 88)
while "its children have exited" in str(seen["frozen"]):  # seen while it ends
    seen["frozen"] = run(tuner(None, None), 88)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hard")
    (folder / "shared").mkdir()
    for name in ("json.py", "sitecustomize.py"):
        (folder / "shared" / name).write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    script = folder / "program.py"
    shown = "import faulthandler; faulthandler.dump_traceback_later(200, exit=True)"
    script.write_text(shown + PRELUDE + HARD_LIFE)
    result = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(safetune.__file__).parents[1]),
            "SAFETUNE_CACHE_DIR": str(folder / "cache"),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {**json.loads(result.stdout), "ran": (folder / "ran").exists()}


class TestAHardLife:
    @pytest.mark.fault("outside-kill")
    @pytest.mark.fault("no-temporary-directory")
    def test_a_killed_child_is_no_verdict_and_no_directory_is_needed(self, seen: Any) -> None:
        """The search path has odd entries, and is longer than an argument can be."""
        told, *trials = seen["first"]
        assert told == []
        assert trials[0] == ["died", "SIGABRT"]
        assert {tuple(trial) for trial in trials[1:]} == {("ok", "")}

    @pytest.mark.fault("core-file")
    def test_a_child_that_aborts_leaves_no_core_file(self, seen: Any) -> None:
        assert seen["files"] == ["json.py", "sitecustomize.py"]

    @pytest.mark.fault("file-in-working-directory")
    def test_no_file_of_the_working_directory_runs(self, seen: Any) -> None:
        """Anyone may write to it, and the program never imports from it."""
        assert not seen["ran"]

    @pytest.mark.fault("no-working-directory")
    def test_a_working_directory_that_is_gone_is_not_needed(self, seen: Any) -> None:
        told, *trials = seen["no directory"]
        assert told == []
        assert {tuple(trial) for trial in trials} == {("ok", "")}

    @pytest.mark.fault("no-descriptors")
    def test_what_the_system_refuses_costs_a_warning(self, seen: Any) -> None:
        none_left, *few_left = seen["descriptors"]
        assert len(none_left) == 1
        assert all(len(told) <= 1 for told in few_left)
        assert seen["files of tunings"] == []
        (told,) = seen["no proc"]
        assert "No such file or directory" in told
        assert "it is tried again later" in told

    @pytest.mark.fault("outside-kill")
    def test_a_killed_server_is_no_verdict(self, seen: Any) -> None:
        (told,), *trials = seen["server killed"]
        assert "it is tried again later: the fork server" in told
        assert trials == [["not_judged", ""]], "of the first config"

    def test_what_a_signal_handler_raises_is_no_timeout_of_a_config(self, seen: Any) -> None:
        assert seen["handler"] == ["the program's own", ["not_judged", ""]]

    def test_two_threads_and_a_grid_that_launches_the_kernel_of_the_other(self, seen: Any) -> None:
        """Each tunes one kernel; neither waits for the other with a lock that the other needs."""
        assert seen["threads that ended"] == 3

    def test_a_call_that_cannot_be_rebuilt_has_its_fallback_for_calls_of_its_kind(
        self, seen: Any
    ) -> None:
        (told,) = seen["not importable"]
        assert "No module named 'module_on_no_path'" in told
        assert "calls with other kinds of arguments are tried" in told
        assert seen["kinds that wait"] == 1

    def test_a_kernel_that_a_hook_launches_is_not_tuned_in_the_child(self, seen: Any) -> None:
        """It would wait for the tuning that it is a part of."""
        told, *trials = seen["a kernel in a hook"]
        assert told == []
        assert trials == [["ok", ""]] * 2

    def test_a_program_that_is_its_own_python_is_not_started_again(self, seen: Any) -> None:
        (told,) = seen["frozen"]
        assert "set one of the same version with multiprocessing.set_executable" in told


@pytest.mark.parametrize(
    ("name", "started"), [("/usr/bin/blender", False), ("", False), ("/opt/bin/python3.11", True)]
)
def test_only_a_python_is_started(
    name: str, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", name)
    monkeypatch.setattr(spawn, "_python_exe", name)
    if started:
        assert fork_server._python() == name
        return
    with pytest.raises(WorkerUnavailable, match="found no Python executable to start tuning"):
        fork_server._python()
    monkeypatch.setattr(spawn, "_python_exe", "/opt/app/bin/python3")
    assert fork_server._python() == "/opt/app/bin/python3", "named by the program"


class TestOutput:
    """What a child prints is kept in memory, and bounded."""

    def test_the_end_is_kept_and_the_rest_is_not(self) -> None:
        output = Output()
        for number in range(300):
            os.write(output.fileno(), f"line {number}\n".encode() + b"x" * 9_000 + b"\n")
            output.cut()
        os.write(output.fileno(), b"the end\n")
        assert os.fstat(output.fileno()).st_size < 1 << 21
        assert output.tail().endswith("x\nthe end")
        output.mark()
        os.write(output.fileno(), b"of another job\n")
        assert output.tail() == "of another job"
        output.close()
