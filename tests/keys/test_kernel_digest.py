"""A kernel's identity follows what it computes, and nothing else."""

from __future__ import annotations

import importlib.util
import linecache
import math
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton

from safetune.errors import InvalidSetting
from safetune.keys.identity import Graph, base_function, hook_identity, kernel_identity
from safetune.keys.source_text import is_foreign, source_of
from safetune.keys.text_facts import facts_of_function
from tests.keys import phantom_kernels

Load = Callable[..., ModuleType]

KERNEL = """
from triton.language import float32

SCALE = tl.constexpr(3)
LIMIT = 7
UNUSED = 1

@triton.constexpr_function
def twice(n):
    return n * 2

@jit
def inner(x):
    return x + LIMIT

@jit
def helper(x, n):
    return inner(x) * SCALE

@jit
def kernel(x, n, BLOCK: tl.constexpr = 128):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + offsets).to(float32)
    tl.store(x + offsets, helper(value, n) + twice(4))
"""


@pytest.fixture(params=[False, True], ids=["compiler", "interpreter"])
def interpret(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def load(tmp_path: Path, interpret: bool) -> Load:
    def load(text: str, name: str = "a", **options: Any) -> ModuleType:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        return phantom_kernels.load(directory, text, **{"interpret": interpret, **options})

    return load


def digest(module: ModuleType) -> str:
    return kernel_identity(module.kernel).digest


@pytest.mark.internals
def test_digest_is_the_same_in_every_version(load: Load) -> None:
    """It names rows that other machines wrote: a change here makes every stored choice unknown."""
    assert digest(load(KERNEL)) == "6e23ec5e7d9bc031a5f482b1a1d46023"


@pytest.mark.internals
def test_the_compiler_and_the_interpreter_have_one_digest(load: Load) -> None:
    texts = [KERNEL, KERNEL.replace("@jit\n", "@jit(noinline=True)\n")]
    for text in texts:
        compiled, interpreted = load(text, interpret=False), load(text, interpret=True)
        assert digest(compiled) == digest(interpreted)


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("line numbers", "SCALE", "\n\n\nSCALE"),
        ("a jit option of no effect", "@jit\ndef kernel", "@jit(debug=False)\ndef kernel"),
        ("an unused global", "UNUSED = 1", "UNUSED = 2"),
        ("the module's imports", "UNUSED", "import math\nUNUSED"),
        (
            "spaces at the end of a line",
            "offsets = tl.arange(0, BLOCK)",
            "offsets = tl.arange(0, BLOCK)  ",
        ),
        ("another function", "UNUSED", "def other(): return LIMIT\nUNUSED"),
    ],
)
def test_a_change_of_form_does_not_change_the_digest(
    load: Load, what: str, old: str, new: str
) -> None:
    changed = KERNEL.replace(old, new, 1) if what != "line numbers" else "\n\n" + KERNEL
    assert changed != KERNEL
    assert digest(load(KERNEL, "a")) == digest(load(changed, "b"))


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("the body", "helper(value, n)", "helper(value, n) + 1"),
        ("a callee", "inner(x) * SCALE", "inner(x) / SCALE"),
        ("a callee's callee", "x + LIMIT", "x - LIMIT"),
        ("a callee's global", "LIMIT = 7", "LIMIT = 8"),
        ("the type of a global", "LIMIT = 7", "LIMIT = 7.0"),
        ("a constexpr global", "constexpr(3)", "constexpr(4)"),
        ("a constexpr function", "n * 2", "n * 3"),
        ("a default", "tl.constexpr = 128", "tl.constexpr = 64"),
        ("specialisation", "@jit\ndef kernel", "@jit(do_not_specialize=['n'])\ndef kernel"),
        (
            "specialisation on alignment",
            "@jit\ndef kernel",
            "@jit(do_not_specialize_on_alignment=['x'])\ndef kernel",
        ),
        ("debug", "@jit\ndef kernel", "@jit(debug=True)\ndef kernel"),
        ("specialisation of a callee", "@jit\ndef inner", "@jit(do_not_specialize=[0])\ndef inner"),
        ("noinline of a callee", "@jit\ndef helper", "@jit(noinline=True)\ndef helper"),
        ("a dtype under the same name", "import float32", "import float16 as float32"),
        ("what the same text calls", "\n@jit\ndef kernel", "\nhelper = inner\n@jit\ndef kernel"),
    ],
)
def test_a_change_of_content_changes_the_digest(load: Load, what: str, old: str, new: str) -> None:
    changed = KERNEL.replace(old, new, 1)
    assert changed != KERNEL
    assert digest(load(KERNEL, "a")) != digest(load(changed, "b"))


