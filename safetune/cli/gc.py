"""`safetune stats` and `gc`: the size of the store, and less of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import metadata
from typing import Any

import click

from safetune.cli.messages import echo
from safetune.cli.stored import json_option, located, open_store, print_json
from safetune.cli.tables import counted
from safetune.settings import Settings, display_url, parse_size

_DAY_S = 86_400.0


@click.command("gc")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Delete keys without a trial or choice of the last DAYS, and damaged databases.",
)
@click.option(
    "--dead-toolchains",
    is_flag=True,
    help="Delete keys of every Triton version except the installed one.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Delete the oldest keys until the database has about this size.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@json_option
def gc(
    older_than: float | None,
    dead_toolchains: bool,
    max_size: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete stored keys that are old, of another Triton, or over a size limit.

    A key is deleted with its trials and choices. Keys that are being tuned now stay.
    """
    from safetune.store.local.gc import Rule, sweep

    if older_than is None and not dead_toolchains and max_size is None:
        raise click.UsageError("give --older-than, --dead-toolchains or --max-size")
    rule = Rule(
        before=None if older_than is None else time.time() - older_than * _DAY_S,
        triton=metadata.version("triton") if dead_toolchains else None,
        most_bytes=None if max_size is None else parse_size("--max-size", max_size),
    )
    swept = sweep(open_store(), rule, dry_run)
    if as_json:
        print_json({**asdict(swept), "dry_run": dry_run})
        return
    echo(_sentence(asdict(swept), dry_run))


def _sentence(swept: dict[str, Any], dry_run: bool) -> str:
    verb = "would delete" if dry_run else "deleted"
    parts = [counted(swept[f"{noun}s"], noun) for noun in ("key", "trial", "choice")]
    if swept["calls"]:
        parts.append(counted(swept["calls"], "recorded call"))
    if swept["files"]:
        parts.append(counted(swept["files"], "damaged database"))
    size = "" if dry_run else f"; {swept['bytes_before']} bytes before, {swept['bytes_after']} now"
    return f"{verb} {', '.join(parts)}{size}"


@click.command("stats")
@json_option
def stats(as_json: bool) -> None:
    """Show the size, the contents and the age of the store."""
    from safetune.store.local import gc

    where = located()
    found = gc.stats(open_store())
    found |= {"network": where.network, "shared": display_url(where.shared(Settings.current()))}
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    for name, value in found.items():
        echo(f"{name.replace('_', ' '):<{width}}  {_words(name, value)}")


def _words(name: str, value: Any) -> str:
    if name in ("oldest", "newest") and value is not None:
        from safetune.store.schema import LAST_SECOND

        seconds = max(0, min(value, LAST_SECOND))  # a row that another program wrote may say 1e300
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    if isinstance(value, dict):
        return ", ".join(f"{count} {each or '?'}" for each, count in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value in (None, "") else str(value)
