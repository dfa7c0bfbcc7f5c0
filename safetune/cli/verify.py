"""`safetune verify`: which program writes which element, for every config and workload."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from safetune.cli import targets
from safetune.cli.messages import describe, location_of, only_our_output, typed
from safetune.cli.stored import print_json
from safetune.cli.tables import empty_table, stdout_console
from safetune.errors import SafetuneError, TargetError

if TYPE_CHECKING:
    from triton.runtime.autotuner import Config

    from safetune.offline.tasks import OfflineKernel, Task
    from safetune.verify.report import OverlapReport

#: A launch of this size takes seconds in the interpreter.
MAX_ELEMENTS = 1 << 22


@click.command("verify")
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

    TARGET is package.module[:kernel] or file.py[:kernel]. Runs every config on every workload in
    Triton's interpreter, on the CPU. Exits with 1 if there is a finding.
    """
    targets.use_interpreter_without_gpu()
    left_out: list[str] = []
    with only_our_output():
        kernels = targets.kernels_of(target, left_out=left_out)
        verified = list(_verify_all(kernels, shape, dtype, max_elements))
    if as_json:
        print_json({**_data(verified), "no_workload": left_out})
    else:
        _print(verified)
        if left_out:
            click.echo(f"not checked, because they declare no workload: {', '.join(left_out)}")
    sys.exit(1 if any(not row.ok for one in verified for row in one.rows) else 0)


@dataclass(frozen=True)
class _Row:
    """One config of one task, or all configs: a report, or the reason why it is missing."""

    config: str
    report: OverlapReport | None
    error: str

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok

    @property
    def verdict(self) -> str:
        if self.report is None:
            return "not checked"
        return "ok" if self.ok else ", ".join(f.kind.value for f in self.report.findings)


@dataclass(frozen=True)
class _Verified:
    """One kernel at one workload and dtype; without rows if it has too many elements."""

    facts: dict[str, str]
    elements: int
    rows: tuple[_Row, ...]


def _verify_all(
    kernels: Sequence[OfflineKernel],
    shapes: Sequence[str],
    dtypes: Sequence[str],
    max_elements: int,
) -> Iterator[_Verified]:
    from safetune.offline import tasks

    console = Console(stderr=True)
    checked, seen = 0, []
    for kernel in kernels:
        for task in tasks.tasks(kernel, "cpu", dtypes):
            seen.append(task.workload.name)
            if shapes and task.workload.name not in shapes:
                continue
            facts = {"kernel": kernel.name, "shape": task.workload.name, "dtype": task.dtype}
            elements = _elements(task)
            rows: tuple[_Row, ...] = ()
            if elements <= max_elements:
                with console.status("  ".join(facts.values())):
                    rows = tuple(_rows(task))
                checked += 1
            yield _Verified(facts, elements, rows)
    targets.check_shapes(shapes, seen)
    if not checked:
        raise TargetError(
            f"every workload has more than {max_elements} elements: declare a smaller workload for "
            "the device cpu, or raise --max-elements"
        )


def _rows(task: Task) -> Iterator[_Row]:
    from safetune.config import config_text
    from safetune.verify.overlap import check_overlap, configs_for

    workload = task.workload
    launch = (task.kernel.outer, workload.grid, *workload.args)
    configs: Sequence[Config] = ()
    # Functions of a target may raise anything, or exit: a hook, a heuristic, the grid, pruning.
    try:
        configs = configs_for(launch[0], workload.args, workload.kwargs)
    except (Exception, SystemExit) as error:
        yield _Row("all configs", None, _reason(error))
    for config in configs:
        try:
            report = check_overlap(
                *launch, config=config, outputs=workload.outputs, **workload.kwargs
            )
        except (Exception, SystemExit) as error:
            yield _Row(config_text(config), None, _reason(error))
        else:
            yield _Row(config_text(config), report, "")


def _reason(error: BaseException) -> str:
    if isinstance(error, SafetuneError):
        return describe(error)
    return typed(error) + location_of(error)


def _elements(task: Task) -> int:
    from safetune.inputs.call import leaves

    values = (task.workload.args, dict(task.workload.kwargs))
    return sum(leaf.numel() for leaf in leaves(values) if hasattr(leaf, "numel"))


def _data(verified: Sequence[_Verified]) -> dict[str, Any]:
    launches = [
        {
            **one.facts,
            "config": row.config,
            "verdict": row.verdict,
            "error": row.error,
            "report": row.report and row.report.data(),
        }
        for one in verified
        for row in one.rows
    ]
    skipped = [{**one.facts, "elements": one.elements} for one in verified if not one.rows]
    ok = all(row.ok for one in verified for row in one.rows)
    return {"ok": ok, "launches": launches, "skipped": skipped}


def _print(verified: Sequence[_Verified]) -> None:
    console = stdout_console()
    for one in verified:
        title = "  ".join(one.facts.values())
        if not one.rows:
            console.print(
                f"{title}: skipped, because it has {one.elements} elements (--max-elements)"
            )
            continue
        table = empty_table(title, "config", "verdict", "grid", "notes")
        for row in one.rows:
            notes, grid = "", ""
            if row.report is not None:
                notes = "; ".join(row.report.notes)
                grid = " x ".join(map(str, row.report.grid))
            style = "green" if row.ok else "red"
            table.add_row(row.config, row.verdict, grid, notes, style=style)
        console.print(table)
        for text, configs in _reasons(one.rows).items():
            console.print(f"  {configs[0]}" + (f", {len(configs) - 1} more" * (len(configs) > 1)))
            console.print("\n".join(f"    {line}" for line in text.splitlines()))
    rows = [row for one in verified for row in one.rows]
    reports = [row.report for row in rows if row.report is not None]
    found = sum(not report.ok for report in reports)
    missing = len(rows) - len(reports)
    console.print(
        f"{len(reports)} launches checked, {found} with findings"
        + (f"; {missing} not checked" if missing else "")
    )


def _reasons(rows: Sequence[_Row]) -> dict[str, list[str]]:
    """Each reason as text, with the configs that share it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if not row.ok:
            text = row.error if row.report is None else "\n".join(map(str, row.report.findings))
            found.setdefault(text, []).append(row.config)
    return found
