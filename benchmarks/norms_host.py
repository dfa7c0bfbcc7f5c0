"""What one call of a norm's module costs the host, on 16 rows of bf16: ours, torch's and FLA's."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import device_time
import norm_systems
import recording
from recording import Figures, Row

SYSTEMS = ("ours", "torch", "fla")
NORMS = ("ln", "rms")
BATCHES, CALLS = 60, 100
PART_S = 30.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the microseconds, and FLA's over ours."""
    times = recording.medians(
        [row for row in rows if "microseconds" in row], "microseconds", "op", "norm", "system"
    )
    found = {f"host_us_{op}_{s}_{norm}": value for (op, norm, s), value in sorted(times.items())}
    for op, norm, system in times:
        if system == "ours" and (op, norm, "fla") in times:
            found[f"host_{op}_vs_fla_{norm}"] = times[op, norm, "fla"] / times[op, norm, "ours"]
    return found


def measure(norm: str) -> list[Row]:
    """Return what a forward and a backward call of a module on 16 rows cost the host.

    The systems take turns, batch by batch: what else the host does slows down all of them.
    """
    rows: list[Row] = []
    times: dict[tuple[str, str], list[float]] = {}
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for system in SYSTEMS:
        try:
            for op, call in _module_calls(system, norm).items():
                _batch_us(call)  # tuned and compiled
                calls[system, op] = call
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append({"part": norm, "norm": norm, "system": system, "error": problem})
    for _ in range(1 if recording.interpreted() else BATCHES):
        for case, call in calls.items():
            times.setdefault(case, []).append(_batch_us(call))
    for (system, op), batches in times.items():
        found = {"part": norm, "norm": norm, "system": system, "op": op}
        spread = {"least": min(batches), "most": max(batches)}
        rows.append({**found, "microseconds": statistics.median(batches), **spread})
    return rows


def _module_calls(system: str, norm: str) -> dict[str, Callable[[], object]]:
    import torch

    device = recording.torch_device()
    module = norm_systems.make_module(system, 1024, norm == "rms", device)
    x = torch.randn(16, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    y, leaves = module(x), [x, *module.parameters()]
    dy = torch.randn_like(y)
    backward = functools.partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)
    return {"forward": functools.partial(module, x), "backward": backward}


def _batch_us(call: Callable[[], object]) -> float:
    call()
    return device_time.host_us(call, 1 if recording.interpreted() else CALLS)


def main() -> None:
    """Run the parts that are still missing, print and record."""
    options = recording.part_arguments(__doc__ or "").parse_args()
    recording.run_parts(recording.begin("norms_host"), NORMS, measure, figures, options, PART_S)


if __name__ == "__main__":
    main()
