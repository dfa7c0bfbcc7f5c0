"""Stored keys, each with its trials and its choice, and the blocks that show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safetune.errors import SafetuneError
from safetune.frozen import dataclass
from safetune.messages import counted, logger, one_line
from safetune.outcome import Mark, duration
from safetune.settings import Settings
from safetune.show.choices import (
    Row,
    Summary,
    failures,
    gains,
    summary_blocks,
    trial_blocks,
)
from safetune.show.tables import Block, facts, heading
from safetune.show.words import (
    PACK,
    config_words,
    moment,
    origin_word,
    origin_words,
    place,
    readable_call,
    readable_calls,
    time_words,
    words,
)
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

if TYPE_CHECKING:
    from safetune.store.local.store import Store

#: The kernel's digest is cut to this.
_DIGEST = 8


@dataclass(frozen=True)
class Entry:
    """A choice with its key, and its origin as in `Store.origin`."""

    key: KeyRecord
    choice: ChoiceRecord
    origin: str

    @property
    def made(self) -> float:
        """The time when the choice was made."""
        return self.choice.created


@dataclass(frozen=True)
class StoredKey:
    """A key with the last trial of each of its configs, and its choice if it has one."""

    key: KeyRecord
    trials: tuple[TrialRecord, ...]
    entry: Entry | None

    @property
    def made(self) -> float:
        """The time of its choice, or of its last trial."""
        if self.entry is not None:
            return self.entry.made
        return max((trial.created for trial in self.trials), default=0.0)

    @property
    def rows(self) -> list[Row]:
        """Its configs."""
        digest = self.entry and self.entry.choice.config_digest
        return [
            Row(t.config, t.outcome, t.config_digest == digest, [f.outcome for f in t.elsewhere])
            for t in self.trials
        ]

    def summary(self, call: Mapping[str, str]) -> Summary:
        """Return a table row for the key, headed by the values of its call."""
        entry = self.entry
        if entry is None:
            return Summary(call, self.rows, None, note="no config works")
        origin = origin_word(entry.origin) * bool(entry.origin)
        note = ", ".join(filter(None, (origin, remarks(entry.choice))))
        return Summary(call, self.rows, entry.choice.config, entry.choice.median_ms, note)

    def blocks(self, names: str = "") -> Iterator[Block]:
        """Yield the key, the choice with its origin and gain, and every config.

        Args:
            names: the classes of the names in the key.
        """
        yield from kernel_blocks(self.key)
        yield facts((name, text) for name, text in self.facts(names) if text)
        yield ""
        yield from trial_blocks(self.rows)
        yield ""

    def facts(self, names: str = "") -> Iterator[tuple[str, str]]:
        """Yield named facts about the key, without its configs."""
        rows, key = self.rows, self.key
        yield "key", words(readable_call({**key.call, "dtypes": []}) | dict(key.call["dtypes"]))
        yield "names", names
        if self.entry is None:
            yield "choice", "no config works"
        else:
            yield from _choice_facts(self.entry, rows)
        if rows:
            working = sum(row.ms is not None for row in rows)
            causes = [f"{count} {verdict}" for verdict, count in failures(rows).items()]
            yield "configs", f"{len(rows)}: {', '.join([f'{working} timed', *causes])}"


def _choice_facts(entry: Entry, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    choice = entry.choice
    time = time_words(choice.median_ms) or "its time is unknown"
    yield "choice", f"{config_words(choice.config)}, {time}"
    was_made_here = any(row.chosen for row in rows)
    source = origin_words(entry.origin) if entry.origin or was_made_here else "no trial stored"
    yield "made", f"{moment(choice.created)}, {source}, generation {choice.generation}"
    over = ("the first declared config", "the median")
    gained = zip(gains(rows, choice.median_ms), over, strict=True)
    gain = [f"{ratio[:-1]} times as fast as {what}" for ratio, what in gained if ratio[-1:] == "x"]
    yield "gain", ", ".join(gain)
    for final in (row.outcome.final for row in rows if row.chosen):
        if final is not None:
            yield "final", f"{duration(final.median_ms)} a launch, as replays of a CUDA graph"
    among = Mark.SEARCHED.reason_in(choice.marks)
    yield "searched", f"among {among}" * bool(among)
    yield "same bits", Mark.SAME_BITS.reason_in(choice.marks)
    yield "disputed", choice.dispute
    yield "contended", Mark.CONTENDED.reason_in(choice.marks)
    yield "pinned", "by hand; it is not tuned again until it is cleared" * choice.pinned


def remarks(choice: ChoiceRecord) -> str:
    """Return the marks of a choice that a table shows."""
    marks = (Mark.PINNED, Mark.DISPUTED, Mark.SEARCHED, Mark.CONTENDED)
    return ", ".join(mark.value for mark in marks if mark.reason_in(choice.marks))


def key_blocks(keys: Sequence[StoredKey], everything: bool, names: str = "") -> Iterator[Block]:
    """Yield a row for each key; for one key, or with `everything`, a row for each config.

    Args:
        names: the classes of the names in the key.
    """
    shown, folded = (keys, "") if everything else newest_sources(keys)
    if everything or len(shown) == 1:
        for key in shown:
            yield from key.blocks(names)
    else:
        for group in grouped(shown):
            yield from kernel_blocks(group[0].key)
            calls = readable_calls([key.key.call for key in group])
            yield from summary_blocks([*map(StoredKey.summary, group, calls)])
        yield f"{counted(len(shown), 'key')}; --all prints every config, --key chooses"
    if folded:
        yield folded


def keys_of(store: Store, kernel: str) -> list[StoredKey]:
    """Return the keys of all kernels with a name, including those in packs."""
    entries = {entry.key.digest: entry for entry in entries_of(store, kernel)}
    keys = [
        StoredKey(key, tuple(_latest(trials)), entries.pop(key.digest, None))
        for key, trials in store.trials_of(kernel)
    ]
    keys += [StoredKey(entry.key, (), entry) for entry in entries.values()]
    return sorted(keys, key=lambda key: by_kernel(key.key))


def _latest(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trial of the highest generation for each config."""
    ordered = sorted(trials, key=lambda trial: trial.generation)
    return list({trial.config_digest: trial for trial in ordered}.values())


