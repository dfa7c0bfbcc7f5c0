"""Benchmarks: what they run is right, every committed result has the figures of its rows, and pages
and bars show them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.ready import is_ready

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
FOLDER = BENCHMARKS / "results"
RESULTS = sorted(FOLDER.rglob("*.json"))

#: Results whose command was written down in words, by hand, and is not known any more.
IN_WORDS = {
    "NVIDIA_H100_80GB_HBM3/fused_moe_sweep.json",
    "NVIDIA_H100_80GB_HBM3/triton_3.9.0/first_tuning.json",
    "NVIDIA_H200/proofs.json",
}


def name_of(path: Path) -> str:
    """A committed result's path in the folder of results: device, newer Triton if any, file."""
    return path.relative_to(FOLDER).as_posix()


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and _is_ours(sys.modules[name]):
            del sys.modules[name]


def _is_ours(module: ModuleType) -> bool:
    return Path(str(module.__file__)).parent == BENCHMARKS


def test_the_kernels_of_choice_quality_compute_the_right_result(device: str) -> None:
    """The judge's own check must not be one that anything passes: it fails before the launch."""
    module = importlib.import_module("choice_quality")
    short = importlib.import_module("short_problems").SHORT
    assert len(short) >= 12
    for problem in (*importlib.import_module("choice_problems").PROBLEMS, *short):
        work = problem.prepare(device)
        assert not work.error() < module.ERROR_LIMIT
        work.launch(problem.kernel, **problem.configs[0].all_kwargs())
        assert work.error() < module.ERROR_LIMIT, problem.name


def test_a_short_problem_is_judged_by_its_deployed_times(device: str, tmp_path: Path) -> None:
    module = importlib.import_module("choice_quality")
    problem = next(p for p in importlib.import_module("short_problems").SHORT if p.name == "rope")
    options = module.parse(["--configs", "2", "--repetitions", "1", "--measure", "graph"])
    rows = module.run_part(problem, options, tmp_path, short=True)
    assert [row["kind"] for row in rows] == ["deployed"] * 2 + ["choice"] * 2 + ["cost"]
    found = module.figures(rows)
    for name in ("deployed_regret_rope", "deployed_regret_triton_rope"):
        assert 0 <= found[name] < 100
    assert found["problems"] == 0, "of those with the other truth"
    made = [{**row, "median_ms": 2.0 - number} for number, row in enumerate(rows[:2])]
    slow = {**rows[2], "tuner": "safetune", "config": rows[0]["config"]}
    fast = {**rows[2], "tuner": "triton", "config": rows[1]["config"]}
    found = module.figures([*made, slow, fast])
    assert found["deployed_regret_rope"] == pytest.approx(1.0)
    assert found["deployed_regret_triton_rope"] == 0.0


@pytest.mark.parametrize("count", [4, 16])
def test_the_kernels_of_first_tuning_are_right(device: str, count: int) -> None:
    for name, make in importlib.import_module("first_tuning_kernels").CALLS.items():
        call = make(count, device)
        assert len(call.configs) == len(set(map(str, call.configs))) == count
        assert not call.right(), name
        config, arguments = (
            call.configs[-1],
            dict(zip(call.kernel.arg_names, call.arguments, strict=False)),
        )
        if config.pre_hook is not None:
            config.pre_hook({**arguments, **config.kwargs})
        call.kernel[call.grid](*call.arguments, **config.kwargs)
        assert call.right(), name


def test_the_startup_kernels_are_right(device: str) -> None:
    kernels = importlib.import_module("startup_kernels")
    torch = importlib.import_module("torch")
    for layer in kernels.LAYERS:
        call = next(layer.calls(device, kernels.TINY_COLUMNS[1:]))
        call.output.fill_(float("nan"))
        call.launch(layer.kernel, **layer.configs[0].all_kwargs())
        torch.testing.assert_close(call.output, call.expected(), rtol=1e-3, atol=1e-3)


