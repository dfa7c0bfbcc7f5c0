"""The benchmarks' figures follow from their rows, here and in every result that is committed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ["tuning_time", "launch_overhead"]
RESULTS = sorted((BENCHMARKS / "results").glob("*/*.json"))


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


TUNING_ROWS = [
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


def test_tuning_time_figures() -> None:
    figures = importlib.import_module("tuning_time").figures(TUNING_ROWS)
    assert figures["wall_ratio_cold"] == pytest.approx(9.0 / 65.0)
    assert figures["wall_ratio_warm"] == pytest.approx(7.5 / 9.0)
    assert figures["process_ratio_cold"] == pytest.approx(15.0 / 71.5)
    assert figures["first_call_s_cold_safetune"] == 9.0
    assert figures["first_call_s_warm_triton"] == 9.0
    assert figures["regret_worst_safetune"] == pytest.approx(0.1)
    assert figures["regret_median_safetune"] == pytest.approx(0.05)
    assert figures["regret_worst_triton"] == pytest.approx(0.05)
    assert figures["alternations"] == 2.0


def test_tuning_time_figures_of_half_a_part() -> None:
    """No ratio of something to nothing, and no figure that was not measured."""
    module = importlib.import_module("tuning_time")
    assert module.figures([]) == {"alternations": 0.0}
    figures = module.figures(TUNING_ROWS[:1])
    assert "wall_ratio_cold" not in figures
    assert figures["first_call_s_cold_safetune"] == 8.0


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


def launch(count: int, variant: str, *times: float, style: str = "positional") -> list[Any]:
    row = {"arguments": count, "style": style, "variant": variant}
    return [{**row, "round": i, "microseconds": time} for i, time in enumerate(times)]


LAUNCH_ROWS = [
    *launch(3, "jit", 16.0, 17.0, 99.0),
    *launch(3, "safetune", 8.0, 8.5, 9.0),
    *launch(3, "autotune", 34.0, 34.0, 34.0),
    *launch(13, "jit", 20.0),
    *launch(13, "safetune", 10.0),
    *launch(13, "jit", 50.0, style="keyword"),
    *launch(13, "run", 7.0),
]


def test_launch_overhead_figures() -> None:
    figures = importlib.import_module("launch_overhead").figures(LAUNCH_ROWS)
    assert figures["ratio_to_jit_3"] == pytest.approx(0.5)
    assert figures["autotune_ratio_to_jit_3"] == pytest.approx(2.0)
    assert figures["ratio_to_jit_13"] == pytest.approx(0.5)
    assert figures["us_run_13"] == 7.0
    assert not any(name.endswith("_24") for name in figures)


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


def test_no_key_of_the_launch_kernels_is_phantom() -> None:
    """Else safetune would look at fewer arguments than triton.autotune does."""
    from safetune import safetune

    triton = pytest.importorskip("triton")
    for case in importlib.import_module("launch_overhead").cases("cpu"):
        configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
        report = safetune(configs=configs, key=list(case.key))(case.kernel).explain_key()
        assert tuple(report.kept) == case.key


def test_help(script: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "--out DIR" in done.stdout


def test_the_interpreter_writes_no_result(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recording = importlib.import_module("recording")
    parsed = importlib.import_module(script).parse([])
    with pytest.raises(SystemExit, match="--out"):
        recording.output_folder(parsed)
    parsed = importlib.import_module(script).parse(["--out", "elsewhere"])
    assert recording.output_folder(parsed) == Path("elsewhere")


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


def test_nan_is_no_result(tmp_path: Path) -> None:
    bad = result()
    bad.rows = [{**TUNING_ROWS[0], "first_call_s": float("nan")}]
    with pytest.raises(ValueError, match="JSON"):
        bad.save(tmp_path, importlib.import_module("tuning_time").figures)
    assert not list(tmp_path.glob("*/*.json"))


def test_parts_end_with_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that are done are not run again, and none is begun that would overrun."""
    module = importlib.import_module("tuning_time")
    options = module.parse(["--alternations", "4", "--parts", "2"])
    assert list(module._parts_to_run(TUNING_ROWS[:4], options)) == [1, 2]
    options = module.parse(["--alternations", "4"])
    assert list(module._parts_to_run(TUNING_ROWS, options)) == [2, 3]
    options = module.parse(["--budget", "0"])
    assert list(module._parts_to_run([], options)) == []
    assert "run again" in capsys.readouterr().out


def check_file(path: Path) -> None:
    """Fail unless a result has every field and its figures are those of its rows."""
    recording = importlib.import_module("recording")
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(stored) == recording.FIELDS
    assert stored["bench"] == path.stem
    assert stored["device"] == path.parent.name
    assert stored["rows"]
    assert stored["commit"] not in ("", "unknown")
    assert {"triton"} <= set(stored["versions"])
    figures = importlib.import_module(path.stem).figures(stored["rows"])
    assert stored["figures"] == pytest.approx(figures)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_results(path: Path) -> None:
    if not (BENCHMARKS / f"{path.stem}.py").exists():
        pytest.fail(f"{path} was written by no script in benchmarks/")
    check_file(path)


def test_readme_shows_the_committed_figures() -> None:
    table = importlib.import_module("readme_table").table()
    assert table in (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
