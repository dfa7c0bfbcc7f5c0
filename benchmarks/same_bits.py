"""What `same_bits` costs: how often there is a choice, and how much slower it is than the free one.

Each part is tuned in a fresh process with SAFETUNE_SAME_BITS=1, from an empty store: layers of FLA
(`cold_steps`), matrix products (`choice_problems`) and safetune's own norms. A row for each key has
the number of its configs that work, of those with the bits of the first one, and the time of the
fastest of these over that of the fastest of all. Both times are from one screening.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cold_steps
import fresh_process
import recording
from recording import Figures, Row

LAYERS = ("fla_gla", "fla_kda", "fla_gsa")
LIMIT_S = 200.0

#: What the first part is expected to take on an H200 with 16 cores.
PART_S = 60.0

WIDTHS = (1024, 4096, 8192)


def figures(rows: Sequence[Row]) -> Figures:
    """Return, by part, the share of keys with at least two configs to choose from, and the cost."""
    found: Figures = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        keys = [row for row in rows if row["part"] == part and row["kind"] == "key"]
        kept = [row["ratio"] for row in keys if not row["refused"]]
        found[f"same_bits_{part}_keys"] = float(len(keys))
        found[f"same_bits_{part}_refused"] = float(len(keys) - len(kept))
        if kept:
            choices = sum(row["alike"] > 1 for row in keys)
            found[f"same_bits_{part}_share"] = choices / len(keys)
            found[f"same_bits_{part}_ratio_median"] = statistics.median(kept)
            found[f"same_bits_{part}_ratio_worst"] = max(kept)
    return found


def run_part(part: str) -> Iterator[Row]:
    """Tune one part in a fresh process; yield a row for each key."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as place:
        folder = Path(place)
        caches = fresh_process.caches(folder / "triton", folder / "store")
        variables = {**caches, "SAFETUNE_SAME_BITS": "1"}
        start = time.monotonic()
        if part in OWN:
            fresh_process.run(OWN[part], variables=variables, limit_s=LIMIT_S)
        else:
            command = [sys.executable, "-m", "safetune", "run", cold_steps.__file__, part]
            env = fresh_process.environment(variables)
            status, output = fresh_process.output_of([*command, str(folder / "r")], env, LIMIT_S)
            if status != 0:
                raise SystemExit(f"{part} ended with {status}:\n{output}")
        yield {"part": part, "kind": "process", "seconds": time.monotonic() - start}
        for row in key_rows(folder / "store"):
            yield {"part": part, "kind": "key", **row}


def key_rows(store: Path) -> Iterator[Row]:
    """Yield what `same_bits` has left of each key with at least two configs that work."""
    from safetune.outcome import Mark
    from safetune.store.local.store import Store

    opened = Store.open(store)
    try:
        refused = {
            entry.key.digest: Mark.SAME_BITS.reason_in(entry.choice.marks).startswith("refused")
            for entry in opened.choices()
        }
        for key, trials in opened.trials_of():
            timed = [
                (trial.outcome.timing.undisturbed_ms, trial.outcome.marked(Mark.SAME_BITS))
                for trial in trials
                if trial.outcome.ok and trial.outcome.timing
            ]
            alike = [time_ms for time_ms, marked in timed if marked]
            if len(timed) > 1 and alike:
                yield {
                    "kernel": key.kernel_name,
                    "configs": len(timed),
                    "alike": len(alike),
                    "refused": refused.get(key.digest, False),
                    "ratio": min(alike) / min(timed)[0],
                }
    finally:
        opened.close()


def matmul() -> dict[str, Any]:
    """Launch the matrix products, long and short."""
    import choice_problems
    import short_problems
    import tuners

    for problem in (*choice_problems.PROBLEMS, *short_problems.SHORT):
        if "matmul" in problem.kernel.fn.__name__:
            work = problem.prepare("cpu" if recording.interpreted() else "cuda")
            work.launch(tuners.tuned("safetune", problem.kernel, problem.configs, problem.key))
    return {}


def norms() -> dict[str, Any]:
    """Launch both norms, with gradients."""
    import torch

    from safetune import kernels

    device, rows, widths = (
        ("cpu", 128, (1024,)) if recording.interpreted() else ("cuda", 4096, WIDTHS)
    )
    for width, norm in itertools.product(widths, (kernels.LayerNorm, kernels.RMSNorm)):
        layer = norm(width, device=device, dtype=torch.bfloat16)
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
    return {}


OWN = {"matmul": matmul, "norms": norms}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that are still missing, print and record."""
    parsed = recording.part_arguments(__doc__ or "").parse_args(argv)
    result = recording.begin("same_bits")
    recording.run_parts(result, (*OWN, *LAYERS), run_part, figures, parsed, PART_S)


if __name__ == "__main__":
    main()
