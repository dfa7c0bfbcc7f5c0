"""`safetune tune`: what it measures, what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.schema import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import FreshProcess

    Command = Callable[..., Any]

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
        for folder in ("", "inner", ".hidden"):
            (package / folder).mkdir(parents=True, exist_ok=True)
        text = Path(add).read_text()
        (package / "__init__.py").write_text("")
        (package / "shapes.py").write_text("raise SystemExit('nothing imports it')\n")
        (package / ".hidden" / "kernels.py").write_text("raise SystemExit(1)  # safetune .workload")
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

        assert [trial["message"] for trial in data["trials"]] == [""] * 4

    def test_heuristics_above(self, safetune: Any, targets: Path) -> None:
        """The key holds what the heuristic says of each call, so 256 and 384 share their choice."""
        data = safetune.json("tune", targets / "heuristics.py")

        measured = {tuning["shape"]: tuning["measured"] for tuning in data["tunings"]}
        assert measured == {"256": CONFIGS, "384": 0, "500": CONFIGS}
        keys = [entry["call"]["values"] for entry in safetune.json("list")]
        assert sorted(keys, key=str) == [{"EVEN": False}, {"EVEN": True}]


class TestOptions:
    def test_shape(self, safetune: Any, add: str) -> None:
        assert shapes_of(safetune.json("tune", f"{add}:add_one", "--shape", "large")) == ["large"]
        both = safetune.json("tune", f"{add}:add_one", "--shape", "large", "--shape", "small")
        assert shapes_of(both) == SHAPES
        assert both["measured"] == CONFIGS, "large is known"

    def test_dtype(self, safetune: Any, add: str) -> None:
        data = safetune.json(
            "tune", add, "--shape", "small", "--dtype", "float16", "--dtype", "float64"
        )

        assert [(t["kernel"], t["dtype"]) for t in data["tunings"]] == [
            ("kernel", "float16"),
            ("kernel", "float64"),
            ("add_one", "float16"),
            ("add_one", "float64"),
        ]
        stored = {entry["call"]["dtypes"]["x"] for entry in safetune.json("list")}
        assert stored == {"float16", "float64"}

    def test_device(self, safetune: Any, add: str, device: str) -> None:
        data = safetune.json("tune", f"{add}:add_one", "--device", device, "--shape", "small")

        assert data["measured"] == CONFIGS
        assert [trial["message"] for trial in data["trials"]] == [""] * CONFIGS

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
        planned = safetune.json(*command, "--force", "--dry-run")
        assert planned["to_measure"] > 0
        assert sum(each["estimate_s"] for each in planned["tunings"]) > planned["estimate_s"]
        assert planned["estimate_s"] == 0.001

    def test_another_value_is_refused_before_anything_is_tuned(
        self, safetune: Any, add: str
    ) -> None:
        result = safetune("tune", add, "--budget", "5 minutes")
        assert result.exit_code == 2
        assert "budget='5 minutes' of safetune tune is neither a number of" in result.stderr


class TestOutput:
    def test_good_and_bad_configs(
        self, safetune: Any, targets: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel without a working config makes the exit code 1; the other is tuned."""
        monkeypatch.delenv("COLUMNS", raising=False)
        target = str(targets / "faulty.py")

        as_json = safetune("tune", target, "--json")
        as_table = safetune("tune", target, "--all")

        for result in (as_json, as_table):
            assert result.exit_code == 1
            assert result.stderr == "", "no progress bar without a terminal"
        data = json.loads(as_json.stdout)
        check_json(data)
        check_table([line.rstrip() for line in as_table.stdout.splitlines()], data)

    def test_only_the_result_is_on_standard_output(
        self, safetune: Any, add: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the target and its workloads print goes to standard error, as warnings do."""
        monkeypatch.setenv("TEST_PRINTS", "1")
        monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")

        result = safetune("tune", f"{add}:add_one", "--shape", "small", "--json")

        assert json.loads(result.stdout)["measured"] == CONFIGS
        lines = result.stderr.splitlines()
        assert lines[:2] == ["printed while it was imported", "Warning: something is old"]
        assert set(lines[2:]) == {"printed by the workload"}

    def test_nothing_is_measured_twice_and_what_failed_still_counts(
        self, safetune: Any, targets: Path
    ) -> None:
        target = str(targets / "faulty.py:hopeless")
        first = safetune("tune", target)
        assert first.stdout.splitlines()[-1] == (
            "1 tuning, 2 configs measured, 1 without a working config"
        )

        again = safetune("tune", target)

        assert again.exit_code == 1
        *_, failed, last = again.stdout.splitlines()
        assert last == (
            "1 tuning, 0 configs measured, 1 without a working config (1 by stored outcomes: "
            "--force to measure again)"
        )
        assert "1 died(SIGSEGV)" in failed
        assert failed.endswith("; --all says why")

    def test_force_measures_again_what_never_worked(self, safetune: Any, targets: Path) -> None:
        """Without a choice there was no generation to go on from, and nothing was measured."""
        target = str(targets / "faulty.py:hopeless")
        assert json.loads(safetune("tune", target, "--json").stdout)["measured"] == 2

        forced = safetune("tune", target, "--force", "--json")

        assert json.loads(forced.stdout)["measured"] == 2

    def test_brackets_are_shown_as_they_are(self, safetune: Any, tmp_path: Path) -> None:
        """Rich takes `[red]` for a colour and leaves it out."""
        file = tmp_path / "brackets.py"
        file.write_text(BRACKETS)

        result = safetune("tune", file)

        assert "[red] of [/]  " in result.stdout


def check_json(data: dict[str, Any]) -> None:
    """One tuning for each kernel, and one trial for each config with its verdict."""
    hopeless, mixed = data["tunings"]
    assert (data["measured"], hopeless["measured"], mixed["measured"]) == (7, 2, 5)
    assert hopeless["choice"] is None
    trials = [trial for trial in data["trials"] if trial["shape"] == "mixed"]
    assert [(trial["config"].split()[0], trial["label"]) for trial in trials] == [
        ("BLOCK=32", "ok"),
        ("BLOCK=48", trials[1]["verdict"]),
        ("BLOCK=64", "died(SIGSEGV)"),
        ("BLOCK=128", "timeout"),
        ("BLOCK=256", "ok"),
    ]
    assert [trial["verdict"] for trial in trials[2:4]] == ["died", "timeout"]
    assert trials[1]["verdict"] in ("launch_error", "compile_error")
    assert "power of 2" in trials[1]["message"]
    for trial in trials:
        assert (trial["timing"] is None) == (trial["verdict"] != "ok")
        assert trial["chosen"] == (trial["config"] == mixed["choice"])
    assert [trial["chosen"] for trial in trials].count(True) == 1
    timing = trials[0]["timing"]
    assert 0 < timing["p20_ms"] <= timing["median_ms"] <= timing["p80_ms"]


def check_table(lines: list[str], data: dict[str, Any]) -> None:
    """The same as a table for people, from what is stored now."""
    dtype = data["tunings"][1]["dtype"]
    choice = data["tunings"][1]["choice"].split()[0].removeprefix("BLOCK=")
    assert lines[0] == f"add_one  hopeless  {dtype}  (no config works)"
    today = time.strftime("%Y-%m-%d", time.localtime(seconds(data["tunings"][1]["created"])))
    assert lines[-1] == (
        "2 tunings, 0 configs measured, 1 already tuned (--force to measure again), "
        "1 without a working config (1 by stored outcomes: --force to measure again)"
    )
    assert lines[-2].startswith("configs that failed: ")
    table = lines[lines.index(f"add_one  mixed  {dtype}  (already tuned {today})") :]
    assert table[1] == "all configs: num_warps=4 num_stages=3"
    heading = next(line for line in table if "verdict" in line)
    columns = ["verdict", "median", "ratio", "speed", "p20", "-", "p80"]
    assert heading.split()[-len(columns) :] == columns
    rows = {line.replace("*", " ").split()[0]: line for line in table[4:9]}
    assert list(rows)[2:] == ["48", "64", "128"], "those without a time, as they were declared"
    assert {*list(rows)[:2]} == {"32", "256"}
    assert next(iter(rows)) == choice, "the fastest first"
    assert " died(SIGSEGV)" in rows["64"]
    assert " timeout" in rows["128"]
    starred = [name for name, line in rows.items() if line.startswith("*")]
    assert starred == [choice]
    ratios = {name: re.findall(r" [mu]s +(\d+\.\d\d) ", line) for name, line in rows.items()}
    assert ratios[choice] == ["1.00"]
    slower = rows[list(rows)[1]]
    assert " ok " in slower
    assert slower.count(" ms") + slower.count(" us") == 3, "median, p20 and p80"
    assert float(ratios[list(rows)[1]][0]) >= 1
    assert any(line.startswith("  BLOCK=64") and "ended with SIGSEGV" in line for line in table)
    assert any("BLOCK=48" in line and "power of 2" in line for line in table)


FACTORY_BELOW = """
import torch, triton, triton.language as tl
from safetune import Workload, safetune
CONFIGS = [triton.Config({"BLOCK": size}) for size in (64, 128)]

@safetune(configs=CONFIGS, key=["N"])
@triton.jit
def outer(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)

def make():
    @safetune(configs=CONFIGS, key=["N"])
    @triton.jit
    def inner(x, N, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) * 2, mask=offsets < N)
    return inner

