"""Random sequences of calls and of changes between them, as data.

Each call is like one before, with a few respects changed: near misses, and hits. `FEATURES` has
every kind of change and every unusual way of calling; a sequence can be drawn without some of them,
and is then the same but for these.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safetune.triton_internals import version
from tests.fuzz import programs
from tests.fuzz.kernels import BY_POSITION, CONFIG_OPTIONS, OPTIONS, Parameter, Spec

#: Kinds of change, with how often each comes.
CHANGES = {
    "cache cleared": 3,
    "cache assigned": 1,
    "choices written": 2,
    "config in place": 3,
    "config hook in place": 1,
    "configs assigned": 1,
    "config appended": 1,
    "config removed": 1,
    "keys assigned": 2,
    "debug": 2,
    "jit debug": 1,
    "instrumentation": 1,
    "inspection hook": 1,
    "fpsan": 1,
    "enter hook": 1,
    "exit hook": 1,
    "pre-run hook": 1,
    "instance run": 1,
    "class run": 1,
    "launcher class": 1,
    "heuristic replaced": 3,
    "heuristics assigned": 2,
    "heuristics kernel": 2,
    "heuristics run": 1,
    "kernel assigned": 2,
    "heuristics around kernel": 1,
    "source replaced": 2,
    "callee redefined": 2,
    "global changed": 1,
    "metadata assigned": 1,
    "binaries cleared": 2,
    "binaries of a device cleared": 1,
    "copied": 0.3,
    "deep copy": 0.3,
}

#: Changes that the same change undoes, soon: else they would be in the way for the rest.
SWITCHES = frozenset(
    {
        *("debug", "jit debug", "instrumentation", "inspection hook", "fpsan", "enter hook"),
        *("exit hook", "pre-run hook", "instance run", "class run", "heuristics run"),
        *("launcher class", "global changed", "config hook in place", "heuristics around kernel"),
    }
)

#: Ways of calling that are not in every sequence.
CALLS = (
    "grid changes its dict",
    "grid changes the device",
    "grid raises",
    "odd grids",
    "odd values",
    "missing and extra arguments",
    "options in the call",
    "run",
    "warmup",
    "devices",
)

#: Parts of a kernel.
PARTS = (
    "reserved names",
    "parameters named as options",
    "subclass below",
    "wrapper below",
    "jit subclass",
    "layers above",
    "stateful heuristics",
    "metadata",
    "config hooks",
    "launcher of CUDA",
    "ignored by callees",
)

#: Names that no kernel has. The tuner of Triton 3.6 also measures a config that is the only one
#: left, and fails where an argument is named `config`; safetune does not.
_TUNERS_OWN = ("config",) if version() < (3, 9) else ()

FEATURES = frozenset({*CHANGES, *CALLS, *PARTS})

#: Features in which safetune is known to differ from stock Triton, by mistake: now there are none.
NOT_YET: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Tensor:
    """A tensor: where in which memory it starts, and its class."""

    dtype: str
    start: int
    kind: str = "tensor"


@dataclass(frozen=True)
class Made:
    """An object of `programs.OBJECTS`."""

    kind: str
    number: int


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes:
        values: by parameter; one may be missing.
        positional: how many are passed by position, at most.
        order: how far the keywords are rotated.
        grid: its kind, and a number.
        options: launch options.
        how: `getitem`, `run` or `warmup`.
    """

    values: tuple[tuple[str, Any], ...]
    positional: int
    order: int
    grid: tuple[str, int]
    device: int = 0
    stream: int = 100
    options: tuple[tuple[str, Any], ...] = ()
    how: str = "getitem"


@dataclass(frozen=True)
class Change:
    """A change, of which `number` decides the details."""

    what: str
    number: int


POINTERS = [
    Tensor(dtype, start) for dtype in ("float32", "float16", "int32") for start in (0, 1, 4, 8)
]
ODD_POINTERS = [
    Tensor("float32", 0, "parameter"),
    Tensor("float32", 0, "subclass"),
    Tensor("float32", 0, "empty"),
    Tensor("float32", 0, "transposed"),
    Tensor("bool", 0),
    Tensor("int8", 1),
    None,
    64,
    72,
]
INTEGERS = [0, 1, 2, 3, 5, 7, 15, 16, 17, 32, 48, -1, -16]
WIDE = [
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**32,
    2**33 + 1,
    2**63 - 1,
    2**63,
    2**64,
    2**31 - 16,
]
NUMBERS = [0.0, 0.5, 1.0, -2.0, 16.0]
CONSTANTS = [0, 1, 2, 16, 3, "a", "b", True, False]
ODD_CONSTANTS = [None, 1.0, 0.0, -0.0, "dtype", (1, 2), (1, True)]
ODD_SCALARS = [
    True,
    False,
    1.0,
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    None,
    "s",
    Tensor("int32", 0),
]

