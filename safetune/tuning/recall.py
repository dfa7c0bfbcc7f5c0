"""Which stored outcomes of a key still count, and when a key that has a choice is tuned again."""

from __future__ import annotations

import time
from dataclasses import replace

from safetune.config import config_digest
from safetune.outcome import OF_THE_CALL, TRANSIENT, Mark, Outcome, Verdict
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, TrialRecord
from safetune.tuning.requests import Limits, TuningRequest

_STARTED = time.time()


def lasting_outcomes(request: TuningRequest, store: Store) -> dict[int, Outcome]:
    """Return the stored outcomes that are not measured again, by the config's index."""
    indexes = {config_digest(config): index for index, config in enumerate(request.configs)}
    trials = {
        indexes[trial.config_digest]: trial
        for trial in store.trials(request.key.digest)
        if trial.config_digest in indexes and trial.outcome.verdict not in TRANSIENT
    }
    outcomes = {config: _unsettled(trial.outcome) for config, trial in trials.items()}
    some_work = len(trials) < len(indexes) or any(outcome.ok for outcome in outcomes.values())
    return {  # where no config works, the caller may have corrected its call since
        config: outcomes[config]
        for config, trial in trials.items()
        if some_work or trial.outcome.verdict not in OF_THE_CALL or trial.created > _STARTED
        if not _had_less_time(trial, request.limits)
    }


def _unsettled(outcome: Outcome) -> Outcome:
    """Return a stored outcome; one that was disputed or not judged is to be judged again."""
    if outcome.verdict is Verdict.NOT_JUDGED or (outcome.ok and outcome.marked(Mark.DISPUTED)):
        return replace(outcome, verdict=Verdict.OK, judged=0)
    return outcome


def usable_choice(request: TuningRequest, store: Store) -> ChoiceRecord | None:
    """Return the newest choice for a key whose config is one of those that pruning leaves."""
    left = [config_digest(config) for config in request.configs]
    return store.choice(request.key.digest, request.declared, left)


def is_due(request: TuningRequest, store: Store) -> bool:
    """Whether a key that has a choice has configs to measure, once.

    Those that pruning has left only since, that were timed and not judged, and that had less time
    than they have now. A choice that was not made here has no trials, which says nothing of what
    was tried.
    """
    choice = usable_choice(request, store)
    trials = {trial.config_digest: trial for trial in store.trials(request.key.digest)}
    if choice is None or choice.config_digest not in trials:
        return False
    found = [trials.get(config_digest(config)) for config in request.configs]
    return any(
        trial is None
        or trial.outcome.verdict is Verdict.NOT_JUDGED
        or _had_less_time(trial, request.limits)
        for trial in found
    )


def _had_less_time(trial: TrialRecord, limits: Limits) -> bool:
    """Whether a config took longer than a limit that has been raised since."""
    limit_s = limits.of(trial.outcome.verdict)
    if limit_s is None:
        return False
    try:
        return float(trial.outcome.detail.removesuffix(" s")) < limit_s
    except ValueError:  # an older version did not store it
        return True
