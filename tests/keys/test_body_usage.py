"""Who reads a parameter: the body, what it calls, the functions around it, the launch grids."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from safetune.keys.callback_usage import usage_in_callback, usage_in_callbacks
from safetune.keys.kernel_text import usage_in_body
from safetune.keys.launch_usage import usage_in_grids
from safetune.keys.launches import launches_of
from tests.keys import phantom_kernels

Load = Callable[[str], ModuleType]


@pytest.fixture(params=[False, True], ids=["compiler", "interpreter"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    return functools.partial(phantom_kernels.load, tmp_path, interpret=request.param)


#: What the bodies below may call. `ignores` does nothing with its second parameter.
HELPERS = """
import functools

@jit
def ignores(x, unused, n=0):
    return x + n

@jit
def passes_on(x, m):
    return ignores(x, m)

@jit
def calls_itself(x, m):
    return calls_itself(x, m)

@jit
def takes_all(x, *rest):
    return x

@triton.constexpr_function
def ignores_at_compile_time(n, unused):
    return n * 2

def not_a_kernel(x, unused):
    return x

class Holder:
    @jit
    def ignores(x, unused):
        return x

def scaled(function):
    @functools.wraps(function)
    def wrapper(x, m):
        return function(x, m) * m
    return wrapper

@triton.constexpr_function
@scaled
def wrapped(x, unused):
    return x

@jit
@scaled
def wrapped_kernel(x, unused):
    return x

class Operation:
    def __init__(self, function):
        self.fn = function
    def __call__(self, x, m):
        return self.fn(x, m) * m

operation = Operation(not_a_kernel)
operation_of_a_kernel = Operation(ignores)

class OwnCall(type(ignores)):
    def __call__(self, x, m):
        return super().__call__(x, m) * m

own_call = OwnCall(not_a_kernel)

class Bound:
    @jit
    def second(self, x, m=0):
        return x * m

    @jit
    def first(ignored, x, m):
        return x * m

bound = Bound()

@triton.constexpr_function
def by_name_only(n, /, **options):
    return options

