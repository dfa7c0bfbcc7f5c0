"""Benchmarks: what they run is right, every committed result has the figures of its rows, and pages
and bars show them.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import triton
import triton.language as tl

import safetune
from tests.ready import is_ready

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ["tuning_time", "launch_overhead", "choice_quality", "startup", "store", "unmodified"]
SCRIPTS += ["argument_size", "first_tuning", "install_time", "sweep", "search_replay"]
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


def first_call(part: int, state: str, tuner: str, seconds: float, whole: float) -> dict[str, Any]:
    row = {"kind": "first_call", "part": part, "state": state, "tuner": tuner}
    return {**row, "first_call_s": seconds, "process_s": whole, "config": "BM: 64", "failed": 2}


def choice(part: int, tuner: str, median_ms: float) -> dict[str, Any]:
    return {"kind": "choice", "part": part, "tuner": tuner, "median_ms": median_ms}


def further(key: str, tuner: str, seconds: float) -> dict[str, Any]:
    return {"kind": "further_key", "part": 0, "key": key, "tuner": tuner, "seconds": seconds}


TUNING_ROWS = [
    further("further_key", "safetune", 2.0),
    further("further_key", "triton", 8.0),
    further("further_key_128MiB", "safetune", 4.5),
    further("further_key_128MiB", "triton", 9.0),
    first_call(0, "cold", "safetune", 8.0, 14.0),
    first_call(0, "cold", "triton", 64.0, 70.0),
    first_call(0, "warm", "safetune", 6.0, 12.0),
    first_call(0, "warm", "triton", 8.0, 14.0),
    first_call(1, "cold", "triton", 66.0, 73.0),
    first_call(1, "cold", "safetune", 10.0, 16.0),
    first_call(1, "warm", "triton", 10.0, 17.0),
    first_call(1, "warm", "safetune", 9.0, 15.0),
    choice(0, "safetune", 0.20),
    choice(0, "triton", 0.21),
    choice(1, "safetune", 0.22),
    choice(1, "triton", 0.20),
]


def test_a_replayed_search_sees_the_stored_times_and_its_regret_is_to_the_best(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn")
    replay = importlib.import_module("search_replay")
    configs = [{"BM": 16 << i, "BN": 16 << j, "num_warps": 4} for i in range(6) for j in range(6)]
    valley = [1.0 + abs(i - 3) + abs(j - 2) for i in range(6) for j in range(6)]
    keys = [
        {
            "name": f"M={m}",
            "median_ms": [None if i == 5 else m * ms for i, ms in enumerate(valley)],
            "verdicts": ["out_of_resources" if i == 5 else "ok" for i in range(36)],
        }
        for m in (64, 128, 1024)
    ]
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"configs": configs, "keys": keys}).encode()))
    _, found = replay.space(path)
    assert found["M=64"].best == 3 * 6 + 2
    assert found["M=64"].regret([0, 5]) == 5.0
    assert found["M=64"].regret([5]) == float("inf")
    for strategy, budget in (("random", 36), ("search", 20), ("search_neighbours", 3)):
        tried = replay.search(path, "M=64", strategy, 0, budget)
        assert len(tried) == budget or found["M=64"].best in tried, "no search ends before that"
        assert replay.regret(path, "M=64", strategy, budget, 0) == 0, strategy
    nearest = replay.start(path, "M=64", 2).neighbours
    assert [round(each.distance) for each in nearest] == [1, 4]


def test_the_sweep_has_1920_configs() -> None:
    configs = importlib.import_module("grouped_matmul").configs
    assert len({str(config) for config in configs()}) == len(configs()) == 1920
    assert len(configs(most=5)) == 5


LIBRARY = """
import triton
from sglang.srt.environ import envs
from sglang.srt.utils import is_cuda, is_hip
assert not is_cuda() and not envs.SGLANG_USE_AITER.get()

@triton.jit
def fused_moe_kernel(a_pointer):
    pass
