"""What `safetune tune --dry-run` prints: a plan, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safetune.cli.output import counted, empty_table, print_json, stdout_console

if TYPE_CHECKING:
    from safetune.offline.plan import Plan
    from safetune.offline.replay import LeftOut


def print_plan(plan: Plan, left_out: Sequence[LeftOut], as_json: bool) -> None:
    """Print every tuning of a plan, and what is left to do in all."""
    if as_json:
        print_json(_plan_data(plan, left_out))
        return
    console = stdout_console()
    headings = ("kernel", "shape", "dtype", "configs", "stored", "to measure", "compilations")
    table = empty_table("plan", *headings, "share", "time")
    for each in plan.tunings:
        sketch = each.sketch
        sizes = (each.configs, each.configs - len(each.new), len(each.new), len(each.binaries))
        share = "" if each.share is None else f"{each.share * 100:.3g} %"
        time = "" if each.estimate_s is None else about(each.estimate_s)
        table.add_row(sketch.kernel, sketch.shape, sketch.dtype, *map(str, sizes), share, time)
    console.print(table)
    console.print(plan_words(plan))
    for left in left_out:
        console.print(f"not tuned: {left.words}: {left.reason}")


def plan_words(plan: Plan) -> str:
    """Return what a plan leaves to do, as one line."""
    kernels = len({each.sketch.kernel for each in plan.tunings})
    parts = [
        f"{counted(len(plan.tunings), 'tuning')} of {counted(kernels, 'kernel')}",
        f"{counted(plan.configs, 'config')}, {plan.configs - plan.new} stored, "
        f"{plan.new} to measure",
    ]
    if plan.compilations:
        parts.append(f"at most {counted(plan.compilations, 'compilation')}")
    if plan.new and plan.estimate_s is not None:
        least = "" if plan.is_estimated else "at least "
        parts.append(f"{least}about {about(plan.estimate_s)}, as in earlier tunings")
    return "; ".join(parts)


def about(seconds: float) -> str:
    """Return a length of time, with one unit or two."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _plan_data(plan: Plan, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    tunings = [
        {
            "kernel": each.sketch.kernel,
            "shape": each.sketch.shape,
            "dtype": each.sketch.dtype,
            "key": each.key,
            "configs": each.configs,
            "to_measure": len(each.new),
            "compilations": len(each.binaries),
            "share": each.share,
            "estimate_s": each.estimate_s,
        }
        for each in plan.tunings
    ]
    names = ("configs", "compilations", "estimate_s")
    data = {"tunings": tunings, "to_measure": plan.new}
    data |= {name: getattr(plan, name) for name in names}
    return data | {"left_out": [{"call": left.words, "reason": left.reason} for left in left_out]}