"""

#: (name, body of `kernel(x, P, Q, R: constexpr)`, the names among P, Q and R that it reads)
BODIES = [
    ("nothing", "pass", ""),
    ("arithmetic", "tl.store(x + P, R)", "PR"),
    ("several lines", "a = Q\n    tl.store(x, a)", "Q"),
    ("augmented assignment", "P += 1", "P"),
    ("augmented assignment of another", "x += P", "P"),
    ("annotated assignment", "a: tl.constexpr = R", "R"),
    ("an annotation does not read it", "a: R = 1", ""),
    ("subscript as a target", "x[P] = 1", "P"),
    ("attribute", "tl.store(x, P.to(tl.int32))", "P"),
    ("a string", "tl.store(x, 'P')", ""),
    ("a comment", "tl.store(x, 1)  # P", ""),
    ("an attribute of that name", "tl.store(x, x.P)", ""),
    ("a keyword of that name", "tl.store(x, P=1)", ""),
    # assigned before it is read
    ("assigned first", "P = 1\n    tl.store(x, P)", ""),
    ("unpacked into first", "(P, (Q, a)) = x\n    tl.store(x, P + Q)", ""),
    ("assigned to itself", "P = P", "P"),
    ("assigned after", "a = P\n    P = 1", "P"),
    ("annotated without a value", "P: tl.int32\n    tl.store(x, P)", "P"),
    ("assigned in one branch", "if Q:\n        P = 1\n    tl.store(x, P)", "PQ"),
    ("assigned in one branch only, unused", "if x:\n        P = 1", "P"),
    (
        "assigned in both branches",
        "if Q:\n        P = 1\n    else:\n        P = 2\n    x += P",
        "Q",
    ),
    ("assigned in a nested branch", "if Q:\n        P = 1\n    elif R:\n        P = 2", "PQR"),
    ("read in one branch before", "if x:\n        a = P\n    else:\n        P = 1", "P"),
    ("assigned in a loop", "for i in range(4):\n        P = i\n        x += P", "P"),
    ("assigned in a while", "while x:\n        P = 1", "P"),
    ("a loop's target", "for P in range(4):\n        tl.store(x, P)", "P"),
    ("assigned before a loop", "P = 0\n    for i in range(4):\n        P += i\n    x += P", ""),
    ("assigned in an expression", "tl.store(x, (P := 1))", "P"),
    ("assigned in a try", "try:\n        P = 1\n    except ValueError:\n        pass", "P"),
    ("with", "with P as Q:\n        tl.store(x, Q)", "PQ"),
    # control flow
    ("both sides of a constexpr-if", "if R:\n        x += P\n    else:\n        x += Q", "PQR"),
    ("a conditional expression", "a = P if R else Q", "PQR"),
    ("after return", "return\n    tl.store(x, P)", "P"),
    ("a range", "for i in tl.static_range(P):\n        tl.store(x, i)", "P"),
    ("a while's test", "while P:\n        tl.store(x, 1)", "P"),
    ("assert", "assert P > 0", "P"),
    ("an f-string", 'tl.static_assert(x, f"{P}")', "P"),
    ("a nested f-string", 'tl.static_print(f"{x:{Q}}")', "Q"),
    # scopes inside
    ("lambda", "f = lambda a: a + P", "P"),
    ("a lambda's own parameter", "f = lambda P: P", ""),
    ("a lambda's default", "f = lambda P=Q: P", "Q"),
    ("a nested function", "def f(a):\n        return a + P", "P"),
    ("a nested function's own", "def f(P):\n        Q = 1\n        return P + Q", ""),
    ("a nested function's lambda", "def f():\n        g = lambda P: P\n        return P", "P"),
    ("a nested function's default", "def f(a=P):\n        return a", "P"),
    ("nonlocal", "def f():\n        nonlocal P\n        P = 1", "P"),
    ("a nested function of that name", "def P():\n        return 1\n    x += P()", ""),
    ("a comprehension", "a = [i + P for i in range(Q) if R]", "PQR"),
    ("a comprehension's own", "a = [P for P in range(4)]", ""),
    ("a comprehension over itself", "a = [P for P in P]", "P"),
    ("a comprehension's second source", "a = {i: j for i in x for j in Q}", "Q"),
    ("everything at once", "tl.static_print(locals())", "PQR"),
    # callees
    ("a builtin", "tl.store(x, P)", "P"),
    ("a callee that ignores it", "ignores(x, P)", ""),
    ("a callee that reads it", "ignores(x, P, Q)", "Q"),
    ("by keyword", "ignores(unused=P, n=Q, x=x)", "Q"),
    ("through two callees", "passes_on(x, P)", ""),
    ("an expression is computed", "ignores(x, P + 1)", "P"),
    ("a callee inside a callee's argument", "ignores(ignores(x, P), ignores(Q, P))", "Q"),
    ("recursion reads all", "calls_itself(x, P)", "P"),
    ("a callee's *args", "takes_all(x, P)", "P"),
    ("unpacked into a callee", "ignores(*(x, P))", "P"),
    ("after something unpacked", "ignores(*x, P)", "P"),
    ("unpacked keywords", "ignores(x, **P)", "P"),
    ("a constexpr function", "ignores_at_compile_time(P, Q)", "P"),
    ("a plain function", "not_a_kernel(x, P)", "P"),
    ("an unknown function", "unheard_of(x, P)", "P"),
    ("a function in a parameter", "x(P)", "P"),
    ("the parameter that is called", "R(x)", "R"),
    ("an attribute of a class", "Holder.ignores(x, P)", "P"),
    ("a local of the callee's name", "ignores = x\n    ignores(x, P)", "P"),
    ("itself", "kernel(x, P, Q, R)", "PQR"),
    # what runs is not the text that Python shows
    ("a wrapper in a constexpr function", "wrapped(x, P)", "P"),
    ("a wrapper in a jit function", "wrapped_kernel(x, P)", "P"),
    ("an object with a call of its own", "operation(x, P)", "P"),
    ("an object around a jit function", "operation_of_a_kernel(x, P)", "P"),
    ("a subclass of a jit function", "own_call(x, P)", "P"),
    ("a method, whose object comes first", "bound.first(P, x)", "P"),
    ("a function of a class", "Bound.first(P, x, Q)", "PQ"),
    ("a name that only a dict can take", "by_name_only(P, n=Q)", "Q"),
]


@pytest.mark.parametrize(("what", "body", "expected"), BODIES, ids=[case[0] for case in BODIES])
def test_a_parameter_is_read_if_its_value_can_reach_anything(
    load: Load, what: str, body: str, expected: str
) -> None:
    text = HELPERS + "@jit\ndef kernel(x, P, Q, R: tl.constexpr):\n    " + body
    reads = usage_in_body(load(text).kernel)
    assert "".join(name for name in "PQR" if reads.reader_of(name)) == expected


def test_a_callee_that_does_not_exist_yet_reads_everything(load: Load) -> None:
    text = """
    from safetune.keys.kernel_text import usage_in_body
    @jit
    def kernel(x, P, Q, R):
        later(x, P)
    EARLY = usage_in_body(kernel)
    @jit
    def later(x, unused):
        return x
    """
    module = load(textwrap.dedent(text))
    assert module.EARLY.reader_of("P").startswith("the body (")
    assert usage_in_body(module.kernel).reader_of("P") == ""


def test_a_default_value_does_not_read_a_parameter(load: Load) -> None:
    reads = usage_in_body(load("P = 1\n@jit\ndef kernel(x, P, Q=P):\n    tl.store(x, Q)").kernel)
    assert (reads.reader_of("P"), bool(reads.reader_of("Q"))) == ("", True)


def test_keyword_only_and_star_parameters_are_followed(load: Load) -> None:
    text = "@jit\ndef kernel(x, *rest, P, Q):\n    tl.store(x, rest[0] + P)"
    reads = usage_in_body(load(text).kernel)
    assert [name for name in ("rest", "P", "Q") if reads.reader_of(name)] == ["rest", "P"]


def test_a_callee_in_another_module_is_followed(load: Load) -> None:
    helpers = load(HELPERS)
    text = f"""
    import {helpers.__name__} as helpers
    @jit
    def kernel(x, P, Q):
        helpers.ignores(x, P)
        helpers.not_there(x, Q)
    """
    reads = usage_in_body(load(textwrap.dedent(text)).kernel)
    assert (reads.reader_of("P"), bool(reads.reader_of("Q"))) == ("", True)


def test_a_callee_in_a_closure_is_followed(load: Load) -> None:
    text = """
    def make():
        @jit
        def ignores(x, unused):
            return x
        @jit
        def kernel(x, P, Q):
            tl.store(x, ignores(Q, P))
        return kernel
    """
    reads = usage_in_body(load(textwrap.dedent(text)).make())
    assert (reads.reader_of("P"), bool(reads.reader_of("Q"))) == ("", True)


def test_a_closure_variable_without_a_value_is_not_the_global_of_its_name(load: Load) -> None:
    """Triton compiles what the variable stands for at the launch."""
    text = """
    from safetune.keys.kernel_text import usage_in_body
    @jit
    def operation(x, unused):
        return x
    def make():
        @jit
        def kernel(x, P):
            tl.store(x, operation(x, P))
        early = usage_in_body(kernel)
        @jit
        def operation(x, m):
            return x * m
        return early, usage_in_body(kernel)
    """
    for reads in load(textwrap.dedent(text)).make():
        assert reads.reader_of("P").startswith("the body (")


def test_a_kernel_in_a_class_is_followed(load: Load) -> None:
    text = "class Holder:\n    @jit\n    def kernel(x, P, Q):\n        tl.store(x, Q)"
    reads = usage_in_body(load(text).Holder.__dict__["kernel"])
    assert (reads.reader_of("P"), reads.reader_of("Q").rpartition(":")[2]) == ("", "6)")


def test_the_reader_has_the_line_in_the_file(load: Load) -> None:
    """The explanation is of no use with the decorator's line."""
    text = "@jit\n\ndef kernel(\n    x,\n    P,\n):\n    # why\n    tl.store(x, P)"
    module = load(text)
    assert module.__file__ is not None
    assert (
        usage_in_body(module.kernel).reader_of("P") == f"the body ({Path(module.__file__).name}:10)"
    )


