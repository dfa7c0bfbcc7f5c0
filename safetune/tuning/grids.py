"""Launch grids, evaluated in the caller.

A grid may be a closure over anything the caller has; only the numbers that it gives travel to a
child. Heuristics run here for it, as they do at every launch.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from triton.runtime.autotuner import Config

from safetune.errors import InvalidSetting
from safetune.keys.kernel_digest import base_function
from safetune.launch.call_shape import heuristic_values
from safetune.tuning.requests import Call


class WatchedArguments(dict[str, Any]):
    """What a grid function is given; tells which of some names it reads."""

    def __init__(self, values: Mapping[str, Any], watch: Iterable[str]) -> None:
        super().__init__(values)
        self._watch = frozenset(watch)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self._watch:
            self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, and remember who asked."""
        return self[name] if name in self else default  # noqa: SIM401 - this is that `get`


def grid_of(call: Call, config: Config, on_read: Callable[[set[str]], None]) -> tuple[int, ...]:
    """Return the grid that a launch with `config` has, from the caller's values.

    `on_read` is called with the dropped names that the grid function reads, if there are any.
    Raises what the grid or a heuristic raises.
    """
    if not callable(call.grid):
        return tuple(int(size) for size in call.grid)
    arguments = WatchedArguments(meta_arguments(call, config), call.pins)
    grid = call.grid(arguments)
    if arguments.seen:
        on_read(arguments.seen)
    return tuple(int(size) for size in grid)


def checked_grid(grid: Any) -> Any:
    """Return a grid as a tuple of up to three integers, or a function that returns one.

    Raises:
        InvalidSetting: it is none, or what the function returns is none.
    """
    if callable(grid):
        return lambda arguments: checked_grid(grid(arguments))
    try:
        sizes = tuple(map(operator.index, grid if isinstance(grid, Iterable) else (grid,)))
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3:
        raise InvalidSetting(
            f"grid={grid!r} is none: give up to three integers, or a function of the arguments by "
            "name that returns them"
        )
    return sizes


def meta_arguments(call: Call, config: Config) -> dict[str, Any]:
    """Return all arguments by name as a grid function sees them: defaults, the call's own, the
    config's, the heuristics'.
    """
    arguments = {**_defaults(call.kernel), **call.named(), **config.all_kwargs()}
    return arguments | heuristic_values(call.kernel, arguments)[1]


def _defaults(kernel: Any) -> dict[str, Any]:
    _, function = base_function(kernel)
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
