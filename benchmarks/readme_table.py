"""The tables of figures in README.md, made from the committed results.

`python benchmarks/readme_table.py` prints them; tests/test_benchmarks.py holds README.md to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def table(device: str = "NVIDIA_H100_80GB_HBM3") -> str:
    """Return the Markdown table of one device's results."""
    tuning, launch = _load(device, "tuning_time"), _load(device, "launch_overhead")
    found = tuning["figures"]
    lines = ["| what | triton.autotune | safetune | ratio |", "| --- | --- | --- | --- |"]
    for cache, words in (("cold", "empty caches"), ("warm", "warm compile cache")):
        stock, ours = (found[f"first_call_s_{cache}_{who}"] for who in ("triton", "safetune"))
        ratio = found[f"wall_ratio_{cache}"]
        lines.append(
            f"| 72 matmul configs, {words}, first call in a fresh process "
            f"| {stock:.1f} s | {ours:.1f} s | {ratio:.2f} |"
        )
    found = launch["figures"]
    lines += ["", "| host time of a launch whose choice is known | " + _heads()]
    lines.append("| --- | --- | --- | --- | --- |")
    for count in (3, 13, 24):
        times = [found[f"us_{who}_{count}"] for who in ("jit", "autotune", "safetune", "run")]
        cells = " | ".join(f"{time:.1f} us" for time in times)
        lines.append(f"| {count} arguments | {cells} |")
    return "\n".join(lines)


def _heads() -> str:
    return "triton.jit | triton.autotune | safetune | the bare launcher |"


def _load(device: str, bench: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / device / f"{bench}.json").read_text())
    return loaded


if __name__ == "__main__":
    print(table())