CLOSURE = """
import dataclasses, enum

class Mode(enum.IntEnum):
    FAST = 1
    SLOW = 2

@dataclasses.dataclass(frozen=True)
class Shape:
    rows: int = 4

class Opaque:
    pass

def make(size, inner_text):
    table = (size, 2, Mode.FAST, Shape(), Opaque())
    @jit
    def inner(x):
        return x + table[0]
    @jit
    def kernel(x, n):
        tl.store(x, inner(x) + size)
    return kernel
"""


def test_closure_values_are_in_the_digest(load: Load) -> None:
    """Two kernels from one factory, told apart by what they closed over alone."""
    module = load(CLOSURE)
    of = lambda *args: kernel_identity(module.make(*args)).digest  # noqa: E731
    assert of(4, "") == of(4, "")
    assert of(4, "") != of(5, "")


@pytest.mark.parametrize(
    ("old", "new"), [("FAST = 1", "FAST = 3"), ("Mode.FAST,", "Mode.SLOW,"), ("int = 4", "int = 5")]
)
def test_values_inside_a_closure_value_are_in_the_digest(load: Load, old: str, new: str) -> None:
    changed = CLOSURE.replace(old, new)
    before, after = load(CLOSURE, "a").make(4, ""), load(changed, "b").make(4, "")
    assert kernel_identity(before).digest != kernel_identity(after).digest


def test_addresses_of_objects_are_not_in_the_digest(load: Load) -> None:
    """`<Opaque object at 0x7f...>` would make every process a stranger to every other."""
    first, second = load(CLOSURE, "a").make(4, ""), load(CLOSURE, "b").make(4, "")
    assert kernel_identity(first).digest == kernel_identity(second).digest


def test_globals_are_read_when_the_digest_is_computed(load: Load) -> None:
    module = load(KERNEL)
    before = digest(module)
    module.LIMIT = 8
    assert digest(module) != before


def test_a_local_hides_a_global(load: Load) -> None:
    """A notebook's loop counter of the same name would make each run a new kernel."""
    text = "i = {}\n@jit\ndef kernel(x, n):\n    for i in range(n):\n        tl.store(x + i, i)\n"
    assert digest(load(text.format(1), "a")) == digest(load(text.format(2), "b"))


def test_functions_that_call_each_other_have_a_digest(load: Load) -> None:
    text = """
    @jit
    def even(n):
        return odd(n - 1)
    @jit
    def odd(n):
        return even(n - {})
    @jit
    def kernel(x, n):
        tl.store(x, even(n))
    """
    assert digest(load(text.format(1), "a")) == digest(load(text.format(1), "b"))
    assert digest(load(text.format(1), "a")) != digest(load(text.format(2), "b"))


def test_attributes_of_modules_are_in_the_digest(load: Load, tmp_path: Path) -> None:
    constants = load("SIZE = 4\n@jit\ndef helper(x):\n    return x\n", "constants")
    text = f"import {constants.__name__} as c\n" + textwrap.dedent("""
    @jit
    def kernel(x, n):
        tl.store(x, c.helper(x) + c.SIZE)
    """)
    module = load(text)
    before = digest(module)
    constants.SIZE = 5
    other_value = digest(module)
    constants.SIZE, constants.helper = 4, load("@jit\ndef helper(x):\n    return -x\n", "c2").helper
    assert len({before, other_value, digest(module)}) == 3


