"""The fast path: generated code launches a compiled kernel without Triton's own path.

Each kind of call (number of positional arguments, names of the keywords, type of each argument) has
its own straight-line code. The code reads the properties of the arguments on which the choice and
the binary depend, at least as finely as Triton does, looks up the compiled kernel by them, and
calls its launcher. It returns None for an unknown call, and if a hook or a switch needs Triton's
own path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.autotuner import Config, Heuristics
from triton.runtime.jit import JITFunction

from safetune import triton_internals, triton_launch
from safetune.launch import fast_path_codegen, scratch_memory
from safetune.launch.call_shape import (
    PIN,
    CallShape,
    Launched,
    Tuner,
    named_arguments,
    own_heuristics,
)
from safetune.launch.grid_functions import only_reads
from safetune.settings import Settings

#: The most compiled kernels that one kind of call remembers. After that all are forgotten at once,
#: and found again.
_MOST_LAUNCHES = 4096

#: A kind of call: positional types, keyword names, keyword types.
Kind = tuple[Any, ...]
#: What a call is remembered by here, and its memory key where there are several configs.
Key = tuple[tuple[Any, ...], Any]
Launch = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class FastPath:
    """The code for one kind of call of one kernel, and the compiled kernels that it knows.

    Attributes:
        launch: (grid, args, kwargs) → the launched compiled kernel, or None. Its attribute
            `fast_path` is this object.
        in_the_way: whether a hook or a switch needs Triton's own path now.
    """

    def __init__(
        self,
        tuner: Tuner,
        jit: Any,
        heuristics: Sequence[Heuristics],
        shape: CallShape,
        source: fast_path_codegen.Source,
    ) -> None:
        self._tuner = tuner
        self._shape = shape
        self._source = source
        self._absent = {name: jit.signature.parameters[name].default for name in source.absent}
        self._jit = jit
        self._switches = self._seen = triton_launch.switches(jit)
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._chosen: dict[Any, tuple[Any, ...]] = {}  # heuristics see the config's values
        self._binds: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._heuristics = [vars(each) for each in heuristics]
        # With a copy of each dict of functions, which may be changed in place.
        self._as_made = [{**each, "values": {**each["values"]}} for each in self._heuristics]
        set_below = {name: f for each in self._as_made for name, f in each["values"].items()}
        self._set = [*set_below]
        names = self._names = {
            **_names(tuner, jit),
            "known": self._known,
            "chosen": self._chosen,
            **{f"heuristic{number}": f for number, f in enumerate(set_below.values())},
            **{
                f"{word}{number}": each
                for number, fact in enumerate(source.facts)
                for word, each in zip(("read", "argument", "value"), fact, strict=True)
            },
            "below": self._heuristics,
            "as_made": self._as_made,
            "by_triton": self._by_triton,
        }

        def learn(grid: Any) -> bool:
            """Whether a grid function only reads; if so, functions with its code do as well."""
            simple = type(grid) is FunctionType and only_reads(grid.__code__)
            if simple:
                names["simple_grid"] = grid.__code__
            return simple

        names["learn"] = learn
        exec(_compiled(source.text()), names)
        self.launch: Launch = names["launch"]
        self._choice_key: Callable[..., Any] = names["choice_key"]
        self.in_the_way: Callable[[], bool] = names["in_the_way"]
        self.launch.__dict__["fast_path"] = self

    def outdated(self) -> bool:
        """Whether this code blocks itself: heuristics have changed, or a switch has differed from
        its value at generation for two launches in a row.
        """
        before, self._seen = self._seen, triton_launch.switches(self._jit)
        switched = self._seen == before != self._switches
        return switched or self._heuristics != self._as_made

    def key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key | None:
        """Return the key under which a call is remembered; None if it is not."""
        choice = None if self.in_the_way() else self._choice_key(args, kwargs)
        if choice is None:
            return None
        return choice, None if self._source.single else self._shape.key(args, kwargs)

    def remember(self, key: Key, launched: Launched) -> None:
        """Launch this kernel for such calls from now on, if that is possible without Triton.

        Args:
            key: of the call, computed before the launch.
        """
        tuner, kernel, config = self._tuner, launched.result, launched.config
        if config is None or type(config) is not Config or type(kernel) is not CompiledKernel:
            return
        if config.pre_hook is not None or self.in_the_way():
            return
        if (len(tuner.configs) == 1) is not self._source.single:
            return  # configs were added or removed in place
        choice, memory_key = key
        if not self._source.single and tuner.states.of(memory_key).hit is not config:
            return  # for this call only: another one was rejected, or a graph captured it
        options = config.all_kwargs()
        if options != launched.options:  # changed by a function that the launch called
            return
        rest = [options.get(name, default) for name, default in self._absent.items()]
        how = triton_launch.launcher(kernel, scratch_memory.launch)
        binary = triton_launch.binary_name(self._jit, choice[0], kernel)
        if how is None or binary is None:
            return
        if len(self._known) >= _MOST_LAUNCHES:
            self._known.clear()
            self._chosen.clear()
        # With a copy of the dict of kwargs, which may also be changed in place.
        guard: tuple[Any, ...] = (
            config,
            vars(config),
            {**vars(config), "kwargs": {**config.kwargs}},
        )
        if self._set:
            values = launched.values
            plain = fast_path_codegen.plain_types().issuperset(map(type, values.values()))
            if not plain or [*values] != self._set:
                return
            before = self._chosen.get(choice)
            if before is not None and (before[0] is not config or before[2] != guard[2]):
                self._known.clear()  # launches with other values of the heuristics are out of date
            self._chosen[choice], guard = (*guard, options), ()
            parts = (part for value in values.values() for part in (value, value.__class__))
            choice = (choice, *parts)
        self._known[choice] = (*guard, binary, how.run, how.head, how.together, rest, kernel)

    def bind(
        self,
        grid: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        watch: tuple[Any, Any, Any],
        offsets: Mapping[int, int],
    ) -> Callable[..., Any] | None:
        """Return a known launch as a function of its first arguments, which are tensors or None.

        The function takes the arguments up to the last tensor, and launches the same kernel on the
        same grid. The caller guarantees that they have the dtypes and the device of the original
        ones. It returns None if launches are observed, if anything that a launch depends on has
        changed, if an address is not a multiple of 16 or may be in freed memory, or if another
        device is current.

        Args:
            watch: an object whose `active` says whether launches are observed; a class, and the
                `run` that it has unless a tool has replaced it.
            offsets: by argument position, the byte offset of the launched tensor from the tensor
                that the function gets.
        """
        if not self._source.can_be_bound or self.in_the_way():
            return None
        parts = tuple(offsets)
        bind = self._binds.get(parts)
        if bind is None:
            made: dict[str, Any] = {}
            exec(_compiled(self._source.bound_text(parts)), self._names, made)
            bind = self._binds[parts] = made["bind"]
        return bind(grid, args, kwargs, *watch, offsets.values())  # type: ignore[no-any-return]

    def _by_triton(
        self,
        config: Config,
        values: dict[str, Any],
        grid: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Launch a call whose heuristics have been called already, and must not be called again."""
        key = self.key(args, kwargs)
        launched = self._tuner.launch_with(config, values, grid, args, kwargs)
        if key is not None:
            self.remember(key, launched)
        return launched.result


