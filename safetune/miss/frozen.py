"""What a key without a choice is launched with where nothing may be tuned, and which that is.

Under `SAFETUNE_MODE=frozen` and `record`. In this order: the key's choice out of another list of
configs; its choice under another toolchain; the choice of the nearest key, of this toolchain and
then of others; the fastest config known to work; the first that is not known to fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton.runtime.autotuner import Config

from safetune.config import config_digest, config_text
from safetune.keys.tuning_key import describe_call
from safetune.miss import candidates

if TYPE_CHECKING:
    from safetune.store.lookup import Lookup
    from safetune.store.records import KinChoice
    from safetune.tuning.requests import TuningRequest

logger = logging.getLogger("safetune")


@dataclass(frozen=True)
class Instead:
    """A config to launch with where there is no choice, and what it is, in words."""

    config: Config
    what: str


def instead(request: TuningRequest, lookup: Lookup) -> Config:
    """Return the best that is known for a key without a choice, with a line in the log."""
    found = next(_candidates(request, lookup))
    logger.warning(
        "%s has no choice for %s and runs with %s: %s",
        request.key.kernel.name,
        request.key,
        config_text(found.config),
        found.what,
    )
    return found.config


def _candidates(request: TuningRequest, lookup: Lookup) -> Iterator[Instead]:
    outcomes = candidates.known_outcomes(request, lookup.store)
    failed = candidates.failed(outcomes)
    configs = {config_digest(c): c for c in request.configs if c not in failed}
    record, toolchain = request.key.record(), request.key.toolchain.record()
    kin = [each for each in lookup.kin(request.key) if each.choice.config_digest in configs]
    kin.sort(key=lambda each: each.choice.created, reverse=True)
    ours = [each for each in kin if each.toolchain == toolchain]
    others = [each for each in kin if each.toolchain != toolchain]
    for group in (ours, others):
        for each in group:
            if each.call == record:
                what = "the choice out of another list of configs" if group is ours else "a choice"
                yield Instead(configs[each.choice.config_digest], what + _origin(request, each))
    for group in (ours, others):
        near = candidates.nearest(request, group, failed)
        if near is not None:
            config, each = near
            what = f"the choice of the nearest key, {describe_call(each.call)}"
            yield Instead(config, what + _origin(request, each))
    for config in candidates.working(outcomes):
        yield Instead(config, "the fastest that is known to work")
    for config in [*candidates.untried(request, outcomes), request.configs[0]]:
        first = config is request.configs[0]
        yield Instead(config, "the first config" if first else "the first not known to fail")


def _origin(request: TuningRequest, kin: KinChoice) -> str:
    """What else there is to know of where a choice comes from."""
    found = []
    if kin.toolchain != request.key.toolchain.record():
        theirs, ours = kin.toolchain.get("triton"), request.key.toolchain.triton
        found.append(
            f"made with Triton {theirs}, and this is {ours}"
            if theirs != ours
            else "made by another compiler or under other switches"
        )
    if kin.place:
        found.append(f"from {kin.place}")
    return f" ({', '.join(found)})" if found else ""