"""


@pytest.fixture
def fused_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, beside an SGLang of which only the kernel's file is there."""
    folder = tmp_path / "sglang" / "kernels" / "ops" / "moe"
    folder.mkdir(parents=True)
    (folder / "fused_moe_triton_kernels.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("fused_moe")


def test_the_kernel_of_sglang_is_run_without_the_rest_of_it(fused_moe: ModuleType) -> None:
    assert fused_moe.library_kernel.fn.__module__ == "sglang_fused_moe"
    assert not [name for name in sys.modules if name.startswith("sglang.")]
    assert len(fused_moe.CONFIGS) == 1920


def test_tokens_are_sorted_by_expert_in_whole_blocks_for_each_size_of_block(
    fused_moe: ModuleType,
) -> None:
    import torch

    experts, tokens = 16, 40
    chosen = torch.rand(tokens, experts).topk(fused_moe.TOP_K).indices
    table, owners, padded = fused_moe._sorted(chosen, experts)
    assert table.stride(0) % 16 == owners.stride(0) % 16 == 0, "one binary for all batch sizes"
    for block in fused_moe.TILES:
        count = int(padded[block // 16])
        assert count % block == 0
        rows = table[block // 16, :count].view(-1, block)
        real = rows < chosen.numel()
        assert sorted(rows[real].tolist()) == list(range(chosen.numel()))
        owner = owners[block // 16, : len(rows), None].expand_as(rows)
        assert torch.equal(chosen.flatten()[rows[real].long()], owner[real].long())


def test_the_matrix_product_has_72_configs_and_no_two_alike() -> None:
    matmul = importlib.import_module("matmul")
    texts = [str(config) for config in matmul.configs()]
    assert len(texts) == len(set(texts)) == 72
    assert len(matmul.configs(most=5)) == 5
    block = {name: {c.kwargs[name] for c in matmul.configs()} for name in ("BM", "BN", "BK")}
    assert block == {"BM": {64, 128, 256}, "BN": {64, 128, 256}, "BK": {32, 64}}
    assert {(c.num_warps, c.num_stages) for c in matmul.configs()} == {
        (4, 3),
        (4, 4),
        (8, 3),
        (8, 4),
    }


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


#: In the place of compute-sanitizer: runs the program, and says of it what a tool would.
TOOL = """#!/bin/sh
shift 4
"$@" || exit 1
case $* in
*--launch-fault) [ "$BLIND" ] || { echo "========= ERROR SUMMARY: 1 error"; exit 9; } ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("blind", "tools"), [(False, ["racecheck"]), (True, [])], ids=["finds it", "blind"]
)
def test_the_sanitizer_must_find_what_is_planted(
    tmp_path: Path, blind: bool, tools: list[str]
) -> None:
    """All kernels are launched under it; one that finds nothing at all proves nothing."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TRITON_INTERPRET": "1",
    }
    environment |= {"BLIND": "1"} if blind else {}
    command = [sys.executable, str(BENCHMARKS / "sanitize.py"), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--tools", *tools],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == int(blind), done.stdout + done.stderr
    written = (tmp_path / "interpreter" / "sanitizer.md").read_text()
    assert "compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks" in written
    assert ("launches of 6 of 6 problems" in written) == bool(tools)
    assert ("ERROR SUMMARY: 1 error" in written) != blind


def test_every_tuner_of_a_stored_step_has_the_first_configs_of_its_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "__init__", Autotuner.__init__)
    importlib.import_module("unmodified").shorten(2)

    class OfALibrary(Autotuner):
        pass

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr, n + BLOCK)

    configs = [triton.Config({"BLOCK": block}) for block in (8, 16, 32)]
    tuners = [
        triton.autotune(configs, key=["n"])(kernel),
        safetune.autotune(configs, key=["n"])(kernel),
        OfALibrary(kernel, kernel.arg_names, configs, ["n"], None, None),
    ]
    assert [tuner.configs for tuner in tuners] == [configs[:2]] * 3


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


def test_a_model_starts_with_60_tunings_of_at_most_eight_configs() -> None:
    kernels = importlib.import_module("startup_kernels")
    assert len(kernels.LAYERS) * len(kernels.COLUMNS) == 60
    assert len(kernels.COLUMNS) == len(kernels.TINY_COLUMNS)
    for layer in kernels.LAYERS:
        assert 4 <= len(layer.configs) <= 8
        assert len(set(map(str, layer.configs))) == len(layer.configs)
        calls = list(layer.calls("cpu", kernels.TINY_COLUMNS))
        named = [dict(zip(layer.kernel.arg_names, c.args, strict=False)) for c in calls]
        keys = {
            tuple({**arguments, **call.constants}[name] for name in layer.key)
            for arguments, call in zip(named, calls, strict=True)
        }
        assert len(keys) == len(kernels.COLUMNS), "each call needs a tuning of its own"


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
    "norm_choices": "--replays 1",
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
    done = fresh_process(*command)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "interpreter" / f"{name}.json"
    stored = json.loads(path.read_text())
    figures = importlib.import_module(name).figures(stored["rows"])
    assert stored["figures"] == pytest.approx(figures)
    if name not in ("norm_choices", "store", "sweep"):  # which have no other tuner beside them
        assert {"safetune", "triton"} <= {row["tuner"] for row in stored["rows"] if "tuner" in row}
    if name != "choice_quality":  # the next part would begin
        again = fresh_process(*command)
        assert f"with its {len(stored['rows'])} rows" in again.stdout
        assert json.loads(path.read_text())["rows"] == stored["rows"]


def test_a_measuring_process_that_fails_or_hangs_is_reported_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    run = importlib.import_module("fresh_process").run
    script = tmp_path / "task.py"
    script.write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit, match="ended with 3"):
        run(str(script), [], {}, tmp_path, 60.0)
    pid = tmp_path / "pid"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    with pytest.raises(SystemExit, match="more than 3 s"):
        run(str(script), [], {}, tmp_path, 3.0)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid.read_text()))
        assert is_ready(handle, 10.0), "what it has started is still there"
        os.close(handle)


