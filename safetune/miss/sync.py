"""`safetune.sync`: after it, all processes launch rank 0's config for a key.

Each process first reads the newest choices from its stores, the shared one included. If
torch.distributed is initialised, rank 0 then broadcasts its config for each of its keys, and the
ranks count the keys that differ. These are two collectives, whatever keys each process has, so no
process can wait in one that another never enters. No lock is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from triton.runtime.autotuner import Config

from safetune.config import config_digest
from safetune.errors import StoreError
from safetune.launch.key_state import Asked, KeyState, Reason, all_states
from safetune.messages import logger
from safetune.miss import failures, reporting
from safetune.settings import Mode, Settings, distributed
from safetune.store.local.store import AGREED
from safetune.store.lookup import open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice, space_of


class Launched(NamedTuple):
    """The config that a process launches for a key, as its digest, and the choice of it."""

    config: str
    choice: ChoiceRecord | None = None  # None if it is in no store


def sync(group: Any = None) -> int:
    """Read the choices of other processes, and launch rank 0's config for each key.

    Call it in every process at the same point, before training and whenever choices may change. It
    updates the local store from the shared one (SAFETUNE_SHARED) within five seconds, and switches
    each key of this process to its newest choice, also from background tunings. If
    torch.distributed is initialised, all ranks of the group then launch rank 0's config, choice or
    fallback, for the same key on the same kind of device until the next call. Keys that rank 0
    lacks stay as they are. It does not wait for running tunings.

    Args:
        group: a process group of torch.distributed; all ranks if None.

    Returns:
        The number of keys for which a rank launched another config than rank 0; equal on all ranks.
    """
    states, settings = list(all_states()), Settings.current()
    known: list[tuple[KeyState, Asked]] = []
    if settings.mode is not Mode.OFF:
        known = [(state, state.asked) for state in states if state.asked and not state.written]
    own = _launched(settings, known)
    agreed, differing = _of_rank_0(own, group)
    failures.count_sync()
    for state in states:
        if state.held is not None:
            state.set_choice(state.held)
    taken: list[StoredChoice] = []
    for state, asked in known:
        launched = agreed.get(asked.identity)
        config = launched and asked.configs.get(launched.config)
        if launched is None or config is None:
            continue
        if launched.choice is None:
            _replace(state, config)
            continue
        state.set_choice(config)
        reporting.warn_of_dispute(asked.key, launched.choice.dispute)
        if launched != own.get(asked.identity):
            taken.append(StoredChoice(KeyRecord.of(asked.key), launched.choice))
    if taken and settings.mode is not Mode.FROZEN:
        _store(settings, taken)
    return differing


def _replace(state: KeyState, config: Config) -> None:
    """Launch rank 0's config, which is not in any store, for the same reason as before."""
    decision = state.decision(capture=None)
    if decision is None:
        state.set_fallback(config)
    elif decision.reason is Reason.CHOICE:
        state.set_choice(config)
    elif decision.config != config:
        state.set_fallback(config, decision.retry)


def _launched(settings: Settings, known: Iterable[tuple[KeyState, Asked]]) -> dict[str, Launched]:
    """Return this process's config for each key, with the newest choices of its stores.

    If two tuners have a key, a choice wins over a fallback, then the older tuner.
    """
    launched: dict[str, Launched] = {}
    fallbacks: dict[str, Launched] = {}
    lookup, spaces = None, set()
    for state, asked in known:
        lookup = lookup or open_lookup(settings)
        shared, space = lookup.store.shared, space_of(asked.key)
        if shared is not None and space not in spaces:
            spaces.add(space)
            shared.pull(space)
        lookup.forget(asked.key.digest, asked.declared)  # a newer generation counts from now on
        choice = lookup.find(asked.key, asked.declared, asked.configs)
        if choice is not None:
            launched[asked.identity] = Launched(choice.config_digest, choice)
        elif (decision := state.decision(capture=None)) is not None:
            of_reason = launched if decision.reason is Reason.CHOICE else fallbacks
            of_reason.setdefault(asked.identity, Launched(config_digest(decision.config)))
    return {**fallbacks, **launched}


def _of_rank_0(own: dict[str, Launched], group: Any) -> tuple[dict[str, Launched], int]:
    """Return rank 0's configs, and the number of keys for which a rank launches another."""
    group_of = distributed()
    if group_of is None or group_of.get_rank(group) < 0:
        return own, 0

    sent = [own]
    source = 0 if group is None else group_of.get_global_rank(group, 0)
    group_of.broadcast_object_list(sent, src=source, group=group)
    agreed = sent[0]
    both = own.keys() & agreed.keys()
    differing = [key for key in both if own[key].config != agreed[key].config]
    of_ranks: list[list[str]] = [[]] * group_of.get_world_size(group)
    group_of.all_gather_object(of_ranks, differing, group=group)
    return agreed, len(set().union(*of_ranks))


def _store(settings: Settings, choices: Sequence[StoredChoice]) -> None:
    """Store rank 0's choices that this rank launches now, for the next run."""
    from safetune.store.shared import local_copy

    try:
        local_copy.adopt(open_lookup(settings).store.connection, choices, origin=AGREED)
    except StoreError as error:
        logger.warning("%s; the agreed choices hold for this process only", error)
