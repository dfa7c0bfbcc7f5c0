"""Programs that are really tuned, as data and as the text of a module.

The module is executed once for each side. Its kernel notes what it is launched with, and `bench`
plants a time for exactly that: so the best config of every key is known, and both sides have to
launch it. Values of arguments and of configs are anything that Triton takes: `VALUES` has each kind
with the text that makes the n-th of it, and the text that reads a number back from it.
"""

from __future__ import annotations

import functools
import linecache
import random
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

#: By kind of value: what makes number `n` of it, and what reads a number from a value `v`.
VALUES: dict[str, tuple[str, str]] = {
    "integer": ("n * 3 + 2", "v"),
    "float": ("n / 4", "int(v * 4)"),
    "text": ("f'text {n}'", "int(v[5:])"),
    "tuple": ("('a', n)", "v[1]"),
    "torch dtype": ("(torch.float16, torch.float32, torch.int64)[n]", "v.itemsize"),
    "triton dtype": ("(tl.float16, tl.float32, tl.int64)[n]", "v.primitive_bitwidth"),
    "function of a factory": ("factory(n)", "v()"),
    "jit function": ("jit_factory(n)", "v.fn(0)"),
    "constexpr function": ("triton.constexpr_function(factory(n))", "v.fn()"),
    "lambda": ("LAMBDAS[n]", "v()"),
    "equal lambda": ("TWINS[n]", "v()"),
    "partial": ("functools.partial(times, n, b=10)", "v()"),
    "bound method": ("Box(n).method", "v()"),
    "callable": ("Callable(n)", "v()"),
    "default": ("with_default(n)", "v()"),
    "function in a tuple": ("('a', (factory(n), 1))", "v[1][0]()"),
    "class": ("class_of(n)", "v.NUMBER"),
    "instance of a local class": ("class_of(n)()", "v.NUMBER"),
    "dataclass": ("Policy('p', n)", "v.factor"),
    "named tuple": ("Point('p', n)", "v.y"),
    "enum": ("list(Color)[n]", "v.value"),
    "frozenset": ("frozenset({f'a{n}', 'b', 'c', 'd', 'e'})", "int(min(v)[1:])"),
    "own repr": ("Quiet(n)", "v.n"),
    "slots": ("Slots(n)", "v.n"),
    "of a class of str": ("Text(f't{n}')", "int(v[1:])"),
    "array": ("Table(n)", "int(v.values[5000])"),
    "pattern": ("re.compile('a{%d}' % n)", "int(v.pattern[2:-1])"),
}

#: Kinds of objects, no two of which are equal; the same objects serve both sides of a launch.
OBJECTS = tuple(
    kind
    for kind in VALUES
    if kind not in ("integer", "float", "text", "torch dtype", "triton dtype", "equal lambda")
)

#: Kinds whose values differ by the text or the closure of a function or a class: that counts in
#: safetune's key also where the argument is not in `key`.
WITH_CODE = frozenset(
    {
        *("function of a factory", "jit function", "constexpr function", "lambda", "equal lambda"),
        *("default", "function in a tuple", "class", "instance of a local class"),
    }
)

#: By identity: the kind and the number of an object.
described: dict[int, tuple[str, int]] = {}

#: Kinds that JSON gives back as they were.
PLAIN = ("integer", "float", "text")

#: By kind of tensor: what makes it of memory `t`.
TENSORS = {
    "plain": "t",
    "requires_grad": "t.requires_grad_(t.is_floating_point())",
    "parameter": "torch.nn.Parameter(t, requires_grad=False)",
    "subclass": "t.as_subclass(Tagged)",
    "attribute": "tagged(t)",
    "slice": "torch.cat([t, t])[64:]",
    "expanded": "t[:1].expand(64)",
    "two axes": "t.view(8, 8)",
}

#: Facts of a tensor `x` and of what is around a call, as a heuristic may read them.
FACTS = (
    "int(x.requires_grad)",
    "getattr(x, 'scale_mode', 0)",
    "x.shape[:1].numel()",
    "len(str(x.shape))",
    "len(type(x).__name__)",
    "int(isinstance(x, torch.nn.Parameter))",
    "x.storage_offset()",
    "len(str(x.dtype))",
    "getattr(x.dtype, 'name', 0)",
    "x.stride(0)",
    "int(x._base is None)",
    "x.is_leaf",
    "str(x.device)",
    "torch.is_grad_enabled()",
)

