"""`safetune gc`: take out of the store what nobody will need again."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import metadata
from typing import Any

import click

from safetune.cli.stored import json_option, open_store, print_json
from safetune.errors import InvalidSetting
from safetune.settings import parse_size

_DAY_S = 86_400.0


def _size(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size("--max-size", value)
    except InvalidSetting as error:
        raise click.BadParameter(str(error), param=parameter) from error


@click.command("gc")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="What has not been tuned for so long, and damaged databases kept aside.",
)
@click.option(
    "--dead-toolchains", is_flag=True, help="What another Triton than the installed one compiled."
)
@click.option("--max-size", metavar="SIZE", callback=_size, help="The oldest, beyond this size.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and keep it.")
@json_option
def gc(
    older_than: float | None,
    dead_toolchains: bool,
    max_size: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Forget what is old, of a dead toolchain, or too much.

    Whole keys go, with their trials and choices; what is being tuned now stays.
    """
    from safetune.store.local.gc import Rule, sweep

    if older_than is None and not dead_toolchains and max_size is None:
        raise click.UsageError("say what may go: --older-than, --dead-toolchains or --max-size")
    rule = Rule(
        before=None if older_than is None else time.time() - older_than * _DAY_S,
        triton=metadata.version("triton") if dead_toolchains else None,
        most_bytes=max_size,
    )
    swept = sweep(open_store(), rule, dry_run)
    if as_json:
        print_json({**asdict(swept), "dry_run": dry_run})
        return
    click.echo(_sentence(asdict(swept), dry_run))


def _sentence(swept: dict[str, Any], dry_run: bool) -> str:
    would = "would forget" if dry_run else "forgot"
    calls = f" and {swept['calls']} recorded calls" if swept["calls"] else ""
    files = f", and {swept['files']} databases kept aside" if swept["files"] else ""
    size = "" if dry_run else f"; {swept['bytes_before']} bytes before, {swept['bytes_after']} now"
    return (
        f"{would} {swept['keys']} keys with {swept['trials']} trials and {swept['choices']} "
        f"choices{calls}{files}{size}"
    )
