"""One launch as its caller wrote it: its arguments by name, its hooks, and its grid.

A grid may be a closure over anything in the caller, so the caller evaluates it, and a child gets
only the resulting numbers. For the grid, heuristics also run in the caller, as at every launch.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import triton.language as tl
from triton.runtime.autotuner import Config

from safetune import forks
from safetune.errors import InvalidSetting
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.identity import base_function
from safetune.launch.call_shape import heuristic_values, named_arguments, specialisation
from safetune.outcome import Scope

#: Indices and sizes are below these addresses, most hashes and times above them.
LOWEST_ADDRESS, HIGHEST_ADDRESS = 1 << 32, 1 << 56

#: The types of a heuristic's values that travel; a dtype of torch would make a child import it.
_PLAIN = (type(None), bool, int, float, str, tl.dtype)


@dataclass(frozen=True)
class Hooks:
    """The functions around a launch, in the child. The first five are `triton.autotune`'s.

    Digests of stored keys depend on the order of the fields.
    """

    pre_hook: Callable[..., object] | None = None
    post_hook: Callable[..., object] | None = None
    do_bench: Callable[..., Any] | None = None
    reset_to_zero: tuple[str, ...] = ()
    restore_value: tuple[str, ...] = ()
    #: Arguments that are not results, so their contents are not compared.
    scratch: tuple[str, ...] = ()
    #: Called with the arguments by name, returns the right values of the written ones.
    reference: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    #: Called with the arguments by name, tensors as meta tensors; returns the values to tune on.
    inputs: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    def identity_parts(self) -> tuple[Any, ...]:
        """Return the parts of an identity besides the kernel."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Call:
    """One launch, as its caller wrote it.

    Attributes:
        kernel: the object below the autotuner: a jit function, or heuristics around one.
        args, kwargs: without `grid` and `warmup`.
        pins: the constant that the compiled kernel sees, for each dropped name.
        index: the device's index in this process; -1 in the interpreter.
    """

    kernel: Any
    arg_names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grid: Any
    pins: Mapping[str, Any]
    hooks: Hooks
    index: int
    #: What the caller's heuristics set for each config; None where a child has to run them: a value
    #: cannot travel, or the config has a hook, which runs before them.
    heuristics: tuple[Mapping[str, Any] | None, ...] = ()

    @property
    def interpreted(self) -> bool:
        """Whether the kernel runs in Triton's interpreter, without a compiler or a device."""
        return self.index < 0

    @forks.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The kernel's parameters by name, read once for all configs."""
        return parameters_of(self.kernel)

    def named(self) -> dict[str, Any]:
        """Return the caller's arguments by name."""
        return named_arguments(self.arg_names, self.args, self.kwargs)

    def may_touch_memory(self) -> bool:
        """Whether an argument has, or may have, elements; an empty tensor has none."""
        return any(_may_have_elements(leaf) for leaf in leaves(self.named()))

    def pinned(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments as the compiled kernel gets them."""
        return self.with_values(self.pins)

    def with_values(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, with other values for some names."""
        positional = named_arguments(self.arg_names, self.args)
        args = tuple(values.get(name, value) for name, value in positional.items())
        return args, {name: values.get(name, value) for name, value in self.kwargs.items()}


def owners_of(named: dict[str, Any], tensors: Sequence[Any]) -> list[str]:
    """Return the arguments that each tensor belongs to, as `x, y`; empty for tensors of hooks."""
    owners: dict[int, list[str]] = {id(tensor): [] for tensor in tensors}
    for name, value in named.items():
        for leaf in leaves(value):
            if name not in owners.get(id(leaf), [name]):
                owners[id(leaf)].append(name)
    return [", ".join(owners[id(tensor)]) for tensor in tensors]


def leaves(value: Any) -> Iterator[Any]:
    """Yield an argument's tensors and plain values, including those in tuples and a descriptor's
    base.
    """
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from leaves([getattr(value, field.name) for field in fields(value)])
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield an argument's tensors, without Triton's wrappers that change the dtype."""
    for leaf in leaves(value):
        tensor = leaf if hasattr(leaf, "zero_") else getattr(leaf, "base", None)
        if hasattr(tensor, "zero_"):
            yield tensor


def may_be_address(value: object) -> bool:
    """Whether a value is an integer that could be an address."""
    return isinstance(value, int) and LOWEST_ADDRESS <= value < HIGHEST_ADDRESS


def _may_have_elements(value: Any) -> bool:
    if isinstance(value, (type(None), bool, float, str)) or encoding.is_dtype(value):
        return False
    if callable(value):  # a constant of the kernel
        return False
    if isinstance(value, int):
        return may_be_address(value)
    return not hasattr(value, "numel") or value.numel() > 0


class WatchedArguments(dict[str, Any]):
    """The arguments that a grid function gets; records which of certain names it reads."""

    def __init__(self, values: Mapping[str, Any], watch: Iterable[str]) -> None:
        super().__init__(values)
        self._watch = frozenset(watch)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self._watch:
            self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, and record the name."""
        return self[name] if name in self else default  # noqa: SIM401 - this is that `get`


def grid_of(
    call: Call, config: Config, values: Mapping[str, Any] | None = None
) -> tuple[tuple[int, ...], set[str]]:
    """Return the grid of a launch with `config`, from the caller's values, and the dropped names
    that the grid function reads.

    `values` are set by heuristics; if None, the heuristics run now. Raises the errors of the grid
    and of the heuristics.
    """
    if not callable(call.grid):
        return tuple(int(size) for size in call.grid), set()
    arguments = WatchedArguments(meta_arguments(call, config, values), call.pins)
    grid = call.grid(arguments)
    return tuple(int(size) for size in grid), arguments.seen


def checked_grid(grid: Any) -> Any:
    """Return a grid as a tuple of up to three integers, or a function that returns one.

    A single integer is a one-dimensional grid, as in `jax_triton`. Raises `InvalidSetting`.
    """
    if callable(grid):
        return lambda arguments: checked_grid(grid(arguments))
    with contextlib.suppress(TypeError):
        grid = (operator.index(grid),)
    return grid_sizes(grid)


def grid_sizes(grid: Any) -> tuple[int, ...]:
    """Return the sizes of a grid in Triton's form; raises `InvalidSetting`."""
    try:
        sizes = tuple(map(operator.index, grid))
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise InvalidSetting(
            f"grid={grid!r} is not a launch grid: give one to three integers of 0 or more, or a "
            "function that takes a dict of the arguments and returns them"
        )
    return sizes


def meta_arguments(
    call: Call, config: Config, values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all arguments as a grid function sees them, with defaults and heuristics."""
    arguments = {**_defaults(call.parameters), **call.named(), **config.all_kwargs()}
    return {**arguments, **(heuristics_of(call, config) if values is None else values)}


def heuristics_of(call: Call, config: Config) -> dict[str, Any]:
    """Return the values that heuristics set for a launch with `config`; raises their errors."""
    return heuristic_values(call.kernel, {**call.named(), **config.all_kwargs()})[1]


def can_travel(value: Any) -> bool:
    """Whether a heuristic's value has the same meaning in a child: it is plain and not an
    address.
    """
    if type(value) is tuple:
        return all(map(can_travel, value))
    return type(value) in _PLAIN and not may_be_address(value)


def parameters_of(kernel: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a kernel's function by name."""
    return dict(inspect.signature(base_function(kernel)[1]).parameters)


def default_values(kernel: Any) -> dict[str, Any]:
    """Return the defaults of a kernel's parameters by name."""
    return _defaults(parameters_of(kernel))


def _defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    return {n: p.default for n, p in parameters.items() if p.default is not p.empty}


def of_the_user(hook: Any) -> Any:
    """Return a hook of the user; None for one that Triton's constructor has set."""
    return None if getattr(hook, "__module__", None) == Config.__module__ else hook


@dataclass(frozen=True)
class Scopes:
    """The calls for which the outcomes of configs hold: see `Outcome.holds_for`.

    A mistake in one call, or a value outside the key, says nothing about other calls of the key.
    """

    call: str  # a digest for all configs
    of: tuple[Scope, ...]  # for each config


def scopes_of(
    call: Call, grids: Sequence[tuple[int, ...]], heuristics: Sequence[Mapping[str, Any] | None]
) -> Scopes:
    """Return the calls for which outcomes of configs hold, from the caller's view of this call.

    Changes by hooks do not count.

    Args:
        grids, heuristics: the grid and the heuristics' values of each config; None if one raises.
    """
    args, kwargs = call.pinned()
    named = named_arguments(call.arg_names, args, kwargs)
    special = _digest(lambda: specialisation(call.kernel, call.arg_names, named))
    whole = _digest(lambda: [special, passed_twice(call), list(_facts(call.named()))])
    scopes = []
    for grid, values in zip(grids, heuristics, strict=True):
        own = special
        if values != {}:
            own = _digest(lambda values=values: [special, _specialised(call, values)])
        scopes.append(Scope(own, _digest(lambda own=own, grid=grid: [whole, own, list(grid)])))
    return Scopes(_digest(lambda: [whole, [list(grid) for grid in grids]]), tuple(scopes))


def passed_twice(call: Call) -> list[str]:
    """Return the parameters that a call passes both by position and by name."""
    return sorted(call.kwargs.keys() & {*call.arg_names[: len(call.args)]})


def _specialised(call: Call, values: Mapping[str, Any] | None) -> Any:
    return None if values is None else specialisation(call.kernel, call.arg_names, values)


def _digest(parts: Any) -> str:
    """Return a digest; of a call that has no facts, as on wrapper subclasses, that of the reason.

    Nothing is stored of such a call, because it cannot be handed to a child.
    """
    try:
        return encoding.digest(_plain(parts()))[:16]
    except Exception as error:
        return encoding.digest(f"{type(error).__name__}: {error}")[:16]


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _facts(value: Any) -> Iterator[Any]:
    """Yield shapes, strides, dtypes and scalars of an argument."""
    if isinstance(value, Mapping):
        for name, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield str(name)
            yield from _facts(item)
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for item in value:
            yield from _facts(item)
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield type(value).__name__
        yield repr(value)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        strides = getattr(value, "stride", None)
        yield encoding.dtype_name(value.dtype)
        yield [int(size) for size in value.shape]
        yield [int(step) for step in strides()] if callable(strides) else str(strides)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _facts(getattr(value, each.name))
    elif hasattr(base := getattr(value, "base", None), "dtype"):  # read as another dtype
        yield encoding.dtype_name(value.dtype)
        yield from _facts(base)
