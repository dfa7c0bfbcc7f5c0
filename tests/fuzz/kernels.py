"""Random kernels, as data and as the text of a module.

A `Spec` is drawn from a seed alone. Its module is executed once for each side, so that the two
share no object. Functions in it append what they are called with to `LOG`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

#: The number of elements that a kernel reads and writes.
SIZE = 64

#: Ordinary names, then names that Triton's launch, safetune's or the generated code use themselves.
NAMES = (
    *("n", "m", "stride", "T", "scale", "eps", "flag", "D", "U", "bias"),
    *(
        "run",
        "config",
        "key",
        "kernel",
        "known",
        "launch",
        "args",
        "kwargs",
        "values",
        "fn",
        "named",
    ),
    *(
        "device",
        "active",
        "stream",
        "rest",
        "head",
        "found",
        "chosen",
        "heuristics",
        "PIN",
        "plain",
    ),
    *("tuner", "state", "wide", "a", "k", "p2", "v3", "jit", "driver", "name", "index", "shape"),
    *("self", "grid", "warmup"),
)

#: Triton also takes these for launch options. Each config sets one of the last, as it sets `BLOCK`.
SWITCH_OPTIONS = ("debug", "launch_pdl", "enable_fp_fusion", "launch_cooperative_grid", "sched4reg")
CONFIG_OPTIONS = ("num_warps", "num_stages", "num_ctas")
OPTIONS = (*SWITCH_OPTIONS, "maxnreg", *CONFIG_OPTIONS)

#: Triton refuses these names as keywords: such arguments can be passed by position only.
BY_POSITION = ("self", "grid", "warmup", "device", "stream")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        kind: pointer, optional (a pointer or None), integer, number, flag, constant, switch (a
            constant that is True or False), or registers (a constant that is a limit of them).
        read: by the `body`, by a `callee`, passed to a callee that `ignores` it, or "".
        default: as text; "" without one.
        set_by: "" or what sets it: a heuristic `below` or `above` the tuner, or each `config`.
    """

    name: str
    kind: str
    read: str = "body"
    annotation: str = ""
    default: str = ""
    keyword_only: bool = False
    set_by: str = ""


@dataclass(frozen=True)
class Heuristic:
    """A heuristic for one parameter or launch option.

    Attributes:
        kind: `pick` (by the values that it reads), `toggle` (another value at each call), `whole`
            (it also looks at all arguments) or `option` (for maxnreg).
        reads, other_reads: what it reads, and what another function reads that may replace it.
    """

    target: str
    kind: str
    reads: tuple[str, ...]
    other_reads: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """What is put around a kernel: heuristics, a `subclass` of them, or a `wrapper`."""

    kind: str
    heuristics: tuple[Heuristic, ...] = ()


@dataclass(frozen=True)
class ConfigSpec:
    """One config; `hook` says what its pre_hook reads: "", `all`, or a parameter."""

    block: int
    num_warps: int
    num_stages: int
    maxnreg: int | None
    hook: str = ""


@dataclass(frozen=True)
class Spec:
    """A kernel, its tuner and what is around them.

    Attributes:
        below, above: from the tuner outwards.
        metadata: what `launch_metadata` reads: "", `all` or a parameter.
        closure: whether the callees are closure variables.
        launcher: `plain`, or `cuda` for Triton's own launcher class.
    """

    parameters: tuple[Parameter, ...]
    key: tuple[str, ...]
    configs: tuple[ConfigSpec, ...]
    below: tuple[Layer, ...] = ()
    above: tuple[Layer, ...] = ()
    jit_subclass: bool = False
    metadata: str = ""
    closure: bool = False
    launcher: str = "plain"
    not_specialized: tuple[str, ...] = ()
    not_aligned: tuple[str, ...] = ()
    uses_global: bool = False
    phantom: str = "drop"

    def parameter(self, name: str) -> Parameter:
        """Return the parameter of this name."""
        return next(each for each in self.parameters if each.name == name)

    def heuristics(self, *places: str) -> Iterator[tuple[str, Heuristic]]:
        """Yield the heuristics of layers, with the name of the function of each."""
        for place in places or ("below", "above"):
            for number, layer in enumerate(getattr(self, place)):
                for heuristic in layer.heuristics:
                    yield f"{place}_{number}_{heuristic.target}", heuristic


