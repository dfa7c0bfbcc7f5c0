"""`safetune stats`: the store in numbers."""

from __future__ import annotations

import time
from typing import Any

import click

from safetune.cli.stored import json_option, open_store, print_json


@click.command("stats")
@json_option
def stats(as_json: bool) -> None:
    """Show the size, the contents and the age of the store."""
    from safetune.store.local import gc

    found = gc.stats(open_store())
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    for name, value in found.items():
        click.echo(f"{name.replace('_', ' '):<{width}}  {_words(name, value)}")


def _words(name: str, value: Any) -> str:
    if name in ("oldest", "newest") and value is not None:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if isinstance(value, dict):
        return ", ".join(f"{count} {each or '?'}" for each, count in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value)
