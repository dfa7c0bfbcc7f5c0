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
from tests.store.shared import conftest as shared_store

from .conftest import DEADLINE_S, Terminal

database, server = shared_store.database, shared_store.server

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
        report.take(name, {"planned": 1, "new": 1, "left_out": left_out})

    assert capsys.readouterr().err == "not tuned: add for n=1: it has changed\n"


class Silent:
    """A worker whose process neither ends nor tells anything more."""

    name = "GPU 0"

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def events(self) -> Iterator[workers.Event]:
        yield {"planned": 1}
        assert self.stopped.wait(DEADLINE_S)
        yield {"planned": 2}

    def stop(self) -> None:
        self.stopped.set()


class Finishing:
    """A worker that tells nothing, and ends when another one was stopped."""

    name = "GPU 1"

    def __init__(self, other: Silent) -> None:
        self._other = other

    def events(self) -> Iterator[workers.Event]:
        while not self._other.stopped.wait(0.05):
            yield {}

    def stop(self) -> None:
        raise AssertionError("it has told that it is there")


def test_a_worker_that_tells_nothing_for_long_is_stopped_and_drops_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = Silent()
    told = [(n, e) for n, e in workers.gather([silent, Finishing(silent)], silent_s=0.2) if e]
    reason = "it has told nothing for 0.2 s"
    assert told == [("GPU 0", {"planned": 1}), ("GPU 0", {"dropped": reason})]
    assert f"GPU 0 drops out: {reason}; the others do its work" in capsys.readouterr().err


def test_what_a_worker_prints_besides_its_events_is_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its interpreter, or a library that it imports, may print before the command begins."""
    worker = workers.LocalWorker("GPU 0", ["--help"], {})
    assert [*worker.events()] == []
    assert "GPU 0: Usage: safetune tune" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--devices", "0,1")], ids=["here", "devices"])
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


@pytest.mark.parametrize("options", [(), ("--devices", "0,1")], ids=["here", "devices"])
@pytest.mark.parametrize("poisoned", POISONED)
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
    last = errors.splitlines()[-1]
    if options:
        assert last == (
            "Error: 1 tuning could not begin, for the reasons above: kernel small float16; the "
            "rest of the list is done and stored"
        )
        assert "drops out" not in errors
    else:
        assert last.startswith(f"Error: {reason}")


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
    assert (found.exit_code, found.stderr.count(raised)) == (2, 2)


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
    process = start("stats", env={}, cwd=wrong_ones, stdout=subprocess.PIPE)
    assert b"choices" in process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0


def test_a_worker_imports_no_library_of_the_working_directory(
    wrong_ones: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: all workers of --devices ended at once, though `safetune` itself worked there."""
    (wrong_ones / "queue.py").write_text("raise SystemExit('of Python itself')")
    monkeypatch.chdir(wrong_ones)
    worker = workers.LocalWorker("GPU 0", ["--help"], {})
    assert [*worker.events()] == []
    assert "GPU 0: Usage: safetune tune" in capsys.readouterr().err


