"""What `safetune tune --dry-run` prints: a plan, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safetune.cli.layout import print_records
from safetune.cli.output import counted, left_out_data, print_json, stdout_console

if TYPE_CHECKING:
    from safetune.offline.plan import Plan
    from safetune.offline.replay import LeftOut


def print_plan(plan: Plan, left_out: Sequence[LeftOut], as_json: bool) -> None:
    """Print every tuning of a plan, and what is left to do in all."""
    tunings = [
        {
            "kernel": each.sketch.kernel,
            "shape": each.sketch.shape,
            "dtype": each.sketch.dtype,
            "key": each.key,
            "configs": each.configs,
            "stored": each.stored,
            "to_measure": len(each.new),
            "compilations": len(each.binaries),
            "share": each.share,
            "estimate_s": each.estimate_s,
        }
        for each in plan.tunings
    ]
    if as_json:
        names = ("configs", "stored", "compilations", "estimate_s")
        all_together = {name: getattr(plan, name) for name in names}
        data = {"tunings": tunings, "to_measure": plan.new, **all_together}
        print_json({**data, "left_out": left_out_data(left_out)})
        return
    console = stdout_console()
    print_records(console, "plan", [_record(each) for each in tunings])
    console.print(plan_words(plan))
    for left in left_out:
        console.print(f"not tuned: {left.words}: {left.reason}")


def _record(tuning: dict[str, Any]) -> dict[str, Any]:
    share, estimate_s = tuning["share"], tuning["estimate_s"]
    return {
        **{name: tuning[name] for name in ("kernel", "shape", "dtype", "configs", "stored")},
        "to measure": tuning["to_measure"],
        "compilations": tuning["compilations"],
        "share": "" if share is None else f"{share * 100:.3g} %",
        "time": "" if estimate_s is None else about(estimate_s),
    }


def plan_words(plan: Plan) -> str:
    """Return what a plan leaves to do, as one line."""
    kernels = len({each.sketch.kernel for each in plan.tunings})
    parts = [
        f"{counted(len(plan.tunings), 'tuning')} of {counted(kernels, 'kernel')}",
        f"{counted(plan.configs, 'config')}, {plan.stored} stored, {plan.new} to measure",
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
