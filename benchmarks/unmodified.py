"""Time to the first training step of a library as it is: FLA under triton.autotune and safetune.

`tests/gpu/scripts/fla_layers.py` (layer norm, GLA, delta rule, forward and backward) in a fresh
process: `cold` with empty caches of its own, `warm` with what the cold one left there: Triton's
compile cache, the timings that FLA has Triton keep beside it, safetune's store. One cold run of
each, as that of triton.autotune takes three to six minutes on an H100's host; the warm ones
alternate.
Each collects garbage before the step, as a full collection, which takes tenths of a second, would
else fall into the step of one tuner and not of the other. `off` is by how much results differ from
those of the first process, over each one's largest value.

`--stored` measures the warm runs alone, as unmodified_stored.json. What is stored before them is
not timed, and cheap: every tuner has the first `CONFIGS` configs of its list only, then and in the
warm runs, and triton.autotune finds the kernels that safetune's process has compiled. That leaves
out what a longer list adds to a warm run: more configs to make a key of, and more timings to read.
A run that goes on with an earlier one needs its caches: `--caches DIR`.
"""

from __future__ import annotations

import functools
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
from recording import Figures, Row

STEP = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "scripts" / "fla_layers.py"
TUNERS = ("safetune", "triton")  # the shorter first: the budget is for both
PARTS = (*TUNERS, "warm")
STORED_PARTS = ("fill", "warm")
CONFIGS = 3
ALTERNATIONS = 3
PROCESS_TIMEOUT_S = 500.0

#: What the cold process of triton.autotune may take, and the fill; the other parts take less.
PART_S, FILL_S = 400.0, 90.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the seconds to the first step, and safetune's over triton's; `stored` is `warm`."""
    timed = [row for row in rows if row["part"] != "fill"]
    times = recording.medians(timed, "first_s", "tuner", "state")
    found: Figures = {}
    for (tuner, state), seconds in sorted(times.items()):
        found[f"unmodified_first_step_s_{tuner}_{state}"] = seconds
        if tuner == "safetune" and ("triton", state) in times:
            found[f"unmodified_first_step_ratio_{state}"] = seconds / times["triton", state]
    if "unmodified_first_step_ratio_warm" in found:
        found["stored_step_ratio"] = found["unmodified_first_step_ratio_warm"]
    return found


def shorten(count: int) -> None:
    """Let each tuner that is made in this process have the first configs of its list only."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    @functools.wraps(make)
    def first(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        make(self, fn, arg_names, list(configs)[:count], *args, **kwargs)

    Autotuner.__init__ = first


def first_step(tuner: str, results: str, configs: int) -> dict[str, Any]:
    """In a fresh process: run the layers; say how long the first and both steps took."""
    if configs:
        shorten(configs)
    installation = None
    if tuner == "safetune":
        import safetune

        installation = safetune.install()
    sys.argv = [str(STEP), "--save", results]
    found = runpy.run_path(str(STEP), run_name="__main__")
    report = {name: found[name] for name in ("first_s", "both_s")}
    if installation is None:
        return report
    if installation.refused or installation.given:
        raise SystemExit(f"not all that was launched was tuned by safetune:\n{installation}")
    from safetune.miss import reporting

    return {**report, "tunings": reporting.tunings.begun, "launches": installation.launches}


def run_part(part: str, folder: Path, configs: int) -> Iterator[Row]:
    """Run one or both tuners with empty caches, or both in turn with what that left there."""
    if part in TUNERS:
        yield _run(part, part, "cold", folder, configs)
        return
    if part == "fill":
        yield _run(part, "safetune", "cold", folder, configs)
        kernels, timings = folder / "safetune" / "triton", shutil.ignore_patterns("*.autotune.json")
        shutil.copytree(kernels, folder / "triton" / "triton", ignore=timings)
        yield _run(part, "triton", "compiled", folder, configs)
        return
    for number in range(ALTERNATIONS):
        for tuner in recording.in_turn(TUNERS, number):
            yield {**_run(part, tuner, "warm", folder, configs), "number": number}


def _run(part: str, tuner: str, state: str, folder: Path, configs: int) -> Row:
    compiled = folder / tuner / "triton"
    if compiled.exists() == (state == "cold"):
        raise SystemExit(f"{folder} has no caches of {tuner}, or has some: see --caches, --fresh")
    results = folder / f"{tuner}-{state}.pt"
    report = fresh_process.run(
        first_step,
        *(tuner, str(results), configs),
        variables=fresh_process.caches(compiled, folder / tuner / "store"),
        limit_s=PROCESS_TIMEOUT_S,
    )
    row = {"part": part, "state": state, "tuner": tuner, **report, "off": _off(results)}
    print(f"{tuner} {state}: {row['first_s']:.2f} s, off by {row['off']:.1e}", flush=True)
    return row


def _off(results: Path) -> float:
    """Return the largest difference from the results that were saved first, for its tensor."""
    import torch

    first = min(results.parent.glob("*.pt"), key=lambda file: file.stat().st_mtime_ns)
    wanted, found = torch.load(first), torch.load(results)
    assert wanted.keys() == found.keys()
    return max(
        ((found[name].float() - want.float()).abs().max() / want.float().abs().max()).item()
        for name, want in wanted.items()
    )


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--caches", type=Path, help="keep the caches here, for another run")
    parser.add_argument("--stored", action="store_true", help="time the warm runs alone")
    options = parser.parse_args()
    bench, parts, first_s, configs = (
        ("unmodified_stored", STORED_PARTS, FILL_S, CONFIGS)
        if options.stored
        else ("unmodified", PARTS, PART_S, 0)
    )
    with tempfile.TemporaryDirectory(prefix="unmodified-") as name:
        recording.run_parts(
            recording.begin(bench),
            parts,
            lambda part: run_part(part, options.caches or Path(name), configs),
            figures,
            options,
            first_s,
            ["tuner", "state", "first_s", "both_s", "process_s", "off", "tunings", "launches"],
        )


if __name__ == "__main__":
    main()