#: By name: what `prune_configs_by` is.
PRUNERS = {
    "": "None",
    "early": "dict(early_config_prune=without_64)",
    "one": "dict(early_config_prune=only_first)",
    "model": "dict(perf_model=estimate, top_k=2)",
    "share": "dict(perf_model=estimate, top_k=0.5)",
}

HEAD = '''\
import collections
import dataclasses
import enum
import functools
import re
import zlib

import torch
import triton
import triton.language as tl

SEEN = {}


def factory(n):
    def made(v=None):
        return n * 10 + @EDIT

    return made


def jit_factory(n):
    @triton.jit
    def made(v):
        return v + n * 10 + @EDIT

    return made


def with_default(n):
    def made(k=n):
        return k * 10 + @EDIT

    return made


LAMBDAS = [lambda: 0 + @EDIT, lambda: 10 + @EDIT, lambda: 20 + @EDIT]
TWINS = [lambda: 5 + @EDIT, lambda: 5 + @EDIT, lambda: 6 + @EDIT]


def times(a, b):
    return a * b + @EDIT


class Box:
    def __init__(self, n):
        self.n = n

    def method(self):
        return self.n * 10 + @EDIT


class Callable(Box):
    def __call__(self):
        return self.n * 10 + @EDIT


def class_of(n):
    class Made:
        """Its text has a line at column 0:
no more than this.
        """

        NUMBER = n * 10

    return Made


@dataclasses.dataclass(frozen=True)
class Policy:
    name: str
    factor: int = dataclasses.field(default=0, repr=False)


Point = collections.namedtuple("Point", "x y")
Color = enum.Enum("Color", "RED GREEN BLUE")


class Quiet(Box):
    def __repr__(self):
        return "Quiet()"


class Slots:
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n


class Text(str):
    pass


class Table:
    def __init__(self, n):
        self.values = torch.zeros(10_000, dtype=torch.int64)
        self.values[5000] = n


class Tagged(torch.Tensor):
    pass


def tagged(t):
    t.scale_mode = 3
    return t


def without_64(configs, named, **kwargs):
    return [each for each in configs if each.kwargs["BLOCK"] != 64] or configs


def only_first(configs, named, **kwargs):
    return configs[:1]


def estimate(BLOCK, **rest):
    return BLOCK % 48


def note(**values):
    SEEN.clear()
    SEEN.update({name: PROBES[name](value) for name, value in values.items()})


def cost():
    # Equal, or further apart than the half percent that is a tie for safetune.
    return 1.01 ** (zlib.crc32(repr([SEEN[name] for name in COSTLY]).encode()) % 600)


def bench(launch, quantiles):
    launch()
    return [float(cost())] * 3

'''

_KERNEL = """

@triton.jit
def body(x, out, n, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
         S: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    note(N=N, K=K, M=M, E=E, C=C, BLOCK=BLOCK)
    o = tl.arange(0, S)
    tl.store(out + o, tl.load(x + o, mask=o < n) + @NONCE * 0, mask=o < n)
"""


@functools.cache
def _objects() -> dict[str, Any]:
    text, name = HEAD.replace("@EDIT", "0"), "<objects of the fuzzer>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    module = ModuleType("safetune_fuzz_objects")
    sys.modules[module.__name__] = module
    exec(compile(text, name, "exec"), vars(module))
    return vars(module)


@functools.cache
def made(kind: str, number: int) -> Any:
    """Return the object of a kind and a number."""
    found = eval(VALUES[kind][0], {**_objects(), "n": number})
    described[id(found)] = kind, number
    return found


#: The arguments of a call, in the kernel's order; K is in every key.
ARGUMENTS = ("x", "out", "n", "N", "K", "M", "D", "S")


