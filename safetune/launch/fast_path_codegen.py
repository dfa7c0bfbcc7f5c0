"""The source of a fast path: reads a call's arguments, looks up the kernel, calls its launcher."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import triton

from safetune import triton_launch
from safetune.launch.call_shape import CallShape, Tuner

#: The attribute that is true for a tensor whose address a kernel can use. It is false for a tensor
#: in pinned host memory, which is left to Triton: Triton asks the driver.
ON_DEVICE = "is_cuda"

#: The properties of an integer that Triton specialises on, and more for those over 32 bits.
_INTEGER = "(2 if {0} == 1 else not {0} & 15) if -0x80000000 <= {0} <= 0x7fffffff else wide({0})"

#: The property `driver.active` sets `_active` where it is None.
_DEVICE = (
    "if driver._active is not own_driver:",
    "    return None",
    "if own_driver.get_current_device is torch_device:",
    "    device = quick_device()",
    "else:",
    "    device = own_driver.get_current_device()",
)

#: What is known of a launch; the first of them only where no heuristics are below the tuner.
_LAUNCHED = "config, settings, as_launched, "
_FOUND = "binary, run, head, together, rest, kernel"

#: The address of a tensor whose memory was freed is its offset in that memory. Addresses of devices
#: are larger than this; one that is not is left to the checks of the caller.
_LOW = 0xFFFFFFFF


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
        self._present = list(values)  # by name alone: a value may be a tensor
        self._tensors: list[int] = []
        self._parts: list[str] = []
        self._pinned: list[int] = []
        self.single = len(tuner.configs) == 1
        #: What was read to find out that nothing reads the pinned names.
        self.facts = tuner.basis.text if shape.pins else ()
        self.possible, plain = True, plain_types()
        for index, parameter in enumerate(jit.params):
            if parameter.name not in values:
                continue
            value, variable = values[parameter.name], f"v{index}"
            if parameter.name in shape.pins and shape.pinnable(parameter.name, value):
                self._pinned.append(index)
                self.possible &= not hasattr(value, "get_device")  # it may be on another device
            elif parameter.is_constexpr or parameter.name in tuner.key_names:
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
        launched = "" if self._heuristics else _LAUNCHED
        return f"""
def in_the_way():
    return bool({triton_launch.IN_THE_WAY})

def choice_key(a, k):
{self._unpack()}
    return {self._key()}

def launch(grid, a, k):
    if {triton_launch.IN_THE_WAY}:
        return None
    if {self._refused}:
        return None
{self._unpack(asked=self._others)}
    key = {self._key()}
{self._set_by_heuristics()}
    found = known.get(key)
    if found is None:
        {self._missed}
    {launched}{_FOUND} = found
    if not ({self._still_known}):
        {self._missed}
    {self._rest}
    stream = own_driver.get_current_stream(device)
    state["best_config"] = config
{self._grid()}
    dimensions = len(grid)
    y = grid[1] if dimensions > 1 else 1
    z = grid[2] if dimensions > 2 else 1
    if together:
        run(grid[0], y, z, stream, *head, ({self._arguments}))
    else:
        run(grid[0], y, z, stream, *head, {self._arguments})
    return kernel
"""

    def bound_text(self, parts: Collection[int]) -> str:
        """Return the code of `bind`, with offsets for the arguments in `parts`.

        See `FastPath.bind`. It contains no numbers of a particular call, so it is compiled once.
        """
        # Those after the last tensor are None, as in every call of this kind.
        given = ", ".join(f"v{i}" for i in range(max(self._tensors) + 1))
        places = {i: f" + offset{i}" if i in parts else "" for i in self._tensors}
        addresses = "\n".join(
            f"            p{i} = v{i}.data_ptr(){place}" for i, place in places.items()
        )
        offsets = "".join(f"offset{i}, " for i in parts)
        device = "\n".join(f"        {line}" for line in _DEVICE)
        in_memory = " and ".join(f"p{i} > {_LOW}" for i in self._tensors)
        return f"""
def bind(grid, a, k, observers, owner, own_run, offsets):
    [{offsets}] = offsets
{self._unpack()}
    found = known.get({self._key()})
    if found is None or ({self._bits}) & 15:
        return None
    {_LAUNCHED}{_FOUND} = found
    {self._rest}
    if grid.__class__ is not tuple:
        if not learn(grid):
            return None
        grid = grid({{{self._named}}})
    x, y, z = sizes(grid)
    launches, own_device = state["_launches"], device

    def launch({given}, *absent):
        if {triton_launch.IN_THE_WAY}:
            return None
        if {self._refused} or state["_launches"] is not launches:
            return None
        if observers.active or owner.run is not own_run:
            return None
        try:
{addresses}
        except RuntimeError:  # one of torch.vmap's
            return None
{device}
        if device != own_device or ({self._bits}) & 15 or not ({in_memory} and {self._still_known}):
            return None
        stream = own_driver.get_current_stream(device)
        state["best_config"] = config
        if together:
            run(x, y, z, stream, *head, ({self._arguments}))
        else:
            run(x, y, z, stream, *head, {self._arguments})
        return kernel

    return launch
