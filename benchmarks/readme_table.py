"""The tables of figures in README.md, made from the committed results.

`python benchmarks/readme_table.py` prints them; tests/test_benchmarks.py holds README.md to it. A
benchmark that has no result yet has no line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import recording

DEVICE = "NVIDIA_H100_80GB_HBM3"
Figures = recording.Figures
Rows = list[list[str]]

#: (benchmark, what is timed, {state of the caches: in words}, figures of both tuners, their ratio)
TIMES = (
    (
        "tuning_time",
        "72 matmul configs, {}, first call in a fresh process",
        {"cold": "empty caches", "warm": "warm compile cache"},
        *("first_call_s_{}_triton", "first_call_s_{}_safetune", "wall_ratio_{}"),
    ),
    (
        "startup",
        "60 small tunings in a row, {}, in a fresh process",
        {"": "empty caches", "_warm": "warm compile cache"},
        *("startup_60_s_triton{}", "startup_60_s_safetune{}", "startup_60_ratio{}"),
    ),
    (
        "unmodified",
        "FLA's layer norm, GLA and delta rule, first forward and backward, {}",
        {"cold": "empty caches", "warm": "caches of an earlier process"},
        *(f"unmodified_first_step_{name}_{{}}" for name in ("s_triton", "s_safetune", "ratio")),
    ),
)


def table(device: str = DEVICE, results: Path = recording.RESULTS) -> str:
    """Return the Markdown tables of one device's results."""
    folder = results / device
    times = [row for benchmark in TIMES for row in _times(folder, *benchmark)]
    tables = (
        _table(["what", "triton.autotune", "safetune", "ratio"], times),
        _table(["choices", "triton.autotune", "safetune"], _choices(folder)),
        _table(
            [
                "host time of a launch whose choice is known",
                *("triton.jit", "triton.autotune", "safetune", "launcher alone"),
            ],
            _launches(recording.stored_figures(folder, "launch_overhead")),
        ),
        _table(
            ["host time of a norm's module, eager", "torch.nn", "FLA", "safetune.kernels"],
            _norm_calls(recording.stored_figures(folder, "norms_host")),
        ),
    )
    return "\n\n".join(filter(None, tables))


def _times(folder: Path, benchmark: str, what: str, states: Mapping[str, str], *names: str) -> Rows:
    """One line for each state of the caches: the figures of both tuners, and their ratio."""
    found = recording.stored_figures(folder, benchmark)
    rows = []
    for state, words in states.items():
        keys = [name.format(state) for name in names]
        if keys[-1] in found:
            stock, ours, ratio = (found[key] for key in keys)
            line = [what.format(words), f"{stock:.1f} s", f"{ours:.1f} s", f"{ratio:.2f}"]
            rows.append(line)
    return rows


def _choices(folder: Path) -> list[list[str]]:
    found = recording.stored_figures(folder, "choice_quality")
    if "mean_regret_ratio" not in found:
        return []
    words = {
        "share_within_1pct": "within 1% of the best config by an exhaustive, long measurement",
        "share_within_2pct": "within 2% of that config",
        "mean_regret": "slower than that config, on average",
        "worst_regret": "slower than that config, at worst",
        "most_common_share": "tunings that made the most common choice of their problem",
    }
    return [
        [text, f"{100 * found[f'{name}_triton']:.1f}%", f"{100 * found[name]:.1f}%"]
        for name, text in words.items()
    ]


def _launches(found: Figures) -> list[list[str]]:
    ways = ("jit", "autotune", "safetune", "run")
    return [
        [f"{count} arguments", *(f"{found[f'us_{way}_{count}']:.1f} us" for way in ways)]
        for count in (3, 13, 24)
        if f"us_jit_{count}" in found
    ]


def _norm_calls(found: Figures) -> list[list[str]]:
    norms = {"ln": "LayerNorm", "rms": "RMSNorm"}
    systems = ("torch", "fla", "ours")
    return [
        [
            f"{words}, {op}",
            *(f"{found[f'host_us_{op}_{system}_{norm}']:.0f} us" for system in systems),
        ]
        for norm, words in norms.items()
        for op in ("forward", "backward")
        if f"host_us_{op}_ours_{norm}" in found
    ]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; nothing where it would have no rows."""
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
