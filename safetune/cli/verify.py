"""`safetune verify`: which program writes which element, for every config and workload."""

from __future__ import annotations

import functools
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from safetune.cli import targets
from safetune.cli.output import (
    describe,
    echo,
    empty_table,
    examples,
    location_of,
    print_json,
    prints_to_stderr,
    stdout_console,
    typed,
)
from safetune.errors import SafetuneError, TargetError
from safetune.frozen import dataclass

if TYPE_CHECKING:
    from safetune.offline.tasks import OfflineKernel, Task
    from safetune.verify.report import OverlapReport

#: A launch of this size takes seconds in the interpreter.
MAX_ELEMENTS = 1 << 22


@click.command(
    "verify",
    epilog=examples(
        "safetune verify my_kernels.py", "safetune verify my_kernels.py:add_kernel --shape 1000"
    ),
)
@click.argument("target", nargs=-1, required=True)
@targets.shape_option
@targets.dtype_option
@click.option(
    "--max-elements",
    type=click.IntRange(min=1),
    default=MAX_ELEMENTS,
    show_default=True,
    help="Skip workloads whose tensors have more elements in total.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def verify_command(
    target: tuple[str, ...],
    shape: tuple[str, ...],
    dtype: tuple[str, ...],
    max_elements: int,
    as_json: bool,
) -> None:
    """Check that no two programs of a kernel write the same element.

    TARGET is package.module[:kernel], file.py[:kernel] or a directory. Runs every config on every
    workload in Triton's interpreter, on the CPU. Does not check that results are right, or that
    configs agree: `safetune tune` compares them. Exits with 1 if there is a finding.
    """
    targets.use_interpreter_without_gpu()
    left_out: list[str] = []
    with prints_to_stderr():
        kernels = targets.kernels_of(target, left_out=left_out)
        rows = list(_verify_all(kernels, shape, dtype, max_elements))
    ok = all(row.ok for row in rows)
    if as_json:
        launches = [row.data() for row in rows if not row.skipped]
        skipped = [{**row.facts, "elements": row.elements} for row in rows if row.skipped]
        data = {"ok": ok, "launches": launches, "skipped": skipped}
        print_json({**data, "no_workload": left_out})
    else:
        _print(rows)
        if left_out:
            echo(f"not checked, because they declare no workload: {', '.join(left_out)}")
    sys.exit(0 if ok else 1)


@dataclass(frozen=True)
class _Row:
    """One config of a kernel at a workload and dtype, or all of them: a report, or an error.

    It has neither where the workload has too many elements.
    """

    facts: dict[str, str]
    elements: int
    config: str = "all configs"
    report: OverlapReport | None = None
    error: str = ""

    @property
    def skipped(self) -> bool:
        return self.report is None and not self.error

    @property
    def ok(self) -> bool:
        return self.skipped or (self.report is not None and self.report.ok)

    @property
    def verdict(self) -> str:
        if self.report is None:
            return "not checked"
        return "ok" if self.ok else ", ".join(f.kind.value for f in self.report.findings)

    def data(self) -> dict[str, Any]:
        found = {"config": self.config, "verdict": self.verdict, "error": self.error}
        return {**self.facts, **found, "report": self.report and self.report.data()}


def _verify_all(
    kernels: Sequence[OfflineKernel],
    shapes: Sequence[str],
    dtypes: Sequence[str],
    max_elements: int,
) -> Iterator[_Row]:
    from safetune.inputs.call import leaves
    from safetune.offline import tasks

    console = Console(stderr=True)
    checked, seen = False, []
    for task in (task for kernel in kernels for task in tasks.tasks(kernel, "cpu", dtypes)):
        workload = task.workload
        seen.append(workload.name)
        if shapes and workload.name not in shapes:
            continue
        facts = {"kernel": task.kernel.name, "shape": workload.name, "dtype": task.dtype}
        values = leaves((workload.args, dict(workload.kwargs)))
        elements = sum(leaf.numel() for leaf in values if hasattr(leaf, "numel"))
        if elements > max_elements:
            yield _Row(facts, elements)
            continue
        checked = True
        with console.status("  ".join(facts.values())):
            yield from _rows(task, functools.partial(_Row, facts, elements))
    targets.check_shapes(shapes, seen)
    if not checked:
        raise TargetError(
            f"every workload has more than {max_elements} elements: declare a smaller workload for "
            "the device cpu, or raise --max-elements"
        )


def _rows(task: Task, row: Callable[..., _Row]) -> Iterator[_Row]:
    from safetune.config import config_text
    from safetune.launch.call_shape import named_arguments
    from safetune.verify.overlap import check_overlap, configs_for, interpreted_as

    kernel, workload = task.kernel.outer, task.workload
    configs, error = _tried(configs_for, kernel, workload.args, workload.kwargs)
    if error:
        yield row(error=error)
        return
    check = functools.partial(_tried, check_overlap, kernel, workload.grid, *workload.args)
    options = {"outputs": workload.outputs, "allow": workload.allow, **workload.kwargs}
    named = named_arguments(kernel.arg_names, workload.args, workload.kwargs)
    known: dict[str, Any] = {}
    for config in configs:
        seen, _ = _tried(interpreted_as, kernel, workload.grid, named, config)
        if seen and seen in known:
            report = known[seen]
            yield row(config_text(config), report and replace(report, config=config_text(config)))
            continue
        found = check(config=config, **options)
        if seen and not found[1]:
            known[seen] = found[0]
        yield row(config_text(config), *found)


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


def _print(verified: Sequence[_Row]) -> None:
    console = stdout_console()
    for facts, group in itertools.groupby(verified, lambda row: row.facts):
        rows, title = list(group), "  ".join(facts.values())
        if rows[0].skipped:
            elements = rows[0].elements
            console.print(f"{title}: skipped, because it has {elements} elements (--max-elements)")
            continue
        table = empty_table(title, "config", "verdict", "grid", "notes")
        reasons: dict[str, list[str]] = {}  # each with the configs that share it
        for row in rows:
            grid = " x ".join(map(str, row.report.grid)) if row.report else ""
            notes = "; ".join(row.report.notes) if row.report else ""
            style = "green" if row.ok else "red"
            table.add_row(row.config, row.verdict, grid, notes, style=style)
            if not row.ok:
                text = "\n".join(map(str, row.report.findings)) if row.report else row.error
                reasons.setdefault(text, []).append(row.config)
        console.print(table)
        for text, (first, *others) in reasons.items():
            console.print(f"  {first}, {len(others)} more" if others else f"  {first}")
            console.print(textwrap.indent(text, "    "))
    reports = [row.report for row in verified if row.report is not None]
    found = sum(not report.ok for report in reports)
    missing = sum(bool(row.error) for row in verified)
    launches = "1 launch" if len(reports) == 1 else f"{len(reports)} launches"
    console.print(
        f"{launches} checked for elements that several programs write, and for writes outside of "
        f"arguments: {found} with findings"
        + (f"; {missing} not checked" if missing else "")
        + ". Results were not compared: `safetune tune` does that."
    )
