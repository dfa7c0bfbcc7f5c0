"""FLA's layers under `safetune run`, unmodified, against the same under triton.autotune."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

RUN = "import sys; from safetune.cli import main; sys.argv[0] = 'safetune'; main()"
LAYERS = ("layer_norm", "gla", "delta_rule")


def test_fla_forward_and_backward(fresh_process: Any, scripts: Path, tmp_path: Path) -> None:
    """Layer norm, GLA's chunks and the delta rule: the same results, each kernel that stock Triton
    tunes tuned in a child, and a second process that tunes nothing.

    Stock Triton has a process for each layer, all at once: in one it compiles for three minutes.
    """
    pytest.importorskip("fla", reason="needs fla-core")
    start = _starter(fresh_process, scripts / "fla_layers.py", tmp_path)

    def with_safetune() -> tuple[Any, Any]:
        return start("ours", RUN, "run"), start("again", RUN, "run", caches="ours")

    with ThreadPoolExecutor() as pool:
        running = {layer: pool.submit(start, layer, layers=[layer]) for layer in LAYERS}
        ours, again = pool.submit(with_safetune).result()
        stock = {layer: done.result() for layer, done in running.items()}

    found = {
        "stock": {layer: _seconds(done) for layer, done in stock.items()},
        "ours": _seconds(ours),
        "again": _seconds(again),
        "report": _report(ours),
        "report again": _report(again),
        "tuned by stock": {layer: sorted(_tried(done)) for layer, done in stock.items()},
        "tuned by ours": sorted(_tuned(ours)),
    }
    told = json.dumps(found, indent=1)
    print(told)

    got = torch.load(tmp_path / "ours.pt")
    expected = {k: v for layer in LAYERS for k, v in torch.load(tmp_path / f"{layer}.pt").items()}
    assert set(expected) == set(got), told
    for name, want in expected.items():
        scale = want.float().abs().max().item() or 1.0
        error = (got[name].float() - want.float()).abs().max().item() / scale
        assert error < 2e-2, f"{name}: off by {error:.1e} of its largest value\n{told}"

    for layer, done in stock.items():
        assert _tried(done), f"stock Triton tunes nothing of {layer}\n{told}"
        assert _tried(done) <= _tuned(ours), f"not tuned by safetune, of {layer}\n{told}"
    for done in (ours, again):
        report = "\n".join(_report(done))
        assert "left to" not in report, told
        assert "its own cache" not in report, told
    assert " 0 tunings" in _report(again)[0], told


def _starter(fresh_process: Any, script: Path, folder: Path) -> Callable[..., Any]:
    """Return a function that runs the script with caches of its own, or of an earlier process."""

    def start(name: str, *how: str, layers: Sequence[str] = (), caches: str = "") -> Any:
        env = {
            "TRITON_CACHE_DIR": str(folder / f"triton-{caches or name}"),
            "SAFETUNE_CACHE_DIR": str(folder / "store"),
            "TRITON_PRINT_AUTOTUNING": "1",
            "FLA_CACHE_MODE": None,
        }
        what = [*how, script, "--save", folder / f"{name}.pt", *layers]
        done = fresh_process(*what, env=env, timeout_s=300, ends=None)
        assert done.returncode == 0, f"{name}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done

    return start


def _seconds(done: Any) -> dict[str, float]:
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _report(done: Any) -> list[str]:
    lines = re.findall(r"^safetune: .*", done.stderr, re.MULTILINE)
    assert lines, f"no report on stderr:\n{done.stderr[-4000:]}"
    return lines


def _tried(done: Any) -> set[str]:
    """Return the kernels of which Triton has tried more than one config."""
    configs = defaultdict(set)
    pattern = r"^Autotuning kernel (\w+) with config (.*)$"
    for kernel, config in re.findall(pattern, done.stdout, re.MULTILINE):
        configs[kernel].add(config)
    return {kernel for kernel, tried in configs.items() if len(tried) > 1}


def _tuned(done: Any) -> set[str]:
    """Return the kernels whose tuning has ended with a choice."""
    return set(re.findall(r"^Triton autotuning for function (\w+),$", done.stdout, re.MULTILINE))
