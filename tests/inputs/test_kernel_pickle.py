"""A kernel rebuilt in another process has the same cache key: a launch finds what that compiled.

One process packs, another unpacks; neither interprets, and the second has no part of the kernels'
modules.
"""

from __future__ import annotations

import json
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from safetune.errors import KernelNotTransferable
from safetune.inputs import kernel_pickle

pytestmark = pytest.mark.internals

ROOT = Path(__file__).parents[2]

#: Answers one JSON request per line. What the kernels print goes to standard error.
PROCESS = """
import base64, importlib.util, inspect, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from safetune.keys.identity import base_function, inner_heuristics
from safetune.inputs import kernel_pickle as kernel_ref

modules = {}

def module(path):
    if path not in modules:
        name = os.path.basename(path).removesuffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        modules[path] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[path])
    return vars(modules[path])

def facts(obj):
    kernel, _ = base_function(obj)
    found = {
        "type": type(kernel).__name__,
        "name": kernel.__name__,
        "heuristics": sorted(getattr(obj, "values", {})),
    }
    if isinstance(kernel, InterpretedFunction):
        rewritten = kernel.rewrite()
        return found | {
            "source": inspect.getsource(kernel.fn).rstrip(),
            "rewritten": [rewritten.__name__, rewritten.__code__.co_firstlineno],
            "called": kernel.fn(20) if kernel.arg_names == ["n", "last"] else None,
        }
    found |= {"key": kernel.cache_key, "src": kernel.src, "line": kernel.starting_line_number}
    if isinstance(kernel, JITFunction):
        found |= {
            "parameters": [
                [p.name, p.annotation, p.is_constexpr, p.has_default and repr(p.default),
                 p.do_not_specialize, p.do_not_specialize_on_alignment]
                for p in kernel.params
            ],
            "noinline": kernel.noinline,
            "debug": kernel.debug,
            "gluon": kernel.is_gluon(),
            "repr": kernel.repr(None),
            "metadata": kernel.launch_metadata and kernel.launch_metadata(None, None, None),
            "version": kernel.version,
        }
    return found

def answer(request):
    if "path" in request:
        values = module(request["path"])
        if "edit" in request:
            with open(request["path"], "w") as file:
                file.write(request["edit"])
        obj = eval(request["what"], values)
        own = [base_function(obj)[1], *inner_heuristics(obj).values()]
        packed = kernel_ref.pack(obj, request["what"], by_value=own)
        return {"blob": base64.b64encode(packed).decode(), "facts": facts(obj)}
    return {"facts": facts(kernel_ref.unpack(base64.b64decode(request["blob"])))}

for line in sys.stdin:
    try:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
    except Exception as error:
        import traceback
        print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
"""


class Process:
    """A process that packs or unpacks kernels; started at once, waited for at the first answer."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process]]:
    directory = tmp_path_factory.mktemp("processes")
    home, away = Process(directory / "home"), Process(directory / "away")
    yield home, away
    home.close()
    away.close()


HEADER = """
import math
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
"""

BODY = """
def kernel(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, offset, mask=offset < n)
"""

#: What is packed is `kernel`.
SOURCES = {
    "plain": "@triton.jit" + BODY,
    "far down the file": "\n" * 5000 + "@triton.jit" + BODY,
    "options": """
@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["x"],
    noinline=True,
    debug=True,
    repr=lambda specialization: "a_name_of_its_own",
    launch_metadata=lambda grid, kernel, arguments: {"flops": 17},
)
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, n)
""",
    "a comment between decorator and function": "@triton.jit  # quick" + BODY,
    "annotations and defaults": """
DEFAULT = tl.constexpr(16)
KIND = tl.int64

@triton.jit
def kernel(x: tl.tensor, n: KIND, flag: "u1", BLOCK: tl.constexpr = DEFAULT, *, LAST=3):
    tl.store(x + LAST, n)
""",
    "callees": """
@triton.jit
def first(value):
    return value + 1

@triton.jit
def second(value, K: tl.constexpr):
    return first(value) * K

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, second(n, BLOCK) + first(n))
""",
    "the standard library of triton": """
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(x, tl.sum(tl.where(values > 0, values, tl.zeros((BLOCK,), tl.float32)), axis=0))
    tl.store(x + 1, tl.cdiv(n, BLOCK) + tl.max(values, 0) + triton.next_power_of_2(BLOCK))
