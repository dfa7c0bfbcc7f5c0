"""`safetune pin`: choose a config by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from safetune.cli.command import Filter, command, filtered, key_option, pairs
from safetune.cli.emit import emit
from safetune.cli.output import counted
from safetune.cli.stored import check_some, kernel_argument, open_store
from safetune.errors import TargetError, with_nearest
from safetune.keys.tuning_key import readable
from safetune.outcome import Mark
from safetune.show.words import call_words, config_words, readable_call
from safetune.store.records import PINNED_LIST, ChoiceRecord, KeyRecord, StoredChoice, TrialRecord

if TYPE_CHECKING:
    from safetune.store.local.store import Store

#: The stored configs of a kernel by their digests.
Configs = dict[str, dict[str, Any]]


@command(
    "pin",
    "safetune pin add_kernel --key N=4096 BLOCK=128 num_warps=8",
    "safetune pin add_kernel BLOCK=128",
)
@kernel_argument()
@click.argument("config", nargs=-1, required=True, metavar="NAME=VALUE...", callback=pairs)
@filtered("device", "file")
@key_option
def pin(kernel: str, config: dict[str, str], only: Filter, parts: dict[str, str]) -> None:
    """Launch KERNEL with the config that has these values, whatever is measured.

    Name enough values to tell the config from the others. It must have been tried for a key of
    KERNEL. Without --key, it is pinned for all keys. Neither a tuning nor a choice of another node
    replaces a pinned choice; `safetune clear` removes it.
    """
    from safetune.store.packs import exchange

    store = open_store()
    keys = [
        key
        for key in store.keys(kernel)
        if only.matches(key) and parts.items() <= readable_call(key.call).items()
    ]
    check_some(kernel, store, keys)
    sources = {key.kernel_digest for key in keys}
    of_source = {digest: _configs(store, kernel, digest) for digest in sources}
    # An older source of the kernel may have had other configs.
    with_config = {d for d, found in of_source.items() if _matching(found, config)}
    digests = with_config or {keys[-1].kernel_digest}
    chosen = {digest: _only(kernel, of_source[digest], config) for digest in digests}
    pinned = [
        _pinned(store, key, *chosen[key.kernel_digest])
        for key in keys
        if key.kernel_digest in chosen
    ]
    exchange.import_into(open_store(writes=True), pinned, origin="")
    words = config_words(pinned[0].choice.config)
    data = {"kernel": kernel, "config": pinned[0].choice.config, "pinned": len(pinned)}
    emit(data, [f"pinned {words} for {counted(len(pinned), 'key')} of {kernel}"])


def _configs(store: Store, kernel: str, digest: str) -> Configs:
    """Return the configs that were tried or launched for a source of a kernel."""
    tried: Sequence[tuple[KeyRecord, Sequence[TrialRecord | ChoiceRecord]]] = [
        *store.trials_of(kernel),
        *((entry.key, [entry.choice]) for entry in store.choices_of_lists(kernel)),
    ]
    return {
        record.config_digest: record.config
        for key, records in tried
        if key.kernel_digest == digest
        for record in records
    }


def _matching(configs: Configs, wanted: Mapping[str, str]) -> Configs:
    return {d: record for d, record in configs.items() if wanted.items() <= _values(record).items()}


def _values(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(readable(value)) for name, value in record.items()}


def _only(kernel: str, configs: Configs, wanted: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the one config with some values, and its digest; raises `TargetError`."""
    if not configs:
        raise TargetError(f"no config of {kernel} has been tried: tune one of its keys first")
    found = _matching(configs, wanted)
    if len(found) == 1:
        return next(iter(found.items()))
    values = [_values(record) for record in configs.values()]
    names = list(dict.fromkeys(name for each in values for name in each))
    if unknown := [name for name in wanted if name not in names]:
        raise TargetError(
            f"the configs of {kernel} do not set {with_nearest(unknown, names)}; they set "
            f"{', '.join(names)}"
        )
    if found:
        listed = "; ".join(map(config_words, found.values()))
        raise TargetError(
            f"{len(found)} configs of {kernel} have these values; give more values to select one "
            f"of: {listed}"
        )
    for name, value in wanted.items():
        known = list(dict.fromkeys(each[name] for each in values if name in each))
        if value not in known:
            raise TargetError(
                f"no config of {kernel} has {name}={value}; {name} can be {', '.join(known)}. To "
                "pin another value, first declare a config that sets it and tune"
            )
    raise TargetError(
        f"no config of {kernel} has all of these values; `safetune show {kernel} --all` lists them"
    )


def _pinned(store: Store, key: KeyRecord, digest: str, config: dict[str, Any]) -> StoredChoice:
    """Return the choice of a config for a key; raises `TargetError` if it is known to fail."""
    trials = [trial for trial in store.trials(key.digest) if trial.config_digest == digest]
    outcome = trials[-1].outcome if trials else None
    if outcome is not None and not outcome.ok:
        call = call_words(key.call)
        raise TargetError(
            f"cannot pin {config_words(config)} for {call}: its outcome there is {outcome.label}"
        )
    ms = outcome.timing.median_ms if outcome is not None and outcome.timing is not None else 0.0
    before = store.pinned(key.digest)
    generation = 1 if before is None else before.generation + 1
    marks = (Mark.PINNED.value,)
    made = (key.digest, generation, digest, config, PINNED_LIST, ms, 0, time.time(), marks)
    return StoredChoice(key, ChoiceRecord(*made))
