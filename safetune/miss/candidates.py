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
from safetune.keys.encoding import visible
from safetune.keys.tuning_key import describe_call
from safetune.launch.call_shape import heuristic_values, named_arguments, specialisation
from safetune.messages import logger
from safetune.outcome import Mark, Outcome, Verdict
from safetune.store.local.store import Store
from safetune.tuning.requests import Plan, TuningRequest
from safetune.tuning.search import comparable, distance

if TYPE_CHECKING:
    from safetune.launch.key_state import KeyState
    from safetune.store.lookup import Lookup
    from safetune.store.records import RelatedChoice


#: The stored outcomes of a key's configs.
Outcomes = list[tuple[Config, Outcome]]

_FIRST = "the first config not known to fail"


def fallback(request: TuningRequest, store: Store) -> Config:
    """Return the config to launch with for now."""
    return next(best_first(request, store), request.configs[0])


def best_known(request: TuningRequest, lookup: Lookup) -> Config:
    """Return the config for a key without a choice in a mode that never tunes, with a log line.

    Unlike a fallback, it may come from a pack or another toolchain; then the line says so.
    """
    outcomes = known_outcomes(request, lookup.store)
    found = ranked(request, outcomes, lookup.related(request.key))
    config, reason = next(found, (request.configs[0], "the first config; all are known to fail"))
    name, text = request.key.kernel.name, config_text(config)
    logger.warning("%s has no choice for %s and runs with %s: %s", name, request.key, text, reason)
    return config


def best_first(
    request: TuningRequest, store: Store, measured_first: bool = False
) -> Iterator[Config]:
    """Yield the configs that a key without a choice can launch, as `ranked` orders them.

    The related choices come from the store, for the same toolchain.
    """
    key, toolchain = request.key, request.key.toolchain.record()
    stored = store.related(key.kernel.digest, key.device.digest)
    related = [source for source in stored if source.toolchain == toolchain]
    for config, _ in ranked(request, known_outcomes(request, store), related, measured_first):
        yield config


def ranked(
    request: TuningRequest,
    outcomes: Outcomes,
    related: Iterable[RelatedChoice],
    measured_first: bool = False,
) -> Iterator[tuple[Config, str]]:
    """Yield each config that is not known to fail for a key once, best first, with its reason.

    Order: the key's choice from another config list, then from another toolchain; the choices of
    other keys, the nearest first, from this toolchain, then from another; the configs known to
    work, fastest first (these come first of all with `measured_first`); those without an outcome,
    as declared. `related` are choices of the same kernel on the same device. With `same_bits`, the
    order is as declared.
    """
    if request.same_bits:
        fails = [config for config, outcome in outcomes if not outcome.ok]
        yield from ((config, _FIRST) for config in request.configs if config not in fails)
        return
    times = {  # those that the choice was not made among come last
        c: (o.marked(Mark.OUTVOTED) or o.marked(Mark.NOT_REPEATABLE), o.timing.median_ms)
        for c, o in outcomes
        if o.ok and o.timing is not None
    }
    fastest = sorted(times, key=times.__getitem__)
    works = [(config, "the fastest config known to work") for config in fastest]
    tried = [config for config, _ in outcomes]
    untried = [(config, _FIRST) for config in request.configs if config not in tried]
    chosen = _chosen_elsewhere(request, outcomes, related)
    seen: set[int] = set()
    for config, reason in chain(works if measured_first else (), chosen, works, untried):
        if id(config) not in seen:
            seen.add(id(config))
            yield config, reason


def _chosen_elsewhere(
    request: TuningRequest, outcomes: Outcomes, related: Iterable[RelatedChoice]
) -> Iterator[tuple[Config, str]]:
    """Yield the choices of related keys: those for the same call, then those of other calls."""
    broken = [config for config, outcome in outcomes if not outcome.ok]
    toolchain, call = request.key.toolchain.record(), request.key.record()
    usable = []
    for config, source in comparable(request.by_digest, call, related):
        far = distance(call["values"], source.call["values"])
        if far is not None and config not in broken:
            is_foreign, created = source.toolchain != toolchain, source.choice.created
            usable.append((source.call != call, is_foreign, far, -created, config, source))
    for is_other, is_foreign, *_, config, source in sorted(usable, key=itemgetter(0, 1, 2, 3)):
        what = "its choice" if is_foreign else "its choice from another list of configs"
        if is_other:
            what = f"the choice for {describe_call(source.call)}"
        yield config, f"{what}{_origin(request, source)}"


def _origin(request: TuningRequest, source: RelatedChoice) -> str:
    """Return in parentheses the toolchain and the file of a choice, if they are others."""
    parts = []
    if source.toolchain != request.key.toolchain.record():
        version = visible(str(source.toolchain.get("triton")))
        parts.append(f"made by another toolchain, with Triton {version}")
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