HEURISTICS = """
def even(args):
    return args["n"] % 2 == 0

@triton.heuristics({"EVEN": even, "ODD": lambda args: args["n"] % 2 == 1})
@jit
def kernel(x, n, EVEN: tl.constexpr, ODD: tl.constexpr):
    tl.store(x, EVEN + ODD)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("% 2 == 0", "% 4 == 0"),
        ("% 2 == 1", "% 4 == 1"),
        ('"EVEN": even', '"EVEN": lambda a: True'),
    ],
)
def test_heuristics_are_in_the_digest(load: Load, old: str, new: str) -> None:
    before = digest(load(HEURISTICS, "a"))
    assert before == digest(load("# moved\n" + HEURISTICS, "b"))
    assert before != digest(load(HEURISTICS.replace(old, new), "c"))


def test_lambdas_on_one_line_have_different_digests(load: Load) -> None:
    text = """
    H = [lambda a: a["n"] + 1, lambda a: a["n"] + 2]
    @triton.heuristics({{"E": H[{}]}})
    @jit
    def kernel(x, n, E: tl.constexpr):
        tl.store(x, E)
    """
    assert digest(load(text.format(0), "a")) != digest(load(text.format(1), "b"))


@pytest.mark.internals
def test_aggregates_are_in_the_digest(load: Load) -> None:
    text = """
    from triton.language.core import _aggregate as aggregate

    @aggregate
    class Pair:
        first: tl.tensor
        second: tl.tensor

        @triton.constexpr_function
        def __init__(self, first, second):
            self.first = first
            self.second = second

        @jit
        def total(self):
            return self.first + self.second

    @jit
    def kernel(x, n):
        tl.store(x, Pair(n, n).total())
    """
    before = digest(load(text, "a"))
    assert before == digest(load("# moved\n" + textwrap.dedent(text), "b"))
    assert before != digest(load(text.replace("first + self", "first - self"), "c"))
    assert before != digest(load(text.replace("second: tl.tensor", "second: tl.constexpr"), "d"))


@pytest.mark.internals
def test_source_is_dedented_and_without_decorators(load: Load) -> None:
    module = load("class Holder:\n    @jit\n    def kernel(x):  \n        tl.store(x, 1)\n")
    assert source_of(module.Holder.__dict__["kernel"]) == "def kernel(x):\n    tl.store(x, 1)\n"


@pytest.mark.internals
def test_source_follows_an_update(tmp_path: Path) -> None:
    kernel = phantom_kernels.load(tmp_path, KERNEL).kernel
    before = kernel_identity(kernel).digest
    kernel._unsafe_update_src("def kernel(x, n, BLOCK: tl.constexpr = 128):\n    tl.store(x, 0)\n")
    assert "tl.store(x, 0)" in (source_of(kernel) or "")
    assert kernel_identity(kernel).digest != before


def test_a_function_without_source_has_the_digest_of_its_code(tmp_path: Path) -> None:
    """Only the interpreter takes such a kernel; the digest then rests on the compiled code."""

    def made(body: str) -> Any:
        scope: dict[str, Any] = {}
        exec(f"def kernel(x, n):\n    return {body}\n", scope)
        return phantom_kernels.jit_decorator(interpret=True)(scope["kernel"])

    assert source_of(made("x")) is None
    assert kernel_identity(made("x + 1")).digest == kernel_identity(made("x + 1")).digest
    assert kernel_identity(made("x + 1")).digest != kernel_identity(made("x + 2")).digest


def test_base_function_goes_through_every_decorator(load: Load) -> None:
    module = load(HEURISTICS)
    tuned = triton.autotune(configs=[triton.Config({})], key=[])(module.kernel)
    jit, function = base_function(tuned)
    assert (jit, function.__name__) == (module.kernel.fn, "kernel")
    assert kernel_identity(tuned).digest == digest(module)


@pytest.mark.parametrize("thing", [print, len, SimpleNamespace(fn=3), lambda: None])
def test_an_object_that_is_not_a_kernel_is_an_error(thing: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"@triton\.jit"):
        base_function(thing)


def test_the_type_that_a_parameter_s_name_stands_for_is_in_the_digest(load: Load) -> None:
    text = "KIND = {}\n@jit\ndef kernel(x, n: KIND):\n    tl.store(x, n)\n"
    digests = {digest(load(text.format(kind), kind)) for kind in ("tl.int32", "tl.int64", "'i16'")}
    assert len(digests) == 3


def test_parameters_of_an_option_by_name_or_number_have_one_digest(load: Load) -> None:
    changed = [
        KERNEL.replace("@jit\ndef kernel", f"@jit(do_not_specialize=[{n}])\ndef kernel")
        for n in ("1", "'n'")
    ]
    assert digest(load(changed[0], "a")) == digest(load(changed[1], "b"))


@pytest.mark.parametrize(
    "name", ["profile", "chunk", "code.ops", "numpy.x", "triton.ops.x", "torch", "jax.kernels"]
)
def test_a_module_named_as_one_of_python_or_the_toolchain_has_its_text_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpret: bool, name: str
) -> None:
    """In each a helper is changed, then the kernel; all three are different kernels."""
    digests = set()
    for change in ("", "inner(x) * SCALE", "helper(value, n)"):
        file = tmp_path / f"{name}.py"
        text = KERNEL.replace(change, f"{change} + 1") if change else KERNEL
        file.write_text(f"import triton\nimport triton.language as tl\n{text}")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.jit = phantom_kernels.jit_decorator(interpret)
        if name != "torch":  # what other tests import
            monkeypatch.setitem(sys.modules, name, module)
        linecache.clearcache()
        spec.loader.exec_module(module)
        digests.add(digest(module))
    assert len(digests) == 3


def test_functions_of_python_and_of_the_toolchain_enter_by_name(load: Load) -> None:
    """Their text differs between versions, and the key has the toolchain's version."""
    text = """
    from {} import {} as f
    @triton.heuristics({{"E": lambda args: f(1)}})
    @jit
    def kernel(x, n, E: tl.constexpr):
        tl.store(x, E)
    """
    names = [("posixpath", "join"), ("ntpath", "join"), ("triton", "cdiv"), ("math", "sqrt")]
    digests = {digest(load(text.format(*name), name[0])) for name in [*names, ("numpy", "sqrt")]}
    assert len(digests) == 5
    assert is_foreign(os.path.join)
    assert is_foreign(triton.cdiv.fn)
    assert is_foreign(math)


