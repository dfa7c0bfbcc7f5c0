"""`safetune.sync`: all processes launch the same config for a key, from a call of the program on.

Each process first reads the newest choices from its stores, the shared one included. Where
torch.distributed is initialised, the processes then exchange the config that each would launch for
each of its keys, and all take the best. That is two gathers of one object each, whatever keys each
process has: no process can wait in a collective that another never enters. No lock is held.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from triton.runtime.autotuner import Config

from safetune import triton_internals
from safetune.config import config_digest
from safetune.errors import InvalidSetting, StoreError, SyncTimeout, TuningWarning
from safetune.keys import encoding
from safetune.launch.key_state import Asked, KeyState, Reason, all_states
from safetune.messages import logger, warn
from safetune.miss import reporting, retry
from safetune.settings import Mode, Settings, distributed
from safetune.store.local.store import AGREED
from safetune.store.lookup import open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice, wins


class Candidate(NamedTuple):
    """The config that a process would launch for a key."""

    #: 2 for a choice, 1 for one that is not shared otherwise (timed beside the program's work, or
    #: on random inputs), 0 for a fallback.
    strength: int
    config: str  # its digest
    choice: ChoiceRecord | None = None

    def beats(self, other: Candidate) -> bool:
        """Return whether all launch this and not `other`, which is of a lower rank."""
        if self.strength != other.strength or self.choice is None or other.choice is None:
            return self.strength > other.strength
        return wins(self.choice, other.choice)


def sync(group: Any = None, timeout_s: float | None = None) -> None:
    """Read the choices of other processes, and agree with them on the config of each key.

    Call it in every process at the same point, before training and whenever choices may change.
    Brings the local store up to date with the shared one (SAFETUNE_SHARED), waiting two seconds at
    most, and launches the newest choice of each key that this process has launched, those of
    background tunings included. Where torch.distributed is initialised, all ranks of the group then
    launch the same config for the same key on the same kind of device: a choice before a fallback,
    a later generation before an earlier one, then the choice that was made first; of fallbacks,
    that of the lowest rank. What they agree on lasts until the next call. Ranks that hold a kernel
    with different sources or lists of configs cannot agree on it: a warning names the kernel. Does
    not wait for tunings that are still running.

    Args:
        group: a process group of torch.distributed; all ranks if None.
        timeout_s: how many seconds to wait for the other ranks; by default as long as the group.

    Raises:
        InvalidSetting: `timeout_s` is not above 0.
        SyncTimeout: a rank did not call `sync` in time. This rank launches what it launched before.
            The group still waits for that rank, so end the job, or make another group.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidSetting(f"timeout_s={timeout_s!r}; it must be a number of seconds above 0")
    states = list(all_states())
    settings = Settings.current()
    known: list[tuple[KeyState, Asked]] = []
    if settings.mode is not Mode.OFF:
        known = [(state, state.asked) for state in states if state.asked is not None]
    mine = _candidates(settings, known)
    agreed, taken = _agreed(mine, _sources(known), group, timeout_s), []
    retry.count_sync()
    for state in states:
        if state.held is not None:
            state.set_choice(state.held)
    for state, asked in known:
        winner = agreed.get(asked.identity)
        if winner is None:
            continue
        own, config = winner == mine.get(asked.identity), asked.configs.get(winner.config)
        if config is None:
            warn(
                f"{asked.key.kernel.name}: another rank launches a config for {asked.key} that "
                "pruning drops here; this rank keeps its own config",
                TuningWarning,
            )
        elif winner.choice is not None:
            state.set_choice(config)
            reporting.warn_of_dispute(asked.key, winner.choice.dispute)
            if not own:
                taken.append(StoredChoice(KeyRecord.of(asked.key), winner.choice))
        else:
            _replace(state, config)
    if taken and settings.mode is not Mode.FROZEN:
        _store(settings, taken)


def _replace(state: KeyState, config: Config) -> None:
    """Launch the agreed config, which is not in any store, for the same reason as before."""
    decision = state.decision(capture=None)
    if decision is not None and decision.config == config:
        return
    if decision is not None and decision.reason is Reason.CHOICE:
        state.set_choice(config)
    else:
        state.set_fallback(config, None if decision is None else decision.retry)


def _candidates(
    settings: Settings, known: Iterable[tuple[KeyState, Asked]]
) -> dict[str, Candidate]:
    from safetune.store.shared.protocol import space_of  # no launch needs it

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
            strength = 1 if decision.reason is Reason.CHOICE else 0
            own = Candidate(strength, config_digest(decision.config))
            if asked.identity not in found or own.beats(found[asked.identity]):
                found[asked.identity] = own
    return found


