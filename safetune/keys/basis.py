"""What the classes of a kernel's key names rest on, to be compared with what it is now.

Triton reads the text of a kernel, and finds what it calls, when it compiles; it reads heuristics
and hooks at each launch. A program may have changed any of them since the names were classified.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

from safetune.keys.body_usage import calls_followed
from safetune.keys.kernel_digest import base_function, is_own, layers

#: (read, argument, value): `read(argument)` was `value`.
Fact = tuple[Callable[[Any], Any], Any, Any]

#: Attributes of a jit function, and of an interpreted one.
_HOOKS = ("launch_metadata", "_repr", "kwargs")


@dataclass(frozen=True)
class Basis:
    """The objects that were read.

    Attributes:
        kernel: the kernel below the tuner.
        text: the text of the kernel and of what it calls, and which names find that.
        heuristics: below the tuner, and what is below each.
        hooks: those of the configs and of the kernel.
    """

    kernel: Any
    text: tuple[Fact, ...]
    heuristics: tuple[Fact, ...]
    hooks: tuple[Fact, ...]

    def holds(self) -> bool:
        """Whether all of them are what they were."""
        return self.is_of(self.kernel) and _hold(self.hooks)

    def is_of(self, kernel: Any) -> bool:
        """Whether this is the kernel, and all that decides what it computes is what it was."""
        return kernel is self.kernel and _hold(self.text) and _hold(self.heuristics)


def _hold(facts: tuple[Fact, ...]) -> bool:
    return all(read(argument) is value for read, argument, value in facts)


def basis_of(kernel: Any, configs: Sequence[Any]) -> Basis:
    """Return what the classes of a kernel's key names rest on now."""
    jit, _ = base_function(kernel)
    text = [_attribute(jit, "_src")]
    for caller, name, callee in calls_followed(kernel):
        text += [*_lookups(caller, name), _attribute(callee, "_src")]
    hooks = (*(_attribute(jit, name) for name in _HOOKS), *_of_configs(configs))
    return Basis(kernel, tuple(text), tuple(_of_heuristics(kernel)), hooks)


def _of_heuristics(kernel: Any) -> Iterator[Fact]:
    for layer in layers(kernel)[:-1]:
        if not is_own(layer):  # it may read anything, so nothing rests on it
            return
        yield from (_attribute(layer, name) for name in ("fn", "values"))
        yield len, layer.values, len(layer.values)
        yield from ((layer.values.get, name, function) for name, function in layer.values.items())


def _of_configs(configs: Sequence[Any]) -> Iterator[Fact]:
    yield len, configs, len(configs)
    for number, config in enumerate(configs):
        yield configs.__getitem__, number, config
        yield _attribute(config, "pre_hook")


def _attribute(owner: Any, name: str) -> Fact:
    return vars(owner).get, name, vars(owner).get(name)


def _lookups(caller: FunctionType, name: str) -> Iterator[Fact]:
    """Yield how a function finds what a dotted name stands for."""
    first, *attributes = name.split(".")
    if first in caller.__code__.co_freevars:
        cell = (caller.__closure__ or ())[caller.__code__.co_freevars.index(first)]
        value = _contents(cell)
        yield _contents, cell, value
    else:
        value = caller.__globals__.get(first)
        yield caller.__globals__.get, first, value
    for attribute in attributes:
        if isinstance(value, ModuleType):
            read: Callable[[Any], Any] = vars(value).get
        else:
            read = functools.partial(_get, value)
        value = read(attribute)
        yield read, attribute, value


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _get(owner: Any, attribute: str) -> Any:
    return getattr(owner, attribute, None)