def entries_of(store: Store, kernel: str | None = None) -> list[Entry]:
    """Return the stored choices, and those in packs for other keys."""
    entries = stored_entries(store, kernel)
    stored = {entry.key.digest for entry in entries}
    for entry in _in_packs():
        if entry.key.digest not in stored and kernel in (None, entry.key.kernel_name):
            stored.add(entry.key.digest)
            entries.append(entry)
    return entries


def stored_entries(store: Store, kernel: str | None = None) -> list[Entry]:
    """Return the choices of a store."""
    origins = store.origins()
    choices = [(stored.key, stored.choice) for stored in store.choices(kernel)]
    return [Entry(key, c, origins[c.key, c.declared, c.generation]) for key, c in choices]


def _in_packs() -> Iterator[Entry]:
    from safetune.store.packs import exchange

    for directory in Settings.current().packs:
        try:
            collected = exchange.collect(directory)
        except (SafetuneError, OSError) as error:
            logger.warning("skipping packs: %s", one_line(str(error)))
            continue
        for entry in collected.entries:
            yield Entry(entry.key, entry.choice, f"{PACK}{directory}")


def by_kernel(key: KeyRecord) -> Any:
    """Return the sort key of a key: by kernel, then by its values."""
    from safetune.store.packs.packs import natural

    return key.kernel_name, key.kernel_file, key.kernel_line, natural(key.call)


def newest_sources(keys: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the keys of each kernel's last tuned source, and a line about the others, if any."""
    sources: dict[tuple[str, str], dict[str, float]] = {}
    for key in keys:
        made = sources.setdefault((key.key.kernel_name, key.key.kernel_file), {})
        digest = key.key.kernel_digest
        made[digest] = max(key.made, made.get(digest, 0.0))
    newest = {max(made, key=made.__getitem__) for made in sources.values()}
    shown = [key for key in keys if key.key.kernel_digest in newest]
    older = sum(map(len, sources.values())) - len(newest)
    left_out = counted(len(keys) - len(shown), "key")
    words = f"{left_out} of {counted(older, 'source')} tuned earlier not shown; --all shows them"
    return shown, words * bool(older)


def grouped(entries: Iterable[Any]) -> list[list[Any]]:
    """Return groups of keys, one per table: same kernel, device and toolchain."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for entry in entries:
        key, toolchain = entry.key, str(sorted(entry.key.toolchain.items()))
        of = (key.kernel_name, key.kernel_digest, key.device_digest, toolchain)
        groups.setdefault(of, []).append(entry)
    return list(groups.values())


def kernel_blocks(key: KeyRecord) -> Iterator[Block]:
    """Yield a kernel's name and location, and the device and toolchain of its keys."""
    yield heading(f"{key.kernel_name}  {place(key.kernel_file, key.kernel_line)}")
    toolchain, name = key.toolchain, str(key.device["name"])
    target = [str(toolchain.get("target"))] * (toolchain.get("target") != name)
    switches = {**toolchain.get("environment", {})}
    if switches.get("default_fp_fusion") == "True":
        del switches["default_fp_fusion"]
    parts = [name, f"Triton {toolchain.get('triton')}", *target, *filter(None, [words(switches)])]
    yield f"{', '.join(parts)}, source {key.kernel_digest[:_DIGEST]}"
