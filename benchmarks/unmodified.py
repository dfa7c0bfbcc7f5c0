"""Time to the first training step of a library as it is: FLA under triton.autotune and safetune.

`tests/gpu/scripts/fla_layers.py` (layer norm, GLA, delta rule, forward and backward) in a fresh
process, plain and with `SAFETUNE_INSTALL=1`: `cold` with empty caches, `warm` with what the cold
process left: Triton's compile cache and safetune's store. One alternation; about 90 s on an H100.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recording
from recording import Figures, Row

STEP = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "scripts" / "fla_layers.py"
PROCESS_TIMEOUT_S = 240.0

#: How the step is started by each tuner: an import of safetune is all that differs.
START = (
    "import sys, runpy; {extra}"
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def figures(rows: Sequence[Row]) -> Figures:
    """Return the seconds to the first step, and safetune's over triton's."""
    times = recording.medians(rows, "first_s", "tuner", "state")
    found: Figures = {}
    for (tuner, state), seconds in sorted(times.items()):
        found[f"unmodified_first_step_s_{tuner}_{state}"] = seconds
        if tuner == "safetune" and ("triton", state) in times:
            found[f"unmodified_first_step_ratio_{state}"] = seconds / times["triton", state]
    return found


def run(tuner: str, state: str, folder: Path) -> dict[str, Any]:
    """Run the step in a fresh process, with the tuner's own caches."""
    extra = "import safetune; " if tuner == "safetune" else ""
    env = {name: v for name, v in os.environ.items() if not name.startswith("SAFETUNE_")}
    env["TRITON_CACHE_DIR"] = str(folder / f"triton-{tuner}")
    if tuner == "safetune":
        env.update(SAFETUNE_INSTALL="1", SAFETUNE_CACHE_DIR=str(folder / "store"))
    command = [sys.executable, "-c", START.format(extra=extra), str(STEP)]
    begin = time.monotonic()
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, timeout=PROCESS_TIMEOUT_S, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    return {"tuner": tuner, "state": state, "process_s": time.monotonic() - begin, **report}


def main() -> None:
    """Run the four processes and record them."""
    parser: argparse.ArgumentParser = recording.arguments(__doc__.split("\n", maxsplit=1)[0])
    options = parser.parse_args()
    recording.require_device()
    result = recording.begin("unmodified")
    with tempfile.TemporaryDirectory(prefix="unmodified-") as name:
        for state in ("cold", "warm"):
            for tuner in ("triton", "safetune"):
                row = run(tuner, state, Path(name))
                print(f"{tuner} {state}: {row['first_s']:.2f} s", flush=True)
                result.rows.append(row)
    path = result.save(recording.output_folder(options), figures)
    print(recording.table(result.rows, ["tuner", "state", "first_s", "both_s", "process_s"]))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
