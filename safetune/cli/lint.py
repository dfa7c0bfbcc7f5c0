"""`safetune lint`: mistakes in the tuners of a tree, from their text."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from safetune.cli.command import FILE, command
from safetune.cli.emit import print_json, wants_json
from safetune.cli.output import counted, echo
from safetune.lint.check import check
from safetune.lint.formats import FORMATS, as_data
from safetune.lint.rules import RULES

_CHOICE = click.Choice([*RULES])


@command(
    "lint",
    "safetune lint .",
    "safetune lint my_package --format github",
    "safetune lint kernels.py --ignore bucket",
)
@click.argument("path", nargs=-1, required=True, type=FILE)
@click.option(
    "--format",
    "form",
    type=click.Choice([*FORMATS]),
    default="text",
    show_default=True,
    help="How findings are printed; `github` is for annotations in a workflow.",
)
@click.option("--select", multiple=True, type=_CHOICE, help="Only this rule; can be repeated.")
@click.option("--ignore", multiple=True, type=_CHOICE, help="Leave out this rule; can be repeated.")
def lint_command(
    path: tuple[Path, ...],
    form: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
) -> None:
    """Find mistakes in the tuners under PATH: phantom key names, missing flags, and others.

    Nothing is imported or run. A comment `# safetune: ignore[RULE]` on the line of a finding, of
    the decorator or of the kernel's `def` suppresses findings. Exits with 1 if there are any.
    """
    findings, tuners = check(path, {*(select or RULES)}.difference(ignore))
    if wants_json():
        print_json(as_data(findings))
    elif text := FORMATS[form](findings):
        echo(text)
    if form == "text" and not wants_json():
        echo(f"{counted(len(findings), 'finding')} in {counted(tuners, 'tuner')}", err=True)
    sys.exit(1 if findings else 0)
