"""`safetune show`: why a choice was made, and every trial."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from safetune.cli.command import FILE, Filter, command, filtered, key_option
from safetune.cli.emit import emit
from safetune.cli.listing import choice_data
from safetune.cli.output import echo
from safetune.cli.stored import check_some, kernel_argument, open_store
from safetune.errors import TargetError
from safetune.settings import Settings
from safetune.show.decorator import decorators
from safetune.show.keys import StoredKey, key_blocks, keys_of, newest_sources
from safetune.show.words import call_data, outcome_data, readable_call
from safetune.store.records import KeyRecord
from safetune.store.schema import time_text


@command(
    "show",
    "safetune show add_kernel",
    "safetune show add_kernel --all",
    "safetune show add_kernel --html add_kernel.html",
)
@kernel_argument()
@filtered("device", "file")
@key_option
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Print every config of every key, also of sources that were tuned earlier.",
)
@click.option("--python", "as_python", is_flag=True, help="Print the decorator to paste.")
@click.option("--html", "page", metavar="FILE", type=FILE, help="Write one page with charts.")
def show(
    kernel: str,
    only: Filter,
    parts: dict[str, str],
    everything: bool,
    as_python: bool,
    page: Path | None,
) -> None:
    """Explain the choices for KERNEL: key, origin, gain and trials.

    Prints a row for each key. For a single key, or with --all, prints every config with the
    verdict, time and a bar for the speed of its last trial.
    """
    store = open_store()
    stored = keys_of(store, kernel)
    _check_names(kernel, parts, stored)
    keys = [
        key
        for key in stored
        if only.matches(key.key)
        if parts.items() <= readable_call(key.key.call).items()
    ]
    check_some(kernel, store, keys)
    chosen = keys if everything else newest_sources(keys)[0]
    if page is not None:
        _write_page(page, kernel, chosen)
    elif as_python:
        emit([row for key in keys for row in _data(key)], decorators(chosen))
    else:
        blocks = key_blocks(keys, everything, _classes_of_names)
        emit([row for key in keys for row in _data(key)], blocks)


def _check_names(kernel: str, parts: Iterable[str], keys: Sequence[StoredKey]) -> None:
    names = dict.fromkeys(name for key in keys for name in readable_call(key.key.call))
    for name in parts:
        if keys and name not in names:
            listed = ", ".join(names) or "no name"
            raise TargetError(f"{name} is not in the key of {kernel}, which has {listed}")


def _write_page(path: Path, kernel: str, keys: list[StoredKey]) -> None:
    from safetune.show.page import page

    try:
        path.write_text(page(kernel, keys), encoding="utf-8")
    except OSError as error:
        raise TargetError(f"cannot write {path}: {error.strerror}") from None
    echo(f"written: {path}", err=True)


def _data(stored: StoredKey) -> Iterator[dict[str, Any]]:
    """Yield the choice if it has no trial here, then the trials."""
    key, entry, rows = stored.key, stored.entry, stored.rows
    of_key = {"kernel": key.kernel_name, "file": key.kernel_file, "line": key.kernel_line}
    if entry is not None and not any(row.chosen for row in rows):
        yield {**choice_data(entry), **of_key, "chosen": True, "origin": entry.origin}
    for trial, row in zip(stored.trials, rows, strict=True):
        yield {
            **of_key,
            "call": call_data(key.call),
            "device": key.device,
            "config": trial.config,
            "generation": trial.generation,
            "created": time_text(trial.created),
            "chosen": row.chosen,
            **outcome_data(trial.outcome),
            "with_other_calls": [outcome_data(outcome) for outcome in row.elsewhere],
        }


def _classes_of_names(key: KeyRecord) -> str:
    """Return the class of each key name by the file's present text; empty if unknown."""
    return _classes_in(key.kernel_file, key.kernel_name)


@functools.cache
def _classes_in(file: str, kernel: str) -> str:
    from safetune.keys.key_names import report_of
    from safetune.lint.check import tuners_under

    with contextlib.suppress(Exception):  # a file that has changed, or gone, is not an error here
        for tuner in tuners_under([Path(file)] if file else []):
            written = tuner.key()
            if tuner.name == kernel and written is not None:
                report = report_of(tuner.facts(), written, Settings.current().phantom)
                return "; ".join(f"{name.name}: {name.reason}" for name in report.names)
    return ""
