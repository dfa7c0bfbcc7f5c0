"""What identifies a value of a config or a key: its content, in every process."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import json
import random
import re
import threading
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from safetune.config import check_configs, config_digest, distinct, without_identity
from safetune.keys import encoding
from safetune.keys.identity import code_of, encode, in_process

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


class Policy:
    def __init__(self, stages: Any) -> None:
        self.stages = stages

    def scale(self) -> Any:
        return self.stages


class Silent(Policy):
    def __repr__(self) -> str:
        return "Silent()"


class Slotted:
    __slots__ = ("__value",)

    def __init__(self, value: Any) -> None:
        self.__value = value


@dataclasses.dataclass(frozen=True)
class Hidden:
    name: str
    factor: Any = dataclasses.field(default=1.0, repr=False, compare=False)


class Pair(NamedTuple):
    first: Any
    second: Any = 0


class Triple(Pair):
    third: Any = 0

    def __init__(self, *_: Any) -> None:
        self.held = self.third


class Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return "Text()"


class Cached(Policy):
    @functools.cached_property
    def twice(self) -> Any:
        return self.stages * 2


class Numbers(array.array):
    pass


class Queue(collections.deque):  # type: ignore[type-arg]
    pass


class Draw(random.Random):
    pass


@dataclasses.dataclass
class Scaled:
    n: int
    scale: dataclasses.InitVar[Any]

    def __post_init__(self, scale: Any) -> None:
        self.inverse = 1 / scale


class Wrapper:
    def __init__(self, stages: Any) -> None:
        self.fn, self.stages = scaled(1), stages


def scaled(by: Any) -> Any:
    amount = tl.constexpr(by)

    @triton.jit
    def scale(v):  # type: ignore[no-untyped-def]
        return v * amount

    return scale


def shaped(by: Any) -> Any:
    @triton.constexpr_function
    def shape(x):  # type: ignore[no-untyped-def]
        return x * by

    return shape


def made_class(by: Any) -> type:
    class Made:
        SCALE = by

    return Made


def triple(by: Any) -> Any:
    value = Triple(1)
    value.held = by
    return value


def pair_with_a_constant(by: Any) -> Any:
    class Sized(Pair):
        __slots__ = ()
        SIZE = by

    class Sub(Sized):
        __slots__ = ()

    return Sub(1)


def pair_with_a_private_method(by: Any) -> Any:
    class Sized(NamedTuple):
        first: int = 1

        def _size(self) -> Any:
            return by

    return Sized()


def member_with_a_property(by: Any) -> Any:
    class Sized(enum.Enum):
        A = 1

        @property
        def size(self) -> Any:
            return by

    return Sized.A


def member_with_a_method_of_a_base(by: Any) -> Any:
    class Base:
        def size(self) -> Any:
            return by

    class Sized(Base, enum.Enum):
        A = 1

    return Sized.A


def linked(by: Any) -> Any:
    first, second = Policy(by), Policy(None)
    first.stages, second.stages = [second, by], {"back": first}
    return first


def by_default(by: Any) -> Any:
    return lambda v, by=by: v * by


#: Each makes a value of a content, anew at each call.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "jit": scaled,
    "constexpr function": shaped,
    "lambda": lambda by: lambda v: v * by,
    "default": by_default,
    "partial": lambda by: functools.partial(scaled(by)),
    "arguments of a partial": lambda by: functools.partial(max, by),
    "bound method": lambda by: Policy(by).scale,
    "wrapped by torch": lambda by: torch.no_grad()(lambda v: v * by),
    "object": Policy,
    "repr of its own": Silent,
    "slots": Slotted,
    "object with fn": Wrapper,
    "dataclass": lambda by: Hidden("p", by),
    "named tuple": Pair,
    "attribute of a named tuple": triple,
    "constant of a named tuple's base": pair_with_a_constant,
    "method of a named tuple": pair_with_a_private_method,
    "class": made_class,
    "instance of a class": lambda by: made_class(by)(),
    "enum": lambda by: enum.Enum("E", {"A": by}).A,  # type: ignore[attr-defined]
    "property of an enum": member_with_a_property,
    "method of an enum's base": member_with_a_method_of_a_base,
    "str": lambda by: Text(by),
    "array": lambda by: np.concatenate([np.zeros(2000), [by]]),
    "array of objects": lambda by: np.array([None, str(by)], dtype=object),
    "regex": lambda by: re.compile("a" * 300 + str(by)),
    "namespace": lambda by: types.SimpleNamespace(a=by),
    "address in a text": lambda by: types.SimpleNamespace(s=f"x at 0x{by}"),
    "fraction": lambda by: Fraction(by, 7),
    "default dict": lambda by: collections.defaultdict(int, a=by),
    "set of functions": lambda by: frozenset({scaled(by), scaled(8), scaled(9), "relu"}),
    "tuple": lambda by: (1, [scaled(by)]),
    "cycle of objects": linked,
    "bytes": lambda by: bytes([by]),
    "array of C": lambda by: Numbers("i", [by]),
    "deque": lambda by: Queue([by]),
    "random numbers": Draw,
    "not a field": lambda by: Scaled(1, by),
    "pointer type": lambda by: tl.block_type(tl.float32, [2**by]),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_one_content_is_one_value_and_another_content_another(kind: str) -> None:
    make = MAKERS[kind]
    one, same, other = encode(make(2)), encode(make(2)), encode(make(3))
    assert encoding.dumps(one) == encoding.dumps(same)
    assert encoding.dumps(one) != encoding.dumps(other)
    assert not in_process([one, other])


def test_values_of_all_kinds_differ() -> None:
    values = [make(2) for make in MAKERS.values()]
    values += [
        2,
        2.0,
        True,
        "2",
        None,
        (2, 0),
        [2, 0],
        {2: 0},
        tl.float32,
        torch.float32,
        np.int32(2),
    ]
    assert len({encoding.dumps(encode(value)) for value in values}) == len(values)


def test_what_an_object_has_only_computed_is_no_content() -> None:
    used = Cached(2)
    before = encode(used)
    assert used.twice == 4
    assert encode(used) == before


def test_a_tensor_is_its_dtype_in_a_key_and_itself_in_a_config() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    assert encode(one, of_call=True) == encode(other, of_call=True) == {"tensor": "float32"}
    assert encode((one, 1)) == encode((one, 1)) != encode((other, 1))


@pytest.mark.parametrize("hold", [Policy, Slotted, Wrapper, lambda tensor: Policy([tensor])])
def test_a_tensor_that_an_object_holds_is_itself_in_a_key_too(hold: Any) -> None:
    """Triton keeps calls with such objects apart: they hold values that a kernel may read."""
    one, other = hold(torch.zeros(2)), hold(torch.ones(2))
    assert in_process(encode(one, of_call=True))
    assert encode(one, of_call=True) == encode(one, of_call=True) != encode(other, of_call=True)
    assert encode((torch.zeros(2), 1), of_call=True) == encode((torch.ones(2), 1), of_call=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda tmp: (tmp / "file").open("w"),
        lambda tmp: (i for i in range(3)),
        lambda tmp: iter([1]),
        lambda tmp: threading.Lock(),
        lambda tmp: Policy([threading.Lock()]),
        lambda tmp: functools.partial(max, torch.zeros(1)),
        lambda tmp: Policy(list(range(60_000))),
        lambda tmp: by_default([0] * 60_000),
        lambda tmp: shaped(iter([1])),
        lambda tmp: by_default(threading.Lock()),
        lambda tmp: shaped(torch.zeros(1)),
        lambda tmp: by_default([torch.zeros(1)]),
    ],
    ids=[
        *("file", "generator", "iterator", "lock", "held", "tensor", "too much"),
        "too much of a function",
        *("closure", "default", "tensor in a closure", "tensor in a default"),
    ],
)
def test_what_has_no_identity_is_told_apart_in_the_process(make: Any, tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    assert in_process([1, {"a": encode(one)}])
    assert encode(one) == encode(one) != encode(other)


def test_a_tensor_in_a_function_is_its_dtype_in_a_call_and_itself_in_a_config() -> None:
    made = [shaped(torch.zeros(1)), shaped(torch.ones(1))]
    assert encode(made[0]) != encode(made[1])
    assert encode(made[0], of_call=True) == encode(made[1], of_call=True)
    assert code_of(made[0]) == code_of(made[1])
    configs = [triton.Config({"BLOCK": 16}, pre_hook=by_default(each.fn)) for each in made]
    assert without_identity(configs) == "pre_hook"
    assert len(distinct([*configs, *configs])) == 2


def relu(x: Any) -> Any:
    return x


def gelu(x: Any) -> Any:
    return x + 1


class Activation(enum.Enum):
    RELU = (relu,)
    GELU = (gelu,)


@pytest.mark.parametrize(
    "hold",
    [
        Policy,
        Slotted,
        tl.constexpr,
        lambda function: Activation.RELU if function is relu else Activation.GELU,
        lambda function: Policy({"a": [function]}),
        lambda function: types.SimpleNamespace(f=function),
        linked,
    ],
    ids=["object", "slots", "constexpr", "enum", "dictionary", "namespace", "cycle"],
)
def test_the_functions_that_an_argument_holds_are_its_code(hold: Any) -> None:
    one, other = code_of(hold(relu)), code_of(hold(gelu))
    assert code_of(hold(relu)) == one != other
    assert not in_process(one)


@pytest.mark.parametrize("value", [3, "text", None, torch.zeros(1), tl.float32, (1, 2), {"a": 1}])
def test_what_holds_no_function_has_no_code(value: Any) -> None:
    assert code_of(value) is None


def test_a_function_over_what_has_no_identity_is_told_apart_in_the_process() -> None:
    assert in_process(code_of(shaped(iter([1]))))


def test_no_object_gets_the_number_of_one_that_is_gone() -> None:
    seen = {encoding.dumps(encode(threading.Lock())) for _ in range(500)}
    assert len(seen) == 500
    iterators = {encoding.dumps(encode(iter([1]))) for _ in range(500)}
    assert len(iterators) == 500


SEEDS = """
import json, enum, triton
from safetune.keys.identity import encode
class A:
    def __init__(self, v): self.v = v
