"""Device time of layer and RMS norm on few rows, bf16: ours and torch.compile's max-autotune.

As in norms.py: replays of CUDA graphs, in turns. A figure is the worse of both passes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import norm_calls
import norms
import recording
from recording import Figures, Row

SHAPES = ("450x256", "1x4096", "8x4096", "64x4096")
SYSTEMS = ("ours", "compile_max")
PARTS = [f"{norm}-{shape}" for shape in SHAPES for norm in norms.NORMS]
#: What a part takes where nothing is compiled, and where all is.
PART_S, WARM_PART_S = 40.0, 8.0
REPLAYS = 15


def figures(rows: Sequence[Row]) -> Figures:
    """Return our time over the other's: of each pass, and the larger of the two."""
    times = recording.medians(
        [row for row in rows if "microseconds" in row], "microseconds", "op", "part", "system"
    )
    found: Figures = {}
    for op, part, system in sorted(times):
        if system != "ours" or (op, part, "compile_max") not in times:
            continue
        norm, shape = part.split("-")
        ratio = times[op, part, "ours"] / times[op, part, "compile_max"]
        name = f"vs_max_autotune_{shape}_{norm}"
        found[f"{op}_{name}"] = ratio
        found[name] = max(found.get(name, 0.0), ratio)
    return found


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--warm", action="store_true", help="first, compile in parallel")
    parser.add_argument("--workers", type=int, default=14, help="compiling processes")
    options = parser.parse_args()
    options.ops, options.systems = norm_calls.OPS, SYSTEMS
    os.environ["TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE"] = "0"
    result = recording.begin("norms_small")
    if options.warm:
        norm_calls.warm_all(PARTS, options)
    recording.run_parts(
        result,
        PARTS,
        lambda part: norms.measure(part, norm_calls.OPS, SYSTEMS, REPLAYS),
        figures,
        options,
        WARM_PART_S if options.warm else PART_S,
    )


if __name__ == "__main__":
    main()