TRIALS = {
    "choice_quality": "--parts 1 --configs 3 --repetitions 1 --truth-ms 5",
    "startup": "--alternations 1 --tunings 2",
    "first_tuning": "--short",
    "store": "--launches 1 --repetitions 2 --rounds 1 --most 200 --most-processes 8",
    "sweep": "--sweeps 1 --size 256 --configs 2",
}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU gets the real thing, by hand"
)
@pytest.mark.full
@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_run(name: str, fresh_process: FreshProcess, tmp_path: Path) -> None:
    """Real tunings by both tuners, in the interpreter; a second run has nothing left to do."""
    command = [BENCHMARKS / f"{name}.py", "--out", tmp_path, *TRIALS[name].split()]
    fresh_process(*command)
    path = tmp_path / "interpreter" / f"{name}.json"
    stored = json.loads(path.read_text())
    figures = importlib.import_module(name).figures(stored["rows"])
    assert stored["figures"] == pytest.approx(figures)
    if name not in ("store", "sweep"):  # which have no other tuner beside them
        assert {"safetune", "triton"} <= {row["tuner"] for row in stored["rows"] if "tuner" in row}
    if name != "choice_quality":  # the next part would begin
        again = fresh_process(*command)
        assert f"with its {len(stored['rows'])} rows" in again.stdout
        assert json.loads(path.read_text())["rows"] == stored["rows"]


TASKS = """
import pathlib, subprocess, sys

def fail():
    sys.exit(3)

def hang(pid):
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(pid).write_text(str(child.pid))
    child.wait()
"""


def test_a_measuring_process_that_fails_or_hangs_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = importlib.import_module("fresh_process").run
    (tmp_path / "measuring_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks, pid = importlib.import_module("measuring_tasks"), tmp_path / "pid"
    with pytest.raises(SystemExit, match="ended with 3"):
        run(tasks.fail, variables={}, limit_s=60.0)
    with pytest.raises(SystemExit, match="more than 3 s"):
        run(tasks.hang, str(pid), variables={}, limit_s=3.0)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid.read_text()))
        assert is_ready(handle, 10.0), "what it has started is still there"
        os.close(handle)


#: Results of a benchmark's script that do not have its name.
SCRIPT_OF = {
    "norms_residual": "norms",
    "norms_max_autotune": "norms",
    "norms_residual_max_autotune": "norms",
    "fused_moe_exhaustive": "fused_moe_sweep",
    "judge_in_the_wild": "wild",
    "unmodified_stored": "unmodified",
    "proof_steps": "proofs",
}


@pytest.fixture
def bars() -> ModuleType:
    pytest.importorskip("tomllib")
    return importlib.import_module("bars")


def write_figures(folder: Path, bench: str, **figures: float) -> None:
    path = folder / f"{bench}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": figures}))