_USUAL = {
    "pointer": POINTERS,
    "optional": [None, *POINTERS[:8]],
    "integer": INTEGERS,
    "number": NUMBERS,
    "flag": [True, False],
    "switch": [True, False],
    "registers": [32, 64],
    "constant": CONSTANTS,
}
_ODD = {
    "pointer": ODD_POINTERS,
    "optional": ODD_POINTERS,
    "integer": [*WIDE, *ODD_SCALARS],
    "number": [*WIDE[:3], *ODD_SCALARS, 1],
    "flag": [*ODD_SCALARS, 1, 0],
    "switch": [True, False],
    "registers": [32, 64, 96],
    "constant": ODD_CONSTANTS,
}

GRIDS = ("tuple", "tuple", "function", "function", "partial")
ODD_GRIDS = ("list", "integer", "empty", "four", "numpy")


def draw(rng: random.Random, spec: Spec, length: int) -> list[Call | Change]:
    """Return a random sequence for a kernel."""
    calls = [_call(rng, spec)]
    found: list[Call | Change] = [calls[0]]
    undone: dict[int, Change] = {}
    changes, weights = list(CHANGES), list(CHANGES.values())
    while len(found) < length:
        change = Change(rng.choices(changes, weights)[0], rng.randrange(1 << 16))
        wanted = rng.random() < 0.3
        call = _changed(rng, spec, rng.choice(calls[-4:]))
        calls.append(call)
        found += [undone.pop(at) for at in sorted(undone) if at <= len(found)]
        if wanted and change.what not in {each.what for each in undone.values()}:
            found.append(change)
            if change.what in SWITCHES:
                undone[len(found) + rng.randint(1, 5)] = change
        # Twice: the second time it is known.
        found += [call] * rng.choice((1, 2, 3, 3))
        if call.grid[0] == "device" or rng.random() < 0.03:
            found.append(replace(call, device=1 - call.device))
    return found


def allowed(
    sequence: Sequence[Call | Change], spec: Spec, off: Collection[str]
) -> list[Call | Change]:
    """Return a sequence without the features in `off`, for a kernel without them."""
    return [
        _plain(event, spec, off) if isinstance(event, Call) else event
        for event in sequence
        if isinstance(event, Call) or event.what not in off
    ]


def _call(rng: random.Random, spec: Spec) -> Call:
    values = {each.name: _value(rng, each) for each in spec.parameters if _is_given(rng, each)}
    return Call(
        tuple(values.items()),
        rng.randint(0, len(spec.parameters)),
        rng.randint(0, 3),
        _grid(rng),
    )


def _is_given(rng: random.Random, parameter: Parameter) -> bool:
    if parameter.name == "BLOCK" or parameter.set_by:
        return False
    # Triton gives a parameter named debug a value of its own.
    return not (parameter.default or parameter.name == "debug") or rng.random() < 0.6


