"""`safetune tune`: what it measures, what it prints, and its exit codes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.schema import seconds

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: What `targets/add.py` declares for `add_one`.
CONFIGS, SHAPES = 2, ["small", "large"]


@pytest.fixture
def add(targets: Path) -> str:
    return str(targets / "add.py")


def shapes_of(data: dict[str, Any]) -> list[str]:
    return [tuning["shape"] for tuning in data["tunings"]]


def planned(safetune: Any, *words: object) -> list[tuple[str, str]]:
    """The kernels and shapes that a command would tune."""
    tunings = safetune.json("tune", *words, "--dry-run")["tunings"]
    return [(tuning["kernel"], tuning["shape"]) for tuning in tunings]


class TestTargets:
    def test_a_file_is_all_its_kernels_with_a_workload(
        self, safetune: Any, add: str, targets: Path
    ) -> None:
        """Named once, however often it is given."""
        both = [("add_one", "small"), ("add_one", "large")]
        assert planned(safetune, add) == [("kernel", "small"), *both]
        other = str(targets / "heuristics.py")
        several = planned(safetune, f"{add}:add_one", f"{add}:add_one", other)
        assert [shape for _, shape in several] == [*SHAPES, "256", "384", "500"]

    @pytest.mark.parametrize("name", [":twice", ":kernel", "::kernel"])
    def test_one_kernel(self, safetune: Any, add: str, name: str) -> None:
        """A function's name may be shared; of these, the one that has a workload is meant."""
        assert planned(safetune, f"{add}{name}") == [("kernel", "small")]

    @pytest.mark.parametrize("as_module", [True, False], ids=["module", "file"])
    def test_a_module_in_the_working_directory_and_a_file_with_the_name_of_a_loaded_module(
        self, safetune: Any, add: str, tmp_path: Path, monkeypatch: Any, as_module: bool
    ) -> None:
        """`json.py` would take the place of the standard library's for the rest of the run."""
        package = tmp_path / "cli_package"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "json.py").write_text(Path(add).read_text())
        monkeypatch.chdir(tmp_path)
        if not as_module:
            (package / "__init__.py").unlink()

        name = "cli_package.json" if as_module else package / "json.py"
        assert [shape for _, shape in planned(safetune, f"{name}:add_one")] == SHAPES

    def test_a_directory_is_all_files_below_it_that_declare_workloads(
        self, safetune: Any, add: str, tmp_path: Path
    ) -> None:
        """No other file is run; a file of a package is its module, with relative imports."""
        package = tmp_path / "project" / "tuned_package"
        for folder in ("", "inner", ".hidden", "venv/lib/site-packages"):
            (package / folder).mkdir(parents=True, exist_ok=True)
        text = Path(add).read_text()
        (package / "__init__.py").write_text("")
        (package / "shapes.py").write_text("raise SystemExit('nothing imports it')\n")
        for skipped in (".hidden", "venv/lib/site-packages"):
            file = package / skipped / "kernels.py"
            file.write_text("raise SystemExit(1)  # safetune .workload")
        (package / "names.py").write_text("ONE = 1\n")
        (package / "kernels.py").write_text(
            text.replace("import os", "import os\nfrom .names import ONE", 1)
        )
        (package / "inner" / "more.py").write_text(text)

        everything = safetune.json("tune", tmp_path / "project", "--shape", "large")
        named = safetune.json("tune", f"{tmp_path / 'project'}::twice")

        assert shapes_of(everything) == ["large", "large"]
        assert [tuning["kernel"] for tuning in named["tunings"]] == ["kernel", "kernel"]
        assert [tuning["measured"] for tuning in named["tunings"]] == [CONFIGS, 0], "one kernel"

    def test_a_kernel_above_one_in_a_factory(self, safetune: Any, tmp_path: Path) -> None:
        """In the child, which knows of the file only these two, the first ran into the second."""
        file = tmp_path / "factory_below.py"
        file.write_text(FACTORY_BELOW)

        data = safetune.json("tune", f"{file}:inner", f"{file}:outer")

        assert [trial["message"] for trial in data["trials"]] == [""] * 2


