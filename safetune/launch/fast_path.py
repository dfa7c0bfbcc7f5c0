"""The fast path: launches a compiled kernel without Triton's own path, by generated code.

Each kind of call (number of positional arguments, names of the keywords, type of each argument) has
straight-line code of its own. The code reads the properties of the arguments on which the choice
and the binary depend, at least as finely as Triton does, looks up the compiled kernel by them, and
calls its launcher. It returns None for a call that it does not know, and where a hook or a switch
needs Triton's own path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.autotuner import Config, Heuristics
from triton.runtime.jit import JITFunction

from safetune import triton_internals
from safetune.launch import fast_path_codegen, scratch_memory
from safetune.launch.call_shape import PIN, CallShape, Tuner, named_arguments
from safetune.settings import Settings

#: The most compiled kernels that one kind of call remembers. After that all are forgotten at once,
#: and found again.
_MOST_LAUNCHES = 4096

#: A kind of call: positional types, keyword names, keyword types.
Kind = tuple[Any, ...]
Launch = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class FastPath:
    """The code for one kind of call of one kernel, and the compiled kernels that it knows.

    Attributes:
        launch: (grid, args, kwargs) → the compiled kernel that was launched, or None. Its attribute
            `fast_path` is this object.
        in_the_way: whether a hook or a switch needs Triton's own path now.
    """

    def __init__(
        self,
        tuner: Tuner,
        jit: Any,
        heuristics: Mapping[str, Any],
        shape: CallShape,
        source: fast_path_codegen.Source,
    ) -> None:
        self._tuner = tuner
        self._shape = shape
        self._single = source.single
        defaults = {parameter.name: parameter.default for parameter in jit.params}
        self._absent = {name: defaults[name] for name in source.absent}
        self._jit = jit
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._chosen: dict[Any, dict[str, Any]] = {}  # for heuristics, which see a config's options
        self._heuristics = tuple(heuristics)
        names = {
            **_names(tuner, jit),
            "known": self._known,
            "chosen": self._chosen,
            "heuristics": tuple(heuristics.values()),
        }
        exec(_compiled(source.text()), names)
        self.launch: Launch = names["launch"]
        self._choice_key: Callable[..., Any] = names["choice_key"]
        self.in_the_way: Callable[[], bool] = names["in_the_way"]
        self.launch.__dict__["fast_path"] = self

    def remember(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: Config,
        kernel: Any,
        values: Mapping[str, Any],
    ) -> None:
        """Launch this kernel for such calls from now on, if that can be done without Triton.

        Args:
            values: the values that the heuristics set for the launch of this kernel, by name. For
                another launch of the same arguments they may set others.
        """
        tuner = self._tuner
        if type(kernel) is not CompiledKernel or config.pre_hook is not None or self.in_the_way():
            return
        if (len(tuner.configs) == 1) is not self._single:
            return  # configs were added or removed in place
        if not self._single and tuner.states.hits.get(self._shape.key(args, kwargs)) is not config:
            return  # for this call only: another one was rejected, or a graph captured it
        options = config.all_kwargs()
        rest = [options.get(name, default) for name, default in self._absent.items()]
        key = self._choice_key(args, kwargs)
        how = triton_internals.launcher(kernel, scratch_memory.launch)
        if key is None or how is None:
            return
        made_in = triton_internals.compiled_on(self._jit, key[0])
        if len(self._known) >= _MOST_LAUNCHES:
            self._known.clear()
            self._chosen.clear()
        if self._heuristics:
            plain = fast_path_codegen.plain_types().issuperset(map(type, values.values()))
            if not plain or tuple(values) != self._heuristics:
                return
            self._chosen[key] = options
            key = (key, *(part for value in values.values() for part in (value, value.__class__)))
        self._known[key] = (kernel, config, made_in, how.run, how.head, how.together, rest)


def make(tuner: Tuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FastPath | None:
    """Return the fast path for calls like this one; None where Triton's own path is needed."""
    jit, heuristics = _below(tuner.fn)
    if (
        not Settings.current().fast_launch
        or type(jit) is not JITFunction
        or any(config.pre_hook for config in tuner.configs)
        or tuner.states.tuner is not tuner  # a copy does not get to know when a choice changes
        # Another back end may specialise a binary on more of a tensor than the code here reads.
        or triton_internals.target_name() != "cuda"
        or not triton_internals.has_hook_chains()
        or any(each.kind is each.VAR_POSITIONAL for each in jit.signature.parameters.values())
    ):
        return None
    names = [parameter.name for parameter in jit.params]
    if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
        return None
    values = named_arguments(names, args, kwargs)
    if heuristics.keys() & values.keys():
        return None
    shape = tuner.shapes.of(args, kwargs)
    source = fast_path_codegen.Source(tuner, jit, tuple(heuristics), shape, len(args), values)
    return FastPath(tuner, jit, heuristics, shape, source) if source.possible else None


def _below(kernel: Any) -> tuple[Any, dict[str, Any]]:
    """Return the kernel below a tuner's heuristics, and these in the order in which they run."""
    found: dict[str, Any] = {}
    while type(kernel) is Heuristics and not found.keys() & kernel.values.keys():
        found.update(kernel.values)
        kernel = kernel.fn
    return kernel, found


#: As it was before a tool could replace it.
_JIT_RUN = triton_internals.own_jit_run()


def _names(tuner: Tuner, jit: Any) -> dict[str, Any]:
    """Return the names that the generated code refers to, with the switches as they are now."""
    import torch

    torch_device = torch.cuda.current_device
    return {
        "state": vars(tuner),
        **triton_internals.launch_names(jit, _JIT_RUN),
        "configs": tuner.configs,
        "driver": driver,
        "own_driver": driver.active,
        "torch_device": torch_device,
        "quick_device": getattr(torch._C, "_cuda_getDevice", torch_device),
        "wide": _wide,
        "PIN": PIN,
        "plain": fast_path_codegen.plain_types(),
    }


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> Any:
    return compile(source, "<safetune launch>", "exec")


def _wide(value: int) -> Any:
    return value % 16 == 0, value < 1 << 63, -(1 << 63) <= value < 1 << 64