def test_bars_say_what_is_met_missed_and_absent(
    bars: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdicts(*argv: str) -> tuple[int, dict[str, str]]:
        status = bars.main(["--results", str(tmp_path), "--device", "A_GPU", *argv])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        words = {"met", "missed", "absent", "bar"}
        return status, {
            line[2]: next(word for word in line[3:] if word in words)
            for line in lines
            if len(line) > 3 and line[:2] == ["launch", "launch_overhead"]
        }

    names = [f"ratio_to_jit_{count}" for count in (3, 13, 24)]
    assert verdicts("launch") == (1, dict.fromkeys(names, "absent"))
    folder = tmp_path / "A_GPU"
    write_figures(folder, "launch_overhead", **dict(zip(names, (0.5, 0.7, 0.6), strict=True)))
    assert verdicts("launch") == (1, dict(zip(names, ("met", "missed", "met"), strict=True)))
    write_figures(folder, "launch_overhead", ratio_to_jit_3=0.5, ratio_to_jit_13=0.4)
    assert verdicts("launch") == (1, dict(zip(names, ("met", "met", "absent"), strict=True)))
    write_figures(folder, "launch_overhead", **dict.fromkeys(names, 0.55))
    assert verdicts("launch") == (1, dict.fromkeys(names, "met"))  # nothing with Triton 3.9
    write_figures(folder, "triton_3.9.0/launch_overhead", **dict.fromkeys(names, 0.55))
    assert verdicts("launch") == (0, dict.fromkeys(names, "met"))
    assert verdicts()[0] == 1  # the other groups are absent
    with pytest.raises(SystemExit):
        bars.main(["lanch"])
    assert "tuning, choice, launch, store, norms" in capsys.readouterr().err


def result(commit: str = "abc", versions: dict[str, str] | None = None) -> Any:
    recording = importlib.import_module("recording")
    return recording.Result("tuning_time", "A_GPU", versions or {"triton": "1"}, commit, "python x")


def test_a_saved_result_is_continued_by_the_same_code_only(tmp_path: Path) -> None:
    recording = importlib.import_module("recording")
    first = result()
    first.rows = [{"part": 0}]
    path = first.save(tmp_path / "a", lambda rows: {"parts": len(rows)})
    assert path == tmp_path / "a" / "A_GPU" / "tuning_time.json"
    for other, rows in (
        (result(), first.rows),
        (result("other"), []),
        (result(versions={"triton": "2"}), []),
    ):
        recording.resume(other, [tmp_path / "none", tmp_path / "a"])
        assert other.rows == rows
    stored = json.loads(path.read_text())
    assert (tuple(stored), stored["figures"]) == (recording.FIELDS, {"parts": 1})


def check_file(path: Path) -> None:
    """Fail unless a result has every field and the figures that are made of its rows today.

    It may have others, which later benchmarks do not make. Those of another Triton are in a folder
    of their own in that of the device.
    """
    recording = importlib.import_module("recording")
    folder, _, triton = path.parent.name.partition("triton_")
    device = folder or path.parents[1].name
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(stored) == recording.FIELDS
    assert stored["bench"] == path.stem
    assert stored["device"] == device
    assert stored["rows"]
    assert stored["commit"] not in ("", "unknown")
    assert stored["versions"]["triton"].startswith(triton)
    script = importlib.import_module(SCRIPT_OF.get(path.stem, path.stem))
    figures = script.figures(stored["rows"])
    kept = {name: value for name, value in stored["figures"].items() if name in figures}
    assert kept == pytest.approx(figures)


def test_committed_results_have_the_figures_of_their_rows() -> None:
    wrong = []
    for path in RESULTS:
        try:
            check_file(path)
        except (AssertionError, ImportError) as error:
            wrong.append(f"{name_of(path)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_committed_result_names_a_command_of_the_repository() -> None:
    """A path of the machine that measured it is of no use elsewhere, nor are words to be pasted."""
    commands = {name_of(path): json.loads(path.read_text("utf-8"))["command"] for path in RESULTS}
    named = {name: command for name, command in commands.items() if command}
    assert len(named) > 20
    for name, command in named.items():
        script = re.match(r"python (benchmarks/\w+\.py)", command)
        assert script, name
        assert (ROOT / script[1]).exists(), name
        assert not re.search(r"(^|[\s=])/|\.\./", command), name
        can_be_pasted = re.fullmatch(r"[\w./-]+( [\w./-]+)*", command)
        assert bool(can_be_pasted) is (name not in IN_WORDS), f"{name}: {command}"


def test_figures_are_drawn_from_the_committed_rows() -> None:
    drawn = importlib.import_module("figures")
    for name in ("norms", "launches", "tuning_configs", "tuning_arguments"):
        results = drawn.stored_rows(name)
        for theme in drawn.THEMES:
            file = drawn.path(name, theme)
            assert file.exists() == bool(results), f"run `make figures`: {file}"
            digest = drawn.digest(results) if results else ""
            assert not results or f"<dc:description>{digest}</dc:description>" in file.read_text()


def test_the_pages_show_the_committed_figures() -> None:
    """`make figures` writes them."""
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    for page in pages.PAGES:
        assert pages.written(page, pages.Results()) == page.read_text(encoding="utf-8"), page


def test_the_page_names_each_bar_that_is_missed_or_has_no_figure(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    figures = {"host_us_forward_ours_ln": 50.5, "host_us_forward_ours_rms": 49.5}
    write_figures(tmp_path / "A_GPU", "norms_host", **figures)
    shown = pages.missed(pages.Results("A_GPU", tmp_path)).splitlines()
    assert "| norms_host | host_us_forward_ours_ln | 50.5 | <= 50 |" in shown
    assert "| norms_host | host_us_backward_ours_ln | not measured | <= 160 |" in shown
    assert not any("host_us_forward_ours_rms" in line for line in shown)


def test_every_table_of_figures_is_on_a_page() -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(pages.blocks())