class TestOptions:
    def test_shape(self, safetune: Any, add: str) -> None:
        command = ("tune", f"{add}:add_one", "--shape", "large")
        assert shapes_of(safetune.json(*command)) == ["large"]
        both = safetune.json(*command, "--shape", "small")
        assert shapes_of(both) == SHAPES
        assert both["measured"] == CONFIGS, "large is known"

    def test_dtype(self, safetune: Any, add: str) -> None:
        options = ("--shape", "small", "--dtype", "float16", "--dtype", "float64")
        data = safetune.json("tune", add, *options)

        assert [(t["kernel"], t["dtype"]) for t in data["tunings"]] == [
            (kernel, dtype) for kernel in ("kernel", "add_one") for dtype in ("float16", "float64")
        ]
        stored = {entry["call"]["dtypes"]["x"] for entry in safetune.json("list")}
        assert stored == {"float16", "float64"}

    def test_force_measures_again_and_opens_the_next_generation(
        self, safetune: Any, add: str
    ) -> None:
        target = f"{add}:add_one"

        counts = [
            safetune.json("tune", target, *options)["measured"]
            for options in ([], [], ["--force"], [])
        ]

        all_of_them = CONFIGS * len(SHAPES)
        assert counts == [all_of_them, 0, all_of_them, 0]
        assert [entry["generation"] for entry in safetune.json("list")] == [2, 2]
        shown = safetune.json("show", "add_one")
        assert [trial["generation"] for trial in shown] == [2] * all_of_them


class TestBudget:
    def test_it_is_planned_and_kept_for_each_key_and_a_larger_one_goes_on(
        self, safetune: Any, add: str
    ) -> None:
        command = ("tune", f"{add}:add_one", "--shape", "large")
        first = safetune.json(*command, "--budget", "1")
        assert (first["measured"], len(first["trials"])) == (1, 1)
        assert safetune.json(*command, "--budget", "1")["measured"] == 0
        assert safetune("list").stdout.rstrip().endswith("  searched")
        planned = [
            safetune.json(*command, "--dry-run", *budget)["tunings"][0]
            for budget in (("--budget", "1"), ("--budget", "9"), ())
        ]
        assert [(each["configs"], each["stored"], each["to_measure"]) for each in planned] == [
            *((1, 1, 0), (2, 1, 1), (2, 1, 1)),
        ]
        rest = safetune.json(*command)
        assert len(rest["trials"]) == CONFIGS
        assert "searched" not in safetune("list").stdout
        assert safetune.json(*command)["measured"] == 0

    def test_a_time_is_for_all_keys_together(self, safetune: Any, add: str) -> None:
        """Each of them is tuned, however short it is."""
        command = ("tune", f"{add}:add_one", "--budget", "0.001s")
        first = safetune.json(*command)
        assert first["tunings"]
        assert all(each["choice"] for each in first["tunings"])
        again = safetune.json(*command, "--dry-run")
        assert again["to_measure"] == 0, "a choice within a time is not searched for again"
        assert again["stored"] == len(first["trials"]) < again["configs"]