def f(v): return v
def g(v): return v + 1
values = [frozenset({"relu", "gelu", "silu"}), {f, g, A, "x"}, {A(1), A(2), A(3)}, {1: {"b", "c"}}]
print(json.dumps(list(map(encode, values))))
"""


def test_sets_do_not_depend_on_the_order_of_their_hashes(
    fresh_process: FreshProcess, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SEEDS)
    found = {fresh_process(script, env={"PYTHONHASHSEED": str(seed)}).stdout for seed in range(4)}
    (text,) = found
    assert len(json.loads(text)) == 4


def test_configs_of_one_digest_are_duplicates_whatever_equality_says() -> None:
    named = [
        Hidden("p", 1.0),
        Hidden("p", 2.0),
        Hidden("p", 1.0),
        Pair(1),
        (1, 0),
        Policy(1),
        Policy(1),
    ]
    configs = [triton.Config({"P": value}) for value in named]
    assert configs[0] == configs[1]
    left = distinct(check_configs("kernel", configs, ["P"]))
    places = [next(i for i, c in enumerate(configs) if c is each) for each in left]
    assert places == [0, 1, 3, 4, 5]
    assert len({config_digest(config) for config in left}) == len(left) == 5


@pytest.mark.parametrize("values", [(1, True, 1.0), (0.0, -0.0), ("1", 1)])
def test_equal_numbers_of_other_types_are_other_configs(values: tuple[Any, ...]) -> None:
    configs = [triton.Config({"P": value}) for value in values]
    assert list(distinct(check_configs("kernel", configs, ["P"]))) == configs


#: Sources of a heuristic, within a function, that have lines which do not begin where it does.
LINES = {
    "comment": "def h(args):\n        v = 1\n#       v = 2\n        return v",
    "docstring": 'def h(args):\n        """Doc\nat column 0."""\n        return 1',
    "text": 'def h(args):\n        s = """\na\n"""\n        return len(s) - 2',
    "tabs": "def h(args):\n    \t    return 1",
    "continued": "def h(args):\n        return \\\n1",
    "bracket": "def h(args): return (\n1)",
    "lambda": "h = (lambda args:\n1)",
    "twins": "h, g = lambda args: 1, lambda args: 1",
    "twins that differ": "h, g = lambda args: 1, lambda args: (1)",
    "long": "def h(args): return 1 + 0 * (" + " + ".join(["args['n']"] * 2500) + ")",
    "object": 'class K:\n        def __call__(self, args):\n            """Doc\n0"""\n'
    "            return 1\n"
    "    h = K()",
    "refers to a class": 'class K:\n        def use(self):\n            print("""\nUsage\n""")\n'
    "    k = K()\n    def h(args): return 1 if k else 2",
    "form feed": "def h(args):\n        x = '\x0c'\n        return len(x)",
}  # fmt: skip

HEURISTIC = """
import torch
from safetune import safetune
import triton, triton.language as tl
def make():
    {source}
    return h
