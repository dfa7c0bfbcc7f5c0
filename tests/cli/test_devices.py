"""`safetune tune --devices` and `--shard`: every key once, also where one of the processes dies.

In the interpreter a device is a process on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.cli import targets as found_targets
from safetune.cli import workers
from safetune.cli.report import Report
from safetune.errors import NoDevice
from safetune.store.local import db_files, locks

from .conftest import DEADLINE_S, Fifo, Terminal

Start = Callable[..., "subprocess.Popen[bytes]"]

SHAPES = ["100", "101", "102", "103"]


@pytest.fixture
def target(targets: Path) -> str:
    return str(targets / "fleet.py")


def finished(process: subprocess.Popen[bytes]) -> tuple[Any, str]:
    """Return what a command printed as JSON, and its messages."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    return json.loads(output or "null"), errors.decode()


def choices(data: dict[str, Any]) -> dict[str, str]:
    return {tuning["shape"]: tuning["choice"] for tuning in data["tunings"]}


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_what_the_workers_leave_out_is_told_once_before_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left_out = [{"words": "add for n=1", "reason": "it has changed", "failed": False}]
    report = Report(allow_disputed=False)

    for name in ("GPU 0", "GPU 1"):
        report.take({"plan": {}, "left_out": left_out}, name)

    assert capsys.readouterr().err == "not tuned: add for n=1: it has changed\n"


class Device:
    """A worker whose plan has these keys; it drops out in some of them.

    Args:
        after: it begins when this is set.
        until: it drops out when this is set, or after a while.
        begun, finished: set when it tunes its first key, and when it gets no more.
    """

    def __init__(self, name: str, keys: str, bad: str = "", **events: threading.Event) -> None:
        self.name, self._keys, self._bad, self._events = name, keys, bad, events
        self.stopped = False

    def _event(self, name: str) -> threading.Event:
        return self._events.get(name) or threading.Event()

    def ask(self, key: str | None = None) -> Iterator[workers.Event]:
        if key is None:
            if "after" in self._events:
                assert self._events["after"].wait(DEADLINE_S)
            yield {"plan": dict.fromkeys(self._keys, (1, 1))}
        elif not key:
            self._event("finished").set()
        else:
            self._event("begun").set()
            yield {"tried": 1, "failed": 0}
            yield {"facts": key}
            if key in self._bad:
                if "until" in self._events:
                    self._events["until"].wait(0.2)
                raise workers.DroppedOut(f"{key} ended it")
            yield {"done": key}

    def stop(self) -> None:
        self.stopped = True


def tuned_by(*devices: Device) -> dict[str, list[str]]:
    """Return the keys that each worker has tuned, in their order."""
    found: dict[str, list[str]] = {device.name: [] for device in devices}
    for name, event in workers.gather(devices):
        if "facts" in event:
            found[name].append(event["facts"])
    return found


def test_every_key_of_a_list_is_tuned_once_and_the_first_ones_first() -> None:
    found = tuned_by(*(Device(name, "abcdefgh") for name in ("GPU 0", "GPU 1", "GPU 2")))
    assert sorted(key for keys in found.values() for key in keys) == [*"abcdefgh"]
    assert all(keys == sorted(keys) for keys in found.values())


