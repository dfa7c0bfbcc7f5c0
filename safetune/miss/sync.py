"""`safetune.sync`: all processes launch the same config for a key, from a call of the program on.

Each process first reads the newest choices from its stores, the shared one included. Where
torch.distributed is initialised, the processes then exchange the config that each would launch for
each of its keys, and all take the best. That is two gathers of one object each, whatever keys each
process has: no process can wait in a collective that another never enters. No lock is held.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from triton.runtime.autotuner import Config

from safetune.config import config_digest
from safetune.errors import StoreError
from safetune.keys import encoding
from safetune.launch.key_state import Asked, KeyState, Reason, all_states
from safetune.miss import reporting, retry
from safetune.settings import Mode, Settings
from safetune.store.local.store import AGREED
from safetune.store.lookup import GuardedStore, open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice, wins

logger = logging.getLogger("safetune")


class Candidate(NamedTuple):
    """The config that a process would launch for a key.

    Attributes:
        strength: 2 for a choice, 1 for a choice that is not shared otherwise (timed beside the
            program's work, or on random inputs), 0 for a fallback.
        config: its digest.
        choice: the stored choice; None for a fallback.
    """

    strength: int
    config: str
    choice: ChoiceRecord | None = None

    def beats(self, other: Candidate) -> bool:
        """Return whether all launch this and not `other`, which is of a lower rank."""
        if self.strength != other.strength or self.choice is None or other.choice is None:
            return self.strength > other.strength
        return wins(self.choice, other.choice)


def sync(group: Any = None) -> None:
    """Read the choices of other processes, and agree with them on the config of each key.

    Call it in every process at the same point, before training and whenever choices may change.
    Brings the local store up to date with the shared one (SAFETUNE_SHARED), waiting two seconds at
    most, and launches the newest choice of each key that this process has launched, those of
    background tunings included. Where torch.distributed is initialised, all ranks of the group then
    launch the same config for the same key on the same kind of device: a choice before a fallback,
    a later generation before an earlier one, then the choice that was made first; of fallbacks,
    that of the lowest rank. Does not wait for tunings that are still running.

    Args:
        group: a process group of torch.distributed; all ranks if None.
    """
    retry.count_sync()
    states = list(all_states())
    for state in states:
        if state.held is not None:
            state.set_choice(state.held)
    settings = Settings.current()
    known: list[tuple[KeyState, Asked]] = []
    if settings.mode is not Mode.OFF:
        known = [(state, state.asked) for state in states if state.asked is not None]
    mine = _candidates(settings, known)
    agreed, taken = _agreed(mine, group), []
    for state, asked in known:
        winner = agreed.get(asked.identity)
        if winner is None:
            continue
        own, config = winner == mine.get(asked.identity), asked.configs.get(winner.config)
        if config is None:
            warnings.warn(
                f"{asked.key.kernel.name}: another rank launches a config for {asked.key} that "
                "pruning drops here; this rank keeps its own config",
                stacklevel=2,
            )
        elif winner.choice is not None:
            state.set_choice(config)
            reporting.warn_of_dispute(asked.key, winner.choice.dispute)
            if not own:
                taken.append(StoredChoice(KeyRecord.of(asked.key), winner.choice))
        elif not own:
            _replace(state, config)
    if taken and settings.mode is not Mode.FROZEN:
        _store(settings, taken)


def _replace(state: KeyState, config: Config) -> None:
    """Launch another rank's config, which is not in any store, for the same reason as before."""
    decision = state.decision()
    if decision is not None and decision.reason is Reason.CHOICE:
        state.set_choice(config)
    else:
        state.set_fallback(config)


def _candidates(
    settings: Settings, known: Iterable[tuple[KeyState, Asked]]
) -> dict[str, Candidate]:
    from safetune.store.shared.record import space_of  # no launch needs it

    found: dict[str, Candidate] = {}
    lookup, now, spaces = None, time.time(), set()
    for state, asked in known:
        lookup = lookup or open_lookup(settings)
        shared, space = lookup.store.shared, space_of(asked.key)
        if shared is not None and space not in spaces:
            spaces.add(space)
            shared.refresh(space, since=now)
        lookup.forget(asked.key.digest, asked.declared)  # a newer generation counts from now on
        choice = lookup.find(asked.key, asked.declared, asked.configs)
        if choice is not None:
            trials = lookup.store.trials(asked.key.digest)
            outcomes = [t.outcome for t in trials if t.config_digest == choice.config_digest]
            strength = 2 if all(outcome.shareable for outcome in outcomes[-1:]) else 1
            found[asked.identity] = Candidate(strength, choice.config_digest, choice)
        elif (decision := state.decision(capture=None)) is not None:
            found.setdefault(asked.identity, Candidate(0, config_digest(decision.config)))
    return found


def _agreed(mine: dict[str, Candidate], group: Any) -> dict[str, Candidate]:
    """Return the best candidate of all ranks for each key; without a group, this process's own."""
    distributed = _distributed(group)
    if distributed is None:
        return mine

    def gathered(text: str) -> list[str]:
        texts = [""] * distributed.get_world_size(group)
        distributed.all_gather_object(texts, text, group=group)
        return texts

    text = encoding.dumps(
        {
            identity: [own.strength, own.config, own.choice and vars(own.choice)]
            for identity, own in mine.items()
        }
    )
    if len(set(gathered(encoding.digest(text)))) == 1:
        return mine
    agreed: dict[str, Candidate] = {}
    for table in gathered(text):
        for identity, (strength, config, choice) in json.loads(table).items():
            candidate = Candidate(strength, config, choice and _choice(choice))
            if identity not in agreed or candidate.beats(agreed[identity]):
                agreed[identity] = candidate
    differing = sum(1 for identity, own in mine.items() if agreed[identity].config != own.config)
    logger.info("%d of %d keys launch another rank's config from now on", differing, len(mine))
    return agreed


def _choice(data: dict[str, Any]) -> ChoiceRecord:
    return ChoiceRecord(**{**data, "marks": tuple(data["marks"])})


def _distributed(group: Any) -> Any:
    """Return torch.distributed, if it is initialised and this process is in the group."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed if distributed.get_rank(group) >= 0 else None


def _store(settings: Settings, choices: Sequence[StoredChoice]) -> None:
    """Store the choices of other ranks that this rank launches now, for the next run."""
    store = open_lookup(settings).store
    if isinstance(store, GuardedStore):
        from safetune.store.shared import local_copy

        try:
            local_copy.adopt(store.connection, choices, origin=AGREED)
        except StoreError as error:
            logger.warning("%s; the agreed choices hold for this process only", error)
