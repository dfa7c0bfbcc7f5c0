"""The choices of a kernel as source code: the decorator to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from safetune.messages import counted
from safetune.show.keys import StoredKey, grouped
from safetune.show.tables import Block, verbatim
from safetune.show.words import call_words, config_source, time_words


def decorators(keys: Sequence[StoredKey]) -> Iterator[Block]:
    """Yield a decorator for each kernel and device, with the chosen configs."""
    for group in grouped(key for key in keys if key.entry is not None):
        yield verbatim("\n".join(_lines(group)))


def _lines(keys: Sequence[StoredKey]) -> Iterator[str]:
    chosen: dict[str, list[str]] = {}
    for key in keys:
        assert key.entry is not None
        choice = key.entry.choice
        for_call = f"{call_words(key.key.call)} {time_words(choice.median_ms)}".strip()
        chosen.setdefault(config_source(choice.config), []).append(for_call)
    first = keys[0].key
    yield f"# {first.kernel_name} on {first.device['name']}: chosen for {counted(len(keys), 'key')}"
    yield "@safetune("
    yield "    configs=["
    for source, calls in chosen.items():
        yield from (f"        # {call}" for call in calls)
        yield f"        {source}"
    yield "    ],"
    names = [name for name, _ in first.call["values"]]
    yield f"    key={names!r},".replace("'", '"')
    yield ")"