def test_the_key_in_which_a_worker_drops_out_is_tuned_by_another_after_all_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may end each process that tunes it. What was told of it is told once."""
    begun, finished = threading.Event(), threading.Event()
    first = Device("GPU 0", "abc", bad="a", begun=begun, until=finished)
    second = Device("GPU 1", "abc", after=begun, finished=finished)
    assert tuned_by(first, second) == {"GPU 0": [], "GPU 1": ["b", "c", "a"]}
    assert first.stopped
    message = "Warning: GPU 0 dropped out: a ended it; the others take over its work\n"
    assert capsys.readouterr().err == message


def test_where_every_worker_drops_out_no_device_finishes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(workers.DroppedOut, match="no device finished the list, for the reasons"):
        tuned_by(Device("GPU 0", "abc", bad="abc"), Device("GPU 1", "abc", bad="abc"))
    assert "no device is left" in capsys.readouterr().err


def test_a_key_that_only_a_worker_has_that_dropped_out_is_an_error() -> None:
    """As of a GPU of another kind. The keys of the others are tuned."""
    told = []
    with pytest.raises(workers.DroppedOut, match="a device dropped out and left 1 key untuned"):
        for _, event in workers.gather([Device("GPU 0", "x", bad="x"), Device("GPU 1", "ab")]):
            told.append(event.get("facts"))
    assert [key for key in told if key] == ["a", "b"]


def test_what_a_worker_prints_besides_its_events_is_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its interpreter, or a library that it imports, may print before the command begins."""
    worker = workers.LocalWorker("GPU 0", ["--help"], {})
    with pytest.raises(workers.DroppedOut, match="ended with exit code 0"):
        list(worker.ask())
    assert "GPU 0: Usage: safetune tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="here", marks=pytest.mark.full),
        pytest.param(("--devices", "0,1"), id="devices"),
    ],
)
def test_standard_streams_may_be_closed(start: Start, targets: Path, options: Any) -> None:
    """Regression: without standard error, as under some schedulers, `tune` ended, and said nothing.

    The workers of --devices ended, too.
    """
    words = ("tune", targets / "add.py", "--shape", "small", "--json", *options)
    process = start(
        *words, env={}, stdin=None, stdout=subprocess.PIPE, preexec_fn=lambda: os.closerange(2, 3)
    )
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, json.loads(output)["measured"]) == (0, 4)


#: A function of the kernel that comes first, which raises when it is called the second time.
POISON = """
import weakref

calls, held = [], []


def poison(configs=(), *_, **__):
    calls.append(1)
    tensor = torch.zeros(1)
    if len(calls) > 1:
        held.append(weakref.ref(tensor))
        raise ValueError("full")
    return configs


def check():
    assert not any(each() is not None for each in held), "the error still holds its tensor"


def make_twice():
"""
POISONED = {
    "workload": ("def one_vector(device, dtype):\n", "the workload one_vector of kernel raised "),
    "pruning": ("    @safetune(configs=CONFIGS,", "preparing kernel for small raised "),
}


@pytest.mark.parametrize(
    ("poisoned", "options"),
    [
        pytest.param("workload", ("--devices", "0,1"), id="workload-devices"),
        pytest.param("pruning", (), id="pruning-here"),
        pytest.param("pruning", ("--devices", "0,1"), id="pruning-devices", marks=pytest.mark.full),
        pytest.param("workload", (), id="workload-here", marks=pytest.mark.full),
    ],
)
def test_a_tuning_that_cannot_begin_keeps_no_process_from_the_others(
    start: Start, targets: Path, tmp_path: Path, options: Any, poisoned: str
) -> None:
    """Regression: each process of a sweep that came to it ended, until none was left."""
    line, raised = POISONED[poisoned]
    text = (targets / "add.py").read_text().replace("def make_twice():\n", POISON)
    pruned = " prune_configs_by={'early_config_prune': poison},"
    call = pruned if poisoned == "pruning" else "    poison()\n"
    file = tmp_path / "poisoned.py"
    other = "def vectors(device, dtype):\n"
    file.write_text(text.replace(line, line + call).replace(other, f"{other}    check()\n"))
    process = start("tune", file, "--json", *options, env={}, **PIPES)
    data, errors = finished(process)
    assert process.returncode == 2
    tuned = [(each["shape"], each["choice"]) for each in data["tunings"]]
    assert sorted(dict(tuned)) == ["large", "small"], "of the other kernel, though it comes first"
    assert all(dict(tuned).values()), errors
    reason = f"{raised}ValueError: full ({file}:"
    (not_begun,) = data["not_begun"]
    assert not_begun["reason"].startswith(reason)
    assert not_begun["key"] not in {each["key"] for each in data["tunings"]}
    names = ("kernel", "shape", "dtype")
    assert [not_begun[name] for name in names] == ["kernel", "small", "float16"]
    assert f"not tuned: kernel small float16: {reason}" in errors
    assert errors.splitlines()[-1] == (
        "Error: 1 tuning could not start, for the reasons above: kernel small float16; all others "
        "are done and stored"
    )
    assert "dropped out" not in errors


