"""A config that took the machine or the process down is not tried again, and no other one is lost.

Another text in the file of the boot's name stands in for a machine that went down and came back. A
config's hook, in the child, copies the database as it is when the config runs: what a machine that
goes down in that moment finds when it is back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from click.testing import CliRunner

from safetune import NoWorkingConfig, safetune
from safetune.cli import main
from safetune.config import config_digest
from safetune.errors import InvalidSetting
from safetune.miss.resolve import Miss
from safetune.outcome import Outcome, Verdict
from safetune.settings import Settings
from safetune.store.local import db_files, in_flight
from safetune.store.local.db_files import LOGS
from safetune.store.local.store import Store
from safetune.store.lookup import open_lookup
from safetune.tuning.requests import Plan, TuningRequest
from safetune.tuning.tuner import tune

MANY = 50


@triton.jit
def fill_kernel(dst, n, BLOCK: tl.constexpr, TAG: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, 1.0, mask=offset < n)


class Enough(Exception):
    """A hook has seen what it wants to see; an interpreted launch takes long."""


def made(hook: Any, count: int, **options: Any) -> Any:
    configs = [triton.Config({"BLOCK": 16, "TAG": tag}, pre_hook=hook) for tag in range(count)]

    def bench(launch: Any, quantiles: Any) -> list[float]:
        with contextlib.suppress(Enough):
            launch()
        return [1.0, 1.0, 1.0]

    return safetune(configs=configs, key=["n"], do_bench=bench, **options)(fill_kernel)


def request_of(kernel: Any, force: bool = False) -> TuningRequest:
    return Miss(kernel, (torch.zeros(16), 16), {"grid": (1,)}).request(force=force)


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The machine: its store outlives it, and calling this starts it again."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    boots = iter(range(1_000))

    def start(named: bool = True) -> None:
        name = tmp_path / f"boot-{next(boots)}"
        if named:
            name.write_text(f"{name.name}\n")
        monkeypatch.setattr(in_flight, "BOOT_ID", name)

    start()
    return start


@dataclass
class Tuned:
    """A kernel whose configs leave a copy of the store when they run, and a line."""

    kernel: Any
    copies: Path
    log: Path

    def launched(self) -> list[int]:
        """Return the tags that ran since the last call."""
        tags = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return list(dict.fromkeys(map(int, tags)))

    def plan(self, store: Store) -> Plan:
        return Plan.read(request_of(self.kernel), store, since=time.time())


@pytest.fixture
def copying(tmp_path: Path, cache_dir: Path) -> Any:
    def build(count: int) -> Tuned:
        copies, log, database = tmp_path / "copies", tmp_path / "log", cache_dir / "safetune.db"

        def hook(arguments: dict[str, Any]) -> None:
            tag = arguments["TAG"]
            with open(log, "a") as file:
                file.write(f"{tag}\n")
            copy = copies / str(tag)
            if copy.exists():
                copy = copies / "last"
                shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
            for suffix in ("", LOGS[0]):
                source = database.with_name(database.name + suffix)
                if source.exists():
                    shutil.copy(source, copy / source.name)

        return Tuned(made(hook, count), copies, log)

    return build


def open_store() -> Store:
    return open_lookup(Settings.current()).store


class TestTheMachineGoesDown:
    def test_in_each_of_50_configs(self, boot: Any, copying: Any) -> None:
        tuned = copying(MANY)
        request = request_of(tuned.kernel)
        tune(request, open_store())
        assert tuned.launched() == [*range(MANY)]
        copies = [Store.open(tuned.copies / str(tag)) for tag in range(MANY)]
        for tag, copy in enumerate(copies):
            killed = tuned.plan(copy)  # the process alone: no config is to blame
            assert sorted(killed.outcomes) == [*range(tag)]
        boot()
        for tag, copy in enumerate(copies):
            plan = tuned.plan(copy)
            labels = [outcome.label for _, outcome in sorted(plan.outcomes.items())]
            assert labels == [*["ok"] * tag, "died(machine)"]
            assert plan.left == [*range(tag + 1, MANY)]
        tag = MANY - 5
        result = tune(request, copies[tag])
        assert tag not in tuned.launched()
        assert [o.label for _, o in result.outcomes].count("ok") == MANY - 1
        assert not tuned.plan(copies[tag]).due
        in_the_final = tuned.plan(Store.open(tuned.copies / "last"))
        assert {outcome.label for outcome in in_the_final.outcomes.values()} == {"ok"}

    def test_it_is_said_once_and_lifted_by_the_command_named(
        self, boot: Any, copying: Any, cache_dir: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        tuned = copying(3)
        store = open_store()
        tune(request_of(tuned.kernel), store)
        shutil.rmtree(cache_dir)
        shutil.copytree(tuned.copies / "1", cache_dir)
        boot()
        tuned.launched()
        tuned.kernel[(1,)](torch.zeros(16), 16)
        assert 1 not in tuned.launched()
        (line,) = [text for text in caplog.messages if "is not tried" in text]
        assert "fill_kernel: skipping BLOCK=16 TAG=1" in line
        assert "the machine went down" in line
        assert "`safetune clear --failures fill_kernel`" in line
        assert tune(request_of(tuned.kernel, force=True), open_store()).measured == 2
        assert 1 not in tuned.launched()
        assert len([text for text in caplog.messages if "is not tried" in text]) == 1
        done = CliRunner().invoke(main, ["clear", "--failures", "fill_kernel"])
        assert done.output == "cleared 1 failure of fill_kernel\n"
        tune(request_of(tuned.kernel), open_store())
        assert 1 in tuned.launched()

    def test_it_is_tried_again_after_30_days(self, boot: Any, copying: Any) -> None:
        tuned, store = copying(2), open_store()
        tune(request_of(tuned.kernel), store)
        copy = Store.open(tuned.copies / "1")
        boot()
        _, died = copy.trials(request_of(tuned.kernel).key.digest)
        for days, left in ((29.9, []), (30.1, [1])):
            created = time.time() - days * 86_400
            copy.put_trial(replace(died, created=created, flight="another boot"))
            assert tuned.plan(copy).left == left

    def test_a_row_that_another_program_wrote_says_nothing(self, boot: Any, copying: Any) -> None:
        tuned, store = copying(2), open_store()
        tune(request_of(tuned.kernel), store)
        first, second = store.trials(request_of(tuned.kernel).key.digest)
        here = in_flight.here()
        store.put_trial(replace(first, flight=f"{here} no process"))
        store.put_trial(replace(second, flight="another boot", created=1e300))
        assert tuned.plan(store).left == [0, 1]

    def test_a_boot_that_has_no_name_says_nothing(self, boot: Any, copying: Any) -> None:
        """As in a sandbox that hides /proc/sys: a config of this boot counted as died."""
        tuned = copying(2)
        tune(request_of(tuned.kernel), open_store())
        boot(named=False)
        assert tuned.plan(Store.open(tuned.copies / "1")).left == [1]

    def test_every_config_may_have_been_in_flight(self, boot: Any, copying: Any) -> None:
        tuned, store = copying(2), open_store()
        request = request_of(tuned.kernel)
        tune(request, store)
        boot()
        (died,) = Store.open(tuned.copies / "0").trials(request.key.digest)
        digests = [config_digest(config) for config in request.configs]
        for digest in digests:
            store.put_trial(replace(died, config_digest=digest, flight="another boot"))
        with pytest.raises(NoWorkingConfig, match=r"died\(machine\)  the machine went down"):
            tune(request_of(tuned.kernel, force=True), store)


class TestWhatIsWritten:
    @pytest.mark.parametrize("lasting", [True, False])
    def test_one_commit_waits_for_the_disk_before_each_first_launch(
        self, lasting: bool, copying: Any, request: pytest.FixtureRequest
    ) -> None:
        if lasting:
            request.getfixturevalue("boot")
        statements: list[str] = []
        store = open_store()
        with store.connection.reading() as connection:
            connection.set_trace_callback(statements.append)
        tune(request_of(copying(4).kernel), store)
        full = [i for i, text in enumerate(statements) if text == "PRAGMA synchronous=FULL"]
        assert len(full) == (4 + 1 if lasting else 0)
        for index in full:
            begin, end = (statements.index(text, index) for text in ("BEGIN IMMEDIATE", "COMMIT"))
            assert index < begin < end < statements.index("PRAGMA synchronous=NORMAL", index)

    @pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
    def test_a_database_on_a_disk_outlives_the_machine(self, boot: Any, tmp_path: Path) -> None:
        below = ("not made yet", "safetune.db")
        assert db_files.outlives_machine(tmp_path.joinpath(*below))
        assert not db_files.outlives_machine(Path("/dev/shm").joinpath(*below))
        assert not db_files.outlives_machine((tmp_path / "tmp").joinpath(*below))

    def test_a_tuning_that_is_interrupted_leaves_no_config_in_flight(
        self, boot: Any, tmp_path: Path
    ) -> None:
        tuner = os.getpid()

        def hook(arguments: dict[str, Any]) -> None:
            if arguments["TAG"] == 1:
                os.kill(tuner, signal.SIGINT)
                time.sleep(60)

        kernel, store = made(hook, 3), open_store()
        with pytest.raises(KeyboardInterrupt):
            tune(request_of(kernel), store)
        boot()
        plan = Plan.read(request_of(kernel), store)
        assert (sorted(plan.outcomes), plan.left) == ([0], [1, 2])

    def test_a_lack_of_memory_ends_the_flight(self, boot: Any, copying: Any) -> None:
        tuned, store = copying(2), open_store()
        request = request_of(tuned.kernel)
        tune(request, store)
        copy = Store.open(tuned.copies / "1")
        with copy.connection.reading() as connection:
            statement = "SELECT record FROM trial WHERE verdict = 'died'"
            assert len(connection.execute(statement).fetchall()) == 1
        digest = config_digest(request.configs[1])
        trial = next(t for t in store.trials(request.key.digest) if t.config_digest == digest)
        copy.put_trial(replace(trial, outcome=Outcome(Verdict.NO_MEMORY)))
        boot()
        assert tuned.plan(copy).left == [1]


INLINE = """
import contextlib, os, signal, sys
from pathlib import Path
import torch
from safetune.settings import Settings
from safetune.store.local.store import Store
from tests.tuning.test_in_flight import MANY, Enough, made, request_of

