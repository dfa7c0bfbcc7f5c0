"""A tuning within a budget: the configs that it screens."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from safetune.messages import logger
from safetune.tuning.search import BATCH, Proposer, RandomProposer, Search

if TYPE_CHECKING:
    from safetune.outcome import Outcome
    from safetune.settings import SearchBudget
    from safetune.store.local.store import Store
    from safetune.tuning.requests import Phases, TuningRequest

#: Of a longer list one line says that there is another way.
MANY_CONFIGS = 200

NO_SCIKIT_LEARN = (
    "scikit-learn is not installed, so the configs within the budget were drawn at random; install "
    "safetune[search] for a search that finds better ones"
)


def batches(
    request: TuningRequest,
    budget: SearchBudget,
    store: Store,
    outcomes: Mapping[int, Outcome],
    notes: list[str],
    phases: Phases,
) -> Iterator[list[int]]:
    """Yield the configs that a search proposes until the budget ends, and then until one works.

    Args:
        outcomes: of the tried configs; grows meanwhile.
        notes: collects what to report to the user.
    """
    from safetune.tuning.neighbours import history_of

    start, before = time.perf_counter(), len(outcomes)
    asked = set[int]()  # one that compiles for too long gets no outcome
    if request.same_bits:  # the others are compared with the first one that works
        for config in range(len(request.configs)):
            if config not in outcomes:
                yield [config]
            if config in outcomes and outcomes[config].ok:
                break
    with phases("search"):
        search = Search(history_of(request, store), _proposer(request, notes))
    while True:
        known = {i: o.timing.median_ms if o.ok and o.timing else None for i, o in outcomes.items()}
        times = known | dict.fromkeys(asked - known.keys())
        elapsed_s = time.perf_counter() - start
        remaining = budget.remaining(len(times), len(times) - before, elapsed_s)
        works = any(time_ms is not None for time_ms in times.values())
        if remaining < 1 and works:
            return
        with phases("search"):
            batch = search.ask(times, remaining if remaining > 0 else BATCH)
        if not batch:
            return
        batch = batch if budget.configs is not None else batch[:BATCH]  # then the time is looked at
        asked.update(batch)
        yield batch


def _proposer(request: TuningRequest, notes: list[str]) -> Proposer:
    """Return who proposes: the user's own, a Gaussian process, or chance without scikit-learn."""
    if request.proposer is not None:
        return request.proposer
    seed = int(request.key.digest[:8], 16)
    try:
        from safetune.tuning.gaussian import GaussianProcess
    except ImportError:
        notes.append(NO_SCIKIT_LEARN)
        return RandomProposer(seed)
    return GaussianProcess(seed)


@functools.cache
def name_budget(kernel: str, count: int) -> None:
    """Tell the user, once per kernel, about budgets as a way to tune a long list."""
    logger.warning(
        "%s: all %d configs are measured for each key; `safetune tune --budget 200`, or budget=200 "
        "in the decorator, measures the most promising only",
        kernel,
        count,
    )