def test_the_kernels_have_as_many_arguments_as_they_say() -> None:
    module = importlib.import_module("launch_overhead")
    cases = module.cases("cpu")
    assert [case.count for case in cases] == [3, 13, 24]
    for case in cases:
        assert len(case.values) + len(case.constants) + 1 == case.count
        names = case.kernel.arg_names
        assert tuple(case.constants) == tuple(names[len(case.values) : -1])
        assert names[-1] == "BLOCK"
        assert set(case.key) <= set(names)


def test_heuristics_above_and_below_a_tuner() -> None:
    module = importlib.import_module("launch_overhead")
    few, some, _ = module.cases("cpu")
    names = {name for name in module.VARIANTS if "heuristics" in name}
    assert set(module.variants_of(some, "positional")) >= names
    assert not names & set(module.variants_of(few, "positional")), "no constant to set"


def test_no_key_of_the_launch_kernels_is_phantom() -> None:
    """Else safetune would look at fewer arguments than triton.autotune does."""
    from safetune import safetune

    triton = pytest.importorskip("triton")
    for case in importlib.import_module("launch_overhead").cases("cpu"):
        configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
        report = safetune(configs=configs, key=list(case.key))(case.kernel).explain_key()
        assert tuple(report.kept) == case.key


def test_a_later_command_measures_the_missing_systems() -> None:
    """By system, so that all are in one file in the end."""
    norms = importlib.import_module("norms")
    part = "ln-32768x1024"
    rows = [{"part": part, "op": "forward", "system": "ours"}, {"part": "copy"}]
    assert norms.unmeasured(part, ["ours", "torch"], rows) == ["torch"]
    assert norms.unmeasured("ln-4096x32768", ["ours", "fla"], rows) == ["ours"]
    assert norms.unmeasured("copy", ["ours", "torch"], rows) == []
    assert norms.unmeasured("copy", ["ours", "torch"], []) == [""]