@pytest.mark.internals
def test_a_body_without_source_reads_everything() -> None:
    scope: dict[str, Any] = {}
    exec("def kernel(x, P):\n    pass\n", scope)
    reads = usage_in_body(phantom_kernels.jit_decorator(interpret=True)(scope["kernel"]))
    assert "source is missing" in reads.reader_of("P")


#: (name, function that gets a dict, the names of P, Q and R that it reads)
DICT_READERS = [
    ("subscript", lambda a: a["P"] is not None, "P"),
    ("two", lambda a: a["P"] + a["Q"], "PQ"),
    ("get", lambda a: a.get("Q", 0), "Q"),
    ("get with a default that reads", lambda a: a.get("Q", a["P"]), "PQ"),
    ("in", lambda a: "R" in a, "R"),
    ("not in", lambda a: "R" not in a, "R"),
    ("nothing", lambda a: 1, ""),
    ("other dict", lambda a, b=None: (b or {})["P"], ""),
    ("store", lambda a: a.__setitem__("P", 1), "PQR"),
    ("a variable key", lambda a: [a[k] for k in ("P",)], "PQR"),
    ("handed on", lambda a: dict(a), "PQR"),
    ("returned", lambda a: a, "PQR"),
    ("iterated", lambda a: [k for k in a], "PQR"),  # noqa: C416
    ("values", lambda a: sum(a.values()), "PQR"),
    ("unpacked", lambda a: {**a}, "PQR"),
    ("nested", lambda a: [c for c in range(4) if c < a["P"]], "P"),
    ("inner lambda", lambda a: (lambda: a["P"])(), "P"),
    ("stars alone", lambda *a: a[0]["P"], "PQR"),
    ("locals", lambda a: [locals()], "PQR"),
]