"""

    @property
    def can_be_bound(self) -> bool:
        """Whether each launch needs to check only the addresses of its tensors."""
        return bool(self._tensors) and not (self._heuristics or self._pinned)

    @property
    def _arguments(self) -> str:
        return "".join(f"{self._argument(i)}, " for i in range(len(self._names)))

    @property
    def _named(self) -> str:
        return ", ".join(f"{name!r}: v{i}" for i, name in enumerate(self._names))

    @property
    def _rest(self) -> str:
        """Write the values that a config or a default has set."""
        absent = "".join(f"v{self._names.index(name)}, " for name in self.absent)
        return f"{absent}= rest" if absent else ""

    @property
    def _refused(self) -> str:
        others = [f"read{i}(argument{i}) is not value{i}" for i in range(len(self.facts))]
        return " or ".join([triton_launch.REFUSED, *others])

    @property
    def _still_known(self) -> str:
        compiled = f"{triton_launch.COMPILED} is kernel"
        return compiled if self._heuristics else f"{compiled} and not ({self._changed})"

    def _grid(self) -> str:
        """Write the call of a grid function."""
        named = self._named
        put_back = "".join(f"meta[{self._names[i]!r}] = " for i in self._pinned)
        return f"""
    if grid.__class__ is not tuple:
        if grid.__class__ is function and grid.__code__ is simple_grid:
            grid = grid({{{named}}})
        elif callable(grid):
            if learn(grid):
                grid = grid({{{named}}})
            else:  # it may change what is launched
                meta = {{{named}}}
                grid = grid(meta)
                {put_back}PIN
                meta = (*meta.values(),)
                run(*sizes(grid), stream, *head, *((meta,) if together else meta))
                return kernel
"""

    @property
    def _changed(self) -> str:
        """Whether the config of a launch, or the list that it is from, is another one now."""
        configs = "len(configs) != 1 or configs[0] is not config"
        return f"settings != as_launched or {configs if self.single else 'len(configs) < 2'}"

    @property
    def _missed(self) -> str:
        """Leave a launch to Triton, which is not to call the heuristics a second time."""
        if not self._heuristics:
            return "return None"
        values = ", ".join(f"{name!r}: {variable}" for name, variable in self._heuristics)
        return f"return by_triton(config, {{{values}}}, grid, a, k)"

    @property
    def absent(self) -> list[str]:
        """The parameters that a config or a default sets."""
        set_by_heuristics = dict(self._heuristics)
        return [
            each for each in self._names if not (self._given(each) or each in set_by_heuristics)
        ]

    def _set_by_heuristics(self) -> str:
        """Write the code of `Heuristics.run`, after the choice and before Triton's part."""
        if not self._heuristics:
            return ""
        given = [
            f"{name!r}: {'PIN' if i in self._pinned else f'v{i}'}"
            for i, name in enumerate(self._names)
            if self._given(name)
        ]
        extra = "**options, 'grid': grid, 'warmup': False"
        lines = [
            "if Heuristics.run is not heuristics_run or below != as_made:",
            "    return None",
            "found = chosen.get(key)",
            "if found is None:",
            "    return None",
            "config, settings, as_launched, options = found",
            f"if {self._changed}:",
            "    return None",
            f"named = {{{', '.join([*given, extra])}}}",
        ]
        variables = [variable for _, variable in self._heuristics]
        for number, (name, variable) in enumerate(self._heuristics):
            lines.append(f"{variable} = named[{name!r}] = heuristic{number}({{**named}})")
        lines += [
            f"if not plain.issuperset(({''.join(f'{each}.__class__, ' for each in variables)})):",
            f"    {self._missed}",
            f"key = (key, {''.join(f'{each}, {each}.__class__, ' for each in variables)})",
        ]
        return "\n".join(f"    {line}" for line in lines)

    def _given(self, name: str) -> bool:
        return name in self._present

    def _argument(self, index: int) -> str:
        if index in self._pinned:
            return "PIN"
        # As an integer: Triton would ask the driver whether a tensor's address is a device's.
        return f"p{index}" if index in self._tensors else f"v{index}"

    @property
    def _first(self) -> int:
        """The tensor whose device is part of the key."""
        return min(self._tensors, key=lambda i: self._present.index(self._names[i]))

    @property
    def _others(self) -> list[int]:
        return [i for i in self._tensors if i != self._first]

    @property
    def _bits(self) -> str:
        """The bits that are set in any address."""
        return " | ".join(f"p{i}" for i in self._tensors)

    def _unpack(self, asked: Sequence[int] | None = None) -> str:
        """Write the code that reads the arguments; by default each tensor is asked whether to."""
        lines = []
        if self._positional:
            lines.append("".join(f"v{i}, " for i in range(self._positional)) + "= a")
        lines += [
            f"v{i} = k[{name!r}]"
            for i, name in enumerate(self._names)
            if i >= self._positional and self._given(name)
        ]
        if self._tensors:
            on = " and ".join(
                f"v{i}.{ON_DEVICE}" for i in (self._tensors if asked is None else asked)
            )
            lines += [f"if not ({on}):", "    return None"] if on else []
            lines.append("try:")
            lines += [f"    p{i} = v{i}.data_ptr()" for i in self._tensors]
            lines += ["except RuntimeError:  # one of torch.vmap's", "    return None"]
        lines += _DEVICE
        return "\n".join(f"    {line}" for line in lines)

    def _key(self) -> str:
        parts = ["device", *self._parts, *(f"v{i}.dtype" for i in self._tensors)]
        if self._tensors:
            each = "".join(f"not p{i} & 15, " for i in self._tensors)
            parts += [f"v{self._first}.get_device()", f"({self._bits}) & 15 and ({each})"]
        return f"({', '.join(parts)},)"


def _is_tensor(value: Any) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def plain_types() -> frozenset[type]:
    """Return the types whose equal values are the same constant, for Triton and in a key."""
    import torch

    return frozenset({int, bool, float, str, type(None), torch.dtype, triton.language.dtype})
