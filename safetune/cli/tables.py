"""Outcomes and choices as tables for people and as data for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from safetune.outcome import Outcome

#: (config as text, outcome, whether it is the choice)
Row = tuple[str, Outcome, bool]


def outcome_table(title: str, rows: Iterable[Row]) -> Table:
    """Return one row per config: config, verdict, median, p20-p80, ratio to the best."""
    listed = list(rows)
    medians = [o.timing.median_ms for _, o, _ in listed if o.ok and o.timing is not None]
    best = min(medians, default=0.0)
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("config", overflow="fold")
    table.add_column("verdict")
    for heading in ("median", "p20-p80", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for config, outcome, chosen in listed:
        style = "green" if chosen else None if outcome.ok else "red"
        table.add_row(
            f"* {config}" if chosen else f"  {config}",
            outcome.label,
            *_times(outcome, best),
            style=style,
        )
    return table


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON data."""
    timing = None if outcome.timing is None else vars(outcome.timing)
    return {
        "verdict": outcome.verdict.value,
        "label": outcome.label,
        "detail": outcome.detail,
        "message": outcome.message,
        "stderr": outcome.stderr,
        "timing": timing,
        "gpu_uuid": outcome.gpu_uuid,
    }


#: A stored config's launch options, in the order in which people read them, with their defaults.
_OPTIONS = {"num_warps": None, "num_stages": None, "num_ctas": 1, "maxnreg": None}


def config_words(record: Mapping[str, Any]) -> str:
    """Return a stored config as people read it: its kwargs, then its launch options."""
    words = [
        f"{name}={_plain(value)}"
        for name, value in record.items()
        if name not in _OPTIONS and name != "pre_hook"
    ]
    words += [
        f"{name}={record[name]}"
        for name, default in _OPTIONS.items()
        if name in record and record[name] != default
    ]
    return " ".join([*words, *(["with a pre_hook"] if "pre_hook" in record else [])])


def call_words(call: Mapping[str, Any]) -> str:
    """Return the values and dtypes of a stored key as people read them."""
    values = [f"{name}={_plain(value)}" for name, value in call["values"]]
    dtypes = "/".join(dict.fromkeys(dtype for _, dtype in call["dtypes"]))
    return " ".join([*values, *([dtypes] if dtypes else [])])


def milliseconds(value: float) -> str:
    """Return a time with three significant digits and its unit."""
    return f"{value:.3g} ms" if value >= 0.1 else f"{value * 1e3:.3g} us"


def _plain(value: Any) -> Any:
    return next(iter(value.values())) if isinstance(value, dict) and value else value


def _times(outcome: Outcome, best: float) -> tuple[str, str, str]:
    timing = outcome.timing
    if not outcome.ok or timing is None:
        return "", "", ""
    spread = f"{milliseconds(timing.p20_ms)} - {milliseconds(timing.p80_ms)}"
    return milliseconds(timing.median_ms), spread, f"{timing.median_ms / best:.2f}"
