"""The judge in the wild: verdicts and disputes of FLA's and Liger's autotuned kernels, unmodified.

`tests/gpu/scripts/wild_layers.py` runs under stock Triton, every tuner with its first config, and
under `safetune run` with empty caches. A row for each kernel has its tunings, its verdicts and its
disputed choices; a row for each output has its largest difference from stock, over stock's largest
value. One kernel is planted: one of its four configs is wrong, and must be `wrong_result`.

Each layer runs in a process of its own, all at once. Takes four minutes on an H100 at most: layers
that do not fit are left out, and a row says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
from recording import Figures, Row

LAYERS = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "scripts" / "wild_layers.py"
LAYER_NAMES = (
    "planted",
    "fla_l2norm",
    "liger_dyt",
    "fla_layer_norm",
    "fla_gla",
    "fla_delta_rule",
    "fla_simple_gla",
    "fla_gated_delta_rule",
)
#: A layer that takes longer is left out.
LIMIT_S = 200.0
PLANTED = "planted_kernel"


def figures(rows: Sequence[Row]) -> Figures:
    """Return the sums over the kernels, and the largest difference from stock."""
    kernels = [row for row in rows if row["kind"] == "kernel" and row["kernel"] != PLANTED]
    outputs = [row["off"] for row in rows if row["kind"] == "output"]
    wrong = ("wrong_result", "order_dependent")
    found: Figures = {
        "wild_kernels": float(len(kernels)),
        "wild_tunings": float(sum(row["tunings"] for row in kernels)),
        "wild_configs": float(sum(sum(row["verdicts"].values()) for row in kernels)),
        "wild_disputed_choices": float(sum(row["disputed"] for row in kernels)),
        "wild_rejected_configs": float(
            sum(row["verdicts"].get(verdict, 0) for row in kernels for verdict in wrong)
        ),
    }
    if outputs:
        found["wild_off_largest"] = max(outputs)
    return found


def kernel_rows(store: Path) -> Iterator[Row]:
    """Yield what became of each kernel, from the store in which it was tuned."""
    from safetune.store.local.store import Store

    opened = Store.open(store)
    disputes = {e.key.digest: e.choice.dispute for e in opened.choices() if e.choice.dispute}
    found: dict[str, Row] = {}
    for key, trials in opened.trials_of():
        row = found.setdefault(
            key.kernel_name,
            {"kind": "kernel", "kernel": key.kernel_name, "file": Path(key.kernel_file).name}
            | {"tunings": 0, "verdicts": Counter(), "disputed": 0, "reasons": []},
        )
        row["tunings"] += bool(trials)
        row["verdicts"].update(trial.outcome.verdict.value for trial in trials)
        row["disputed"] += key.digest in disputes
        said = [disputes.get(key.digest), *(trial.outcome.message for trial in trials)]
        row["reasons"] += [text.splitlines()[0] for text in said if text]
    opened.close()
    for row in found.values():
        reasons = sorted(set(row["reasons"]))[:5]
        yield {**row, "verdicts": dict(row["verdicts"]), "reasons": reasons}


def output_rows(folder: Path) -> Iterator[Row]:
    """Yield how far each output that both have computed is from stock's."""
    import torch

    wanted, found = (
        {
            name: value
            for path in folder.glob(f"{tuner}-*.pt")
            for name, value in torch.load(path).items()
        }
        for tuner in ("stock", "safetune")
    )
    for name in sorted(wanted.keys() & found.keys()):
        want, mine = wanted[name].float(), found[name].float()
        off = ((mine - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
        yield {"kind": "output", "output": name, "off": off}


def run(tuner: str, folder: Path, layers: Sequence[str]) -> Iterator[Row]:
    """Run each layer in a fresh process, all at once, from empty caches; yield what they report."""
    deadline = time.monotonic() + LIMIT_S
    started = {layer: _start(tuner, folder, layer) for layer in layers}
    for layer, process in started.items():
        status = fresh_process.end_of(process, deadline - time.monotonic())
        if status is None:
            yield {"kind": "process", "tuner": tuner, "seconds": {}, "left": [layer], "failed": {}}
            continue
        if status != 0:
            raise SystemExit(f"{layer} under {tuner} ended with {status}")
        report = json.loads(_report(folder, tuner, layer).read_text())
        yield {"kind": "process", "tuner": tuner, **report}


def _start(tuner: str, folder: Path, layer: str) -> subprocess.Popen[bytes]:
    report = _report(folder, tuner, layer)
    options = ["--save", str(report.with_suffix(".pt")), "--report", str(report), layer]
    command = [sys.executable, str(LAYERS), "--first-config", *options]
    if tuner == "safetune":
        command = [sys.executable, "-m", "safetune", "run", str(LAYERS), *options]
    env = fresh_process.environment(fresh_process.caches(folder / tuner, folder / "store"))
    return subprocess.Popen(command, env=env, start_new_session=True)


def _report(folder: Path, tuner: str, layer: str) -> Path:
    return folder / f"{tuner}-{layer}.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Run both processes, and write the result."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("layers", nargs="*", default=LAYER_NAMES)
    parsed: argparse.Namespace = parser.parse_args(argv)
    result = recording.begin("judge_in_the_wild")
    with tempfile.TemporaryDirectory(prefix="wild-") as name:
        folder = Path(name)
        for tuner in ("stock", "safetune"):
            result.rows += run(tuner, folder, parsed.layers)
        result.rows += kernel_rows(folder / "store")
        result.rows += output_rows(folder)
    path = result.save(recording.output_folder(parsed), figures)
    kernels: list[dict[str, Any]] = [row for row in result.rows if row["kind"] == "kernel"]
    print(recording.table(kernels, ["kernel", "tunings", "verdicts", "disputed", "reasons"]))
    recording.report(result, path)
    planted = next((row for row in kernels if row["kernel"] == PLANTED), None)
    if planted is None or planted["verdicts"] != {"ok": 3, "wrong_result": 1}:
        raise SystemExit("the planted wrong config was not found")


if __name__ == "__main__":
    main()
