"""`safetune tune --devices`, `--shard` and `--ray`: every key once, also where a process dies.

In the interpreter a device is a process on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.cli import targets as found_targets
from safetune.cli import workers
from safetune.cli.report import Report
from safetune.errors import NoDevice
from safetune.store.local import db_files, locks
from tests.cli.conftest import DEADLINE_S, ROOT, Start
from tests.conftest import FreshProcess

SHAPES = ["100", "101", "102", "103"]


@pytest.fixture
def target(targets: Path) -> str:
    return str(targets / "fleet.py")


def tune(run: FreshProcess, *words: object, ends: int = 0, **options: Any) -> tuple[Any, str]:
    """Return what `tune --json` printed in a process of its own, and its messages."""
    done = run("tune", *words, "--json", ends=ends, warm=True, **options)
    return json.loads(done.stdout or "null"), done.stderr


def choices(data: dict[str, Any]) -> dict[str, str]:
    return {tuning["shape"]: tuning["choice"] for tuning in data["tunings"]}


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


def poisoned(targets: Path, tmp_path: Path, in_workload: bool) -> Path:
    """A file of which the first kernel cannot be tuned, for its workload or its pruning."""
    pruned = " prune_configs_by={'early_config_prune': poison},"
    text = (targets / "add.py").read_text().replace("def make_twice():\n", POISON)
    for line, call in (
        ("def vectors(device, dtype):\n", "    check()\n"),
        ("def one_vector(device, dtype):\n", "    poison()\n" * in_workload),
        ("    @safetune(configs=CONFIGS,", pruned * (not in_workload)),
    ):
        assert line in text
        text = text.replace(line, line + call)
    file = tmp_path / "poisoned.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("way", ["workload", "pruning"])
def test_a_tuning_that_cannot_begin_keeps_no_process_from_the_others(
    run: FreshProcess, targets: Path, tmp_path: Path, way: str
) -> None:
    """Regression: each process of a sweep that came to it ended, until none was left."""
    file = poisoned(targets, tmp_path, way == "workload")
    options = ("--devices", "0,1") if way == "workload" else ()
    data, errors = tune(run, file, *options, ends=2)
    tuned = [(each["shape"], each["choice"]) for each in data["tunings"]]
    assert sorted(dict(tuned)) == ["large", "small"], "of the other kernel, though it comes first"
    assert all(dict(tuned).values()), errors
    raised = {
        "workload": "the workload one_vector of kernel raised ",
        "pruning": "preparing kernel for small raised ",
    }
    reason = f"{raised[way]}ValueError: full ({file}:"
    (not_begun,) = data["not_begun"]
    assert not_begun["reason"].startswith(reason)
    assert not_begun["key"] not in {each["key"] for each in data["tunings"]}
    assert f"not tuned: kernel small float16: {reason}" in errors
    assert errors.splitlines()[-1] == (
        "Error: 1 tuning could not start, for the reasons above: kernel small float16; all others "
        "are done and stored"
    )
    assert "dropped out" not in errors


def test_the_only_tuning_could_not_begin(safetune: Any, targets: Path, tmp_path: Path) -> None:
    """Its reason was on standard error alone."""
    file = poisoned(targets, tmp_path, in_workload=False)
    data = safetune.json("tune", f"{file}:kernel", code=2)
    raised = "preparing kernel for small raised "
    assert (data["tunings"], data["measured"], len(data["not_begun"])) == ([], 0, 1)
    assert data["not_begun"][0]["reason"].startswith(raised)
    file.write_text(file.read_text() + "\n")  # imported anew, so that it raises at the second call
    found = safetune("tune", f"{file}:kernel", "--debug")
    assert "0 tunings, 0 configs measured, 1 not begun" in found.stdout
    assert found.exit_code == 2
    assert "Error: 1 tuning could not start, for the reasons above: kernel small" in found.stderr
    assert "ValueError: full\n" in found.stderr, "the traceback"


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
    def test_they_share_the_list_and_a_process_that_dies_leaves_its_work_to_the_other(
        self, run: FreshProcess, safetune: Any, target: str, tmp_path: Path
    ) -> None:
        environment = {"TEST_KILL": str(tmp_path / "killed")}
        data, errors = tune(run, target, "--devices", "0,1", env=environment)

        assert (tmp_path / "killed").exists()
        assert sorted(choices(data)) == SHAPES
        assert all(tuning["choice"] for tuning in data["tunings"])
        assert "dropped out: its process ended with SIGKILL; the others take over" in errors
        assert re.search(r"^process \d: add_one  100  float32  BLOCK=.*  \(2 meas", errors, re.M)
        # A config that was timed before its process died counts, and one under way is begun again.
        assert sum(tuning["measured"] for tuning in data["tunings"]) in (7, 8)

        again = safetune.json("tune", target)
        assert again["measured"] == 0
        assert choices(again) == choices(data)

    @pytest.mark.full
    def test_force_measures_every_key_again_and_once(self, run: FreshProcess, target: str) -> None:
        for _ in range(2):
            data, errors = tune(run, target, "--devices=0,1", "--force")
            assert sorted(choices(data)) == SHAPES, errors
            assert [tuning["measured"] for tuning in data["tunings"]] == [2] * 4

    def test_an_error_of_all_is_an_error_of_the_command(
        self, run: FreshProcess, tmp_path: Path
    ) -> None:
        (tmp_path / "broken.py").write_text("import no_such_module\n")
        errors = run("tune", tmp_path / "broken.py", "--devices", "0,1", ends=2, warm=True).stderr
        assert "process 0: Error: " in errors
        assert "no_such_module" in errors
        assert errors.splitlines()[-1].startswith("Error: no device finished the list")


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


#: Starts a cluster of two nodes with one CPU each beside its head, and runs the command on it.
CLUSTER = """
import subprocess, sys
from ray.cluster_utils import Cluster

small = {"include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
for _ in range(2):
    cluster.add_node(num_cpus=1, **small)
cluster.wait_for_nodes()
command = [sys.executable, "-m", "safetune", "tune", *sys.argv[1:], "--ray", cluster.address]
done = subprocess.run([*command, "--json"], check=False)
cluster.shutdown()
sys.exit(done.returncode)
"""


@pytest.mark.full
def test_a_node_that_dies_loses_its_key_to_the_other(targets: Path, tmp_path: Path) -> None:
    """Two raylets, of which one is killed while its worker tunes the third key."""
    pytest.importorskip("ray", reason="the extra `ray` has ray")
    (tmp_path / "shared").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "SAFETUNE_SHARED": f"file://{tmp_path}/shared",
        "SAFETUNE_CACHE_DIR": str(tmp_path / "store"),
        "TEST_KILL": str(tmp_path / "killed"),
        "TEST_KILLS": "raylet",
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(targets / "fleet.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").read_text() == "raylet"
    assert "dropped out: its actor or its node died; the others take over its work" in done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    assert sorted(tuning["shape"] for tuning in data["tunings"]) == ["100", "101", "102", "103"]
    assert all(tuning["choice"] for tuning in data["tunings"])
    assert len([*(tmp_path / "shared").rglob("*.json")]) == 4