h = make()
def bench(fn, quantiles=None):
    fn()
    return [1.0, 1.0, 1.0]
@safetune(configs=[triton.Config({{"BLOCK": b}}) for b in (64, 128)], key=["n"], do_bench=bench)
@triton.heuristics({{"E": h}})
@triton.jit
def k(x, n, E: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, E, mask=o < n)
"""
LAUNCH = """
x = torch.zeros(256)
k[lambda m: (triton.cdiv(256, m["BLOCK"]),)](x, 256)
print(x.unique().tolist(), k.identity.digest)
"""


@pytest.mark.parametrize(
    "lines",
    [
        line if line in ("comment", "text") else pytest.param(line, marks=pytest.mark.full)
        for line in LINES
    ],
)
def test_no_line_of_a_source_ends_a_launch(
    lines: str, fresh_process: FreshProcess, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEURISTIC.format(source=LINES[lines]) + LAUNCH)
    done = fresh_process(script, warm=True)
    assert done.stdout.startswith("[1.0]"), done.stderr


CHOOSES = """
import sys, torch, triton, triton.language as tl, safetune
@triton.jit
def slow(v):
    return v + 1.0 - 1.0
@triton.jit
def fast(v):
    return v + 2.0 - 2.0
def bench(fn, quantiles=None):
    fn()
    return [times[-1]] * 3
