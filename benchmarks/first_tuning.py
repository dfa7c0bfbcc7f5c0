"""How long the first tuning of a process takes: safetune against triton.autotune.

A fresh process with nothing started beforehand tunes one kernel, with 4 or 16 configs: `cold` with
an empty compile cache and an empty store, `warm` with the compile cache that the same tuner's cold
process filled and an empty store. The time is from just before the first call until the device has
finished. The two tuners alternate, and change who goes first. The figures are those of the worst of
three kernels.

One alternation of one kernel is one part (under 60 seconds on an H100 with 16 cores); parts are
kept as they end, so that the script can be run again and goes on. `--short` runs one alternation of
the vector add with 4 configs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
import tuners
from recording import Figures, Row
from tuners import TUNERS

STATES = ("cold", "warm")
KERNELS = ("add", "norm", "described")
COUNTS = (4, 16)
PROCESS_TIMEOUT_S = 120.0

#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 60.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the ratios of medians, of each kernel and of the worst, and safetune's phases."""
    found: Figures = {}
    times = recording.medians(rows, "seconds", "configs", "state", "kernel", "tuner")
    for count, state, kernel, tuner in sorted(times):
        if tuner == "safetune" and (count, state, kernel, "triton") in times:
            ratio = times[count, state, kernel, tuner] / times[count, state, kernel, "triton"]
            name = f"ratio_{state}_{count}"
            found[f"{name}_{kernel}"] = ratio
            found[name] = max(ratio, found.get(name, 0.0))
        found[f"s_{state}_{count}_{kernel}_{tuner}"] = times[count, state, kernel, tuner]
    found["alternations"] = float(min(_alternations(rows).values(), default=0))
    return found


def _alternations(rows: Sequence[Row]) -> dict[tuple[str, int], int]:
    parts: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        parts.setdefault((row["kernel"], row["configs"]), set()).add(row["part"])
    return {name: len(found) for name, found in parts.items()}


def run_part(part: str) -> Iterator[Row]:
    """Measure both tuners once in each state; a part is `kernel-configs-alternation`."""
    kernel, count, alternation = part.split("-")
    with tempfile.TemporaryDirectory(prefix="first-tuning-") as folder:
        for state in STATES:
            for tuner in recording.in_turn(TUNERS, int(alternation)):
                report = fresh_process.run(
                    tune_first,
                    *(tuner, kernel, int(count)),
                    variables=tuners.caches(Path(folder), tuner, state),
                    limit_s=PROCESS_TIMEOUT_S,
                )
                print(f"{part}: {tuner} {state}: {report['seconds']:.2f} s", flush=True)
                row = {"part": part, "kernel": kernel, "configs": int(count), "state": state}
                yield {**row, "tuner": tuner, **report}


def tune_first(tuner_name: str, kernel: str, count: int) -> dict[str, Any]:
    """In a fresh process: tune a kernel, and say how long that took and where it went."""
    import first_tuning_kernels
    import torch

    torch.manual_seed(0)
    call = first_tuning_kernels.CALLS[kernel](count, recording.torch_device())
    tuner = tuners.tuned(tuner_name, call.kernel, call.configs, call.key, call.settings)
    found = tuners.tune(tuner, lambda: tuner[call.grid](*call.arguments))
    if not call.right():
        raise SystemExit(f"{tuner_name} gave a wrong result of {kernel}")
    return found


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--short", action="store_true", help="one kernel, 4 configs, once")
    options = parser.parse_args()
    parts = [
        f"{kernel}-{count}-{alternation}"
        for alternation in range(options.alternations)
        for count in COUNTS
        for kernel in KERNELS
    ]
    recording.run_parts(
        recording.begin("first_tuning"),
        parts[:1] if options.short else parts,
        run_part,
        figures,
        options,
        PART_S,
        ["part", "state", "tuner", "seconds", "failed"],
    )


if __name__ == "__main__":
    main()