#: Results of a benchmark's script that do not have its name.
SCRIPT_OF = {
    "norms_residual": "norms",
    "norms_max_autotune": "norms",
    "norms_residual_max_autotune": "norms",
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


def test_a_card_without_a_figure_has_that_of_the_bar_s_device(
    bars: ModuleType, tmp_path: Path
) -> None:
    bar = bars.Bar("tuning", "sweep", "first_key_s", "smaller", 100.0, device="OTHER_GPU")
    write_figures(tmp_path / "OTHER_GPU", "sweep", first_key_s=70.0)
    (line,) = bars.report([bar], tmp_path / "A_GPU")
    assert (line["value"], line["verdict"]) == ("70", "met")
    write_figures(tmp_path / "A_GPU", "sweep", first_key_s=130.0)
    (line,) = bars.report([bar], tmp_path / "A_GPU")
    assert (line["value"], line["verdict"]) == ("130", "missed")
    (line,) = bars.report([replace(bar, device="")], tmp_path / "NO_GPU")
    assert line["verdict"] == "absent"


def test_a_bar_that_makes_no_sense(bars: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "bars.toml"
    for limits, message in (
        ("{ bar = 1.0 }", "better"),
        ('{ better = "smaller" }', "needs a bar or an aim"),
        ('{ better = "smaller", bar = 1.0, aim = 1.3 }', "the aim must be further than the bar"),
    ):
        path.write_text(f"[group.bench]\nfigure = {limits}\n")
        with pytest.raises(ValueError, match=message):
            bars.load(path)


def test_a_figure_has_one_bar(bars: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "bars.toml"
    bar = '{ better = "smaller", bar = 1.0 }'
    path.write_text(f'[group.bench]\n"a_{{x,y}}" = {bar}\na_y = {bar}\n')
    with pytest.raises(ValueError, match="a_y"):
        bars.load(path)


def test_the_interpreter_writes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recording = importlib.import_module("recording")
    for script in SCRIPTS:
        parsed = importlib.import_module(script).parse([])
        with pytest.raises(SystemExit, match="--out"):
            recording.output_folder(parsed)
        parsed = importlib.import_module(script).parse(["--out", "elsewhere"])
        assert recording.output_folder(parsed) == Path("elsewhere"), script


def test_a_device_is_a_folder() -> None:
    slug = importlib.import_module("recording").device_slug
    assert slug("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3"
    assert slug("AMD Instinct MI300X / OAM") == "AMD_Instinct_MI300X_OAM"


def result(commit: str = "abc", versions: dict[str, str] | None = None) -> Any:
    recording = importlib.import_module("recording")
    return recording.Result("tuning_time", "A_GPU", versions or {"triton": "1"}, commit, "python x")


def test_a_saved_result_is_continued_by_the_same_code_only(tmp_path: Path) -> None:
    module = importlib.import_module("tuning_time")
    recording = importlib.import_module("recording")
    first = result()
    first.rows = TUNING_ROWS[:4]
    path = first.save(tmp_path / "a", module.figures)
    assert path == tmp_path / "a" / "A_GPU" / "tuning_time.json"
    again = recording.resume(result(), [tmp_path / "none", tmp_path / "a"])
    assert again.rows == TUNING_ROWS[:4]
    assert recording.resume(result("other"), [tmp_path / "a"]).rows == []
    assert recording.resume(result(versions={"triton": "2"}), [tmp_path / "a"]).rows == []
    check_file(path)


def test_rows_of_other_code_are_kept_with_their_origin(tmp_path: Path) -> None:
    module = importlib.import_module("tuning_time")
    recording = importlib.import_module("recording")
    versions = {"triton": "1", "torch": "1"}
    first = result(versions={**versions, "sources": "a"})
    first.rows = [TUNING_ROWS[0], {**TUNING_ROWS[1], "commit": "older", "date": "then"}]
    first.save(tmp_path, module.figures)
    later = recording.take_over(result("other", {**versions, "sources": "b"}), [tmp_path])
    assert [(row["commit"], row["date"]) for row in later.rows] == [
        ("abc", first.date),
        ("older", "then"),
    ]
    assert {name: later.rows[0][name] for name in TUNING_ROWS[0]} == TUNING_ROWS[0]
    assert recording.take_over(result("abc", {**versions, "torch": "2"}), [tmp_path]).rows == []


def test_a_result_with_nan_is_not_saved(tmp_path: Path) -> None:
    bad = result()
    bad.rows = [{**TUNING_ROWS[0], "first_call_s": float("nan")}]
    with pytest.raises(ValueError, match="JSON"):
        bad.save(tmp_path, importlib.import_module("tuning_time").figures)
    assert not list(tmp_path.glob("*/*.json"))


def parts(*argv: str, done: tuple[Any, ...] = (), expected_s: float = 0.0) -> list[Any]:
    recording = importlib.import_module("recording")
    options = recording.part_arguments("").parse_args(argv)
    rows = [{"part": part} for part in done]
    return list(recording.parts_to_run(["a", "b", "c", "d"], rows, options, expected_s))


def test_parts_that_are_done_are_not_run_again() -> None:
    assert parts() == ["a", "b", "c", "d"]
    assert parts(done=("a", "a", "c")) == ["b", "d"]
    assert parts("--parts", "2", done=("a",)) == ["b", "c"]


def test_no_part_is_begun_that_would_overrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert parts("--budget", "100", expected_s=99.0) == ["a", "b", "c", "d"]  # they took no time
    assert parts("--budget", "100", expected_s=101.0) == []
    assert "run again" in capsys.readouterr().out


def check_file(path: Path) -> None:
    """Fail unless a result has every field and its figures are those of its rows.

    Those of another Triton are in a folder of their own in that of the device.
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
    assert stored["figures"] == pytest.approx(figures)


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


def test_a_command_has_no_path_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = importlib.import_module("recording")
    script = str(recording.ROOT / "benchmarks" / "proofs.py")
    given = ["--sources", "/data/sources", "--out", "/data/out", "--only", "fp8"]
    monkeypatch.setattr(sys, "argv", [script, *given])
    assert recording.command() == "python benchmarks/proofs.py --sources DIR --only fp8"


def test_what_takes_longer_with_safetune_says_so(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    folder, results = tmp_path / "A_GPU", pages.Results("A_GPU", tmp_path)
    write_figures(folder, "startup", startup_60_s_triton=65.0, startup_60_s_safetune=65.5)
    times = {"s_warm_4_described_triton": 1.0, "s_warm_4_described_safetune": 1.0}
    write_figures(folder, "first_tuning", **times)
    shares = {"share_within_2pct_triton": 0.9, "share_within_2pct": 1.0}
    write_figures(folder, "choice_quality", **shares)
    slower, *others = pages.blocks()["more"](results).splitlines()[2:]
    assert slower == "| slower: 60 small tunings in a row, empty caches | 65.0 s | 65.5 s |"
    assert len(others) == 2
    assert not any("slower" in line for line in others)


def test_figures_are_drawn_from_the_committed_rows() -> None:
    drawn = importlib.import_module("figures")
    for name in ("norms", "launches", "tuning_configs", "tuning_arguments"):
        results = drawn.stored_rows(name)
        for theme in drawn.THEMES:
            file = drawn.path(name, theme)
            assert file.exists() == bool(results), f"run `make figures`: {file}"
            digest = drawn.digest(results) if results else ""
            assert not results or f"<dc:description>{digest}</dc:description>" in file.read_text()


def test_the_figure_of_the_norms_has_the_shares_of_their_result() -> None:
    drawn = importlib.import_module("figures")
    results = drawn.stored_rows("norms")
    figures = importlib.import_module("norms").figures(results["norms"])
    shown = drawn.shares(results)
    for (op, norm), by_system in shown.items():
        assert set(by_system) == set(drawn.SYSTEMS)
        for columns, share in by_system["ours"].items():
            assert share / 100 == pytest.approx(figures[f"{op}_share_D{columns}_{norm}"])
    assert {op for op, _ in shown} == {"backward", "forward"}


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
    write_figures(tmp_path / "NVIDIA_H200", "norms_host", host_us_forward_ours_ln=19.5)
    shown = pages.missed(pages.Results("A_GPU", tmp_path)).splitlines()
    assert "| norms_host | host_us_forward_ours_ln | 50.5 | <= 50 | 19.5 |" in shown
    assert "| norms_host | host_us_backward_ours_ln | not measured | <= 160 |  |" in shown
    assert not any("host_us_forward_ours_rms" in line for line in shown)


def test_a_page_says_that_no_bar_is_missed(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    for bar in importlib.import_module("bars").load():
        folder = tmp_path / (bar.device or "A_GPU")
        known = importlib.import_module("recording").stored_figures(folder, bar.bench)
        write_figures(folder, bar.bench, **{**known, bar.figure: bar.bar})
    assert pages.missed(pages.Results("A_GPU", tmp_path)) == "None."


def test_every_table_of_figures_is_on_a_page() -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(pages.blocks())