def _value(rng: random.Random, parameter: Parameter) -> Any:
    token = zlib.crc32(repr(parameter).encode())
    if parameter.kind == "constant" and token % 3 == 0 and rng.random() < 0.7:
        # All of one kind, so that they meet.
        return Made(programs.OBJECTS[token // 3 % len(programs.OBJECTS)], rng.randrange(3))
    odd = rng.random() < 0.12
    return rng.choice((_ODD if odd else _USUAL)[parameter.kind])


def _grid(rng: random.Random) -> tuple[str, int]:
    kind = rng.choice(GRIDS)
    if rng.random() < 0.15:
        kind = rng.choice((*ODD_GRIDS, "changes", "changes", "device", "raises"))
    return kind, rng.randrange(6)


def _changed(rng: random.Random, spec: Spec, call: Call) -> Call:
    """Return a call that differs from another in few respects."""
    values = dict(call.values)
    for each in rng.sample(spec.parameters, rng.choice((0, 0, 0, 0, 1, 1, 2))):
        if not (each.name == "BLOCK" or each.set_by):
            values[each.name] = _value(rng, each)
    for each in rng.sample(spec.parameters, rng.choice((0, 0, 0, 0, 1))):
        if each.default:
            values.pop(each.name, None)
    call = replace(call, values=tuple(values.items()), options=(), how="getitem")
    if rng.random() < 0.02:  # too few, or what a config or a heuristic sets
        name = rng.choice(spec.parameters).name
        values = {key: value for key, value in values.items() if key != name} or {name: 1}
        values.update({} if name in dict(call.values) else {name: 16})
        call = replace(call, values=tuple(values.items()))
    respect = rng.random()
    if respect < 0.2:
        call = replace(call, positional=rng.randint(0, len(spec.parameters)))
    elif respect < 0.25:
        call = replace(call, order=rng.randint(0, 3))
    elif respect < 0.5:
        call = replace(call, grid=_grid(rng))
    elif respect < 0.57:
        call = replace(call, device=rng.choice((0, 0, 1)))
    elif respect < 0.6:
        call = replace(call, stream=rng.choice((100, 200)))
    elif respect < 0.63:
        option = (("maxnreg", 32), ("num_warps", 8), ("enable_fp_fusion", False), ("unknown", 1))
        call = replace(call, options=(rng.choice(option),))
    elif respect < 0.66:
        call = replace(call, how=rng.choice(("run", "run", "warmup")))
    return call


def _plain(call: Call, spec: Spec, off: Collection[str]) -> Call:
    """Return a call without the features in `off`."""
    grids = {
        "changes": "grid changes its dict",
        "device": "grid changes the device",
        "raises": "grid raises",
        **dict.fromkeys(ODD_GRIDS, "odd grids"),
    }
    if grids.get(call.grid[0]) in off:
        call = replace(call, grid=("function", call.grid[1]))
    if "devices" in off:
        call = replace(call, device=0)
    if "options in the call" in off:
        call = replace(call, options=())
    if call.how in off:
        call = replace(call, how="getitem")
    names = [each.name for each in spec.parameters]
    values = {name: value for name, value in call.values if name in names}
    for each in spec.parameters:
        if "missing and extra arguments" in off:
            if each.name == "BLOCK" or each.set_by:
                values.pop(each.name, None)
            elif not (each.default or each.name == "debug") and each.name not in values:
                values[each.name] = _USUAL[each.kind][0]
        if "odd values" in off and each.name in values:
            usual = _USUAL[each.kind]
            value = values[each.name]
            if (type(value), value) not in [(type(other), other) for other in usual]:
                values[each.name] = usual[0]
    return replace(call, values=tuple(values.items()))


def without(spec: Spec, off: Collection[str]) -> Spec:
    """Return a kernel without the features in `off`."""

    def keeps(layer: Any) -> bool:
        return f"{layer.kind} below" not in off

    names = _TUNERS_OWN
    if "reserved names" in off:
        names = (*names, *BY_POSITION)
    if "parameters named as options" in off:
        names = (*names, *OPTIONS)
    if names:
        parameters = tuple(each for each in spec.parameters if each.name not in names)
        spec = replace(
            spec, parameters=parameters, key=tuple(n for n in spec.key if n not in names)
        )
    if "jit subclass" in off:
        spec = replace(spec, jit_subclass=False)
    if "metadata" in off:
        spec = replace(spec, metadata="")
    if "launcher of CUDA" in off:
        spec = replace(spec, launcher="plain")
    if "config hooks" in off:
        spec = replace(spec, configs=tuple(replace(each, hook="") for each in spec.configs))
    if "ignored by callees" in off:
        parameters = tuple(
            replace(each, read="") if each.read == "ignores" else each for each in spec.parameters
        )
        spec = replace(spec, parameters=parameters)
    spec = replace(spec, below=tuple(filter(keeps, spec.below)))
    if "layers above" in off:
        spec = replace(spec, above=())
    if "stateful heuristics" in off:
        spec = replace(spec, below=tuple(map(_stateless, spec.below)))
        spec = replace(spec, above=tuple(map(_stateless, spec.above)))
    return _consistent(spec)


def _stateless(layer: Any) -> Any:
    pure = [replace(h, kind="pick") if h.kind == "toggle" else h for h in layer.heuristics]
    return replace(layer, heuristics=tuple(pure))


def _consistent(spec: Spec) -> Spec:
    """Mend what refers to a part that is gone."""
    names = {each.name for each in spec.parameters}
    targets = {h.target: place for place in ("below", "above") for _, h in spec.heuristics(place)}
    targets |= dict.fromkeys(CONFIG_OPTIONS, "config")

    def layer_of(layer: Any) -> Any:
        kept = []
        for each in layer.heuristics:
            if each.target in names or each.kind == "option":
                reads, other = (
                    tuple(n for n in read if n in names) or ("x",)
                    for read in (each.reads, each.other_reads)
                )
                kept.append(replace(each, reads=reads, other_reads=other))
        return replace(layer, heuristics=tuple(kept))

    def config_of(config: Any) -> Any:
        return replace(config, hook=config.hook if config.hook in {*names, "all"} else "")

    return replace(
        spec,
        parameters=tuple(replace(p, set_by=targets.get(p.name, "")) for p in spec.parameters),
        key=spec.key or ("x",),
        below=tuple(map(layer_of, spec.below)),
        above=tuple(map(layer_of, spec.above)),
        metadata=spec.metadata if spec.metadata in {*names, "all"} else "",
        configs=tuple(dict.fromkeys(map(config_of, spec.configs))),  # safetune drops equal ones
        not_specialized=tuple(n for n in spec.not_specialized if n in names),
        not_aligned=tuple(n for n in spec.not_aligned if n in names),
    )


def arguments(spec: Spec, call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments as it passes them, with tensors as data."""
    values = dict(call.values)
    args: list[Any] = []
    for number, each in enumerate(spec.parameters):
        needed = any(
            later.name in BY_POSITION and later.name in values
            for later in spec.parameters[number:]
            if not later.keyword_only
        )
        if (
            each.name not in values
            or each.keyword_only
            or (number >= call.positional and not needed)
        ):
            break
        args.append(values.pop(each.name))
    names = [name for name in values if name not in BY_POSITION]
    names = names[call.order :] + names[: call.order]
    return args, {**{name: values[name] for name in names}, **dict(call.options)}
