"""Choices and trials as blocks: a row for each key, or a row for each config of one key."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.bar import Bar

from safetune.frozen import dataclass
from safetune.outcome import Mark, Outcome, duration
from safetune.show.tables import Block, Column, Table, common_and_columns, indented
from safetune.show.words import config_words, one_reason, readable_config, time_words, words

_BAR_WIDTH = 10


class Row(NamedTuple):
    """A stored config with its outcome, and whether it is the choice.

    `elsewhere` has its outcomes in other calls of the key.
    """

    config: Mapping[str, Any]
    outcome: Outcome
    chosen: bool
    elsewhere: Sequence[Outcome] = ()

    @property
    def ms(self) -> float | None:
        """The config's time; None if it may not be chosen."""
        timing = self.outcome.timing
        return timing.median_ms if self.outcome.ok and timing else None


def by_time(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, fastest first; those without a time come last."""
    return sorted(rows, key=lambda row: (row.ms is None, row.ms or 0.0))


def gains(rows: Sequence[Row], choice_ms: float) -> tuple[str, str]:
    """Return the speedup of a choice over the first declared config, and over the median config.

    Empty if a time is unknown.
    """
    times = [row.ms for row in rows if row.ms is not None]
    over_median = _over(statistics.median(times) if times else None, choice_ms)
    for row in rows:
        if row.outcome.marked(Mark.FIRST):
            return ("failed" if row.ms is None else _over(row.ms, choice_ms)), over_median
    return "", over_median


def _over(ms: float | None, choice_ms: float) -> str:
    return f"{ms / choice_ms:.2f}x" if ms and choice_ms > 0 else ""


def failures(rows: Sequence[Row]) -> Counter[str]:
    """Return the number of configs with each verdict except ok."""
    return Counter(row.outcome.label for row in rows if not row.outcome.ok)


@dataclass(frozen=True)
class Summary:
    """One row of a summary: a key or workload, its trials, and its choice if it has one."""

    call: Mapping[str, str]
    rows: Sequence[Row]
    config: Mapping[str, Any] | None
    ms: float = 0.0
    note: str = ""


def summary_blocks(summaries: Sequence[Summary]) -> Iterator[Block]:
    """Yield a row for each key: the choice, its time, its gain and the number of failures."""
    gained = [gains(s.rows, s.ms) if s.config is not None else ("", "") for s in summaries]
    failed = [sum(failures(s.rows).values()) for s in summaries]
    columns = [
        Column("time", [time_words(s.ms) for s in summaries]),
        Column("over first", [over_first for over_first, _ in gained], spare=True),
        Column("over median", [over_median for _, over_median in gained], spare=True),
        Column(
            "failed",
            [f"{n} of {len(s.rows)}" * bool(n) for n, s in zip(failed, summaries, strict=True)],
        ),
        Column("", [summary.note for summary in summaries]),
    ]
    styles = ["red" if s.config is None else None for s in summaries]
    yield from choice_blocks(
        [s.call for s in summaries], [s.config for s in summaries], columns, styles
    )


def choice_blocks(
    calls: Sequence[Mapping[str, str]],
    configs: Sequence[Mapping[str, Any] | None],
    columns: Sequence[Column],
    styles: Sequence[str | None] = (),
) -> Iterator[Block]:
    """Yield a row for each call and its config, with more columns, below their common values."""
    shown: list[Column] = []
    readable = [readable_config(config or {}) for config in configs]
    for what, rows in (("all", calls), ("all choices", readable)):
        common, own = common_and_columns(rows)
        shown += own
        if common:
            yield f"{what}: {words(common)}"
    yield Table([*shown, *columns], styles)
    yield ""


def _label(outcome: Outcome) -> str:
    shown = {
        Mark.DISPUTED: "disputed",
        Mark.NOT_REPEATABLE: "not repeatable",
        Mark.VARIES: "varies",
    }
    words = [text for mark, text in shown.items() if outcome.marked(mark)]
    return f"{outcome.label} ({', '.join(words)})" if words else outcome.label


def _bar(share: float) -> Bar:
    """Return a bar for the speed of a config, as a share of the best one's."""
    return Bar(size=1.0, begin=0.0, end=share, width=_BAR_WIDTH)


def trial_blocks(rows: Sequence[Row]) -> Iterator[Block]:
    """Yield a row per config, fastest first, a star at the choice; then reasons of failures."""
    rows = by_time(rows)
    common, parameters = common_and_columns([readable_config(row.config) for row in rows])
    if common:
        yield f"all configs: {words(common)}"
    best = next((row.ms for row in rows if row.ms), 0.0)
    timings = [row.outcome.timing if row.ms is not None else None for row in rows]
    spreads = [f"{duration(t.p20_ms)} - {duration(t.p80_ms)}" if t else "" for t in timings]
    labels = [_label(row.outcome) for row in rows]
    columns = [
        Column("", ["*" if row.chosen else " " for row in rows]),
        *parameters,
        Column("verdict", labels),
        Column("median", ["" if row.ms is None else duration(row.ms) for row in rows]),
        Column("ratio", [f"{row.ms / best:.2f}" if row.ms else "" for row in rows], spare=True),
        Column("speed", [_bar(best / row.ms) if row.ms else "" for row in rows], spare=True),
        Column("p20 - p80", spreads, spare=True),
    ]
    of_rows = [Mark.SAME_BITS.reason_in(row.outcome.marks) for row in rows]
    wanted = next((bits for row, bits in zip(rows, of_rows, strict=True) if row.chosen), "")
    if wanted:
        columns.append(Column("bits", ["same" * (bits == wanted) for bits in of_rows]))
    styles = ["green" if row.chosen else None if row.outcome.ok else "red" for row in rows]
    yield Table(columns, styles)
    for row in rows:
        own = {n: v for n, v in row.config.items() if n not in common}
        name = config_words(own or row.config)
        if not row.outcome.ok and row.outcome.message:
            yield indented(f"{name}: {one_reason(row.outcome.message)}")
        for outcome in row.elsewhere:
            reason = one_reason(outcome.message) if outcome.message else "no reason is known"
            yield indented(f"{name}: {outcome.label} with another call: {reason}")
        if row.chosen and (dispute := Mark.DISPUTED.reason_in(row.outcome.marks)):
            yield indented(f"{name}: its result is disputed: {dispute}")