@pytest.mark.parametrize(
    ("what", "reader", "expected"), DICT_READERS, ids=[case[0] for case in DICT_READERS]
)
def test_the_entries_of_a_dict_that_a_function_reads(what: str, reader: Any, expected: str) -> None:
    reads = usage_in_callback("it", reader, position=0)
    assert "".join(name for name in "PQR" if reads.reader_of(name)) == expected


def stores(nargs: dict[str, Any]) -> None:
    nargs["P"] = nargs["Q"]


def adds(nargs: dict[str, Any]) -> None:
    nargs["P"] += 1


def rebinds(nargs: dict[str, Any]) -> None:
    nargs = nargs or {}
    nargs["P"] = 1


class Reader:
    def __call__(self, args: dict[str, Any]) -> int:
        return args["P"]

    def method(self, args: dict[str, Any]) -> int:
        return args["Q"]

    @staticmethod
    def static(args: dict[str, Any]) -> int:
        return args["R"]


def second(first: int, args: dict[str, Any]) -> int:
    return args["Q"]


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(args: dict[str, Any]) -> Any:
        return function(args)

    return wrapper


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (stores, "Q"),
        (adds, "P"),
        (rebinds, "PQR"),
        (Reader(), "P"),
        (Reader().method, "Q"),
        (Reader.static, "R"),
        (functools.partial(second, 1), "Q"),
        (functools.partial(functools.partial(second, 1)), "Q"),
        (functools.partial(second, args={}), ""),
        (decorated(Reader.static), "PQR"),
        (len, "PQR"),
        (max, "PQR"),
        (dict, "PQR"),
        (eval("lambda a: a['P']"), "PQR"),
        (None, ""),
    ],
)
def test_every_kind_of_callable_is_followed(reader: Any, expected: str) -> None:
    reads = usage_in_callback("it", reader, position=0)
    assert "".join(name for name in "PQR" if reads.reader_of(name)) == expected