times = []
def hook(nargs, **kw):
    times.append({"slow": 9.0, "fast": 1.0}[nargs["F"].fn.__name__])
fs = [slow, fast][:: int(sys.argv[1])]
configs = [triton.Config({"F": f, "BLOCK": b}) for f in fs for b in (64, 128)]
@safetune.safetune(configs=configs, key=["n"], pre_hook=hook, do_bench=bench)
@triton.jit
def k(x, n, F: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, F(tl.load(x + o, mask=o < n)), mask=o < n)
k[(4,)](torch.zeros(256), 256)
print(k.best_config.kwargs["F"].fn.__name__, len(k.configs_timings))
"""


@pytest.mark.parametrize("order", [1, -1])
def test_the_config_that_was_measured_best_is_launched_in_each_process(
    order: int, fresh_process: FreshProcess, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHOOSES)
    done = [fresh_process(script, str(order), warm=True) for _ in range(2)]
    assert [each.stdout.split() for each in done] == [["fast", "4"]] * 2, done[0].stderr


UNSTORED = """
import sys, warnings, torch, triton, triton.language as tl, safetune
class Held:
    def __init__(self): self.file = open(sys.argv[0])
configs = [triton.Config({"P": Held(), "BLOCK": b}) for b in (64, 128)]
@safetune.safetune(configs=configs, key=["n"], do_bench=lambda fn, quantiles=None: [1.0] * 3)
@triton.jit
def k(x, n, P: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x, n)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for n in (4, 4, 5):
        k[(1,)](torch.zeros(4, dtype=torch.int32), n)
print(len([w for w in caught if "could recognise its value of P" in str(w.message)]))
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
print(len(open_lookup(Settings.current()).store.choices()))
"""


def test_a_choice_of_what_has_no_identity_is_not_stored_and_one_warning_names_it(
    fresh_process: FreshProcess, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNSTORED)
    done = fresh_process(script, warm=True)
    assert done.stdout.split() == ["1", "0"], done.stderr
    script.write_text(
        UNSTORED.replace("open(sys.argv[0])", "len(configs_made)").replace(
            "configs = [", "configs_made = [1]\nconfigs = ["
        )
    )
    assert fresh_process(script, warm=True).stdout.split() == ["0", "2"]


OVER_TENSORS = """
import warnings, torch, triton, triton.language as tl, safetune
def of(tensor):
    def check(nargs):
        if int(tensor) == 1:
            raise ValueError("not this one")
    return check
configs = [triton.Config({"BLOCK": 16}, pre_hook=of(torch.tensor(i))) for i in (1, 2)]
@safetune.safetune(configs=configs, key=["n"], do_bench=lambda fn, quantiles=None: [1.0] * 3)
@triton.jit
def k(x, n, BLOCK: tl.constexpr):
    tl.store(x, n)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    k[(1,)](torch.zeros(4, dtype=torch.int32), 4)
print(configs.index(k.best_config))
print(len([w for w in caught if "could recognise its value of pre_hook" in str(w.message)]))
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
print(len(open_lookup(Settings.current()).store.choices()))
"""


def test_hooks_that_close_over_different_tensors_make_two_configs(
    fresh_process: FreshProcess, tmp_path: Path
) -> None:
    """They shared a digest: the first was launched though only the second worked."""
    script = tmp_path / "script.py"
    script.write_text(OVER_TENSORS)
    done = fresh_process(script)
    assert done.stdout.split() == ["1", "1", "0"], done.stderr


class Locked(NamedTuple):
    first: Any
    LOCK = threading.Lock()  # type: ignore[misc]


def test_what_python_generates_for_a_named_tuple_is_not_in_its_identity() -> None:
    """Each version generates other functions; and a class may hold what has no identity."""
    assert encode(Pair(1, 2)) == {"namedtuple": ["Pair", [["first", 1], ["second", 2]], {}]}
    assert not in_process(encode(Locked(1)))
