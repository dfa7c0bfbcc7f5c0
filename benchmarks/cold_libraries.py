"""What a user of a library waits for: libraries as they are, under stock Triton and `safetune run`.

`cold_steps.py` in a fresh process for each: with empty caches under both, `cold`, and under
safetune once more with the choices of the first process, `stored`. A process that ends otherwise
has a row with its end and the last line that it printed; so has one that takes over `LIMIT_S`.

One library is one part; a library that is not installed is left out by name. The verdicts of all
configs that safetune tried are rows, too.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import cold_steps
import fresh_process
import recording
import wild
from recording import Figures, Row

STEPS = Path(cold_steps.__file__).resolve()
#: How a process is started, and whether an earlier one has filled its caches.
RUNS = (("safetune", "cold"), ("safetune", "stored"), ("triton", "cold"))
LIMIT_S = 150.0

#: What the first part is expected to take on an H200 with 16 cores.
PART_S = 120.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the seconds of all first steps of a library, and safetune's over stock's.

    For a process that did not end well, the number of its signal, or the seconds that it was given.
    """
    found: Figures = {}
    for row in rows:
        if row["kind"] != "process":
            continue
        of = f"{row['part']}_{row['tuner']}"
        if row["ended"] == "ok":
            found[f"cold_s_{of}_{row['state']}"] = sum(step["first_s"] for step in row["steps"])
        elif stopped := re.fullmatch(r"over (\d+) s|exit code -(\d+)", row["ended"]):
            over_s, signal = stopped.groups()
            found[f"cold_{'over_s' if over_s else 'signal'}_{of}"] = float(over_s or signal)
    for part in {row["part"] for row in rows}:
        ours, stock = (found.get(f"cold_s_{part}_{t}_cold") for t in ("safetune", "triton"))
        if ours and stock:
            found[f"cold_ratio_{part}"] = ours / stock
    kernels = [row for row in rows if row["kind"] == "kernel"]
    if kernels:
        verdicts = [row["verdicts"] for row in kernels]
        rejected = ("wrong_result", "order_dependent", "not_repeatable")
        found["configs"] = float(sum(sum(each.values()) for each in verdicts))
        found["rejected_configs"] = float(
            sum(each.get(name, 0) for each in verdicts for name in rejected)
        )
    return found


def run_part(name: str) -> Iterator[Row]:
    """Run one library in each way; yield a row for each process and each kernel."""
    with tempfile.TemporaryDirectory(prefix=f"cold-{name}-") as folder:
        for tuner, state in RUNS:
            row = _run(name, tuner, Path(folder))
            print(f"{name}: {tuner} {state}: {row['ended']}, {row['wall_s']:.1f} s", flush=True)
            yield {"part": name, "kind": "process", "tuner": tuner, "state": state, **row}
        for row in wild.kernel_rows(Path(folder) / "safetune-store"):
            yield {"part": name, **row}


def _run(name: str, tuner: str, folder: Path) -> dict[str, Any]:
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, str(STEPS), name, str(report)]
    if tuner == "safetune":
        command[1:1] = ["-m", "safetune", "run"]
    caches = fresh_process.caches(folder / f"{tuner}-triton", folder / f"{tuner}-store")
    start = time.monotonic()
    status, output = fresh_process.output_of(command, fresh_process.environment(caches), LIMIT_S)
    row = {"ended": "ok", "wall_s": time.monotonic() - start}
    row["steps"] = json.loads(report.read_text()) if report.exists() else []
    if status is None:
        return {**row, "ended": f"over {LIMIT_S:g} s", "said": ""}
    if status:
        said = (output.strip().splitlines() or [""])[-1]
        return {**row, "ended": f"exit code {status}", "said": said}
    return row


def installed(name: str) -> str:
    """Return the version of a library; an empty text where it is not installed."""
    try:
        return metadata.version(cold_steps.LIBRARIES[name][2])
    except metadata.PackageNotFoundError:
        return ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that are still missing, print and record."""
    options = recording.part_arguments(__doc__ or "").parse_args(argv)
    result = recording.begin("cold_libraries")
    every = {name: installed(name) for name in cold_steps.LIBRARIES}
    there = {name: version for name, version in every.items() if version}
    if left := sorted(every.keys() - there.keys()):
        print("not installed:", ", ".join(left))
    recording.run_parts(
        result,
        there,
        lambda part: ({**row, "version": there[part]} for row in run_part(part)),
        figures,
        options,
        PART_S,
    )


if __name__ == "__main__":
    main()