def prune(configs: Any, named_args: Any, P: int = 0, **kwargs: Any) -> Any:
    if named_args["Q"] > 4 or "S" in kwargs:
        return configs[:P]
    return configs


def prune_whole(configs: Any, named_args: Any, **kwargs: Any) -> Any:
    return {**named_args, **kwargs} and configs


def perf_model(P: int, Q: int, R: int, num_warps: int, **_: Any) -> int:
    Q = 1
    return P + Q


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    return phantom_kernels.load(tmp_path, "@jit\ndef kernel(x, P, Q, R, S):\n    pass").kernel


def read_names(reads: Any) -> str:
    return "".join(name for name in "PQRS" if reads.reader_of(name))


def test_a_prune_function_reads_its_entries(kernel: Any) -> None:
    assert (
        read_names(usage_in_callbacks(kernel, prune_configs_by={"early_config_prune": prune}))
        == "PQS"
    )


def test_a_prune_function_that_passes_its_dict_on_reads_everything(kernel: Any) -> None:
    reads = usage_in_callbacks(kernel, prune_configs_by={"early_config_prune": prune_whole})
    assert read_names(reads) == "PQRS"
    assert "which passes all of `named_args` on" in reads.reader_of("R")


def test_perf_model_reads_the_parameters_that_it_uses(kernel: Any) -> None:
    assert (
        read_names(usage_in_callbacks(kernel, prune_configs_by={"perf_model": perf_model})) == "P"
    )


def test_hooks_are_readers(kernel: Any) -> None:
    reads = usage_in_callbacks(
        kernel,
        [triton.Config({}, pre_hook=lambda nargs: nargs["P"])],
        pre_hook=lambda kwargs, reset_only=False: kwargs["Q"],
        post_hook=lambda kwargs, exception: kwargs["R"].zero_(),
    )
    assert read_names(reads) == "PQR"
    assert reads.reader_of("P").startswith(f"a config's pre_hook ({Path(__file__).name}:")
    assert reads.reader_of("R").startswith("post_hook (")


def test_launch_metadata_is_a_reader(load: Load) -> None:
    text = """
    def metadata(grid, kernel, args):
        return {"flops": args["P"], "grid": grid}
    @jit(launch_metadata=metadata)
    def kernel(x, P, Q, R, S):
        pass
    """
    assert read_names(usage_in_callbacks(load(textwrap.dedent(text)).kernel)) == "P"


def test_a_repr_that_uses_its_specialisation_reads_everything(load: Load) -> None:
    text = "@jit(repr=lambda s: f'k{s.constants}')\ndef kernel(x, P, Q, R, S):\n    pass"
    assert read_names(usage_in_callbacks(load(text).kernel)) == "PQRS"


LAYERS = """
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import KernelInterface

@jit
def kernel(x, P, Q, R, S):
    pass

class Scaled(KernelInterface):
    def __init__(self, fn):
        self.fn, self.arg_names = fn, fn.arg_names

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs)

class OwnHeuristics(Heuristics):
    pass

class OwnJIT(type(kernel)):
    pass

def replaced():
    other = type(kernel)(kernel.fn)
    other.run = lambda *args, **kwargs: None
    return other

heuristic = triton.heuristics({"S": lambda args: 1})
"""


@pytest.mark.parametrize(
    "kernel",
    [
        "Scaled(kernel)",
        "heuristic(Scaled(kernel))",
        "Scaled(heuristic(kernel))",
        "OwnHeuristics(kernel, kernel.arg_names, {})",
        "heuristic(OwnHeuristics(kernel, kernel.arg_names, {}))",
        "OwnJIT(kernel.fn)",
        "heuristic(OwnJIT(kernel.fn))",
        "triton.autotune(configs=[], key=[])(kernel)",
        "replaced()",
    ],
)
def test_what_runs_below_a_tuner_and_is_not_tritons_own_reads_everything(
    load: Load, kernel: str
) -> None:
    """It sees every argument, and what it does with them is nowhere in the kernel's text."""
    module = load(LAYERS + f"made = {kernel}\n")
    assert read_names(usage_in_callbacks(module.made)) == "PQRS"
    assert read_names(usage_in_callbacks(module.heuristic(module.kernel))) == ""


