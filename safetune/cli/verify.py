"""`safetune verify`: which program writes which element, for every config and workload."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click
from rich.console import Console

from safetune.cli import targets
from safetune.cli.command import command
from safetune.cli.emit import emit
from safetune.cli.output import counted, describe, location_of, prints_to_stderr, typed
from safetune.errors import SafetuneError, TargetError
from safetune.show.tables import Block, Table, heading

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from safetune.offline.tasks import OfflineKernel, Task
    from safetune.verify.report import OverlapReport

#: A report, or the reason for none.
Checked = tuple["OverlapReport | None", str]

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
    targets.use_interpreter_without_gpu()
    with prints_to_stderr():
        kernels = targets.kernels_of(target)
        launches, skipped = _verify_all(kernels, shape, dtype, max_elements)
    left_out = [kernel.name for kernel in kernels if not kernel.tuner.workloads]
    ok = all(launch["verdict"] == "ok" for launch in launches)
    shown = [{**each, "report": each["report"] and each["report"].data()} for each in launches]
    data = {"ok": ok, "launches": shown, "skipped": skipped, "no_workload": left_out}
    emit(data, _blocks(launches, skipped, left_out))
    sys.exit(0 if ok else 1)


def _verify_all(
    kernels: Sequence[OfflineKernel], shapes: Sequence[str], dtypes: Sequence[str], most: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a launch for each config, kernel, workload and dtype, and the workloads too large.

    A launch has a report, or an error.
    """
    from safetune.inputs.call import leaves
    from safetune.offline import tasks

    console = Console(stderr=True)
    launches: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    seen: list[str] = []
    for task in (task for kernel in kernels for task in tasks.tasks(kernel, "cpu", dtypes)):
        workload = task.workload
        seen.append(workload.name)
        if shapes and workload.name not in shapes:
            continue
        facts = {"kernel": task.kernel.name, "shape": workload.name, "dtype": task.dtype}
        values = leaves((workload.args, dict(workload.kwargs)))
        elements = sum(leaf.numel() for leaf in values if hasattr(leaf, "numel"))
        if elements > most:
            skipped.append({**facts, "elements": elements})
            continue
        with console.status("  ".join(facts.values())):
            for config, report, error in _checked(task):
                kinds = [finding.kind.value for finding in report.findings] if report else []
                verdict = "not checked" if report is None else ", ".join(kinds) or "ok"
                found = {"config": config, "verdict": verdict, "error": error, "report": report}
                launches.append({**facts, **found})
    targets.check_shapes(shapes, seen)
    if not launches:
        raise TargetError(
            f"every workload has more than {most} elements: declare a smaller workload for the "
            "device cpu, or raise --max-elements"
        )
    return launches, skipped


def _checked(task: Task) -> Iterator[tuple[str, OverlapReport | None, str]]:
    """Yield each config of a task, or all of them, with a report or the reason for none."""
    from safetune.config import config_text
    from safetune.launch.call_shape import named_arguments
    from safetune.verify.overlap import check_overlap, configs_for, interpreted_as

    kernel, workload = task.kernel.outer, task.workload
    configs, error = _tried(configs_for, kernel, workload.args, workload.kwargs)
    if error:
        yield "all configs", None, error
        return
    check = functools.partial(_tried, check_overlap, kernel, workload.grid, *workload.args)
    options = {"outputs": workload.outputs, "allow": workload.allow, **workload.kwargs}
    named = named_arguments(kernel.arg_names, workload.args, workload.kwargs)
    known: dict[str, Any] = {}
    for config in configs:
        seen, _ = _tried(interpreted_as, kernel, workload.grid, named, config)
        if seen and seen in known:
            report = known[seen]
            yield config_text(config), replace(report, config=config_text(config)), ""
            continue
        one = functools.partial(check, config=config, **options)
        found = _in_fork(one) if config.pre_hook is not None else one()
        if seen and not found[1]:
            known[seen] = found[0]
        yield config_text(config), *found


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


def _in_fork(check: Callable[[], Checked]) -> Checked:
    """Return what `check` returns, or the end of its process: a config's hook may crash."""
    from safetune.isolation.child_handle import exit_text

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(check, sender))
    process.start()
    sender.close()
    answer: Checked | None = None
    with receiver, contextlib.suppress(EOFError):
        answer = cast("Checked", receiver.recv())
    process.join()
    return answer or (None, f"its process ended with {exit_text(process.exitcode or 0)}")


def _answer(check: Callable[[], Checked], sender: Connection) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no second traceback
    torch.set_num_threads(1)  # torch's threads did not survive the fork
    sender.send(check())


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
    return "  ".join(row[name] for name in ("kernel", "shape", "dtype"))
