"""The launch grids of a call, one for each config, computed in the caller's process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triton.runtime.autotuner import Config

from safetune.errors import from_signal_handler
from safetune.inputs.call import Call, grid_of
from safetune.keys.kernel_digest import base_function, inner_heuristics
from safetune.outcome import Outcome, Verdict


@dataclass(frozen=True)
class Grids:
    """The launch grids of a call.

    Attributes:
        sizes: for each config; without numbers where a config has no grid.
        failures: the outcome of each config that cannot be launched on its grid.
        reads: the dropped names that the grid function reads.
    """

    sizes: tuple[tuple[int, ...], ...]
    failures: Mapping[int, Outcome]
    reads: frozenset[str]

    @property
    def launch_something(self) -> bool:
        """Whether the grid of some config has programs, or is not known."""
        return not all(map(_is_empty, self.sizes))


def grids_of(call: Call, configs: Sequence[Config]) -> Grids:
    """Return the grids that launches of a call would have.

    A config fails where its grid cannot be computed, and where it launches nothing while another
    config launches something: it would be the fastest.
    """
    sizes: list[tuple[int, ...]] = []
    failures: dict[int, Outcome] = {}
    reads: set[str] = set()
    for index, config in enumerate(configs):
        try:
            _check_complete(call, config)
            grid, seen = grid_of(call, config)
        except Exception as error:
            if from_signal_handler(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            failures[index] = _failed(
                f"the grid cannot be computed: {reason}", type(error).__name__
            )
            grid, seen = (), set()
        sizes.append(grid)
        reads |= seen
    if not all(map(_is_empty, sizes)):
        for index, grid in enumerate(sizes):
            if _is_empty(grid):
                failures[index] = _failed(f"its grid {grid} launches nothing; others launch work")
    return Grids(tuple(sizes), failures, frozenset(reads))


def _check_complete(call: Call, config: Config) -> None:
    """Raise `TypeError` where no launch could bind all of the kernel's parameters."""
    given = {*call.named(), *config.all_kwargs(), *inner_heuristics(call.kernel)}
    parameters = inspect.signature(base_function(call.kernel)[1]).parameters.values()
    missing = [each.name for each in parameters if each.default is each.empty]
    if missing := [name for name in missing if name not in given]:
        raise TypeError(f"the call does not pass {', '.join(missing)}")


def _is_empty(grid: tuple[int, ...]) -> bool:
    return any(size < 1 for size in grid)


def _failed(message: str, detail: str = "") -> Outcome:
    return Outcome(Verdict.LAUNCH_ERROR, detail=detail, message=message)