HEURISTICS = """
def from_s(args):
    return args["S"]

TABLE = {"C": lambda args: args["R"]}

@triton.heuristics({"A": lambda args: args["P"], "B": from_s})
@triton.heuristics(values=TABLE)
@jit
def kernel(x, P, Q, R, S, A, B, C):
    pass
"""


def test_heuristics_below_the_tuner_are_readers(load: Load) -> None:
    reads = usage_in_callbacks(load(HEURISTICS).kernel)
    assert read_names(reads) == "PRS"
    assert reads.reader_of("P").startswith("the heuristic for A (")


def test_heuristics_above_the_tuner_are_readers(load: Load) -> None:
    """They do not exist yet when the tuner below them is made: only their text does."""
    reads = usage_in_callbacks(load(HEURISTICS).kernel.fn.fn)
    assert read_names(reads) == "PRS"


def test_heuristics_above_may_have_names_that_are_no_text_or_the_same_name_twice(
    load: Load,
) -> None:
    text = """
    FIRST, SECOND = "A", "B"
    @triton.heuristics({FIRST: lambda args: args["P"], SECOND: lambda args: args["Q"]})
    @triton.heuristics({"C": lambda args: args["R"]})
    @triton.heuristics({"C": lambda args: args["S"]})
    @jit
    def kernel(x, P, Q, R, S, A, B, C):
        pass
    """
    above = load(textwrap.dedent(text)).kernel.fn.fn.fn
    assert read_names(usage_in_callbacks(above)) == "PQRS"


def test_heuristics_above_that_cannot_be_followed_read_everything(load: Load) -> None:
    text = """
    def make():
        return {"A": lambda args: args["P"]}
    @triton.heuristics(make())
    @jit
    def kernel(x, P, Q, R, S, A):
        pass
    """
    assert read_names(usage_in_callbacks(load(textwrap.dedent(text)).kernel.fn)) == "PQRS"
    assert read_names(usage_in_callbacks(load(textwrap.dedent(text)).kernel)) == "P"


