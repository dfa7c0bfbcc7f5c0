"""`safetune pin`: choose a config by hand."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from safetune.cli.command import Filter, command, filtered, key_option, pairs
from safetune.cli.emit import emit
from safetune.cli.output import counted
from safetune.cli.stored import check_some, open_store
from safetune.errors import TargetError
from safetune.keys.tuning_key import readable
from safetune.outcome import Mark
from safetune.show.words import call_words, config_words, readable_call, words
from safetune.store.records import PINNED_LIST, ChoiceRecord, KeyRecord, StoredChoice

if TYPE_CHECKING:
    from safetune.store.local.store import Store

#: The stored configs of a kernel by their digests.
Configs = dict[str, dict[str, Any]]


@command(
    "pin",
    "safetune pin add_kernel --key N=4096 BLOCK=128 num_warps=8",
    "safetune pin add_kernel BLOCK=128",
)
@click.argument("kernel")
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
    of_source = _tried(store, kernel)
    # An older source of the kernel may have had other configs.
    sources = {key.kernel_digest for key in keys}
    with_config = {d for d in sources if _matching(of_source[d], config)}
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


def _tried(store: Store, kernel: str) -> defaultdict[str, Configs]:
    """Return the configs that were tried or chosen, by the source of the kernel."""
    found = defaultdict[str, Configs](dict)
    for key, trials in store.trials_of(kernel):
        found[key.kernel_digest].update((trial.config_digest, trial.config) for trial in trials)
    for stored in store.choices_of_lists(kernel):
        choice = stored.choice
        found[stored.key.kernel_digest].setdefault(choice.config_digest, choice.config)
    return found


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
    if found:
        listed = "; ".join(map(config_words, found.values()))
        raise TargetError(
            f"{len(found)} configs of {kernel} have these values; give more values to select one "
            f"of: {listed}"
        )
    raise TargetError(
        f"no config of {kernel} that was tried has {words(wanted)}. One is "
        f"{config_words(next(iter(configs.values())))}; `safetune show {kernel} --all` lists all"
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