def draw(rng: random.Random) -> Spec:
    """Return a random kernel."""
    names = rng.sample(NAMES[:10], rng.randint(2, 5))
    names += rng.sample(NAMES[10:], rng.choice((0, 0, 1, 2)))
    parameters = [_parameter(rng, name) for name in names]
    if rng.random() < 0.12:
        parameters.append(_option(rng))
    below, parameters = _layers(rng, "below", parameters)
    above, parameters = _layers(rng, "above", parameters)
    defaults = [each for each in parameters if each.default and not each.keyword_only]
    plain = [each for each in parameters if not each.default and not each.keyword_only]
    plain.sort(key=lambda each: each.name not in BY_POSITION)  # before what heuristics set
    last = [each for each in parameters if each.keyword_only]
    block = Parameter("BLOCK", "constant", annotation="tl.constexpr")
    x, out = (Parameter(name, "pointer", annotation=_pointer(rng)) for name in ("x", "out"))
    variables = [each.name for each in parameters if each.kind != "constant"]
    ordered = (x, out, *plain, block, *defaults, *last)
    # A tensor as a key name sends every launch through Triton.
    kinds = () if rng.random() < 0.08 else ("pointer", "optional")
    candidates = [p.name for p in (x, *parameters) if not p.set_by and p.kind not in kinds] or ["x"]
    key = tuple(rng.sample(candidates, rng.randint(1, len(candidates))))
    key = tuple(name for name in key if name not in ("grid", "warmup")) or ("x",)
    return Spec(
        ordered,
        key,
        _configs(rng, names),
        below,
        above,
        jit_subclass=rng.random() < 0.04,
        metadata=rng.choice((*[""] * 8, "all", names[0])),
        closure=rng.random() < 0.2,
        launcher=rng.choice(("plain", "plain", "cuda")),
        not_specialized=tuple(name for name in variables if rng.random() < 0.1),
        not_aligned=tuple(name for name in ("x", *variables) if rng.random() < 0.1),
        uses_global=rng.random() < 0.2,
        phantom=rng.choice(("drop", "drop", "drop", "keep")),
    )


def _option(rng: random.Random) -> Parameter:
    name = rng.choice(OPTIONS)
    kind = {"maxnreg": "registers"}.get(name, "switch")
    constant = rng.random() < 0.7
    if not constant:
        kind = {"switch": "flag", "registers": "integer"}[kind]
    if name in CONFIG_OPTIONS:
        kind = "constant" if constant else "integer"
    default = rng.choice(("", "", "64" if kind in ("registers", "integer") else "True"))
    set_by = "config" if name in CONFIG_OPTIONS else ""
    annotation = "tl.constexpr" if constant else ""
    return Parameter(name, kind, "", annotation, "" if set_by else default, set_by=set_by)


def _pointer(rng: random.Random) -> str:
    return rng.choice(("", "", "", "'*fp32'")) if rng.random() < 0.3 else ""


def _parameter(rng: random.Random, name: str) -> Parameter:
    kind = rng.choice(("integer", "integer", "number", "flag", "optional", "constant", "constant"))
    read = rng.choice(("body", "body", "callee", "ignores", "", ""))
    annotation = default = ""
    if kind == "constant":
        annotation = rng.choice(("tl.constexpr", "tl.constexpr", "'tl.constexpr'"))
    elif kind == "integer":
        annotation = rng.choice(("", "", "", "", "tl.int64", "'i32'"))
    elif kind == "number":
        annotation = rng.choice(("", "", "", "tl.float32", "'fp32'"))
    if rng.random() < 0.2:
        default = {"integer": "16", "number": "0.5", "flag": "True", "constant": "2"}.get(
            kind, "None"
        )
    keyword_only = rng.random() < 0.08 and name not in BY_POSITION
    return Parameter(name, kind, read, annotation, default, keyword_only)


def _layers(
    rng: random.Random, place: str, parameters: list[Parameter]
) -> tuple[tuple[Layer, ...], list[Parameter]]:
    """Return layers, and the parameters with those marked that their heuristics set."""
    layers = []
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        kind = rng.choice((*["heuristics"] * 14, "subclass", "wrapper"))
        found: list[Heuristic] = []
        for _ in range(0 if kind == "wrapper" else rng.choice((1, 1, 2))):
            taken = {each.target for layer in layers for each in (*layer.heuristics, *found)}
            heuristic = _heuristic(rng, place, parameters, taken | {each.target for each in found})
            if heuristic is not None:
                found.append(heuristic)
                parameters = [
                    replace(each, set_by=place) if each.name == heuristic.target else each
                    for each in parameters
                ]
        if found or kind == "wrapper":
            layers.append(Layer(kind, tuple(found)))
    return tuple(layers), parameters


