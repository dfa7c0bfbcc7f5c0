"""How long the first call of a kernel with 72 configs takes: safetune against triton.autotune.

Each measurement is a fresh process with nothing started beforehand: `cold` with an empty compile
cache and an empty store, `warm` with the compile cache that the same tuner's cold process filled
and an empty store. The two tuners alternate, and change who goes first. The time is from just
before the first call until the device has finished it. choice_quality.py judges what they choose.

The cold process goes on to two further keys, for which every config is compiled: half the rows, and
an output of 128 MiB.

One alternation is one part (under three minutes); parts are kept as they end, so that the script
can be run again and goes on: `--parts 1 --budget 450`.
"""

from __future__ import annotations

import argparse
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
PROCESS_TIMEOUT_S = 240.0

#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 150.0
ERROR_LIMIT = 1e-2

#: M and N of the further keys, in the size of the first.
FURTHER = {"further_key": (0.5, 1), "further_key_128MiB": (2, 2)}


def figures(rows: Sequence[Row]) -> Figures:
    """Return ratios of medians, and the medians."""
    found: Figures = {}
    further = [row for row in rows if row["kind"] == "further_key"]
    seconds = recording.medians(further, "seconds", "key", "tuner")
    for key in FURTHER:
        if all((key, tuner) in seconds for tuner in TUNERS):
            found[f"{key}_ratio"] = seconds[key, "safetune"] / seconds[key, "triton"]
    firsts = [row for row in rows if row["kind"] == "first_call"]
    times = recording.medians(firsts, "first_call_s", "state", "tuner")
    whole = recording.medians(firsts, "process_s", "state", "tuner")
    for state in STATES:
        for tuner in TUNERS:
            if (state, tuner) in times:
                found[f"first_call_s_{state}_{tuner}"] = times[state, tuner]
                found[f"process_s_{state}_{tuner}"] = whole[state, tuner]
        if all((state, tuner) in times for tuner in TUNERS):
            found[f"wall_ratio_{state}"] = times[state, "safetune"] / times[state, "triton"]
            found[f"process_ratio_{state}"] = whole[state, "safetune"] / whole[state, "triton"]
    for state, name, seconds in _phase_medians(firsts):
        found[f"{name}_{state}"] = seconds
    found["alternations"] = float(len({row["part"] for row in firsts}))
    return found


def _phase_medians(firsts: Sequence[Row]) -> Iterator[tuple[str, str, float]]:
    """Yield (state, column, seconds) for each phase of safetune's that was recorded."""
    names = sorted({name for row in firsts for name in row if name.startswith("phase_s_")})
    for name in names:
        timed = [row for row in firsts if name in row]
        for (state,), seconds in recording.medians(timed, name, "state").items():
            yield state, name, seconds


def run_part(part: int, options: argparse.Namespace) -> Iterator[Row]:
    """Measure both tuners once, cold and warm."""
    with tempfile.TemporaryDirectory(prefix="tuning-time-") as name:
        folder = Path(name)
        for state in STATES:
            for order, tuner in enumerate(recording.in_turn(TUNERS, part)):
                report = fresh_process.run(
                    first_call,
                    *(tuner, options.size, options.configs, FURTHER if state == "cold" else {}),
                    variables=tuners.caches(folder, tuner, state),
                    limit_s=PROCESS_TIMEOUT_S,
                )
                further = report.pop("further")
                report["process_s"] -= sum(found["seconds"] for found in further.values())
                print(f"part {part}: {tuner} {state}: {report['first_call_s']:.2f} s", flush=True)
                row = {"part": part, "tuner": tuner}
                yield {"kind": "first_call", **row, "order": order, "state": state, **report}
                for key, found in further.items():
                    yield {"kind": "further_key", **row, "key": key, **found}


def first_call(
    tuner_name: str, size: int, configs: int, further: dict[str, tuple[float, int]]
) -> dict[str, Any]:
    """In a fresh process: tune the product once, then further keys; say how long that took."""
    import matmul

    every = matmul.configs(configs)
    tuner = tuners.tuned(tuner_name, matmul.matmul_kernel, every, matmul.KEY)

    def tuned(m: float, n: float) -> dict[str, Any]:
        operands = matmul.operands(int(m * size), int(n * size), size, recording.torch_device())
        found = tuners.tune(tuner, lambda: matmul.launch(tuner, *operands))
        error = matmul.relative_error(*operands)
        if not error < ERROR_LIMIT:
            raise SystemExit(f"{tuner_name} gave a wrong product: relative error {error}")
        return {**found, "configs": len(every)}

    first = tuned(1, 1)
    found = {key: tuned(m, n) for key, (m, n) in further.items()}
    return {"first_call_s": first.pop("seconds"), **first, "further": found}


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--size", type=int, default=4096, help="M = N = K")
    parser.add_argument("--configs", type=int, default=72, help="fewer, for a trial run")
    options = parser.parse_args()
    recording.run_parts(
        recording.begin("tuning_time"),
        range(options.alternations),
        lambda part: run_part(part, options),
        figures,
        options,
        PART_S,
        ["kind", "part", "state", "tuner", "first_call_s", "process_s", "failed", "config"],
    )


if __name__ == "__main__":
    main()