log = Path(sys.argv[1])


def hook(arguments):
    with open(log, "a") as file:
        file.write(f"{arguments['TAG']}\\n")
    if os.environ["DIES"] == str(arguments["TAG"]):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys._getframe(2).f_code.co_name == "bench":
        raise Enough


kernel = made(hook, MANY, isolation="inline")
key = request_of(kernel).key.digest


def run(dies):
    log.unlink(missing_ok=True)
    os.environ["DIES"] = str(dies)
    if not (pid := os.fork()):
        kernel[(1,)](torch.zeros(16), 16)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, list(dict.fromkeys(map(int, log.read_text().split())))


os.environ["DIES"] = ""
kernel[(1,)](torch.zeros(32), 32)  # another key: the imports are made once
assert run(20) == (-signal.SIGKILL, [*range(21)])
assert run(20) == (0, [tag for tag in range(MANY) if tag != 20])
with contextlib.closing(Store.open(Settings.current().cache_dir)) as store:
    assert store.clear_failures([key]) == 1
for dies in range(MANY):
    assert run(dies) == (-signal.SIGKILL, [dies])
with contextlib.closing(Store.open(Settings.current().cache_dir)) as store:
    assert [(t.outcome.label, t.config["TAG"]) for t in store.trials(key)] == [
        ("died(process)", tag) for tag in range(MANY)
    ]
