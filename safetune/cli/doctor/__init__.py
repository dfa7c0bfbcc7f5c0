"""`safetune doctor`: whether this machine, the store and the settings are fit for tuning."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import click
from rich.console import Console

from safetune.cli.doctor.report import Check, State, fail
from safetune.cli.layout import print_fact
from safetune.cli.output import counted, examples, print_json, stdout_console, typed
from safetune.errors import InvalidSetting

_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


@click.command("doctor", epilog=examples("safetune doctor", "safetune doctor --quick --json"))
@click.option("--quick", is_flag=True, help="Do not start a tuning process.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")
def doctor(quick: bool, as_json: bool) -> None:
    """Check the GPU, the versions, isolation, the store and the limits of this process.

    Prints a line for each check: ok, warn or fail, and how to fix it. Isolation is checked with a
    real tuning, in which one config crashes. Exits with 1 if a check fails.
    """
    from safetune.cli.doctor import gpus, machine, stores

    checks: list[Check] = []
    console = stdout_console()
    wanted = [*machine.CHECKS, *gpus.CHECKS, *stores.CHECKS]
    if not quick:
        wanted.append(machine.isolation)
    for each in _results(wanted):
        checks.append(each)
        if not as_json:
            _print(console, each)
    states = Counter(check.state for check in checks)
    if as_json:
        found = [{**vars(check), "state": check.state.value} for check in checks]
        print_json({"ok": not states[State.FAIL], "checks": found})
    else:
        counts = (counted(states[State.WARN], "warning"), counted(states[State.FAIL], "failure"))
        console.print(f"{counted(len(checks), 'check')}: {', '.join(counts)}")
    sys.exit(1 if states[State.FAIL] else 0)


def _results(checks: Iterable[Callable[[], Iterator[Check]]]) -> Iterator[Check]:
    """Yield the results of all checks; an error of a check is a failure."""
    for check in checks:
        try:
            yield from check()
        except InvalidSetting:
            continue  # `stores.settings` says which
        except Exception as error:
            name = check.__name__.replace("_", " ")
            yield fail(name, f"this check failed: {typed(error)}", "report it as a bug of safetune")


def _print(console: Console, check: Check) -> None:
    name = f"{check.state.value:<5} "
    print_fact(console, name, f"{check.name}: {check.found}", _STYLES[check.state])
    if check.fix:
        print_fact(console, f"{' ' * len(name)}-> ", check.fix)
