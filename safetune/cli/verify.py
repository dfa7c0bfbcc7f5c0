"""`safetune verify`: which program writes which element, for every config and workload."""

from __future__ import annotations

import functools
import itertools
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import forked, targets
from safetune.cli.command import command
from safetune.cli.emit import emit
from safetune.cli.forked import Place, Result, Step
from safetune.cli.output import (
    counted,
    describe,
    location_of,
    prints_to_stderr,
    show_traceback,
    typed,
)
from safetune.errors import SafetuneError, TargetError, WorkloadError
from safetune.show.tables import Block, Table, heading

if TYPE_CHECKING:
    from triton import Config

    from safetune.offline.tasks import Task
    from safetune.verify.report import OverlapReport

#: A launch of this size takes seconds in the interpreter.
MAX_ELEMENTS = 1 << 22


@command(
    "verify",
    "safetune verify my_kernels.py",
    "safetune verify my_kernels.py:add_kernel --shape 1000",
)
@targets.workload_options(required=True)
@click.option(
    "--max-elements",
    type=click.IntRange(min=1),
    default=MAX_ELEMENTS,
    show_default=True,
    help="Skip workloads whose tensors have more elements in total.",
)
def verify_command(
    target: tuple[str, ...],
    shape: tuple[str, ...],
    dtype: tuple[str, ...],
    max_elements: int,
) -> None:
    """Check that no two programs of a kernel write the same element.

    TARGET is package.module[:kernel], file.py[:kernel] or a directory. Runs every config on every
    workload in Triton's interpreter, on the CPU. Does not check that results are right, or that
    configs agree: `safetune tune` compares them. Exits with 1 if there is a finding.
    """
    found: dict[str, list[Any]] = {"launches": [], "skipped": [], "no_workload": []}
    with prints_to_stderr():
        work = functools.partial(_checked, target, shape, dtype, max_elements)
        for name, result in forked.results(work):
            found[name].append(result)
    launches, skipped, left_out = found.values()
    if not launches:
        raise TargetError(
            f"every workload has more than {max_elements} elements: declare a smaller workload for "
            "the device cpu, or raise --max-elements"
            if skipped
            else f"the workload functions of {', '.join(target)} yield nothing"
        )
    ok = all(launch["verdict"] == "ok" for launch in launches)
    shown = [{**each, "report": each["report"] and each["report"].data()} for each in launches]
    data = {"ok": ok, "launches": shown, "skipped": skipped, "no_workload": left_out}
    emit(data, _blocks(launches, skipped, left_out))
    sys.exit(0 if ok else 1)


def _checked(
    target: Sequence[str],
    shapes: Sequence[str],
    dtypes: Sequence[str],
    most: int,
    over: Container[Place],
) -> Iterator[Step | Result]:
    """Yield each launch, each workload that is too large, and each kernel without a workload."""
    from safetune.offline import tasks

    targets.use_interpreter_without_gpu()
    seen: list[str] = []
    all_seen = True
    for number, kernel in enumerate(targets.kernels_of(target)):
        if (number,) in over:
            all_seen = all_seen and not kernel.tuner.workloads
            continue
        no_launch = _launch({"kernel": kernel.name, "shape": "", "dtype": ""}, "all workloads")
        making = Step((number,), ("launches", no_launch))
        yield making
        if not kernel.tuner.workloads:
            yield "no_workload", kernel.name
        try:
            for index, task in enumerate(tasks.tasks(kernel, "cpu", dtypes)):
                seen.append(task.workload.name)
                if not shapes or task.workload.name in shapes:
                    yield from _checked_task(task, (number, index), most, over)
                    yield making
        except WorkloadError as error:
            all_seen = False
            show_traceback()
            yield "launches", {**no_launch, "error": describe(error)}
    if all_seen:
        targets.check_shapes(shapes, seen)