def _sources(known: Iterable[tuple[KeyState, Asked]]) -> dict[str, list[str]]:
    """Return which sources, and lists of configs, this process has of each kernel, by its name."""
    found: dict[str, set[str]] = {}
    for state, asked in known:
        function = state.tuner.base_fn
        name = f"{function.__module__}.{function.__qualname__}"
        found.setdefault(name, set()).add(f"{asked.key.kernel.digest} {asked.declared}")
    return {name: sorted(sources) for name, sources in found.items()}


def _agreed(
    mine: dict[str, Candidate],
    sources: dict[str, list[str]],
    group: Any,
    timeout_s: float | None,
) -> dict[str, Candidate]:
    """Return the best candidate of all ranks for each key; without a group, this process's own."""
    distributed = _distributed(group)
    if distributed is None:
        return mine
    keys = {
        identity: [own.strength, own.config, own.choice and vars(own.choice)]
        for identity, own in mine.items()
    }
    texts = _gathered(distributed, encoding.dumps([keys, sources]), group, timeout_s)
    if texts is None:
        return mine
    tables = [json.loads(text) for text in texts]
    _tell_of_sources([table for _, table in tables], distributed.get_rank(group))
    agreed: dict[str, Candidate] = {}
    for table, _ in tables:
        for identity, (strength, config, choice) in table.items():
            candidate = Candidate(strength, config, choice and _choice(choice))
            if identity not in agreed or candidate.beats(agreed[identity]):
                agreed[identity] = candidate
    differing = sum(1 for identity, own in mine.items() if agreed[identity].config != own.config)
    logger.info("%d of %d keys launch another rank's config from now on", differing, len(mine))
    return agreed


def _gathered(distributed: Any, text: str, group: Any, timeout_s: float | None) -> list[str] | None:
    """Return the texts of all ranks; None where all have the same."""

    def gather(text: str) -> list[str]:
        texts = [""] * distributed.get_world_size(group)
        distributed.all_gather_object(texts, text, group=group)
        return texts

    def run() -> list[str] | None:
        return None if len(set(gather(encoding.digest(text)))) == 1 else gather(text)

    if timeout_s is None:
        return run()
    return _within(timeout_s, run)


def _within(timeout_s: float, run: Callable[[], list[str] | None]) -> list[str] | None:
    """Return the result of `run`, which a thread keeps running if it takes longer."""
    result: Future[list[str] | None] = Future()
    driver = triton_internals.active_driver()
    device = driver and driver.get_current_device()

    def work() -> None:
        try:
            if driver:  # a thread begins with the first device
                driver.set_current_device(device)
            result.set_result(run())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="safetune-sync", daemon=True).start()
    try:
        return result.result(timeout_s)
    except FutureTimeoutError:
        if result.done():  # the group has a timeout of its own
            raise
        raise SyncTimeout(
            f"another rank did not call safetune.sync() within {timeout_s:g} s; this rank launches "
            "what it launched before"
        ) from None


def _tell_of_sources(tables: Sequence[Mapping[str, Sequence[str]]], rank: int) -> None:
    """Warn once of each kernel of which two ranks have what the other one lacks."""
    for name in sorted(set().union(*tables) - _told):
        ranks: dict[frozenset[str], list[int]] = {}
        for number, table in enumerate(tables):
            if name in table:
                ranks.setdefault(frozenset(table[name]), []).append(number)
        if any(a - b and b - a for a, b in itertools.combinations(ranks, 2)):
            _told.add(name)
            sources = {text.split()[0] for found in ranks for text in found}
            differs = "sources" if len(sources) > 1 else "lists of configs"
            groups = " and ".join(_ranks_text(numbers) for numbers in ranks.values())
            text = (
                f"{groups} have different {differs} of {name}, so safetune.sync() cannot make them "
                "launch the same config. A hook, a heuristic or the list of configs may depend on "
                "the rank."
            )
            if rank == 0:  # one line for the whole job
                warn(text, TuningWarning)
            else:
                logger.info("%s", text)


def _ranks_text(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return (
        f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{', ...' if len(numbers) > 8 else ''}"
    )


#: The kernels that `_tell_of_sources` has told of.
_told: set[str] = set()


def _choice(data: dict[str, Any]) -> ChoiceRecord:
    return ChoiceRecord(**{**data, "marks": tuple(data["marks"])})


def _distributed(group: Any) -> Any:
    """Return torch.distributed, if it is initialised and this process is in the group."""
    found = distributed()
    return found if found is not None and found.get_rank(group) >= 0 else None


def _store(settings: Settings, choices: Sequence[StoredChoice]) -> None:
    """Store the choices of other ranks that this rank launches now, for the next run."""
    from safetune.store.shared import local_copy

    try:
        local_copy.adopt(open_lookup(settings).store.connection, choices, origin=AGREED)
    except StoreError as error:
        logger.warning("%s; the agreed choices hold for this process only", error)
