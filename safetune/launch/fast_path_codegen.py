"""The source of a fast path: reads a call's arguments, looks up the kernel, calls its launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton

from safetune import triton_internals
from safetune.launch.call_shape import CallShape, Tuner

#: The attribute that is true for a tensor whose address a kernel can use. It is false for a tensor
#: in pinned host memory, which is left to Triton: Triton asks the driver.
ON_DEVICE = "is_cuda"

#: The properties of an integer that Triton specialises on, and more for those over 32 bits.
_INTEGER = "(2 if {0} == 1 else not {0} & 15) if -0x80000000 <= {0} <= 0x7fffffff else wide({0})"

_DEVICE = (
    "active = driver.active",
    "if active is not own_driver:",
    "    return None",
    "current = active.get_current_device",
    "device = quick_device() if current is torch_device else current()",
)


class Source:
    """Writes the code of a fast path. Parameter i is `v{i}` there, and its address `p{i}`."""

    def __init__(
        self,
        tuner: Tuner,
        jit: Any,
        heuristics: Sequence[str],
        shape: CallShape,
        positional: int,
        values: Mapping[str, Any],
    ) -> None:
        self._names = [parameter.name for parameter in jit.params]
        self._heuristics = [
            (name, f"v{self._names.index(name)}" if name in self._names else f"h{number}")
            for number, name in enumerate(heuristics)
        ]
        self._positional = positional
        self._values = values
        self._tensors: list[int] = []
        self._parts: list[str] = []
        self._pinned: list[int] = []
        self.single = len(tuner.configs) == 1
        self.possible, plain = True, plain_types()
        for index, parameter in enumerate(jit.params):
            if parameter.name not in values:
                continue
            value, variable = values[parameter.name], f"v{index}"
            if parameter.name in shape.pins and shape.pinnable(parameter.name, value):
                self._pinned.append(index)
            elif parameter.is_constexpr or parameter.name in tuner.keys:
                self._parts.append(variable)
                self.possible &= type(value) in plain
            elif _is_tensor(value) and parameter.annotation_type[:1] in ("", "*"):
                self._tensors.append(index)  # for a number, Triton takes one out of the tensor
            elif type(value) is int:
                self._parts.append(_INTEGER.format(variable))
            else:
                self.possible &= type(value) in (float, bool, type(None))

    def text(self) -> str:
        """Return the code."""
        arguments = "".join(f"{self._argument(i)}, " for i in range(len(self._names)))
        named = ", ".join(f"{name!r}: v{i}" for i, name in enumerate(self._names))
        same = "len(configs) == 1 and configs[0] is config" if self.single else "len(configs) > 1"
        absent = "".join(f"v{self._names.index(name)}, " for name in self.absent)
        in_the_way = triton_internals.in_the_way()
        return f"""
def in_the_way():
    return bool({in_the_way})

def choice_key(a, k):
{self._unpack()}
    return {self._key()}

def launch(grid, a, k):
    if {in_the_way}:
        return None
    if {triton_internals.REFUSED}:
        return None
{self._unpack()}
    key = {self._key()}
{self._set_by_heuristics()}
    found = known.get(key)
    if found is None:
        return None
    kernel, config, made_in, run, head, together, rest = found
    if config.pre_hook is not None or {triton_internals.COMPILED} is not made_in or not ({same}):
        return None
    {f"{absent}= rest" if absent else ""}
    stream = active.get_current_stream(device)
    state["best_config"] = config
    if grid.__class__ is not tuple and callable(grid):
        grid = grid({{{named}}})
    dimensions = len(grid)
    y = grid[1] if dimensions > 1 else 1
    z = grid[2] if dimensions > 2 else 1
    if together:
        run(grid[0], y, z, stream, *head, ({arguments}))
    else:
        run(grid[0], y, z, stream, *head, {arguments})
    return kernel
"""

    @property
    def absent(self) -> list[str]:
        """The parameters that a config or their default sets."""
        set_by_heuristics = dict(self._heuristics)
        return [
            each for each in self._names if not (self._given(each) or each in set_by_heuristics)
        ]

    def _set_by_heuristics(self) -> str:
        """Write what `Heuristics.run` does, after the choice and before Triton's part."""
        if not self._heuristics:
            return ""
        given = [
            f"{name!r}: {'PIN' if i in self._pinned else f'v{i}'}"
            for i, name in enumerate(self._names)
            if self._given(name)
        ]
        extra = "**options, 'grid': grid, 'warmup': False"
        lines = [
            "options = chosen.get(key)",
            "if options is None:",
            "    return None",
            f"named = {{{', '.join([*given, extra])}}}",
        ]
        variables = [variable for _, variable in self._heuristics]
        for number, (name, variable) in enumerate(self._heuristics):
            lines.append(f"{variable} = named[{name!r}] = heuristics[{number}]({{**named}})")
        lines += [
            f"if not plain.issuperset(({''.join(f'{each}.__class__, ' for each in variables)})):",
            "    return None",
            f"key = (key, {''.join(f'{each}, {each}.__class__, ' for each in variables)})",
        ]
        return "\n".join(f"    {line}" for line in lines)

    def _given(self, name: str) -> bool:
        return name in self._values

    def _argument(self, index: int) -> str:
        if index in self._pinned:
            return "PIN"
        # As an integer: Triton would ask the driver whether a tensor's address is a device's.
        return f"p{index}" if index in self._tensors else f"v{index}"

    def _unpack(self) -> str:
        lines = []
        if self._positional:
            lines.append("".join(f"v{i}, " for i in range(self._positional)) + "= a")
        lines += [
            f"v{i} = k[{name!r}]"
            for i, name in enumerate(self._names)
            if i >= self._positional and self._given(name)
        ]
        if self._tensors:
            off = " and ".join(f"v{i}.{ON_DEVICE}" for i in self._tensors)
            lines += [f"if not ({off}):", "    return None"]
            lines.append("try:")
            lines += [f"    p{i} = v{i}.data_ptr()" for i in self._tensors]
            lines += ["except RuntimeError:  # one of torch.vmap's", "    return None"]
        lines += _DEVICE
        return "\n".join(f"    {line}" for line in lines)

    def _key(self) -> str:
        parts = ["device", *self._parts, *(f"v{i}.dtype" for i in self._tensors)]
        if self._tensors:
            first = min(self._tensors, key=lambda i: list(self._values).index(self._names[i]))
            each = "".join(f"not p{i} & 15, " for i in self._tensors)
            every = " | ".join(f"p{i}" for i in self._tensors)
            parts += [f"v{first}.get_device()", f"({every}) & 15 and ({each})"]
        return f"({', '.join(parts)},)"


def _is_tensor(value: Any) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def plain_types() -> frozenset[type]:
    """Return the types whose equal values are the same constant, for Triton and in a key."""
    import torch

    return frozenset({int, bool, float, str, type(None), torch.dtype, triton.language.dtype})