class TestOutput:
    def test_good_and_bad_configs(self, safetune: Any, targets: Path) -> None:
        """The kernel without a working config makes the exit code 1; the other is tuned."""
        as_json = safetune("tune", targets / "faulty.py", "--json")
        as_table = safetune("tune", targets / "faulty.py")

        for result in (as_json, as_table):
            assert result.exit_code == 1
            assert result.stderr == "", "no progress bar without a terminal"
        data = json.loads(as_json.stdout)
        hopeless, mixed = data["tunings"]
        assert (data["measured"], hopeless["measured"], mixed["measured"]) == (7, 2, 5)
        assert hopeless["choice"] is None
        trials = [trial for trial in data["trials"] if trial["shape"] == "mixed"]
        found = {trial["config"].split()[0].removeprefix("BLOCK="): trial for trial in trials}
        labels = {block: trial["label"] for block, trial in found.items()}
        assert labels.pop("48") in ("launch_error", "compile_error")
        assert labels == {"32": "ok", "64": "died(SIGSEGV)", "128": "timeout", "256": "ok"}
        assert "power of 2" in found["48"]["message"]
        assert [t["config"] for t in trials if t["chosen"]] == [mixed["choice"]]
        assert [t["timing"] is None for t in trials] == [t["verdict"] != "ok" for t in trials]
        check_table(as_table.stdout, data)

    def test_only_the_result_is_on_standard_output(self, safetune: Any, add: str) -> None:
        """What the target and its workloads print goes to standard error, as warnings do."""
        safetune.set(TEST_PRINTS="1", TRITON_PRINT_AUTOTUNING="1")

        result = safetune("tune", f"{add}:add_one", "--shape", "small", "--json")

        assert json.loads(result.stdout)["measured"] == CONFIGS
        lines = result.stderr.splitlines()
        assert lines[:2] == ["printed while it was imported", "Warning: something is old"]
        assert set(lines[2:]) == {"printed by the workload"}

    def test_what_never_worked_is_measured_again_with_force_only(
        self, safetune: Any, targets: Path
    ) -> None:
        """Without a choice there was no generation to go on from, and --force measured nothing."""
        target = targets / "faulty.py:hopeless"
        assert safetune.json("tune", target, code=1)["measured"] == 2

        again = safetune("tune", target)

        assert again.exit_code == 1
        *_, failed, last = again.stdout.splitlines()
        assert last == (
            "1 tuning, 0 configs measured, 1 without a working config (1 by stored outcomes: "
            "--force to measure again)"
        )
        assert "1 died(SIGSEGV)" in failed
        assert failed.endswith("; `safetune show KERNEL` says why")
        assert safetune.json("tune", target, "--force", code=1)["measured"] == 2

    def test_brackets_are_shown_as_they_are(self, safetune: Any, add: str, tmp_path: Path) -> None:
        """Rich takes `[red]` for a colour and leaves it out."""
        file = tmp_path / "brackets.py"
        file.write_text(Path(add).read_text().replace('"small": 100', '"[red] of [/]": 100'))

        assert "[red] of [/]  " in safetune("tune", f"{file}:add_one").stdout


def check_table(text: str, data: dict[str, Any]) -> None:
    """The same as a table for people, from what is stored now."""
    lines = [line.rstrip() for line in text.splitlines()]
    _, mixed = data["tunings"]
    today = time.strftime("%Y-%m-%d", time.localtime(seconds(mixed["created"])))
    (row,) = [line for line in lines if line.startswith("hopeless")]
    assert row.endswith("no config works")
    (row,) = [line for line in lines if line.startswith("mixed")]
    assert row.split()[1] == mixed["choice"].split()[0].removeprefix("BLOCK=")
    assert row.endswith(f"3 of 5  already tuned {today}")
    assert lines[-1] == (
        "2 tunings, 0 configs measured, 1 already tuned (--force to measure again), "
        "1 without a working config (1 by stored outcomes: --force to measure again)"
    )
    assert lines[-2].startswith("configs that failed: ")


FACTORY_BELOW = """
import torch, triton, triton.language as tl
from safetune import Workload, safetune
CONFIGS = [triton.Config({"BLOCK": 64})]

@safetune(configs=CONFIGS, key=["N"])
@triton.jit
def outer(x, N, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) < N)

def make():
    @safetune(configs=CONFIGS, key=["N"])
    @triton.jit
    def inner(x, N, BLOCK: tl.constexpr):
        tl.store(x + tl.arange(0, BLOCK), 2.0, mask=tl.arange(0, BLOCK) < N)
    return inner

inner = make()

@inner.workload
@outer.workload
def vectors(device, dtype):
    yield Workload("vector", (1,), (torch.zeros(64, device=device, dtype=dtype), 64))
"""


def test_the_shipped_kernels_without_a_gpu(run: FreshProcess) -> None:
    """The first time every config for each kernel's key, the second time nothing.

    TRITON_INTERPRET is not set. `safetune.kernels.layer_norm` is a module, and a function of the
    same name in the package.
    """
    env = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}
    options = ("tune", "safetune.kernels.layer_norm", "--json", "--shape", "rms-33x50")

    first, second = (run(*options, env=env) for _ in range(2))

    for result in (first, second):
        assert result.stderr == "No GPU found: running in Triton's interpreter on the CPU.\n"
    said, again = json.loads(first.stdout), json.loads(second.stdout)
    assert len({tuning["kernel"] for tuning in said["tunings"]}) == 3
    assert all(tuning["measured"] > 0 for tuning in said["tunings"])
    assert said["measured"] == len(said["trials"]) == len(again["trials"])
    assert {trial["verdict"] for trial in said["trials"]} == {"ok"}
    assert again["measured"] == 0


