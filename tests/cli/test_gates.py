"""What CI calls before a frozen deployment: `tune --recorded`, and `coverage --fail-under`.

Each way in which a frozen process would launch something else than a choice makes one of them fail.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.local.store import Store
from tests.cli.conftest import COMMAND
from tests.conftest import ROOT, run_python

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

HELPERS = """
import triton
import triton.language as tl

@triton.jit
def double(value):
    return value * 2
"""

KERNELS = """
import torch
import triton
import triton.language as tl

from helpers import double
from safetune import safetune

CONFIGS = [triton.Config({"BLOCK": size}) for size in (64, 128)]


@safetune(configs=CONFIGS, key=["n"])
@triton.jit
def doubles(x, n, m, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n - m
    tl.store(x + offset, double(tl.load(x + offset, mask=mask)), mask=mask)


@safetune(configs=CONFIGS, key=["n"])
@triton.jit
def fills(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 1.0, mask=offset < n)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def call_all():
    doubles[grid](torch.ones(100), 100, 0)
    fills[grid](torch.ones(100), 100)
"""

#: The program of a deployment. What a kernel of its own lacks is called by nobody.
PROGRAM = "import layers; layers.call_all()"


class Deployment:
    """A program whose calls were recorded and tuned, and the packs of its choices."""

    def __init__(self, folder: Path, safetune: Any, fresh_process: FreshProcess) -> None:
        self.code, self.cache, self.packs = (folder / n for n in ("code", "cache", "packs"))
        self.safetune, self._fresh_process = safetune, fresh_process
        self.kernels = self.code / "layers.py"
        safetune.set(SAFETUNE_CACHE_DIR=self.cache)

    def edit(self, path: Path, old: str, new: str, count: int = -1) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, count))

    def edit_pack(self, edit: Callable[[Any], object]) -> None:
        """Change one of the packs that are all that the deployment has."""
        path = sorted(self.packs.iterdir())[0]
        pack = json.loads(path.read_text())
        edit(pack)
        path.write_text(json.dumps(pack))
        self.without_store()

    def without_store(self) -> None:
        self.safetune.set(SAFETUNE_PACKS=self.packs)
        self.safetune.use_store("nothing")

    def database(self, write: Callable[[Any], object]) -> None:
        store = Store.open(self.cache)
        with store.connection.transaction() as connection:
            write(connection)
        store.close()

    def is_frozen_with_choices(self) -> bool:
        """Whether every launch of a frozen process has the choice of its key."""
        env = {"SAFETUNE_MODE": "frozen", "SAFETUNE_LOG": "info"}
        done = self._fresh_process(PROGRAM, env=env, cwd=self.code, warm=True, ends=None)
        with_choice = done.stderr.count("has a choice for")
        assert done.returncode != 0 or with_choice + done.stderr.count("has no choice for") >= 2
        return done.returncode == 0 and with_choice == 2

    def failing(self) -> list[str]:
        """Return which of the commands that CI calls fail."""
        words = ("--fail-under", "100", "--calls", self.cache / "safetune.db")
        covered = self.safetune("coverage", *words).exit_code
        self.safetune.set(SAFETUNE_CACHE_DIR=self.cache)
        tuned = self.safetune("tune", "--recorded").exit_code
        return ["tune"] * (tuned != 0) + ["coverage"] * (covered != 0)


@pytest.fixture(scope="session")
def tuned_deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code, the store and the packs of a deployment. Tests copy it."""
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "code").mkdir()
    (folder / "code/layers.py").write_text(KERNELS)
    (folder / "code/helpers.py").write_text(HELPERS)
    env = {"SAFETUNE_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    process: Any = functools.partial(run_python, cwd=folder / "code", warm=True)
    process(PROGRAM, env={**env, "SAFETUNE_MODE": "record"})
    for words in (("tune", "--recorded"), ("export", folder / "packs")):
        process(COMMAND, *words, env=env)
    return folder


@pytest.fixture
def deployment(
    tuned_deployment: Path,
    tmp_path: Path,
    safetune: Any,
    fresh_process: FreshProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> Deployment:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit in the same second is one
    safetune.set(PYTHONDONTWRITEBYTECODE="1")
    folder = tmp_path / "deployment"
    shutil.copytree(tuned_deployment, folder)
    monkeypatch.chdir(folder / "code")
    return Deployment(folder, safetune, fresh_process)


def _lose_calls(made: Deployment) -> None:
    made.database(lambda db: db.execute("UPDATE call SET record = 'x' WHERE name = 'fills'"))
    made.database(lambda db: db.execute("DELETE FROM choice WHERE key IN (SELECT key FROM call)"))


def _undeclared(pack: Any) -> None:
    pack["tunings"][0]["choices"][0]["config"]["BLOCK"] = 32


#: By what happens after the tuning.
WAYS: dict[str, Callable[[Deployment], object]] = {
    "a kernel is edited": lambda made: made.edit(made.kernels, "1.0", "2.0"),
    "a function in a file that kernels share is edited": lambda made: made.edit(
        made.code / "helpers.py", "value * 2", "value * 3"
    ),
    "a kernel is renamed": lambda made: made.edit(made.kernels, "fills", "sets"),
    "a kernel refuses the call": lambda made: made.edit(
        made.kernels, '({"BLOCK": size})', '({"BLOCK": size, "n": 4})'
    ),
    "the module is gone": lambda made: made.kernels.unlink(),
    "the list of configs is edited": lambda made: made.edit(made.kernels, "(64, 128)", "(32, 256)"),
    "a name joins the key": lambda made: made.edit(made.kernels, 'key=["n"]', 'key=["n", "m"]', 1),
    "a choice is lost": lambda made: made.database(
        lambda db: db.execute("DELETE FROM choice WHERE key IN (SELECT key FROM call LIMIT 1)")
    ),
    "a recorded call is damaged": _lose_calls,
    "a pack is cut off": lambda made: (
        os.truncate(sorted(made.packs.iterdir())[0], 300),
        made.without_store(),
    ),
    "a pack is of another Triton": lambda made: made.edit_pack(
        lambda pack: pack["tunings"][0]["toolchain"].update(triton="3.0.0")
    ),
    "a choice in a pack is not declared": lambda made: made.edit_pack(_undeclared),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_in_which_frozen_would_fall_back_fails_a_gate(
    deployment: Deployment, way: str
) -> None:
    WAYS[way](deployment)
    assert not deployment.is_frozen_with_choices()

    failing = deployment.failing()

    assert failing, way
    if "kernel" in way or "module" in way:
        assert failing[0] == "tune", "an edited or missing kernel"


def test_coverage_alone_counts_no_call_that_it_cannot_compare_with_the_code(
    deployment: Deployment,
) -> None:
    """Its choice is stored, but nobody knows whether the kernel is still the one of the key."""
    WAYS["the module is gone"](deployment)
    assert "coverage" in deployment.failing()


def _rename_packs(made: Deployment) -> None:
    for number, path in enumerate(sorted(made.packs.iterdir())):
        path.rename(made.packs / f"{number}.json")
    made.without_store()


#: By what may happen without any harm.
HARMLESS: dict[str, Callable[[Deployment], object]] = {
    "nothing": lambda made: None,
    "a comment": lambda made: made.edit(made.kernels, "    offset", "    # so\n    offset"),
    "another kernel is added": lambda made: made.kernels.write_text(
        made.kernels.read_text()
        + KERNELS[KERNELS.index("@safetune") :].split("\n\n\n")[0].replace("doubles", "another")
    ),
    "packs are renamed": _rename_packs,
}


@pytest.mark.parametrize("what", HARMLESS)
def test_where_frozen_launches_choices_both_gates_are_green(
    deployment: Deployment, what: str
) -> None:
    HARMLESS[what](deployment)

    assert deployment.is_frozen_with_choices()
    assert deployment.failing() == []


def test_more_keys_than_a_store_keeps(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not recorded is not known to be covered."""
    monkeypatch.setattr(Store, "most_calls", 2)
    assert deployment.failing() == ["coverage"]


class TestTwoFiles:
    """Kernels of one name in two files, of which one is edited."""

    @pytest.fixture(autouse=True)
    def _two(self, tmp_path: Path, fresh_process: FreshProcess, monkeypatch: Any) -> None:
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.chdir(tmp_path)
        for name, number in (("one", "1.0"), ("two", "2.0")):
            text = KERNELS.replace("1.0", number).replace("    doubles[", "    0 and doubles[")
            (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / "helpers.py").write_text(HELPERS)
        code = "import one, two; one.call_all(); two.call_all()"
        fresh_process(code, env={"SAFETUNE_MODE": "record"}, cwd=tmp_path, warm=True)
        two = tmp_path / "two.py"
        two.write_text(two.read_text().replace("2.0", "3.0"))

    def test_the_other_is_tuned(self, safetune: Any) -> None:
        said = safetune.json("tune", "--recorded", code=1)
        assert [tuning["kernel"] for tuning in said["tunings"]] == ["fills"]
        reason = "two:fills has changed since it was recorded: record it again"
        assert [left["reason"] for left in said["left_out"]] == [reason]

    @pytest.mark.parametrize(
        ("target", "code"), [("one.py", 0), ("two.py", 1), ("two.py:fills", 1)]
    )
    def test_a_target_is_asked_for_its_own_alone(
        self, safetune: Any, target: str, code: int
    ) -> None:
        said = safetune.json("tune", "--recorded", target, code=code)
        assert len(said["left_out"]) == code
        covered = safetune.json("coverage", target)["by_calls"]
        assert covered["changed"] == code
        assert covered["exact"] == 1 - code


def test_a_kernel_that_is_gone_from_the_file_of_a_target_is_named(deployment: Deployment) -> None:
    deployment.edit(deployment.kernels, "fills", "sets")
    result = deployment.safetune("tune", "--recorded", deployment.kernels)
    assert result.exit_code == 1
    assert "not tuned: fills for n=100 (float32): layers:fills is not an attribute" in result.stdout


@pytest.mark.full
def test_the_way_of_an_operator(tmp_path: Path) -> None:
    """Two nodes, a shared store, record to frozen, and an edit that stops the pipeline."""
    binaries = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAFETUNE_")}
    done = subprocess.run(
        ["bash", str(ROOT / "docs/examples/operators_path.sh")],
        env={**env, "PATH": f"{binaries}:{env['PATH']}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("== done")
    said = " ".join(done.stdout.split())  # lines are as wide as a terminal
    assert "model:double has changed since it was recorded: record it again" in said
