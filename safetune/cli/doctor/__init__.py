"""`safetune doctor`: whether this machine, the store and the settings are fit for tuning."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import click
from rich.console import Console

from safetune.cli.command import command
from safetune.cli.doctor.report import Check, State, check
from safetune.cli.layout import print_fact
from safetune.cli.output import counted, print_json, stdout_console, typed
from safetune.errors import InvalidSetting

_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


@command("doctor", "safetune doctor", "safetune doctor --quick --json")
@click.option("--quick", is_flag=True, help="Do not start a tuning process.")
def doctor(quick: bool, as_json: bool) -> None:
    """Check the GPU, the versions, isolation, the store and the limits of this process.

    Prints a line for each check: ok, warn or fail, and how to fix it. Isolation is checked with a
    real tuning, in which one config crashes. Exits with 1 if a check fails.
    """
    from safetune.cli.doctor import gpus, machine, stores

    checks: list[Check] = []
    console = stdout_console()
    wanted: list[Callable[[], Iterator[Check]]] = [machine.versions, machine.limits, gpus.gpus]
    wanted += [stores.settings, stores.cache_directory, stores.triton_cache]
    wanted += [stores.shared_store, stores.packs, *([] if quick else [machine.isolation])]
    for each in _results(wanted):
        checks.append(each)
        if not as_json:
            _print(console, each)
    states = Counter(each.state for each in checks)
    if as_json:
        found = [{**vars(each), "state": each.state.value} for each in checks]
        print_json({"ok": not states[State.FAIL], "checks": found})
    else:
        counts = (counted(states[State.WARN], "warning"), counted(states[State.FAIL], "failure"))
        console.print(f"{counted(len(checks), 'check')}: {', '.join(counts)}")
    sys.exit(1 if states[State.FAIL] else 0)


def _results(checks: Iterable[Callable[[], Iterator[Check]]]) -> Iterator[Check]:
    """Yield the results of all checks; an error of a check is a failure."""
    for each in checks:
        try:
            yield from each()
        except InvalidSetting:
            continue  # `stores.settings` says which
        except Exception as error:
            name, bug = each.__name__.replace("_", " "), "report it as a bug of safetune"
            yield check(name, f"this check failed: {typed(error)}", fail=bug)


def _print(console: Console, one: Check) -> None:
    name = f"{one.state.value:<5} "
    print_fact(console, name, f"{one.name}: {one.found}", _STYLES[one.state])
    if one.fix:
        print_fact(console, f"{' ' * len(name)}-> ", one.fix)
