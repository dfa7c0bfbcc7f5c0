"""One page about a kernel: choices by shape, times of configs, and reasons of failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetune.outcome import duration
from safetune.show.choices import by_time
from safetune.show.keys import StoredKey, grouped
from safetune.show.tables import columns_of, common_and_columns
from safetune.show.words import (
    call_words,
    config_words,
    moment,
    one_reason,
    origin_words,
    place,
    readable_calls,
    readable_config,
    time_words,
    words,
)

_TEMPLATE = Path(__file__).with_name("page.html")


def page(kernel: str, keys: Sequence[StoredKey]) -> str:
    """Return the page as self-contained HTML."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(kernel=kernel, groups=[_group(group) for group in grouped(keys)])


def _group(keys: Sequence[StoredKey]) -> dict[str, Any]:
    """Return the page's section on one kernel on one device."""
    key = keys[0].key
    shapes = readable_calls([key.key.call for key in keys])
    choices = [readable_config(key.entry.choice.config) if key.entry else {} for key in keys]
    same, columns = common_and_columns(shapes)
    return {
        "in_all": words(same),
        "place": place(key.kernel_file, key.kernel_line),
        "device": key.device["name"],
        "triton": key.toolchain.get("triton"),
        "source": key.kernel_digest[:8],
        "of_call": [column.name for column in columns],
        "of_choice": [column.name for column in columns_of(choices)],
        "keys": list(map(_key, keys, shapes, choices)),
    }


def _key(key: StoredKey, shape: dict[str, str], choice: dict[str, str]) -> dict[str, Any]:
    facts = {"words": call_words(key.key.call), "shape": shape, "choice": choice}
    entry, rows = key.entry, by_time(key.rows)
    times = [row.ms for row in rows if row.ms is not None]
    return facts | {
        "time": time_words(entry.choice.median_ms) if entry else "no config works",
        "made": moment(entry.choice.created) if entry else "",
        "origin": origin_words(entry.origin) if entry else "",
        "disputed": entry.choice.dispute if entry else "",
        "configs": list(_configs(rows, max(times, default=0.0))),
        "failed": len(rows) - len(times),
    }


def _configs(rows: Sequence[Any], slowest_ms: float) -> Iterator[dict[str, Any]]:
    for row in rows:
        message = row.outcome.message
        yield {
            "words": config_words(row.config),
            "chosen": row.chosen,
            "time": "" if row.ms is None else duration(row.ms),
            "share": 0.0 if row.ms is None else 100 * row.ms / slowest_ms,
            "label": row.outcome.label,
            "reason": one_reason(message) if message.strip() else "",
        }