#: (name, the launch, the names of P, Q, R and S that its grid reads)
GRIDS = [
    ("no launch", "pass", ""),
    ("a lambda", "kernel[lambda META: (META['P'], 1)](x, 1, 2, 3, 4)", "P"),
    ("a local lambda", "grid = lambda m: (m['Q'],)\n    kernel[grid](x, 1, 2, 3, 4)", "Q"),
    ("a local function", "def grid(m):\n        return (m.get('R'),)\n    kernel[grid](x)", "R"),
    ("a global function", "kernel[grid_s](x, 1, 2, 3, 4)", "S"),
    ("a whole dict", "kernel[lambda m: size(m)](x)", "PQRS"),
    ("a tuple of constants", "kernel[(1, 2)](x, 1, 2, 1, 2)", ""),
    ("the same name", "kernel[(b * 2,)](x, P=b, Q=c)", "P"),
    ("the parameter's name", "P = 3\n    kernel[(P,)](x, **options)", "P"),
    ("by position", "kernel[(b, c)](x, a, b, a, c)", "QS"),
    ("after something unpacked", "kernel[(b,)](x, *a, b)", ""),
    ("the same expression", "kernel[(x.shape[0],)](x, P=x.shape[0], Q=x.shape[1])", "P"),
    ("through a name", "n = b * c\n    kernel[(n,)](x, P=b, Q=a)", "P"),
    ("through a name, in a tuple", "grid = (b,)\n    kernel[grid](x, P=b, Q=a)", "P"),
    ("through unpacking", "n, m = b, c\n    kernel[(n,)](x, P=b, Q=c)", "P"),
    ("the argument through a name", "n = x.shape[0]\n    kernel[(x.shape[0],)](x, P=n)", "P"),
    ("one of two grids", "g = (b,) if a else (c,)\n    kernel[g](x, P=b, Q=c, R=a)", "PQ"),
    ("a closure", "grid = lambda m: (triton.cdiv(b, m['S']),)\n    kernel[grid](x, P=b)", "PS"),
    (
        "derived, as FLA's NB",
        "n = b // 2048\n    kernel[lambda m: (b // m['S'],)](x, P=n, Q=b)",
        "QS",
    ),
    ("run", "kernel.run(x, P=b, grid=(b,), warmup=False)", "P"),
    ("warmup", "kernel.warmup(x, P=b, grid=lambda m: (m['Q'],))", "Q"),
    ("wrapped", "torch.library.wrap_triton(kernel)[(b,)](x, P=b)", "P"),
    ("jax", "jt.triton_call(x, kernel=kernel, grid=(b,), P=b)", "P"),
    ("not called", "launch = kernel[lambda m: (m['P'],)]", "P"),
    ("an alias", "k = tune(kernel)\n    k[(b,)](x, P=b)", "P"),
    ("a table", "table['a'] = kernel\n    table['a'][(b,)](x, P=b)", "P"),
    ("another kernel", "other[(b,)](x, P=b)", ""),
    ("not a launch", "kernel.cache[b]", ""),
    ("a grid from outside", "kernel[options](x, P=b)", "PQRS"),
    ("a grid from elsewhere", "from m import g\n    kernel[g](x, P=b)", "PQRS"),
    ("a made grid", "kernel[make_grid(b)](x, P=b)", "PR"),
    ("an unknown maker", "kernel[unheard_of(b)](x, P=b)", "PQRS"),
    ("tuple()", "kernel[tuple([b, 1])](x, P=b)", "P"),
    ("itself", "grid = grid\n    kernel[grid](x)", "PQRS"),
]

GRID_HELPERS = """
def grid_s(meta):
    return (meta["S"],)

def make_grid(n):
    def grid(meta):
        return (n, meta["R"])
    return grid
"""


def grids_of(module: ModuleType) -> str:
    return read_names(usage_in_grids(launches_of(module.kernel), ["x", "P", "Q", "R", "S"]))


@pytest.mark.parametrize(("what", "launch", "expected"), GRIDS, ids=[case[0] for case in GRIDS])
def test_a_grid_reads_what_its_values_are_made_of(
    load: Load, what: str, launch: str, expected: str
) -> None:
    text = "@jit\ndef kernel(x, P, Q, R, S):\n    pass\n" + GRID_HELPERS
    assert grids_of(load(text + f"\ndef launch(x, a, b, c, options):\n    {launch}\n")) == expected


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("self.kernel[(self.n,)](x, P=self.n, Q=self.m)", "P"),
        ("self.compiled[lambda m: (m['Q'],)](x)", "Q"),
        ("type(self).kernel[self.grid](x)", "PQRS"),
    ],
)
def test_a_grid_in_a_method_is_followed(load: Load, launch: str, expected: str) -> None:
    text = f"""
    class Op:
        @jit
        def kernel(x, P, Q, R, S):
            pass

        def __init__(self):
            self.compiled = [self.kernel][0]

        def forward(self, x):
            {launch}
    kernel = Op.__dict__["kernel"]
    """
    assert grids_of(load(textwrap.dedent(text))) == expected


def test_grids_of_a_module_that_is_still_loading_are_found(load: Load) -> None:
    """A decorator runs before the launches below it exist; the file has them already."""
    text = """
    from safetune.keys.launch_usage import usage_in_grids
    from safetune.keys.launches import launches_of
    @jit
    def kernel(x, P, Q, R, S):
        pass
    FOUND = usage_in_grids(launches_of(kernel), ["x", "P", "Q"])
    def launch(x):
        kernel[lambda meta: (meta["Q"],)](x)
    """
    assert read_names(load(textwrap.dedent(text)).FOUND) == "Q"
