"""`safetune doctor`: checks that this machine, the store and the settings are fit for tuning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import click

from safetune.cli.command import command
from safetune.cli.doctor.report import Check, check
from safetune.cli.emit import emit, wants_json
from safetune.cli.output import counted, typed
from safetune.errors import InvalidSetting
from safetune.show.tables import Block, facts

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@command("doctor", "safetune doctor", "safetune doctor --quick --json")
@click.option("--quick", is_flag=True, help="Do not start a tuning process.")
def doctor(quick: bool) -> None:
    """Check the GPU, the versions, isolation, the store and the limits of this process.

    Prints ok, warn or fail for each check, with a fix, and the path and size of the store. Checks
    isolation with a real tuning, in which one config crashes. Exits with 1 if a check fails.
    """
    from safetune.cli.doctor import gpus, machine, stores

    wanted = [machine.versions, machine.limits, gpus.gpus, stores.settings, stores.cache_directory]
    wanted += [stores.triton_cache, stores.shared_store, stores.packs]
    wanted += [] if quick else [machine.isolation]
    checks: list[Check] = []
    blocks = _blocks(_results(wanted), checks)
    if wants_json():
        list(blocks)
    emit({"ok": not _count(checks, "fail"), "checks": [vars(each) for each in checks]}, blocks)
    sys.exit(1 if _count(checks, "fail") else 0)


def _count(checks: Iterable[Check], state: str) -> int:
    return sum(each.state == state for each in checks)


def _results(checks: Iterable[Callable[[], Iterator[Check]]]) -> Iterator[Check]:
    """Yield the results of all checks; an error of a check is a failure."""
    for each in checks:
        try:
            yield from each()
        except InvalidSetting:
            continue  # `stores.settings` says which
        except Exception as error:
            name, bug = each.__name__.replace("_", " "), "report it as a bug in safetune"
            yield check(name, f"this check failed: {typed(error)}", fail=bug)


def _blocks(results: Iterable[Check], checks: list[Check]) -> Iterator[Block]:
    """Yield a block for each result as soon as it is there, and add it to `checks`."""
    for result in results:
        checks.append(result)
        lines = [(f"{result.state:<4}", f"{result.name}: {result.found}")]
        lines += [("", f"-> {result.fix}")] * bool(result.fix)
        yield facts(lines, _STYLES[result.state])
    warnings, failures = _count(checks, "warn"), _count(checks, "fail")
    counts = f"{counted(warnings, 'warning')}, {counted(failures, 'failure')}"
    yield f"{counted(len(checks), 'check')}: {counts}"