def test_an_installed_package_may_lie_behind_a_symlink(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.py").write_text("def f(): pass\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "jax").symlink_to(tmp_path / "real")
    for folder, foreign in (("site-packages", True), ("real", False)):
        package = ModuleType("jax")
        package.__path__ = [str(tmp_path / folder / ("jax" if foreign else ""))]
        monkeypatch.setitem(sys.modules, "jax", package)
        module = ModuleType("jax.x")
        module.__file__ = str(Path(package.__path__[0]) / "x.py")
        assert is_foreign(module) is foreign


def test_the_module_that_a_name_of_triton_comes_from_is_in_the_digest(load: Load) -> None:
    text = "import triton.language.{} as m\n@jit\ndef kernel(x, n):\n    tl.store(x, m.exp(n))\n"
    assert digest(load(text.format("math"), "a")) != digest(
        load(text.format("extra.libdevice"), "b")
    )


STATE = """
import collections, dataclasses, functools, types
import numpy

class Rounding:
    extra = 1
    def __init__(self, to):
        self.to = to
        self.inner = self
    def __call__(self, args):
        return self.value
    @property
    def value(self):
        return self.to + self.extra
    def set(self, args):
        return self.value

class Slots:
    __slots__ = ("to",)
    def __init__(self, to):
        self.to = to
    def __call__(self, args):
        return self.to

def by_cell(to):
    box = [to]
    return lambda args: box[0]

def by_partial(args, to):
    return to

@dataclasses.dataclass
class Inner:
    to: int
    def twice(self, args):
        return 2 * self.to

INNER = Inner({to})
TABLE = numpy.zeros(5000)
TABLE[2500] = {to}
HOLDER = types.SimpleNamespace(to={to})

@triton.heuristics({{"E": {heuristic}}})
@jit
def kernel(x, n, E: tl.constexpr):
    tl.store(x, E)
"""


@pytest.mark.parametrize(
    "heuristic",
    [
        "Rounding({to})",
        "Rounding({to}).set",
        "Slots({to})",
        "functools.partial(by_partial, to={to})",
        "by_cell({to})",
        "lambda args: TABLE[2500]",
        "functools.cache(lambda args: {to})",
        "numpy.vectorize(lambda args: {to})",
        "lambda args: INNER.to",
        "INNER.twice",
        "lambda args: HOLDER.to",
        "{{'n': {to}}}.get",
        "collections.defaultdict(int, n={to}).get",
    ],
)
def test_the_state_of_a_heuristic_is_in_the_digest(load: Load, heuristic: str) -> None:
    def of(to: int, name: str) -> str:
        return digest(load(STATE.format(to=to, heuristic=heuristic.format(to=to)), name))

    assert of(16, "a") == of(16, "b")
    assert of(16, "a") != of(32, "c")