@dataclass(frozen=True)
class Program:
    """A kernel and its tuner.

    Attributes:
        kinds: of the values of K, M and C.
        key: the names in it; times depend on those in `costly` alone.
        configs: of each, BLOCK and the number of C.
        fact: what the heuristic for E reads.
        edits: by session, the number in the text of all functions that are values.
        lists: by session, the numbers of the configs that it declares.
    """

    kinds: dict[str, str]
    key: tuple[str, ...]
    costly: tuple[str, ...]
    configs: tuple[tuple[int, int], ...]
    tensor: str
    fact: str
    pruner: str
    isolation: str
    edits: tuple[int, ...]
    lists: tuple[tuple[int, ...], ...]

    @property
    def is_plain(self) -> bool:
        """Whether a table of choices comes back from JSON as it was."""
        return all(kind in PLAIN for kind in self.kinds.values())


@dataclass(frozen=True)
class Event:
    """One event of a program; `values` are numbers of values, for a launch."""

    what: str
    number: int = 0
    values: tuple[tuple[str, int], ...] = ()


def draw(rng: random.Random, isolation: str) -> Program:
    """Return a random program."""
    kinds = {name: rng.choice(list(VALUES)) for name in "KM"}
    kinds["C"] = rng.choice(list(VALUES))
    if rng.random() < 0.3:
        kinds = {name: rng.choice(PLAIN) for name in "KMC"}
    others = [name for name in "NMD" if rng.random() < 0.4]
    key = ["K", *others]
    rng.shuffle(key)
    costly = [name for name in key if name == "K" or (name != "D" and rng.random() < 0.6)]
    size = rng.randint(2, 5)
    configs = rng.sample([(block, c) for block in (16, 32, 64) for c in range(3)], size)
    edits = tuple(rng.choice((0, 0, 7)) for _ in range(3))
    lists = [tuple(rng.sample(range(size), rng.randint(2, size))) for _ in range(3)]
    return Program(
        kinds,
        tuple(key),
        tuple(costly),
        tuple(configs),
        rng.choice(list(TENSORS)),
        rng.choice(FACTS),
        rng.choice(("", "", "", "", *PRUNERS)),
        isolation,
        edits,
        tuple(lists),
    )


def without(program: Program, off: frozenset[str]) -> Program:
    """Return a program without the features in `off`."""
    for name, kind in program.kinds.items():
        if kind in off:
            program = replace(program, kinds={**program.kinds, name: "integer"})
    if program.tensor in off:
        program = replace(program, tensor="plain")
    if program.pruner in off:
        program = replace(program, pruner="")
    if "facts" in off:
        program = replace(program, fact="0")
    if "worker" in off:
        program = replace(program, isolation="inline")
    if "edits" in off:
        program = replace(program, edits=(0, 0, 0))
    if "lists" in off:
        program = replace(program, lists=(tuple(range(len(program.configs))),) * 3)
    return program


def text_of(program: Program, session: int, nonce: int) -> str:
    """Return the text of a module; the nonce keeps what is stored of one run from the next."""
    functions = []
    for name, kind in program.kinds.items():
        for table, parameter, value in zip(("MAKERS", "PROBES"), "nv", VALUES[kind], strict=True):
            functions.append(f"{table}[{name!r}] = lambda {parameter}: {value}")
    costly = (*program.costly, "E", "C", "BLOCK")
    lines = [
        HEAD.replace("@EDIT", str(program.edits[session])),
        "MAKERS, PROBES = {}, dict.fromkeys(['N', 'E', 'BLOCK'], int)",
        *functions,
        f"COSTLY = {costly!r}",
        f"PRUNER = {PRUNERS[program.pruner]}",
        f"\n\ndef tensor_of(t):\n    return {TENSORS[program.tensor]}",
        "\n\ndef fact_of(args):",
        "    x = args['x']",
        f"    return zlib.crc32(repr(({program.fact}, args['BLOCK'])).encode()) % 5",
        _KERNEL.replace("@NONCE", str(nonce)),
    ]
    return "\n".join(lines)


def shown(program: Program, events: list[Any]) -> str:
    """Return a program and its events as text."""
    fields = [f"{name} = {value!r}" for name, value in vars(program).items()]
    return "\n".join([*fields, *map(str, events)])