""",
    "globals": """
EPSILON = tl.constexpr(1e-6)
NAMES: tl.constexpr = tl.constexpr(("a", ("b", 3)))
WIDE: tl.constexpr = 64

@triton.jit
def other(value):
    return value + EPSILON

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, other(n) + EPSILON + NAMES[1][1] + WIDE)
""",
    "a closure": """
def make(factor, step):
    FACTOR: tl.constexpr = tl.constexpr(factor)

    @triton.jit
    def helper(value):
        return step(value) * FACTOR

    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr):
        tl.store(x, helper(n) + FACTOR)

    return kernel

@triton.jit
def step(value):
    return value - 1

kernel = make(2.5, step)
other = make(3.5, step)
""",
    "recursion": """
@triton.jit
def kernel(x, n, DEPTH: tl.constexpr):
    if DEPTH > 0:
        kernel(x + 1, n, DEPTH - 1)
    tl.store(x, n)
""",
    "mutual recursion": """
@triton.jit
def even(x, DEPTH: tl.constexpr):
    if DEPTH > 0:
        odd(x, DEPTH - 1)

@triton.jit
def odd(x, DEPTH: tl.constexpr):
    if DEPTH > 0:
        even(x, DEPTH - 1)

@triton.jit
def kernel(x, n, DEPTH: tl.constexpr):
    even(x, DEPTH)
    odd(x, DEPTH)
""",
    "libdevice": """
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, tanh(tl.load(x)) + libdevice.exp2(tl.load(x + 1)))
""",
    "a constexpr function": """
LIMIT = 5

@triton.constexpr_function
def bits(value):
    return int(math.log2(value)) + LIMIT

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    WIDTH: tl.constexpr = bits(BLOCK)
    tl.store(x, n + WIDTH)
""",
    "only a constexpr function": """
@triton.constexpr_function
def inner(value):
    return value + 1

@triton.constexpr_function
def kernel(value):
    return inner(value) * 2
""",
    "heuristics": """
HALF = 2

def half(arguments):
    return arguments["BLOCK"] // HALF

@triton.heuristics({"WIDE": lambda arguments: arguments["n"] > 100, "HALF_BLOCK": half})
@triton.heuristics({"LAST": lambda arguments: True})
@triton.jit
def kernel(x, n, WIDE: tl.constexpr, HALF_BLOCK: tl.constexpr, LAST: tl.constexpr):
    if WIDE:
        tl.store(x, n + HALF_BLOCK)
""",
    "a class body": """
class Norm:
    SIZE = 5

    class Inner:
        @staticmethod
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr):
            tl.store(x, n)

kernel = Norm.Inner.kernel
""",
    "a name that means something else now": """
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, n)

first = kernel

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, n + 1)

later, kernel = kernel, first
""",
    "source that was replaced": """
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, n)

kernel._unsafe_update_src(kernel.src.replace("n)", "n * 3)").replace("x, n * 3)", "x, n)", 0))
""",
    "gluon": """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def kernel(x, n, BLOCK: gl.constexpr):
    gl.store(x, n)
""",
}


def pack(process: Process, path: Path, source: str, what: str = "kernel", **more: Any) -> Any:
    path.write_text(HEADER + source)
    return process.ask(path=str(path), what=what, **more)


@pytest.mark.parametrize("name", SOURCES)
def test_the_copy_has_the_same_cache_key(
    name: str, processes: tuple[Process, Process], tmp_path: Path
) -> None:
    home, away = processes
    packed = pack(home, tmp_path / f"source_{len(name)}.py", SOURCES[name])
    assert packed["facts"]["key"]
    assert away.ask(blob=packed["blob"])["facts"] == packed["facts"]


def test_the_parts_that_the_key_depends_on_travel(
    processes: tuple[Process, Process], tmp_path: Path
) -> None:
    """The keys of two closures differ, and each copy's is its own, in one process."""
    home, away = processes
    first = pack(home, tmp_path / "closures.py", SOURCES["a closure"])
    second = home.ask(path=str(tmp_path / "closures.py"), what="other")
    assert first["facts"]["src"] == second["facts"]["src"]
    assert first["facts"]["key"] != second["facts"]["key"]
    for packed in (first, second, first):
        assert away.ask(blob=packed["blob"])["facts"] == packed["facts"]