@pytest.mark.parametrize(("old", "new"), [("to + self", "to - self"), ("extra = 1", "extra = 2")])
def test_the_class_of_a_heuristic_is_in_the_digest(load: Load, old: str, new: str) -> None:
    text = STATE.format(to=1, heuristic="Rounding(1).set")
    assert digest(load(text, "a")) != digest(load(text.replace(old, new), "b"))


def test_a_hook_that_holds_a_data_set_ends_with_a_warning(load: Load) -> None:
    module = load(STATE.format(to=1, heuristic="Rounding(list(range(200_000)))"))
    with pytest.warns(UserWarning, match="kernel and its hooks refer to more than 50,000 values"):
        digest(module)


WRAPPED = """
class Doubling(triton.runtime.KernelInterface):
    def __init__(self, fn):
        self.fn = fn
        self.arg_names = fn.arg_names
    def run(self, *args, **kwargs):
        return self.fn.run(*args, **{**kwargs, "n": 2 * kwargs["n"]})

@Doubling
@jit
def kernel(x, n):
    tl.store(x, n)
"""


def test_a_wrapper_around_the_kernel_is_in_the_digest(load: Load) -> None:
    """It decides what is launched."""
    assert digest(load(WRAPPED, "a")) == digest(load(WRAPPED, "b"))
    assert digest(load(WRAPPED, "a")) != digest(load(WRAPPED.replace("2 *", "3 *"), "c"))


REPLACED = """
import functools

def scaled(f):
    @functools.wraps(f)
    def wrapper(n):
        return f(n) * 2
    return wrapper

@triton.constexpr_function
@scaled
def twice(n):
    return n + 1

@jit
def kernel(x, n):
    tl.store(x, twice(n))
kernel.run = lambda *args, **kwargs: args[4]
"""


@pytest.mark.parametrize(("old", "new"), [("* 2", "* 3"), ("n + 1", "n + 2"), ("[4]", "[5]")])
def test_functions_that_run_in_place_of_a_text_are_in_the_digest(
    load: Load, old: str, new: str
) -> None:
    assert digest(load(REPLACED, "a")) != digest(load(REPLACED.replace(old, new), "b"))


OF_A_DATACLASS = """
import dataclasses

@dataclasses.dataclass(repr=True)
class Table:
    rows: int = 1

TABLE = Table()

def hook(args):
    args["x"] = str(TABLE)
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("repr=True", "repr=False", True),
        ("rows: int = 1", "rows: float = 1", False),
        ("rows: int = 1", "rows: int = 1; __repr__ = lambda self: ''", False),
    ],
)
def test_a_method_that_python_writes_is_not_in_the_digest(
    load: Load, old: str, new: str, is_same: bool
) -> None:
    """Its code was, which differs between versions of Python: they shared no choice."""
    first = hook_identity(load(OF_A_DATACLASS, "a").hook)
    assert (first == hook_identity(load(OF_A_DATACLASS.replace(old, new), "b").hook)) is is_same


FOR_TYPE_CHECKERS = """
import typing

if typing.TYPE_CHECKING:
    from torch import Tensor

class Table:
    rows: Tensor | None = None

TABLE = Table()

def hook(args):
    args["x"] = str(TABLE)
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="the class cannot be defined")
@pytest.mark.parametrize(("old", "new"), [("Tensor |", "Parameter |"), ("= None", "= 1")])
def test_a_class_may_have_names_of_type_checkers(load: Load, old: str, new: str) -> None:
    """Python 3.14 evaluates them when it is asked for them, which raised."""
    first, same = (hook_identity(load(FOR_TYPE_CHECKERS, name).hook) for name in "ab")
    assert first == same != hook_identity(load(FOR_TYPE_CHECKERS.replace(old, new), "c").hook)