def test_the_only_tuning_could_not_begin(safetune: Any, targets: Path, tmp_path: Path) -> None:
    """Its reason was on standard error alone."""
    line, raised = POISONED["pruning"]
    text = (targets / "add.py").read_text().replace("def make_twice():\n", POISON)
    pruned = " prune_configs_by={'early_config_prune': poison},"
    file = tmp_path / "alone.py"
    file.write_text(text.replace(line, line + pruned))
    found = safetune("tune", f"{file}:kernel", "--json")
    data = json.loads(found.stdout)
    assert (found.exit_code, data["tunings"], data["measured"]) == (2, [], 0)
    assert [each["reason"][: len(raised)] for each in data["not_begun"]] == [raised]
    file.write_text(file.read_text() + "\n")  # imported anew, so that it raises at the second call
    found = safetune("tune", f"{file}:kernel")
    assert "0 tunings, 0 configs measured, 1 not begun" in found.stdout
    assert (found.exit_code, found.stderr.count(raised)) == (2, 1)
    assert "Error: 1 tuning could not start, for the reasons above: kernel small" in found.stderr
    file.write_text(file.read_text() + "\n")
    assert "ValueError: full\n" in safetune("tune", f"{file}:kernel", "--debug").stderr


@pytest.fixture
def wrong_ones(tmp_path: Path) -> Path:
    """A folder of files with the names of libraries."""
    for name in ("click", "rich", "msgspec", "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    return tmp_path


def test_the_command_imports_no_library_of_the_working_directory(
    start: Start, wrong_ones: Path
) -> None:
    """Regression: `python -m safetune` had imported click and rich there when it left it."""
    process = start("list", "--json", env={}, cwd=wrong_ones, stdout=subprocess.PIPE)
    assert json.loads(process.communicate(timeout=DEADLINE_S)[0]) == []
    assert process.returncode == 0


def test_a_worker_imports_no_library_of_the_working_directory(
    wrong_ones: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: all workers of --devices ended at once, though `safetune` itself worked there."""
    (wrong_ones / "queue.py").write_text("raise SystemExit('of Python itself')")
    monkeypatch.chdir(wrong_ones)
    worker = workers.LocalWorker("GPU 0", ["--help"], {})
    with pytest.raises(workers.DroppedOut, match="ended with exit code 0"):
        list(worker.ask())
    assert "GPU 0: Usage: safetune tune" in capsys.readouterr().err


def test_a_worker_may_print_bytes_that_are_not_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noise.py").write_text(r'import os; os.write(1, b"\xff\n{"); os._exit(3)')
    worker = workers.LocalWorker("GPU 0", ["--worker=1/1", str(tmp_path / "noise.py")], {})
    with pytest.raises(workers.DroppedOut, match="ended with exit code 3"):
        list(worker.ask())
    assert r"GPU 0: \xff" in capsys.readouterr().err


def test_all_gpus_of_a_machine_without_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NoDevice, match="--devices all needs a GPU, but torch finds none"):
        found_targets.devices_of("all")


class TestDevices:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--devices=0,x", "--dry-run"], "--devices '0,x' is not a list of GPUs"),
            (["--devices=0,1", "--budget=soon"], "budget='soon'"),
        ],
    )
    def test_a_mistake_in_the_options_is_one_error(
        self, safetune: Any, target: str, options: list[str], reason: str
    ) -> None:
        message = safetune.error("tune", target, *options)
        assert reason in message
        assert "dropped out" not in message

    def test_they_share_the_list_and_a_process_that_dies_leaves_its_work_to_the_other(
        self, start: Start, safetune: Any, target: str, tmp_path: Path
    ) -> None:
        environment = {"TEST_KILL": str(tmp_path / "killed")}
        process = start("tune", target, "--devices", "0,1", "--json", env=environment, **PIPES)

        data, errors = finished(process)

        assert process.returncode == 0, errors
        assert (tmp_path / "killed").exists()
        assert sorted(choices(data)) == SHAPES
        assert all(tuning["choice"] for tuning in data["tunings"])
        assert "dropped out: its process ended with SIGKILL; the others take over" in errors
        # A config that was timed before its process died counts, and one under way is begun again.
        assert sum(tuning["measured"] for tuning in data["tunings"]) in (7, 8)

        again = safetune.json("tune", target)
        assert again["measured"] == 0
        assert choices(again) == choices(data)

    @pytest.mark.full
    def test_a_terminal_shows_one_line_for_all_and_one_for_each_finished_key(
        self, start: Start, targets: Path, fifo: Fifo, terminal: Terminal
    ) -> None:
        command = ("tune", targets / "sweep.py", "--devices=0,1")
        start(*command, env={**fifo.env, "TEST_WAIT_AT": "128"}, terminal=terminal.theirs)
        fifo.pids()
        terminal.wait_for("1/2 tunings", "/10 ", " < ")
        terminal.wait_for("process ", ": add_one  first  float32  BLOCK=", "(5 measured)")
        fifo.let_go()
        terminal.read_to_the_end()
        assert "10 configs measured" in terminal.lines[-2]

    @pytest.mark.full
    def test_force_measures_every_key_again_and_once(self, start: Start, target: str) -> None:
        for _ in range(2):
            process = start("tune", target, "--devices=0,1", "--force", "--json", env={}, **PIPES)
            data, errors = finished(process)
            assert sorted(choices(data)) == SHAPES, errors
            assert [tuning["measured"] for tuning in data["tunings"]] == [2] * 4

    def test_an_error_of_all_is_an_error_of_the_command(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text("import no_such_module\n")
        process = start("tune", tmp_path / "broken.py", "--devices", "0,1", env={}, **PIPES)
        _, errors = finished(process)
        assert process.returncode == 2
        assert "process 0: Error: " in errors
        assert "no_such_module" in errors
        assert errors.splitlines()[-1].startswith("Error: no device finished the list")

    @pytest.mark.parametrize("text", ["first", "0;1", ""])
    def test_what_is_not_a_list_of_devices_is_an_error(
        self, safetune: Any, target: str, text: str
    ) -> None:
        assert "give all, or e.g. 0,3" in safetune.error("tune", target, "--devices", f"x{text}")

    def test_a_device_or_devices(self, safetune: Any, target: str) -> None:
        result = safetune("tune", target, "--device", "cpu", "--devices", "0")
        assert "Give --device or --devices, not both" in result.stderr


class TestShards:
    def test_a_shard_tunes_its_part_and_leaves_a_key_that_another_process_has(
        self, safetune: Any, target: str, cache_dir: Path
    ) -> None:
        assert [*choices(safetune.json("tune", target, "--shard", "2/4"))] == ["101"]
        first = ("tune", target, "--shard", "1/2")
        (one, other) = (each["key"] for each in safetune.json(*first, "--dry-run")["tunings"])
        lock = locks.try_lock(cache_dir / db_files.DATABASE_NAME, one)
        assert lock is not None
        data = safetune.json(*first)
        assert [tuning["key"] for tuning in data["tunings"]] == [other]
        assert "1 left to other processes, which tune them" in safetune(*first).stdout
        lock.release()
        again = safetune.json(*first)["tunings"]
        assert [(tuning["key"], tuning["measured"]) for tuning in again] == [(one, 2), (other, 0)]

    @pytest.mark.full
    def test_the_part_of_a_shard_that_died_is_tuned_when_it_runs_again(
        self, start: Start, target: str, tmp_path: Path
    ) -> None:
        (tmp_path / "shared").mkdir()
        environment = {
            "SAFETUNE_SHARED": f"file://{tmp_path}/shared",
            "TEST_KILL": str(tmp_path / "killed"),
            "SLURM_STEP_NUM_TASKS": "2",
        }

        def rank(number: int) -> subprocess.Popen[bytes]:
            node = {
                "SAFETUNE_CACHE_DIR": str(tmp_path / f"node {number}"),
                "SLURM_PROCID": str(number),
            }
            command = ("tune", target, "--shard", "auto", "--json")
            return start(*command, env={**environment, **node}, **PIPES)

        both = [rank(0), rank(1)]
        found = [finished(process) for process in both]
        assert [process.returncode for process in both] == [0, -9], found
        assert sorted(choices(found[0][0])) == ["100", "103"]
        again, errors = finished(rank(1))
        assert sorted(choices(again)) == ["101", "102"], errors
        new_node = {**environment, "SAFETUNE_CACHE_DIR": str(tmp_path / "new node")}
        data, errors = finished(start("tune", target, "--json", env=new_node, **PIPES))
        assert data["measured"] == 0, errors
        assert choices(data) == {**choices(found[0][0]), **choices(again)}