def _heuristic(
    rng: random.Random, place: str, parameters: list[Parameter], taken: set[str]
) -> Heuristic | None:
    kind = rng.choice(("pick", "pick", "pick", "toggle", "whole", "option"))
    free = [
        each.name
        for each in parameters
        if each.kind in ("constant", "integer")
        and not each.set_by
        and each.name not in (*BY_POSITION, *taken)
    ]
    scalars = [
        each.name
        for each in parameters
        if each.kind not in ("pointer", "optional")
        and each.name not in BY_POSITION
        and (not each.default or rng.random() < 0.1)
    ]
    readable = [name for name in scalars if name not in free] or ["x"]
    readable += [name for name in taken if name in scalars]  # of another heuristic: a chain
    if place == "below":
        readable.append("BLOCK")
    reads, other = (
        tuple(rng.sample(readable, min(len(readable), rng.choice((1, 1, 2))))) for _ in "ab"
    )
    if kind == "option":
        return (
            None
            if place == "above" or "maxnreg" in taken
            else Heuristic("maxnreg", kind, reads, other)
        )
    return Heuristic(rng.choice(free), kind, reads, other) if len(free) > 1 else None


def _configs(rng: random.Random, names: list[str]) -> tuple[ConfigSpec, ...]:
    found: list[ConfigSpec] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        config = ConfigSpec(
            rng.choice((16, 32, 64)),
            rng.choice((1, 2, 4)),
            rng.choice((2, 3)),
            rng.choice((None, None, None, 64)),
            rng.choice((*[""] * 40, "all", names[0])),
        )
        if config not in found:
            found.append(config)
    return tuple(found)


# The text of a module.

_HEAD = """\
import zlib

import triton
import triton.language as tl
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import KernelInterface

COUNTS = {{}}
SCALE: tl.constexpr = tl.constexpr(2)


def pick(of, *values):
    texts = [repr(value) for value in values if not hasattr(value, "data_ptr")]
    return of[zlib.crc32(repr(texts).encode()) % len(of)]


class Subclass(Heuristics):
    def run(self, *args, **kwargs):
        LOG.append(("subclass", {{**dict(zip(self.arg_names, args)), **kwargs}}))
        return super().run(*args, **kwargs)


class Wrapper(KernelInterface):
    def __init__(self, fn):
        self.fn, self.arg_names = fn, fn.arg_names

    def run(self, *args, **kwargs):
        LOG.append(("wrapper", {{**dict(zip(self.arg_names, args)), **kwargs}}))
        return self.fn.run(*args, **kwargs)


class Below(Jit):
    def run(self, *args, **kwargs):
        LOG.append(("jit subclass", {{**dict(zip(self.arg_names, args)), **kwargs}}))
        return super().run(*args, **kwargs)

"""

#: How a body reads a parameter `{p}`, by kind.
_READS = {
    "integer": "v += {p}",
    "number": "v += {p}",
    "flag": "v += tl.where({p}, 1.0, 2.0)",
    "optional": "if {p} is not None:\n        v += tl.load({p} + o, mask=o < 64, other=0)",
    "pointer": "v += tl.load({p} + o, mask=o < 64, other=0)",
    "switch": "if {p}:\n        v += 7",
    "constant": "if {p} == 2:\n        v += 3\n    if {p} == 16:\n        v *= 2",
    "registers": "if {p} == 32:\n        v += 9",
}