@pytest.mark.parametrize("edit", ["", "x = 1\n", HEADER + "\n\n\n" + SOURCES["callees"]])
def test_a_file_that_was_edited_after_it_was_imported(
    edit: str, processes: tuple[Process, Process], tmp_path: Path
) -> None:
    """What counts is what was imported: that is what this process would compile."""
    home, away = processes
    packed = pack(home, tmp_path / f"edited_{len(edit)}.py", SOURCES["callees"], edit=edit)
    assert "second(n, BLOCK) + first(n)" in packed["facts"]["src"]
    assert away.ask(blob=packed["blob"])["facts"] == packed["facts"]


def test_a_callee_in_another_module(processes: tuple[Process, Process], tmp_path: Path) -> None:
    """Taken by name from a module that the other process cannot import."""
    home, away = processes
    shift = "@triton.jit\ndef {}(value):\n    return value{}\n"
    library = "SHIFT = tl.constexpr(4)\n" + shift.format("shift", " + SHIFT")
    pack(home, tmp_path / "only_at_home.py", library + shift.format("other", ""), "other")
    packed = pack(
        home,
        tmp_path / "uses_it.py",
        "from only_at_home import shift as shifted\n"
        "@triton.jit\ndef kernel(x, n, BLOCK: tl.constexpr):\n    tl.store(x, shifted(n))\n",
    )
    assert away.ask(blob=packed["blob"])["facts"] == packed["facts"]


def test_a_callee_that_was_compiled_before(
    processes: tuple[Process, Process], tmp_path: Path
) -> None:
    """As when two kernels share a helper that reads a global, and one of them has been launched."""
    home, away = processes
    source = """
    FACTOR = tl.constexpr(2.5)

    @triton.jit
    def helper(value):
        return value * FACTOR

    @triton.jit
    def forward(x, n):
        tl.store(x, helper(n))

    @triton.jit
    def backward(x, n):
        tl.store(x, -helper(n))
    """
    path = tmp_path / "forward_backward.py"
    for name in ("forward", "backward"):
        packed = pack(home, path, textwrap.dedent(source), name)
        assert away.ask(blob=packed["blob"])["facts"] == packed["facts"]


MANY = """
def plain(n):
    return n + 1

@triton.jit
def above(x, n):
    tl.store(x, n)


def make():
    if True:
        @triton.jit
        def inside(x, n):
            tl.store(x, n + 1)

    return inside

inside = make()

@triton.jit
def below(x, n):
    tl.store(x, n + 2)
"""
MANY_INTERPRETED = """
def above(x, n):
    return n


def make():
    def inside(x, n):
        return n + 1

    return inside

inside = InterpretedFunction(make())
above = InterpretedFunction(above)
"""


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (MANY, ("inside", "below", "above", "inside", "above")),
        (MANY_INTERPRETED, ("inside", "above")),
    ],
    ids=["compiled", "interpreted"],
)
def test_many_kernels_of_one_file_in_one_process(
    processes: tuple[Process, Process], tmp_path: Path, source: str, names: tuple[str, ...]
) -> None:
    """In any order: a compile child sees them all."""
    home, away = processes
    path = tmp_path / f"many_{len(names)}.py"
    packed = [pack(home, path, source, name) for name in names]
    for each in packed:
        assert away.ask(blob=each["blob"])["facts"] == each["facts"]


def test_an_interpreted_kernel_is_the_same_function(
    processes: tuple[Process, Process], tmp_path: Path
) -> None:
    home, away = processes
    source = textwrap.dedent("""
    STEP = 3
    LAST = 1

    def helper(n):
        return n * STEP

    def kernel(n, last=LAST):
        return helper(n) + last

    kernel = InterpretedFunction(kernel)
    """)
    packed = pack(home, tmp_path / "one_interpreted.py", source)
    assert packed["facts"]["called"] == 61
    assert away.ask(blob=packed["blob"])["facts"] == packed["facts"]