def left(data: dict[str, Any]) -> dict[str, int]:
    return {f"{each['kernel']} {each['shape']}": each["to_measure"] for each in data["tunings"]}


def test_a_plan_names_every_key_and_stores_nothing(
    safetune: Any, targets: Path, cache_dir: Path
) -> None:
    result = safetune("tune", targets / "add.py", "--dry-run")

    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[1][:3] == ["kernel", "shape", "dtype"]
    assert ["add_one", "large", "float32", "2", "0", "2"] in lines
    last = result.stdout.splitlines()[-1]
    assert last == "3 tunings of 2 kernels; 6 configs, 0 stored, 6 to measure"
    assert not cache_dir.exists()


def test_what_is_stored_is_not_planned_again(safetune: Any, targets: Path) -> None:
    add, small = str(targets / "add.py"), ("--shape", "small")
    safetune.json("tune", f"{add}:add_one", *small)

    data = safetune.json("tune", add, "--dry-run")

    assert left(data) == {"kernel small": 2, "add_one small": 0, "add_one large": 2}
    shown = safetune("tune", add, "--dry-run").stdout.splitlines()[-1]
    assert "6 configs, 2 stored, 4 to measure" in shown
    forced = safetune.json("tune", f"{add}:add_one", *small, "--force", "--dry-run")
    assert left(forced) == {"add_one small": 2}


def test_two_shapes_of_one_key_are_measured_once(safetune: Any, targets: Path) -> None:
    data = safetune.json("tune", targets / "heuristics.py", "--dry-run")

    assert [each["to_measure"] for each in data["tunings"]] == [2, 0, 2]
    assert data["stored"] == 0, "what another key of the plan measures is not stored yet"
    measured = safetune.json("tune", targets / "heuristics.py")["tunings"]
    assert [tuning["measured"] for tuning in measured] == [2, 0, 2], "as planned"
    keys = [entry["call"]["values"] for entry in safetune.json("list")]
    assert sorted(keys, key=str) == [{"EVEN": False}, {"EVEN": True}]


def test_a_choice_that_was_imported_has_no_outcomes_here(
    safetune: Any, targets: Path, tmp_path: Path
) -> None:
    """It said that all configs have a stored outcome, of which none was measured here."""
    command = ("tune", targets / "add.py:add_one", "--shape", "small")
    safetune.json(*command)
    safetune.json("export", tmp_path / "packs")
    safetune.use_store("elsewhere")
    safetune.json("import", tmp_path / "packs")

    data = safetune.json(*command, "--dry-run")

    assert (data["configs"], data["stored"], data["to_measure"]) == (2, 0, 0)


REASON = "1 of 2 configs have this result"


def test_every_command_tells_of_a_disputed_choice(
    safetune: Any, targets: Path, fresh_process: FreshProcess
) -> None:
    target = str(targets / "disputed.py")
    first, again = safetune("tune", target), safetune("tune", target)
    assert (first.exit_code, again.exit_code) == (1, 1), "also where nothing is measured any more"
    assert "1 with a disputed result" in first.stdout
    assert "1 with a disputed result" in again.stdout
    allowed = safetune("tune", target, "--allow-disputed")
    assert allowed.exit_code == 0

    assert safetune("list").stdout.rstrip().endswith("  disputed")
    ((mark,),) = [entry["marks"] for entry in safetune.json("list")]
    assert mark == f"disputed: {REASON}"
    assert f"its result is disputed: {REASON}" in safetune("show", "scale").stdout
    tuned = safetune.json("tune", target, "--allow-disputed")
    assert [tuning["disputed"] for tuning in tuned["tunings"]] == [REASON]
    assert tuned["tunings"][0]["phases"].keys() == {"lookup", "wait", "store"}  # nothing was new
    for _ in range(2):
        program = fresh_process(
            f"import runpy\nrun = runpy.run_path({target!r})['run']\nrun()\nrun()\n", warm=True
        )
        assert program.stderr.count("its configs give different results") == 1