def make(tuner: Tuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch | None:
    """Return the launch for calls like this one; None if they need Triton's own path."""
    jit, heuristics = own_heuristics(tuner.fn)
    set_below = [name for each in heuristics for name in each.values]
    if (
        not Settings.current().fast_launch
        or triton_internals.version() > triton_internals.NEWEST
        or type(jit) is not JITFunction
        or any(config.pre_hook for config in tuner.configs)
        or tuner.states.tuner is not tuner  # a copy does not get to know when a choice changes
        # Another back end may specialise a binary on more of a tensor than the code here reads.
        or triton_internals.target_name() != "cuda"
        or not triton_launch.has_hook_chains()
        or any(each.kind is each.VAR_POSITIONAL for each in jit.signature.parameters.values())
        or triton_launch.set_by_run(jit)
        or len({*set_below}) < len(set_below)
    ):
        return None
    names = [parameter.name for parameter in jit.params]
    if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
        return None
    values = named_arguments(names, args, kwargs)
    if values.keys() & {*set_below}:
        return None
    shape = tuner.shapes.of(args, kwargs)
    source = fast_path_codegen.Source(tuner, jit, set_below, shape, len(args), values)
    return FastPath(tuner, jit, heuristics, shape, source).launch if source.possible else None


#: As it was before a tool could replace it.
_JIT_RUN = triton_launch.own_jit_run()
_HEURISTICS_RUN = Heuristics.run


def _names(tuner: Tuner, jit: Any) -> dict[str, Any]:
    """Return the names that the generated code refers to, with the switches as they are now."""
    import torch

    torch_device = torch.cuda.current_device
    return {
        "state": vars(tuner),
        **triton_launch.launch_names(jit, _JIT_RUN),
        "configs": tuner.configs,
        "driver": driver,
        "own_driver": driver.active,
        "torch_device": torch_device,
        "quick_device": getattr(torch._C, "_cuda_getDevice", torch_device),
        "wide": _wide,
        "PIN": PIN,
        "plain": fast_path_codegen.plain_types(),
        "Heuristics": Heuristics,
        "heuristics_run": _HEURISTICS_RUN,
        "function": FunctionType,
        "simple_grid": None,
        "sizes": _sizes,
    }


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> Any:
    return compile(source, "<safetune launch>", "exec")


def _sizes(grid: Any) -> tuple[Any, Any, Any]:
    dimensions = len(grid)
    return grid[0], grid[1] if dimensions > 1 else 1, grid[2] if dimensions > 2 else 1


def _wide(value: int) -> Any:
    return value % 16 == 0, value < 1 << 63, -(1 << 63) <= value < 1 << 64
