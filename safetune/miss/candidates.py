"""Ranks the configs that a key without a choice can launch, each with a reason.

`ranked` serves all callers: the fallback, the frozen mode, a launch after a rejected config, and
torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.frozen import dataclass
from safetune.keys.encoding import visible
from safetune.keys.tuning_key import describe_call
from safetune.launch.call_shape import heuristic_values, named_arguments, specialisation
from safetune.messages import logger
from safetune.outcome import Mark, Outcome, Verdict
from safetune.store.local.store import Store
from safetune.tuning.search import comparable, distance
from safetune.tuning.requests import Plan, TuningRequest

if TYPE_CHECKING:
    from safetune.launch.key_state import KeyState
    from safetune.store.lookup import Lookup
    from safetune.store.records import RelatedChoice


#: The stored outcomes of a key's configs.
Outcomes = list[tuple[Config, Outcome]]


@dataclass(frozen=True)
class Substitute:
    """A config for a key without a choice, and the reason as text."""

    config: Config
    reason: str


def fallback(request: TuningRequest, store: Store) -> Config:
    """Return the config to launch with for now."""
    return next(best_first(request, store), request.configs[0])


def best_known(request: TuningRequest, lookup: Lookup) -> Config:
    """Return the config for a key without a choice in a mode that never tunes, with a log line.

    Unlike a fallback, it may come from a pack or another toolchain; then the line says so.
    """
    outcomes = known_outcomes(request, lookup.store)
    found = ranked(request, outcomes, lookup.related(request.key))
    best = next(found, first_config(request))
    logger.warning(
        "%s has no choice for %s and runs with %s: %s",
        request.key.kernel.name,
        request.key,
        config_text(best.config),
        best.reason,
    )
    return best.config


def best_first(
    request: TuningRequest, store: Store, measured_first: bool = False
) -> Iterator[Config]:
    """Yield the configs that a key without a choice can launch, as `ranked` orders them.

    The related choices come from the store, for the same toolchain.
    """
    key, toolchain = request.key, request.key.toolchain.record()
    stored = store.related(key.kernel.digest, key.device.digest)
    related = [source for source in stored if source.toolchain == toolchain]
    for found in ranked(request, known_outcomes(request, store), related, measured_first):
        yield found.config


def ranked(
    request: TuningRequest,
    outcomes: Outcomes,
    related: Iterable[RelatedChoice],
    measured_first: bool = False,
) -> Iterator[Substitute]:
    """Yield each config that is not known to fail for a key once, best first, with its reason.

    Order: the key's choice from another config list, then from another toolchain; the nearest key's
    choice, from this toolchain, then from another; the configs known to work, fastest first (these
    come first of all with `measured_first`); those without an outcome, as declared. `related` are
    choices of the same kernel on the same device. With `same_bits`, the order is as declared.
    """
    if request.same_bits:
        fails = [config for config, outcome in outcomes if not outcome.ok]
        for config in request.configs:
            if config not in fails:
                yield Substitute(config, "the first config not known to fail, for same_bits")
        return
    times = {  # those that the choice was not made among come last
        c: (o.marked(Mark.OUTVOTED) or o.marked(Mark.NOT_REPEATABLE), o.timing.median_ms)
        for c, o in outcomes
        if o.ok and o.timing is not None
    }
    works = [
        Substitute(c, "the fastest config known to work")
        for c in sorted(times, key=times.__getitem__)
    ]
    tried = [config for config, _ in outcomes]
    untried = [
        first_config(request)
        if config is request.configs[0]
        else Substitute(config, "the first config not known to fail")
        for config in request.configs
        if config not in tried
    ]
    chosen = _chosen_elsewhere(request, outcomes, related)
    seen: set[int] = set()
    for found in chain(works if measured_first else (), chosen, works, untried):
        if id(found.config) not in seen:
            seen.add(id(found.config))
            yield found


def first_config(request: TuningRequest) -> Substitute:
    """Return the first config, for a key with no outcomes or only failures."""
    return Substitute(request.configs[0], "the first config")


def _chosen_elsewhere(
    request: TuningRequest, outcomes: Outcomes, related: Iterable[RelatedChoice]
) -> Iterator[Substitute]:
    """Yield the choices of related keys: those for the same call, then the nearest ones."""
    broken = [config for config, outcome in outcomes if not outcome.ok]
    toolchain, call = request.key.toolchain.record(), request.key.record()
    found_ones = comparable(request.by_digest, call, related)
    usable = [found for found in found_ones if found[0] not in broken]
    usable.sort(key=lambda found: found[1].choice.created, reverse=True)
    ours = [found for found in usable if found[1].toolchain == toolchain]
    others = [found for found in usable if found[1].toolchain != toolchain]
    for group, words in ((ours, "the choice from another list of configs"), (others, "a choice")):
        for config, source in group:
            if source.call == call:
                yield Substitute(config, words + _origin(request, source))
    for group in (ours, others):
        apart = [
            (far, config, source)
            for config, source in group
            if (far := distance(call["values"], source.call["values"])) is not None
        ]
        if apart:
            _, config, source = min(apart, key=itemgetter(0))
            words = f"the choice of the nearest key, {describe_call(source.call)}"
            yield Substitute(config, words + _origin(request, source))


def _origin(request: TuningRequest, source: RelatedChoice) -> str:
    """Return in parentheses the Triton version and the file of a choice, if they differ."""
    parts = []
    if source.toolchain != request.key.toolchain.record():
        theirs, ours = source.toolchain.get("triton"), request.key.toolchain.triton
        parts.append(
            f"made with Triton {visible(str(theirs))}, and this is {ours}"
            if theirs != ours
            else "made by another compiler or under other switches"
        )
    if source.pack:
        parts.append(f"from {source.pack}")
    return f" ({', '.join(parts)})" if parts else ""


def known_outcomes(request: TuningRequest, store: Store) -> Outcomes:
    """Return the latest stored outcome of each config of a request that holds for its call.

    A config that ran but was not judged counts as untried: it may work.
    """
    plan = Plan(request, None, store.trials(request.key.digest))
    return [
        (request.configs[index], outcome)
        for index, outcome in plan.expected.items()
        if outcome.verdict is not Verdict.NOT_JUDGED
    ]


def replace_failed(state: KeyState, request: TuningRequest, store: Store, config: Config) -> None:
    """Launch the next-best config for calls of a request's specialisation, whose config fails."""
    other = next(best_first(request, store, measured_first=True), None)
    if other is None or other is config:
        return
    call, options = request.call, config.all_kwargs()
    args, kwargs = call.pinned()
    named = {**named_arguments(call.arg_names, args, kwargs), **options}
    values = heuristic_values(call.kernel, named)[1]
    special = specialisation(call.kernel, call.arg_names, {**named, **values})
    state.reject(special, config)
    state.substitute(special, other)