def test_a_kernel_without_a_text_gets_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.13 on, `<string>` is the text of the `-c` that started the process, and the
    interpreter found no `def` in it.
    """
    made: dict[str, Any] = {}
    exec("def kernel(x, n):\n    return n\n", made)
    packed = kernel_pickle.pack(InterpretedFunction(made["kernel"]), "kernel")
    text = "import safetune\n"
    other = {**linecache.cache, "<string>": (len(text), None, [text], "<string>")}
    monkeypatch.setattr(linecache, "cache", other)
    assert kernel_pickle.unpack(packed).rewrite()(0, 3) == 3


class TestErrors:
    def test_name_what_cannot_be_sent(self) -> None:
        with pytest.raises(KernelNotTransferable) as caught:
            kernel_pickle.pack({"lock": threading.Lock()}, "the call of some_kernel")
        text = str(caught.value)
        assert text.startswith("the call of some_kernel cannot be sent to a tuning process")
        assert "_thread.lock" in text
        assert 'isolation="inline"' in text

    def test_a_tensor_where_only_code_is_expected(self) -> None:
        with pytest.raises(KernelNotTransferable, match=r"a tensor of shape \(2, 3\) is captured"):
            kernel_pickle.pack([torch.zeros(2, 3)], "some_kernel")

    def test_a_tensor_keeps_its_identity(self) -> None:
        table = kernel_pickle.TensorTable()
        one, other = torch.zeros(2), torch.ones(3)
        blob = kernel_pickle.pack({"a": [one, other], "b": one}, "a call", table)
        assert [id(t) for t in table.tensors] == [id(one), id(other)]
        stand_ins = [torch.full((2,), 5.0), torch.full((3,), 6.0)]
        rebuilt = kernel_pickle.unpack(blob, stand_ins)
        assert rebuilt["a"][0] is stand_ins[0]
        assert rebuilt["a"][1] is stand_ins[1]
        assert rebuilt["b"] is stand_ins[0]

    def test_shapes_need_torch_only_where_it_is_wanted(self) -> None:
        blob = kernel_pickle.pack([torch.zeros(2, 3).shape], "a descriptor")
        assert b"torch" not in blob
        assert isinstance(kernel_pickle.unpack(blob)[0], torch.Size)
        assert kernel_pickle.unpack(blob, size=list) == [[2, 3]]

    def test_packing_by_value_leaves_no_trace(self) -> None:
        """cloudpickle's registry is one for the whole process, the user's pickles included."""

        def local() -> None: ...

        before = cloudpickle.list_registry_pickle_by_value()
        blob = kernel_pickle.pack(helper_here, "a hook", by_value=[helper_here, local])
        assert cloudpickle.list_registry_pickle_by_value() == before
        assert kernel_pickle.unpack(blob) is not helper_here
        assert kernel_pickle.unpack(blob)() == "here"

    def test_code_keeps_the_name_of_its_file(self) -> None:
        """Also that of a function in a function: tracebacks and Triton look lines up by it."""
        packed = kernel_pickle.pack(helper_with_a_helper, "a hook", by_value=[helper_here])
        copy = kernel_pickle.unpack(packed)
        assert copy is not helper_with_a_helper
        for function in (copy, copy()):
            assert function.__code__.co_filename == __file__

    def test_a_fork_while_another_thread_packs(self) -> None:
        """The fork can pack at once, and finds cloudpickle's registry as the program left it."""
        packing, forked = threading.Event(), threading.Event()

        class Slow:
            def __reduce__(self) -> Any:
                packing.set()
                forked.wait()
                return str, ()

        arguments = ([Slow(), helper_here], "a hook")
        thread = threading.Thread(
            target=lambda: kernel_pickle.pack(*arguments, by_value=[helper_here])
        )
        before = cloudpickle.list_registry_pickle_by_value()
        thread.start()
        packing.wait()
        if not (pid := os.fork()):
            signal.alarm(30)
            same = cloudpickle.list_registry_pickle_by_value() == before
            kernel_pickle.pack(helper_here, "a hook", by_value=[helper_here])
            os._exit(0 if same else 1)
        assert os.waitpid(pid, 0)[1] == 0
        forked.set()
        thread.join()
        assert cloudpickle.list_registry_pickle_by_value() == before


def helper_here() -> str:
    return "here"


def helper_with_a_helper() -> Any:
    return lambda: "here"
