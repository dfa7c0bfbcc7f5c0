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


def gains(rows: Sequence[Row], choice_ms: float) -> tuple[str, str]:
    """Return what a choice gains over the first declared config, and over the median config.

    Empty where a time is not known.
    """
    first = next((row for row in rows if row.outcome.marked(Mark.FIRST)), None)
    times = [row.ms for row in rows if row.ms is not None]
    over_median = _over(statistics.median(times) if times else None, choice_ms)
    if first is None or first.ms is not None:
        return _over(first and first.ms, choice_ms), over_median
    return "failed", over_median


def _over(ms: float | None, choice_ms: float) -> str:
    return f"{ms / choice_ms:.2f}x" if ms and choice_ms > 0 else ""


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
    gained = [gains(s.rows, s.ms) if s.config is not None else ("", "") for s in summaries]
    failed = [f"{sum(failures(s.rows).values())} of {len(s.rows)}" for s in summaries]
    columns = [
        Column("time", tuple(time_words(s.ms) for s in summaries)),
        Column("over first", tuple(over_first for over_first, _ in gained), spare=2),
        Column("over median", tuple(over_median for _, over_median in gained), spare=1),
        Column("failed", tuple("" if text[0] == "0" else text for text in failed)),
        Column("", tuple(summary.note for summary in summaries)),
    ]
    calls, configs = [s.call for s in summaries], [s.config for s in summaries]
    styles = ["red" if config is None else None for config in configs]
    print_choices(console, calls, configs, columns, styles)


def print_choices(
    console: Console,
    calls: Sequence[Mapping[str, str]],
    configs: Sequence[Mapping[str, Any] | None],
    columns: Sequence[Column],
    styles: Sequence[str | None] = (),
) -> None:
    """Print a row for each call and its config, with more columns; above them what all share."""
    shown: list[Column] = []
    readable = [readable_config(config or {}) for config in configs]
    for what, records in (("all", calls), ("all choices", readable)):
        shared, own = shared_and_columns(records)
        shown += own
        if shared:
            print_fact(console, f"{what}: ", words(shared))
    print_table(console, [*shown, *columns], styles)
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
    labels = [row.outcome.label + " (disputed)" * row.outcome.marked(Mark.DISPUTED) for row in rows]
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