def test_a_worker_may_print_bytes_that_are_not_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noise.py").write_text(r'import os; os.write(1, b"\xff\n{"); os._exit(3)')
    worker = workers.LocalWorker("GPU 0", ["--worker=1/1@0", str(tmp_path / "noise.py")], {})
    with pytest.raises(workers.DroppedOut, match="ended with exit code 3"):
        list(worker.events())
    assert r"GPU 0: \xff" in capsys.readouterr().err


def test_all_gpus_of_a_machine_without_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NoDevice, match="--devices all needs a GPU, and torch finds none"):
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
        assert "drops out" not in message

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
        assert "drops out: its process was ended by SIGKILL; the others do its work" in errors
        # A config that was timed before its process died counts, and one under way is begun again.
        assert sum(tuning["measured"] for tuning in data["tunings"]) in (7, 8)

        again = safetune.json("tune", target)
        assert again["measured"] == 0
        assert choices(again) == choices(data)

    @pytest.mark.full
    def test_a_terminal_shows_a_line_for_each(
        self, start: Start, targets: Path, tmp_path: Path, terminal: Terminal
    ) -> None:
        for name in ("fifo", "go"):
            os.mkfifo(tmp_path / name)
        command = ("tune", targets / "one_key.py", "--devices=0,1")
        start(*command, env={"TEST_CARDS": str(tmp_path)}, terminal=terminal.theirs)
        terminal.wait_for("0/1 tunings", "/20 configs", "configs/s", "left")
        for number in (0, 1):
            terminal.wait_for(f"process {number}: add_one 64 float32", "/20", "0 failed", "best")
        (tmp_path / "go").open("w").close()
        terminal.read_to_the_end()
        assert "20 configs measured" in terminal.lines[-2]

    @pytest.mark.full
    def test_with_fewer_keys_than_devices_they_share_the_configs_of_a_key(
        self, start: Start, targets: Path, tmp_path: Path
    ) -> None:
        """The one that tunes the key launches all once more, to judge and to choose."""
        os.mkfifo(tmp_path / "fifo")
        environment = {"TEST_CARDS": str(tmp_path)}
        command = ("tune", targets / "one_key.py", "--devices=0,1", "--json")
        data, errors = finished(start(*command, env=environment, **PIPES))
        assert [tuning["measured"] for tuning in data["tunings"]] == [20], errors
        assert [trial["verdict"] for trial in data["trials"]] == ["ok"] * 20
        cards = [{*card.read_text().split()} for card in tmp_path.glob("card.*")]
        assert max(map(len, cards)) == 20
        assert 0 < min(map(len, cards)) < 20, "the helper has measured a part"

    @pytest.mark.full
    def test_a_card_on_which_every_launch_fails_drops_out_and_its_work_is_done_again(
        self, start: Start, targets: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", str(targets.with_name("broken_card")))
        command = ("tune", targets / "faulty_card.py", "--devices=0,1", "--json")
        process = start(*command, env={}, **PIPES)
        data, errors = finished(process)
        assert process.returncode == 0, errors
        assert "process 1: Error: every launch fails on this device: RuntimeError: CUDA" in errors
        assert "process 1 drops out" in errors
        assert sorted(choices(data)) == ["40", "50"]
        assert [trial["verdict"] for trial in data["trials"]] == ["ok"] * 4

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
        assert "--device names one GPU and --devices several" in result.stderr


class TestShards:
    def test_a_shard_without_a_shared_store_tunes_its_part(
        self, safetune: Any, target: str
    ) -> None:
        data = safetune.json("tune", target, "--shard", "2/4")
        assert sorted(choices(data)) == ["101"]
        assert "3 left to other shards" in safetune("tune", target, "--shard", "1/4").stdout

    @pytest.mark.full
    @pytest.mark.parametrize("store", ["directory", "postgresql"])
    def test_four_nodes_tune_each_key_once_though_one_dies(
        self, start: Start, target: str, tmp_path: Path, store: str, request: pytest.FixtureRequest
    ) -> None:
        (tmp_path / "shared").mkdir()
        url = f"file://{tmp_path}/shared"
        if store == "postgresql":
            url = request.getfixturevalue("database")
        environment = {"SAFETUNE_SHARED": url, "TEST_KILL": str(tmp_path / "killed")}
        ranks = [
            start(
                *("tune", target, "--shard", "auto", "--json"),
                env={
                    **environment,
                    "SAFETUNE_CACHE_DIR": str(tmp_path / f"node{rank}"),
                    "SLURM_PROCID": str(rank),
                    "SLURM_STEP_NUM_TASKS": "4",
                },
                **PIPES,
            )
            for rank in range(4)
        ]
        found = [finished(rank) for rank in ranks]

        assert sorted(rank.returncode for rank in ranks) == [-9, 0, 0, 0], found
        alive = [data for data, _ in found if data]
        measured = dict.fromkeys(SHAPES, 0)
        for data in alive:
            for tuning in data["tunings"]:
                measured[tuning["shape"]] += tuning["measured"]
        assert measured == dict.fromkeys(SHAPES, 2)
        last = start(
            *("tune", target, "--json"),
            env={"SAFETUNE_SHARED": url, "SAFETUNE_CACHE_DIR": str(tmp_path / "new node")},
            **PIPES,
        )
        data, errors = finished(last)
        assert data["measured"] == 0, errors
        chosen = {shape: choice for each in alive for shape, choice in choices(each).items()}
        assert choices(data) == chosen