inner = make()

@inner.workload
@outer.workload
def vectors(device, dtype):
    yield Workload("vector", (1,), (torch.zeros(64, device=device, dtype=dtype), 64))
"""

BRACKETS = """
import torch, triton, triton.language as tl
from safetune import Workload, safetune

@safetune(configs=[triton.Config({"BLOCK": 64})], key=["N"])
@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)

@add_one.workload
def named(device, dtype):
    yield Workload("[red] of [/]", (1,), (torch.zeros(64, device=device, dtype=dtype), 64))
"""


def test_the_shipped_kernels_without_a_gpu(cache_dir: Path, fresh_process: FreshProcess) -> None:
    """The first time every config for each kernel's key, the second time nothing.

    TRITON_INTERPRET is not set. `safetune.kernels.layer_norm` is a module, and a function of the
    same name in the package.
    """
    env = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": "", "SAFETUNE_MODE": None}
    options = ["tune", "safetune.kernels.layer_norm", "--json", "--shape", SHAPE]
    command = f"from safetune.cli import main; main({options})"
    expected = configs_for_the_shape()
    assert len(expected) == 3
    assert all(count > 0 for count in expected.values())

    first, second = (fresh_process(command, env=env) for _ in range(2))

    for result, measured in ((first, expected), (second, dict.fromkeys(expected, 0))):
        assert result.stderr == "No GPU found: running in Triton's interpreter on the CPU.\n"
        data = json.loads(result.stdout)
        per_kernel = dict.fromkeys(expected, 0)
        for tuning in data["tunings"]:
            per_kernel[tuning["kernel"]] += tuning["measured"]
        assert per_kernel == measured
        assert data["measured"] == sum(measured.values())
        assert len(data["trials"]) == sum(expected.values())
        assert {trial["verdict"] for trial in data["trials"]} == {"ok"}


#: One of the shipped kernels' workloads. README's commands, which a test runs, tune for all.
SHAPE = "rms-33x50"


def configs_for_the_shape() -> dict[str, int]:
    """How many configs are left to measure for the workload that each shipped kernel has.

    From the declarations alone: nothing of the tuner's bookkeeping is used.
    """
    import torch

    from safetune import kernels as shipped
    from safetune.kernels import workloads

    assert callable(shipped.layer_norm)
    counts: dict[str, int] = {}
    for name in ("forward", "backward", "finalize"):
        kernel = getattr(workloads, f"layer_norm_{name}_kernel")
        configs_of_key = {}
        for declared in kernel.workloads:
            for workload in declared.function(torch.device("cpu"), torch.float32):
                if workload.name != SHAPE:
                    continue
                arguments = dict(zip(kernel.arg_names, workload.args, strict=False))
                arguments |= workload.kwargs
                key = tuple(str(arguments[each]) for each in kernel.key_names)
                dtypes = tuple(str(getattr(value, "dtype", "")) for value in arguments.values())
                left = kernel.configs
                early, _ = kernel.pruning
                if early is not None:
                    left = early(left, arguments, **workload.kwargs)
                configs_of_key[key, dtypes] = len(left)
        counts[kernel.base_fn.__name__] = sum(configs_of_key.values())
    return counts
