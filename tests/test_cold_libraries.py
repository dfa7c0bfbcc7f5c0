"""The benchmark of libraries as they are: each process has a row, however it ends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

LIBRARY = """
import torch, triton, triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 64 << i, "BY": 3 if i == 3 else 2}) for i in range(4)]

@triton.autotune(CONFIGS, ["n"])
@triton.jit
def twice_kernel(x, y, n, BLOCK: tl.constexpr, BY: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * BY, mask=offsets < n)

def twice(n):
    x, y = torch.ones(n), torch.zeros(n)

    def step():
        twice_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
        return [y]
    return step
"""


@pytest.fixture
def cold_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmark, whose steps are those of a library that is written here."""
    benchmarks = Path(__file__).resolve().parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    module = import_module("cold_libraries")
    (tmp_path / "twice_library.py").write_text(LIBRARY)
    script = tmp_path / "steps.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(benchmarks)!r}, {str(tmp_path)!r}]\n"
        "import cold_steps, twice_library\n"
        "cold_steps.LIBRARIES['twice'] = (twice_library.twice, (300, 600), 'twice')\n"
        "cold_steps.main()\n"
    )
    monkeypatch.setattr(module, "STEPS", script)
    return module


@pytest.mark.full
def test_a_library_has_its_times_and_the_verdicts_of_its_configs(cold_libraries: Any) -> None:
    rows = list(cold_libraries.run_part("twice"))
    ours, stored, stock, kernel = rows
    assert [step["sum"] for step in ours["steps"]] == [2.0, 2.0]
    assert ours["steps"][0]["sum"] == stored["steps"][0]["sum"]
    assert (kernel["kernel"], kernel["verdicts"]) == (
        "twice_kernel",
        {"ok": 6, "wrong_result": 2},
    )
    assert stock["ended"] == "exit code 1", "without a device stock Triton cannot time anything"
    assert "0 active drivers" in stock["said"]
    figures = cold_libraries.figures(rows)
    times = {name for name in figures if name.startswith("cold_s_")}
    assert times == {"cold_s_twice_safetune_cold", "cold_s_twice_safetune_stored"}
    assert (figures["configs"], figures["rejected_configs"]) == (8.0, 2.0)


@pytest.mark.parametrize(
    ("step", "ended", "figure"),
    [
        ("import signal; signal.pause()", "over 2 s", {"cold_over_s_twice_triton": 2.0}),
        ("import os; os.abort()", "exit code -6", {"cold_signal_twice_triton": 6.0}),
    ],
)
def test_a_step_without_an_end_of_its_own_is_a_row(
    cold_libraries: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    step: str,
    ended: str,
    figure: dict[str, float],
) -> None:
    (tmp_path / "steps.py").write_text(step)
    monkeypatch.setattr(cold_libraries, "LIMIT_S", 2.0)

    row = cold_libraries._run("twice", "triton", tmp_path)

    assert (row["ended"], row["steps"]) == (ended, [])
    process = {"part": "twice", "kind": "process", "tuner": "triton", "state": "cold", **row}
    assert cold_libraries.figures([process]) == figure


def test_a_library_that_is_not_installed_is_named(
    cold_libraries: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(cold_libraries, "installed", lambda name: "")
    monkeypatch.setattr("recording.require_device", lambda: None)

    cold_libraries.main(["--out", str(tmp_path)])

    assert "not installed: adasplash, cut_cross_entropy, fla_gla," in capsys.readouterr().out
