"""The config for a key without a choice where nothing may be tuned: modes `frozen` and `record`.

Unlike a fallback, it may come from a pack or from another toolchain; a line in the log says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.miss import candidates

if TYPE_CHECKING:
    from safetune.store.lookup import Lookup
    from safetune.tuning.requests import TuningRequest

logger = logging.getLogger("safetune")


def instead(request: TuningRequest, lookup: Lookup) -> Config:
    """Return the best config known for a key without a choice, with a line in the log."""
    outcomes = candidates.known_outcomes(request, lookup.store)
    found = candidates.ranked(request, outcomes, lookup.kin(request.key))
    best = next(found, candidates.first_config(request))
    logger.warning(
        "%s has no choice for %s and runs with %s: %s",
        request.key.kernel.name,
        request.key,
        config_text(best.config),
        best.reason,
    )
    return best.config