def test_generated_functions_under_one_file_name_have_their_own_digests() -> None:
    """A template engine may give each text to `linecache` under the same name."""

    def made(body: str) -> Any:
        text = f"def hook(args):\n    return {body}\n"
        linecache.cache["<template>"] = (len(text), None, text.splitlines(True), "<template>")
        scope: dict[str, Any] = {}
        exec(compile(text, "<template>", "exec"), scope)
        return scope["hook"]

    first, second = made("args['n']"), made("args['m']")
    assert hook_identity(first) != hook_identity(second)
    assert hook_identity(second) == hook_identity(made("args['m']"))


def test_functions_without_source_differ_by_their_inner_functions() -> None:
    def made(body: str, cell: int = 0) -> Any:
        scope: dict[str, Any] = {}
        text = f"def outer(cell):\n    return lambda a: (lambda: {body})() + cell\n"
        exec(text, scope)
        return scope["outer"](cell)

    assert hook_identity(made("1")) == hook_identity(made("1"))
    assert len({hook_identity(f) for f in (made("1"), made("2"), made("1", cell=1))}) == 3


def test_a_method_a_closure_and_a_nested_function_have_the_digest_of_their_text(
    tmp_path: Path,
) -> None:
    """Not of their code, which each version of Python compiles in another way."""
    text = """
    import functools

    class Base:
        def go(self, args): pass

    class Hook(Base):
        def go(self, args, *more, name="n", **rest):
            return [super().go(args) for _ in more], (lambda: name)()

    def outer(x):
        def inner(args: "text"):
            def innermost():
                return x + 1.0
            return innermost
        return inner

    MADE = [
        Hook.go,
        outer(1),
        lambda args: args["n"] * 2,
        lambda args: triton.cdiv(args["n"], functools.reduce(max, [2])),
    ]
    """
    for function in phantom_kernels.load(tmp_path, text).MADE:
        assert facts_of_function(function, function) is not None


#: Ways in which a hook calls a function of another module, `helpers`.
CALLS_OF_A_MODULE = {
    "a lambda": "import helpers\nhook = lambda args: helpers.go(args)",
    "a function": "import helpers\ndef hook(args):\n    return helpers.go(args)",
    "a module of a package": "import outer.inner\nhook = lambda args: outer.inner.go(args)",
    "with an import of its own": "import helpers\ndef hook(args):\n    import math\n"
    "    return math.floor(helpers.go(args))",
    "beside an import of another": "import helpers\ndef other():\n    import args\n"
    "def hook(args):\n    return args.get(helpers.go(args))",
    "imported in a branch": "if True:\n    import helpers\nhook = lambda args: helpers.go(args)",
}
OTHER_MODULES = {
    "helpers.py": "def go(args): return 1",
    "outer/__init__.py": "",
    "outer/inner.py": "def go(args): return 1",
}


@pytest.mark.parametrize("way", CALLS_OF_A_MODULE)
def test_a_hook_changes_with_the_function_that_it_calls_in_another_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The code of `module.name()` is another one where the module is imported, so the text was
    taken for changed. The module alone stood for the function then.
    """

    def identity_of(result: str) -> Any:
        root = tmp_path / result
        for name, text in OTHER_MODULES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text.replace("return 1", f"return {result}"))
        for name in ("helpers", "outer", "outer.inner"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            return hook_identity(phantom_kernels.load(root, CALLS_OF_A_MODULE[way]).hook)

    assert identity_of("1") == identity_of("1")
    assert identity_of("1") != identity_of("2")


def test_a_file_that_was_changed_since_is_not_the_text_of_its_functions(tmp_path: Path) -> None:
    module = phantom_kernels.load(tmp_path, "def hook(args):\n    return args['n']\n")
    path = Path(str(module.__file__))
    before = Graph().described(module.hook)
    path.write_text(path.read_text().replace("'n'", "'m' "))
    assert facts_of_function(module.hook, module.hook) is None
    assert Graph().described(module.hook) != before


def test_the_location_is_kept_but_not_in_the_digest(load: Load) -> None:
    module = load("\n# \f \x1c\n@jit\ndef kernel(x):\n    tl.store(x, 1)\n")
    identity = kernel_identity(module.kernel)
    assert (identity.file, identity.line) == (module.__file__, 6)
    assert identity.source.startswith("def kernel(x):")
