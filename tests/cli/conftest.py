"""The command in this process, or in one of its own, and what a test and a config wait on."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from tests.conftest import FreshProcess, run_python
from tests.ready import is_ready

ROOT = Path(__file__).resolve().parents[2]

#: How long anything that another process does may take; it never does unless something is wrong.
DEADLINE_S = 90.0


#: Runs `safetune ...` as a script, which does not have the working directory on its path.
COMMAND = """
import sys
sys.path[:] = filter(None, sys.path)
sys.argv[0] = "safetune"
from safetune.cli import main
main()
"""


class Command:
    """`safetune ...` in this process, with the test's store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder = monkeypatch, folder

    def set(self, **variables: object) -> None:
        """Set environment variables until the end of the test."""
        for name, value in variables.items():
            self._monkeypatch.setenv(name, str(value))

    def use_store(self, name: str) -> None:
        """Go on with another store, as on another node; it is empty at first."""
        self.set(SAFETUNE_CACHE_DIR=self._folder / name)

    def share(self) -> str:
        """Set a new shared store, and return its URL."""
        (self._folder / "shared").mkdir()
        url = f"file://{self._folder}/shared"
        self.set(SAFETUNE_SHARED=url)
        return url

    def __call__(self, *words: object) -> Result:
        """Run it; an exception that the command lets through fails the test."""
        from safetune.cli import main

        return CliRunner(catch_exceptions=False).invoke(main, [str(word) for word in words])

    def json(self, *words: object, code: int = 0) -> Any:
        """Run it with --json, see it end so, and return what it printed, of the published form."""
        result = self(*words, "--json")
        assert result.exit_code == code, result.output
        data = json.loads(result.stdout)
        check_json(data, *words)
        return data

    def error(self, *words: object) -> str:
        """Run it, see it end as bad usage and print one line, and return the line.

        Before an error in the options, the usage is printed.
        """
        result = self(*words)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        *usage, line = result.stderr.splitlines()
        assert not usage or usage[0].startswith("Usage: "), result.stderr
        return line


def check_json(data: Any, *words: object) -> None:
    """Raise unless data is what docs/output.schema.json says of a command line."""
    schema = json.loads((ROOT / "docs/output.schema.json").read_text(encoding="utf-8"))
    name = " ".join(str(word) for word in words if word in (words[0], "--dry-run", "--failures"))
    if isinstance(data, dict) and "error" in data:
        name = "error"
    of_command = {"$defs": schema["$defs"], **schema["properties"][name]}
    jsonschema.Draft202012Validator(of_command).validate(data)


@pytest.fixture
def safetune(targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command in this process. What it imports for a TARGET is forgotten after the test.

    Its lines are never wrapped, whatever terminal the tests are started in.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    path, modules = list(sys.path), set(sys.modules)
    yield Command(monkeypatch, tmp_path)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if file.startswith((str(targets), str(tmp_path))):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tuned_add(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> tuple[Path, Any]:
    """A store with `targets/add.py` tuned, and what `tune` said of it. Tests copy the store."""
    directory = tmp_path_factory.mktemp("tuned")
    env = {"SAFETUNE_CACHE_DIR": str(directory)}
    words = ("tune", targets / "add.py", "--json")
    done = run_python(COMMAND, *words, cwd=Path("/"), env=env, warm=True)
    return directory, json.loads(done.stdout)


@pytest.fixture
def tuned(tuned_add: tuple[Path, Any], cache_dir: Path) -> dict[str, Any]:
    """What `tune` said of `add_one` at two shapes and of another kernel, all of it stored."""
    directory, said = tuned_add
    shutil.copytree(directory, cache_dir)
    return copy.deepcopy(said)


@pytest.fixture(scope="session")
def recorded_calls(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Path:
    """A store with six launches of `targets/recorded.py`: two of one key of `scale`, one of five
    other keys. The program is gone.
    """
    directory = tmp_path_factory.mktemp("recorded")
    env = {"SAFETUNE_CACHE_DIR": str(directory), "SAFETUNE_MODE": "record"}
    env["PYTHONWARNINGS"] = "ignore"
    code = "import recorded; recorded.call_all()"
    done = run_python(code, cwd=targets, env=env, warm=True)
    assert done.stderr.count("runs with") == 5, done.stderr
    return directory


@pytest.fixture
def recorded(
    recorded_calls: Path, cache_dir: Path, targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These calls in the test's store; and the folder of their module to work in."""
    shutil.copytree(recorded_calls, cache_dir)
    monkeypatch.chdir(targets)


@pytest.fixture(scope="session")
def targets() -> Path:
    """The folder of files with kernels."""
    return Path(__file__).with_name("targets")


#: What a terminal does with its cursor, not what it shows.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal wide enough for the whole line, and what was shown on it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._shown = b""
        self.resize(200)

    def resize(self, columns: int) -> None:
        """Give it another width."""
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    @property
    def lines(self) -> list[str]:
        text = CONTROL.sub("", self._shown.decode(errors="replace"))
        return re.split(r"[\r\n]+", text)

    def wait_for(self, *words: str) -> str:
        """Return the first line shown, now or later, that has all the words."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for line in self.lines:
                if all(word in line for word in words):
                    return line
            assert self._read(deadline), f"no line with {words} in:\n" + "\n".join(self.lines)

    def type(self, text: bytes) -> None:
        """Send what a user types."""
        os.write(self._ours, text)

    def read_to_the_end(self) -> None:
        """Read until no process has the terminal open."""
        os.close(self.theirs)
        while self._read(time.monotonic() + DEADLINE_S):
            pass

    def _read(self, deadline: float) -> bool:
        """Read some more; False at the end, or when nothing came until the deadline."""
        if not is_ready(self._ours, max(0.0, deadline - time.monotonic())):
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self._shown += data
        return bool(data)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts `python -m safetune ...` in a session of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def run(
        *words: object, env: dict[str, str], terminal: int | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """With a `terminal`, it is standard input, output and error."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal) if terminal else {}
        options = {"stdin": subprocess.DEVNULL, "cwd": "/", **streams, **options}
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [sys.executable, "-m", "safetune", *map(str, words)],
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def run(fresh_process: FreshProcess) -> FreshProcess:
    """A function that runs `safetune ...` in a process of its own, as `fresh_process` does."""
    return functools.partial(fresh_process, COMMAND)


class Fifo:
    """Where the hook of `targets/sweep.py`, in a tuning child, and the test meet."""

    def __init__(self, directory: Path) -> None:
        self._there, self._back = directory / "there", directory / "back"
        os.mkfifo(self._there)
        os.mkfifo(self._back)
        self._reader = os.open(self._there, os.O_RDONLY | os.O_NONBLOCK)
        self.env = {"TEST_THERE": str(self._there), "TEST_BACK": str(self._back)}
        self.env["TEST_WAIT_AT"] = "256"  # the last config of `sweep.py`

    def pids(self) -> list[int]:
        """Wait until the hook runs; return its process and that one's parent."""
        assert is_ready(self._reader, DEADLINE_S), "the config's hook never ran"
        return [int(word) for word in os.read(self._reader, 100).split()]

    def remove(self) -> None:
        """Have every later hook return at once."""
        self._there.unlink()

    def let_go(self) -> None:
        """Let the waiting hook return too."""
        self.remove()
        with open(self._back, "w"):
            pass


@pytest.fixture
def fifo(tmp_path: Path) -> Fifo:
    return Fifo(tmp_path)
