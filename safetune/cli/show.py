"""`safetune show`, which is also `explain`: why a choice was made, and every trial."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from safetune.cli.command import Filter, command, filtered
from safetune.cli.layout import print_fact
from safetune.cli.listing import (
    Entry,
    by_kernel,
    choice_data,
    entries_of,
    grouped,
    print_kernel,
)
from safetune.cli.output import (
    call_words,
    config_words,
    counted,
    echo,
    moment,
    outcome_data,
    print_json,
    readable_call,
    source_words,
    stdout_console,
)
from safetune.cli.python_text import python_config
from safetune.cli.stored import kernel_argument, matching, open_store
from safetune.cli.trials import (
    Row,
    Summary,
    by_time,
    failures,
    gains,
    print_summary,
    print_trials,
    time_words,
)
from safetune.frozen import dataclass
from safetune.settings import Settings
from safetune.store.records import KeyRecord, TrialRecord

if TYPE_CHECKING:
    from safetune.store.local.store import Store


@command("show", "safetune show add_kernel", "safetune show add_kernel --all")
@kernel_argument
@filtered("device", "file")
@click.option(
    "--key", "parts", multiple=True, metavar="NAME=VALUE", help="Only keys with this value."
)
@click.option("--all", "everything", is_flag=True, help="Print every config of every key.")
@click.option("--python", "as_python", is_flag=True, help="Print the choices as triton.Config.")
def show(
    kernel: str,
    only: Filter,
    parts: tuple[str, ...],
    everything: bool,
    as_python: bool,
    as_json: bool,
) -> None:
    """Explain the choices for KERNEL: the key, where each is from, its gain, the trials.

    Prints a row for each key, and for a single key, or with --all, every config with its verdict
    and its time. For a config that was tried more than once, it shows the last trial.
    """
    store = open_store()
    keys = matching(
        kernel,
        store,
        _keys(store, kernel),
        lambda each: (
            only.matches(each.key)
            and {*parts} <= {f"{n}={v}" for n, v in readable_call(each.key.call).items()}
        ),
    )
    if as_json:
        print_json([row for key in keys for row in key.data()])
        return
    console = stdout_console()
    if as_python:
        for source in filter(None, (each.python() for each in keys)):
            echo(source)
    elif everything or len(keys) == 1:
        for key in keys:
            key.print(console)
    else:
        for group in grouped(keys):
            print_kernel(console, group[0].key)
            print_summary(console, "", [key.summary() for key in group])
        console.print(f"{counted(len(keys), 'key')}; --all prints every config, --key chooses")


@dataclass(frozen=True)
class _Key:
    """A key with the last trial of each of its configs, and its choice, if it has one."""

    key: KeyRecord
    trials: tuple[TrialRecord, ...]
    entry: Entry | None

    @property
    def rows(self) -> list[Row]:
        digest = self.entry and self.entry.choice.config_digest
        return [Row(t.config, t.outcome, t.config_digest == digest) for t in self.trials]

    def summary(self) -> Summary:
        call, entry = readable_call(self.key.call), self.entry
        if entry is None:
            return Summary(call, self.rows, None, note="no config works")
        note = entry.short_source if entry.origin else ""
        note = ", ".join(filter(None, (note, "disputed" * bool(entry.choice.dispute))))
        return Summary(call, self.rows, entry.choice.config, entry.choice.median_ms, note)

    def data(self) -> Iterator[dict[str, Any]]:
        """Yield the choice if it has no trial here, then the trials."""
        key, entry, rows = self.key, self.entry, self.rows
        of_key = {"kernel": key.kernel_name, "file": key.kernel_file, "line": key.kernel_line}
        if entry is not None and not any(row.chosen for row in rows):
            yield {**choice_data(entry), **of_key, "chosen": True, "origin": entry.origin}
        for trial, row in zip(self.trials, rows, strict=True):
            yield {
                **of_key,
                "call": key.call,
                "device": key.device,
                "config": trial.config,
                "generation": trial.generation,
                "created": trial.created,
                "chosen": row.chosen,
                **outcome_data(trial.outcome),
            }

    def python(self) -> str:
        """Return the choice as source; empty without one."""
        if self.entry is None:
            return ""
        choice, device = self.entry.choice, self.key.device["name"]
        time = time_words(choice.median_ms)
        where = f"{call_words(self.key.call)} on {device}{f': {time}' if time else ''}"
        return f"# {self.key.kernel_name} for {where}\n{python_config(choice.config)}"

    def print(self, console: Console) -> None:
        """Print the key, the choice, where it is from, what it gains, and every config."""
        print_kernel(console, self.key)
        facts = {"key": _key_words(self.key.call)}
        if names := _classes_of_names(self.key.kernel_file, self.key.kernel_name):
            facts["names"] = names
        if self.entry is None:
            facts["choice"] = "no config works"
        else:
            facts |= self._of_choice(self.entry)
        causes = [f"{count} {verdict}" for verdict, count in failures(self.rows).items()]
        if self.rows:
            working = sum(row.ms is not None for row in self.rows)
            facts["configs"] = f"{len(self.rows)}: {', '.join([f'{working} timed', *causes])}"
        width = max(map(len, facts))
        for name, text in facts.items():
            print_fact(console, f"{name:<{width}}  ", text)
        console.print()
        print_trials(console, self.rows)

    def _of_choice(self, entry: Entry) -> dict[str, str]:
        choice = entry.choice
        time = time_words(choice.median_ms) or "its time is not known"
        found = {"choice": f"{config_words(choice.config)}, {time}"}
        made = any(row.chosen for row in self.rows)
        source = source_words(entry.origin) if entry.origin or made else "no trial stored"
        found["made"] = f"{moment(choice.created)}, {source}, generation {choice.generation}"
        over = ("the first declared config", "the median")
        gained = zip(over, gains(self.rows, choice.median_ms), strict=True)
        gain = [f"{r[:-1]} times as fast as {what}" for what, r in gained if r[-1:] == "x"]
        if gain:
            found["gain"] = ", ".join(gain)
        others = [row for row in by_time(self.rows) if not row.chosen and row.ms is not None]
        if others and others[0].ms and choice.median_ms > 0:
            ratio = others[0].ms / choice.median_ms
            found["next"] = f"{config_words(others[0].config)}, {ratio:.2f} times the time"
        if choice.dispute:
            found["disputed"] = choice.dispute
        return found


def _key_words(call: Mapping[str, Any]) -> str:
    """Return a key with the class of each part: a value, or the dtype of an argument."""
    values = [f"{name}={value}" for name, value in readable_call({**call, "dtypes": []}).items()]
    dtypes = [f"{name}: {dtype}" for name, dtype in call["dtypes"]]
    options = [f"{name}={value}" for name, value in call["options"]]
    parts = (("values", values), ("dtypes", dtypes), ("launch options", options))
    return "; ".join(f"{name} {', '.join(each)}" for name, each in parts if each) or "empty"


@functools.cache
def _classes_of_names(file: str, kernel: str) -> str:
    """Return what the text of the kernel's file says of each key name now; empty if nothing."""
    from safetune.keys.key_names import report_of
    from safetune.lint.check import tuners_under

    with contextlib.suppress(Exception):  # a file that has changed, or gone, is not an error here
        for tuner in tuners_under([Path(file)] if file else []):
            written = tuner.key()
            if tuner.name == kernel and written is not None:
                report = report_of(tuner.facts(), written, Settings.current().phantom)
                return "; ".join(f"{name.name}: {name.reason}" for name in report.names)
    return ""


def _keys(store: Store, kernel: str) -> list[_Key]:
    entries = {entry.key.digest: entry for entry in entries_of(store, kernel)}
    found = [
        _Key(key, tuple(_latest(trials)), entries.pop(key.digest, None))
        for key, trials in store.trials_of(kernel)
    ]
    found += [_Key(entry.key, (), entry) for entry in entries.values()]
    return sorted(found, key=lambda each: by_kernel(each.key))


def _latest(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trial of the highest generation for each config, in the order of the first ones."""
    ordered = sorted(trials, key=lambda trial: trial.generation)
    return list({trial.config_digest: trial for trial in ordered}.values())
