"""The output of `safetune tune --dry-run`: a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from safetune.cli.emit import emit
from safetune.cli.output import counted
from safetune.miss.how_far import clock_time
from safetune.show.tables import Block, Table, heading
from safetune.show.words import left_out_data

if TYPE_CHECKING:
    from safetune.offline.plan import Plan
    from safetune.offline.replay import LeftOut


def print_plan(plan: Plan, left_out: Sequence[LeftOut]) -> None:
    """Print every tuning of a plan, and the remaining work in all."""
    tunings = [
        {
            **{name: getattr(tuning, name) for name in ("kernel", "shape", "dtype", "key")},
            "configs": tuning.configs,
            "stored": tuning.stored,
            "to_measure": len(tuning.new),
            "share": tuning.share,
            "estimate_s": tuning.estimate_s,
        }
        for tuning in plan.tunings
    ]
    in_all = {name: getattr(plan, name) for name in ("configs", "stored", "estimate_s")}
    data = {"tunings": tunings, "to_measure": plan.new, **in_all}
    blocks = _blocks(plan, tunings, left_out)
    emit({**data, "left_out": left_out_data(left_out)}, blocks)


def _blocks(
    plan: Plan, tunings: Sequence[dict[str, Any]], left_out: Sequence[LeftOut]
) -> Iterator[Block]:
    yield heading("plan")
    yield Table.of([_row(**tuning) for tuning in tunings], spare=("stored", "share", "dtype"))
    yield ""
    yield _in_all(plan)
    for left in left_out:
        yield f"not tuned: {left.words}: {left.reason}"


def _row(
    *, key: str, to_measure: int, share: float | None, estimate_s: float | None, **shown: Any
) -> dict[str, Any]:
    return {
        **shown,
        "to measure": to_measure,
        "share": "" if share is None else f"{share * 100:.3g} %",
        "time": "" if estimate_s is None else clock_time(estimate_s),
    }


def _in_all(plan: Plan) -> str:
    """Return the remaining work of a plan as one line."""
    kernels = len({tuning.kernel for tuning in plan.tunings})
    parts = [
        f"{counted(len(plan.tunings), 'tuning')} of {counted(kernels, 'kernel')}",
        f"{counted(plan.configs, 'config')}, {plan.stored} stored, {plan.new} to measure",
    ]
    if plan.new and plan.estimate_s is not None:
        least = "about" if plan.is_estimated else "at least"
        parts.append(f"{least} {clock_time(plan.estimate_s)}, as in earlier tunings")
    return "; ".join(parts)
