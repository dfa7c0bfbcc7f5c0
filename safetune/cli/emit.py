"""The output of a command: one JSON document with --json, else blocks for people."""

from __future__ import annotations

import json
from collections.abc import Iterable

import click

from safetune.show.tables import Block, print_blocks

#: In the context of a command: whether it was given --json, and whether its JSON is printed.
AS_JSON, PRINTED = "safetune.json", "safetune.printed"


def wants_json() -> bool:
    """Return whether the command was given --json."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(AS_JSON))


def emit(data: object, blocks: Iterable[Block]) -> None:
    """Print `data` if the command was given --json; else each block as soon as it is made."""
    if wants_json():
        print_json(data)
    else:
        print_blocks(blocks)


def print_json(data: object) -> None:
    """Print JSON for programs: the one document of a command."""
    click.echo(json.dumps(data, indent=2))
    if context := click.get_current_context(silent=True):
        context.meta[PRINTED] = True