def text_of(spec: Spec) -> str:
    """Return the text of a kernel's module; `LOG`, `jit` and `Jit` are put into it before."""
    parts = [_HEAD.format()]
    parts += [_function_text(name, heuristic) for name, heuristic in spec.heuristics()]
    for what in {spec.metadata, *(config.hook for config in spec.configs)} - {""}:
        parts.append(_hook_text(what))
    callees = [each for each in spec.parameters if each.read in ("callee", "ignores")]
    callee_texts = [
        _callee_text(f"part_{each.name}{suffix}", each, reads)
        for each in callees
        for suffix, reads in (("", each.read == "callee"), ("_other", each.read != "callee"))
    ]
    parameters = ", ".join(_parameter_texts(spec))
    bodies = [
        f"def body({parameters}):\n{_body(spec, everything=False)}",
        f"def other({parameters}):\n{_body(spec, everything=True)}",
    ]
    if spec.closure:
        inner = "\n".join(_indented(part) for part in [*callee_texts, *bodies])
        names = ", ".join(["body", "other", *(f"part_{each.name}_other" for each in callees)])
        parts.append(f"def make():\n{inner}\n    return {names}\n\n{names} = make()\n")
    else:
        parts += [*callee_texts, *bodies]
    return "\n".join([*parts, _launch_text(spec)])


def _launch_text(spec: Spec) -> str:
    """Return a launch to be read: without one, names that nothing reads may stand for others."""
    names = [each.name for each in spec.parameters if each.name != "BLOCK" and not each.set_by]
    passed = ", ".join(f"{name}=given_{name}" for name in names)
    return f"def launched({', '.join(f'given_{n}' for n in names)}):\n    body[(1,)]({passed})\n"


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _parameter_texts(spec: Spec) -> Iterator[str]:
    star = False
    for each in spec.parameters:
        if each.keyword_only and not star:
            star = True
            yield "*"
        annotation = f": {each.annotation}" if each.annotation else ""
        yield f"{each.name}{annotation}" + (f"={each.default}" if each.default else "")


def _body(spec: Spec, everything: bool) -> str:
    lines = [
        "o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        f"v = tl.load(x + o, mask=o < {SIZE}, other=0).to(tl.float32)",
    ]
    for each in spec.parameters:
        if each.name in ("x", "out", "BLOCK"):
            continue
        if each.read in ("callee", "ignores"):
            lines.append(f"v = part_{each.name}(v, o, {each.name})")
        if each.read == "body" or (everything and not each.read):
            lines.append(_READS[each.kind].format(p=each.name))
    if spec.uses_global:
        lines.append("v *= SCALE")
    lines += ["v += 0", f"tl.store(out + o, v, mask=o < {SIZE})"]
    return "".join(f"    {line}\n" for line in lines)


def _callee_text(name: str, parameter: Parameter, reads: bool) -> str:
    annotation = ": tl.constexpr" if parameter.kind == "constant" else ""
    snippet = _READS[parameter.kind].format(p="p") if reads else "v += 0"
    return f"@jit\ndef {name}(v, o, p{annotation}):\n    {snippet}\n    return v\n"


def source_that_reads(spec: Spec, source: str) -> str:
    """Return a kernel's source with a line that reads what its body does not."""
    unread = [each for each in spec.parameters if not each.read]
    lines = "\n    ".join(_READS[each.kind].format(p=each.name) for each in unread)
    return source.replace("v += 0", lines or "v += 1")


def _function_text(name: str, heuristic: Heuristic) -> str:
    return "\n".join(
        _heuristic_text(function, heuristic, reads)
        for function, reads in ((name, heuristic.reads), (f"{name}_other", heuristic.other_reads))
    )


def _heuristic_text(name: str, heuristic: Heuristic, reads: tuple[str, ...]) -> str:
    read = ", ".join(f"args[{each!r}]" for each in reads)
    values = "(32, 64)" if heuristic.kind == "option" else "(1, 2, 16, 3, True, 48)"
    seen = "dict(args)" if heuristic.kind == "whole" else f"({read},)"
    lines = [f"LOG.append(({name!r}, {seen}))"]
    if heuristic.kind == "toggle":
        lines.append(f"COUNTS[{name!r}] = COUNTS.get({name!r}, 0) + 1")
        lines.append(f"return COUNTS[{name!r}] % 2")
    else:
        lines.append(f"return pick({values}, {read}, {name!r})")
    return f"def {name}(args):\n" + "".join(f"    {line}\n" for line in lines)


def _hook_text(what: str) -> str:
    seen = "dict(args)" if what == "all" else f"args[{what!r}]"
    return (
        f"def config_hook_{what}(args):\n    LOG.append(('config_hook', {seen}))\n\n"
        f"def metadata_{what}(grid, metadata, args):\n"
        f"    LOG.append(('metadata', tuple(grid), {seen}))\n    return {{'flops': 1}}\n"
    )