print("ok")
"""


def test_a_process_is_killed_in_each_of_50_configs_that_it_tries_itself(
    fresh_process: Any, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    done = fresh_process(INLINE, tmp_path / "log", env={"TMPDIR": str(tmp_path / "tmp")}, warm=True)
    assert done.stdout == "ok\n", done.stderr
    assert done.stderr.count("the process ended while it ran") == 1


class TestLists:
    """What `safetune export --failures` writes keeps other machines from trying these configs."""

    def test_it_is_carried_to_another_machine(
        self,
        boot: Any,
        copying: Any,
        tmp_path: Path,
        cache_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        tuned, file = copying(3), tmp_path / "failures.json"
        tune(request_of(tuned.kernel), open_store())
        boot()
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tuned.copies / "2"))
        monkeypatch.delenv("COLUMNS", raising=False)
        done = CliRunner().invoke(main, ["export", "--failures", str(file)])
        assert (done.output, done.exit_code) == (f"{file}: 1 failure\n", 0)

        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(cache_dir.parent / "other"))
        monkeypatch.setenv("SAFETUNE_FAILURES", str(file))
        tuned.launched()
        for force in (False, True):
            result = tune(request_of(tuned.kernel, force), open_store())
            labels = [outcome.label for _, outcome in result.outcomes]
            assert labels == ["ok", "ok", "died(machine)"]
            assert 2 not in tuned.launched()
        assert tuned.plan(open_store()).due is False
        tuned.kernel[(1,)](torch.zeros(17), 17)
        assert 2 in tuned.launched(), "another key"

    @pytest.mark.parametrize(
        "content", [None, "", "[]", '{"safetune_failures": 2, "failures": []}']
    )
    def test_a_file_that_is_none_is_an_error_of_a_tuning_alone(
        self,
        content: str | None,
        copying: Any,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        file = tmp_path / "list.json"
        if content is not None:
            file.write_text(content)
        tune(request_of(copying(2).kernel), open_store())
        monkeypatch.setenv("SAFETUNE_FAILURES", str(file))
        kernel = copying(2).kernel
        kernel[(1,)](torch.zeros(16), 16)
        with pytest.raises(InvalidSetting, match=r"^SAFETUNE_FAILURES='.*' cannot be read \(.*"):
            kernel[(1,)](torch.zeros(17), 17)