def _checked_task(
    task: Task, place: Place, most: int, over: Container[Place]
) -> Iterator[Step | Result]:
    """Check a task: yield a row for each config, or one row that says why none was launched."""
    from safetune.config import config_text
    from safetune.inputs.call import leaves
    from safetune.verify.overlap import configs_for

    if place in over:
        return
    kernel, workload = task.kernel, task.workload
    facts = {"kernel": kernel.name, "shape": workload.name, "dtype": task.dtype}
    no_launch, limit_s = _launch(facts, "all configs"), kernel.tuner.limits.run_timeout_s
    yield Step(place, ("launches", no_launch), limit_s)
    values = leaves((workload.args, dict(workload.kwargs)))
    elements = sum(leaf.numel() for leaf in values if hasattr(leaf, "numel"))
    if elements > most:
        yield "skipped", {**facts, "elements": elements}
        return
    configs, error = _tried(configs_for, kernel.outer, workload.args, workload.kwargs)
    if error:
        yield "launches", {**no_launch, "error": error}
        return
    known: dict[str, OverlapReport] = {}
    for number, config in enumerate(configs):
        if (*place, number) not in over:
            text = config_text(config)
            yield Step((*place, number), ("launches", _launch(facts, text)), limit_s)
            checked = _checked_config(task, config, limit_s, known)
            yield "launches", _launch(facts, text, *checked)


def _checked_config(
    task: Task, config: Config, limit_s: float, known: dict[str, OverlapReport]
) -> tuple[OverlapReport | None, str]:
    """Return a report, that of a config that the interpreter runs alike, or the reason for none."""
    from safetune.config import config_text
    from safetune.launch.call_shape import named_arguments
    from safetune.verify.overlap import check_launch, interpreted_as

    kernel, workload = task.kernel.outer, task.workload
    named = named_arguments(kernel.arg_names, workload.args, workload.kwargs)
    alike, _ = _tried(interpreted_as, kernel, workload.grid, named, config)
    if alike in known:
        return replace(known[alike], config=config_text(config)), ""
    report, error = _tried(
        check_launch,
        kernel,
        workload.grid,
        workload.args,
        workload.kwargs,
        config=config,
        outputs=workload.outputs,
        allow=workload.allow,
        each_program=functools.partial(forked.begin_limit, limit_s),
        at_end=functools.partial(forked.begin_limit, 0.0),
    )
    if alike and report:
        known[alike] = report
    return report, error


def _launch(
    facts: dict[str, str], config: str, report: OverlapReport | None = None, error: str = ""
) -> dict[str, Any]:
    kinds = dict.fromkeys(finding.kind.value for finding in report.findings) if report else ()
    verdict = "not checked" if report is None else ", ".join(kinds) or "ok"
    return {**facts, "config": config, "verdict": verdict, "error": error, "report": report}


def _tried(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """Return the result, or the reason why the check gave no result.

    Functions of a target may raise anything, or exit: a hook, a heuristic, the grid, pruning.
    """
    try:
        return function(*args, **kwargs), ""
    except SafetuneError as error:
        return None, describe(error)
    except (Exception, SystemExit) as error:
        return None, typed(error) + location_of(error)


def _blocks(
    launches: Sequence[dict[str, Any]], skipped: Sequence[dict[str, Any]], left_out: Sequence[str]
) -> Iterator[Block]:
    for title, group in itertools.groupby(launches, _title):
        rows = list(group)
        shown = [
            {
                "config": row["config"],
                "verdict": row["verdict"],
                "grid": " x ".join(map(str, row["report"].grid)) if row["report"] else "",
                "notes": "; ".join(row["report"].notes) if row["report"] else "",
            }
            for row in rows
        ]
        styles = ["green" if row["verdict"] == "ok" else "red" for row in rows]
        yield from (heading(title), Table.of(shown, styles), "")
        reasons: dict[str, list[str]] = {}  # each with the configs that share it
        for row in rows:
            if row["verdict"] != "ok":
                report = row["report"]
                text = "\n".join(map(str, report.findings)) if report else row["error"]
                reasons.setdefault(text, []).append(row["config"])
        for text, (first, *others) in reasons.items():
            yield f"  {first}, {len(others)} more" if others else f"  {first}"
            yield textwrap.indent(text, "    ")
    for each in skipped:
        elements = f"{each['elements']} elements (--max-elements)"
        yield f"{_title(each)}: skipped, because it has {elements}"
    missing = sum(bool(row["error"]) for row in launches)
    found = sum(row["verdict"] != "ok" for row in launches) - missing
    yield (
        f"{counted(len(launches) - missing, 'launch', 'launches')} checked for elements that "
        f"several programs write, and for writes outside of arguments: {found} with findings"
        + (f"; {missing} not checked" if missing else "")
        + ". Results were not compared: `safetune tune` does that."
    )
    if left_out:
        yield f"not checked, because they declare no workload: {', '.join(left_out)}"


def _title(row: dict[str, Any]) -> str:
    return "  ".join(filter(None, (row["kernel"], row["shape"], row["dtype"])))
