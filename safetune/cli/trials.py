"""How commands print trials and choices: a summary of each key, or every config with its time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from safetune.cli.layout import Column, print_fact, print_table, shared_and_columns, words
from safetune.cli.output import config_words, one_reason, readable_config
from safetune.frozen import dataclass
from safetune.outcome import Mark, Outcome, duration


class Row(NamedTuple):
    """A config, as it is stored, with its outcome; and whether it is the choice."""

    config: Mapping[str, Any]
    outcome: Outcome
    chosen: bool

    @property
    def ms(self) -> float | None:
        """Its time, if it may be chosen."""
        timing = self.outcome.timing
        return timing.median_ms if self.outcome.ok and timing else None


def by_time(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest first, and those without a time last."""
    return sorted(rows, key=lambda row: (row.ms is None, row.ms or 0.0))


@dataclass(frozen=True)
class Gain:
    """What a choice gains: `over_first` is over the first config that was declared."""

    over_first: str
    over_median: str

    @classmethod
    def of(cls, rows: Sequence[Row], choice_ms: float) -> Gain:
        """Return the gain over other configs; empty where a time is not known."""
        first = next((row for row in rows if row.outcome.marked(Mark.FIRST)), None)
        times = [row.ms for row in rows if row.ms is not None]
        over_first = ""
        if first is not None:
            over_first = "failed" if first.ms is None else _ratio(first.ms, choice_ms)
        return cls(over_first, _ratio(statistics.median(times), choice_ms) if times else "")


def _ratio(ms: float, choice_ms: float) -> str:
    return f"{ms / choice_ms:.2f}x" if choice_ms > 0 else ""


def time_words(ms: float) -> str:
    """Return the time of a choice; empty where it is not known, as of one that others have made."""
    return duration(ms) if ms > 0 else ""


def failures(rows: Sequence[Row]) -> Counter[str]:
    """Return how many configs ended with each verdict that is not ok."""
    return Counter(row.outcome.label for row in rows if not row.outcome.ok)


@dataclass(frozen=True)
class Summary:
    """One row of a summary: a key or workload, its choice if it has one, and its trials."""

    call: Mapping[str, str]
    rows: Sequence[Row]
    config: Mapping[str, Any] | None
    ms: float = 0.0
    note: str = ""


def print_summary(console: Console, title: str, summaries: Sequence[Summary]) -> None:
    """Print a row for each key: the choice, its time and what it gains, and how many failed."""
    if title:
        console.print(title, style="bold", soft_wrap=True)
    shared, keys = shared_and_columns([summary.call for summary in summaries])
    if shared:
        print_fact(console, "all: ", words(shared))
    configs = [readable_config(s.config) if s.config is not None else {} for s in summaries]
    parameters = shared_and_columns(configs)
    if parameters[0]:
        print_fact(console, "all choices: ", words(parameters[0]))
    gains = [Gain.of(s.rows, s.ms) if s.config is not None else Gain("", "") for s in summaries]
    failed = [f"{sum(failures(s.rows).values())} of {len(s.rows)}" for s in summaries]
    columns = [
        *keys,
        *parameters[1],
        Column("time", tuple(time_words(s.ms) for s in summaries)),
        Column("over first", tuple(gain.over_first for gain in gains), spare=2),
        Column("over median", tuple(gain.over_median for gain in gains), spare=1),
        Column("failed", tuple("" if text[0] == "0" else text for text in failed)),
        Column("", tuple(summary.note for summary in summaries)),
    ]
    print_table(console, columns, ["red" if s.config is None else None for s in summaries])
    console.print()


def print_trials(console: Console, rows: Sequence[Row]) -> None:
    """Print one row per config, the fastest first, the choice starred; then why others failed."""
    rows = by_time(rows)
    shared, parameters = shared_and_columns([readable_config(row.config) for row in rows])
    if shared:
        print_fact(console, "all configs: ", words(shared))
    best = next((row.ms for row in rows if row.ms), 0.0)
    timings = [row.outcome.timing if row.ms is not None else None for row in rows]
    spreads = [f"{duration(t.p20_ms)} - {duration(t.p80_ms)}" if t else "" for t in timings]
    labels = [row.outcome.label + " (disputed)" * _is_disputed(row) for row in rows]
    columns = [
        Column("", tuple("*" if row.chosen else " " for row in rows)),
        *parameters,
        Column("verdict", tuple(labels)),
        Column("median", tuple("" if row.ms is None else duration(row.ms) for row in rows)),
        Column("p20 - p80", tuple(spreads), spare=2),
        Column("ratio", tuple(f"{row.ms / best:.2f}" if row.ms else "" for row in rows), spare=1),
    ]
    styles = ["green" if row.chosen else None if row.outcome.ok else "red" for row in rows]
    print_table(console, columns, styles)
    own = {column.name for column in parameters}
    for row in rows:
        varying = {name: v for name, v in readable_config(row.config).items() if name in own}
        name = words(varying) or config_words(row.config)
        if not row.outcome.ok and row.outcome.message:
            print_fact(console, "  ", f"{name}: {one_reason(row.outcome.message)}")
        elif row.chosen and (dispute := Mark.DISPUTED.reason_in(row.outcome.marks)):
            print_fact(console, "  ", f"{name}: its result is disputed: {dispute}")


def _is_disputed(row: Row) -> bool:
    return row.outcome.marked(Mark.DISPUTED)
