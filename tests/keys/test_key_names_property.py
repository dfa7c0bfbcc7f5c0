"""A name is dropped only if its value changes neither the compiled code nor any reader's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.errors import PhantomKeyWarning
from tests.keys import phantom_kernels
from tests.keys.classified import classify

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.internals

PARAMETERS = ("P", "Q", "R", "S")
BEFORE = {"P": 2, "Q": 3, "R": 5, "S": 7}
AFTER = {"P": 6, "Q": 1, "R": 4, "S": 16}


class Oracle:
    """The process that compiles."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("phantom_oracle.py"))],
            env={**os.environ, "TRITON_INTERPRET": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.outcomes: Counter[str] = Counter()

    def compiled(self, path: str, values: list[dict[str, Any]]) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"path": path, "values": values}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle()
    yield made
    made.close()


# Few uses of each parameter: only one that is nowhere else shows what is made of a strange place.
targets = st.sampled_from([*PARAMETERS, "a"])
leaves = st.sampled_from(["a", "b", "1", "2", *PARAMETERS])


@st.composite
def expressions(draw: st.DrawFn, depth: int = 1) -> str:
    kind = draw(st.integers(0, 6)) if depth else 0
    if kind <= 1:
        return draw(leaves)
    inner = [draw(expressions(depth=depth - 1)) for _ in range(3)]
    if kind == 2:
        return f"({inner[0]} + {inner[1]})"
    if kind == 3:
        return f"({inner[0]} if {draw(leaves)} > 2 else {inner[1]})"
    if kind == 4:
        return f"first({inner[0]}, {inner[1]})"
    if kind == 5:
        return f"second(n={inner[0]}, m={inner[1]})"
    return f"third({inner[0]}, {inner[1]}, k={inner[2]})"


#: Places where a parameter's first value may or may not arrive, with one use of it.
snippets = st.sampled_from(
    [
        ["if tl.load(x) > 0:", "    {p} = 1", "tl.store(x, {p})"],
        ["if E > 0:", "    {p} = 1", "tl.store(x, {p})"],
        ["if E > 0:", "    {p} = 1", "else:", "    {q} = 2", "tl.store(x, {p} + {q})"],
        ["if E > 0:", "    {p} = 1", "else:", "    {p} = 2", "tl.store(x, {p})"],
        ["for i in range(E):", "    {p} = 1", "tl.store(x, {p})"],
        ["for i in tl.static_range(E):", "    {p} = 1", "tl.store(x, {p})"],
        ["for i in range(3):", "    tl.store(x, {p})", "    {p} = 1"],
        ["for {p} in tl.static_range(2):", "    tl.store(x, {p})"],
        ["{p} += 1", "tl.store(x, {p})"],
        ["{p} = {q}", "tl.store(x, {p})"],
        ["{p} = first({p}, {q})", "tl.store(x, {p})"],
        ["a = third(1, {p}, k={q})"],
        ["a = second(m={p}, n={q})"],
        ["tl.static_assert(E < 9, f'{{{p}}}')"],
        ["a = tl.full((), {p} if E > 0 else {q}, tl.int32)"],
    ]
)


@st.composite
def statements(draw: st.DrawFn, depth: int = 1) -> list[str]:
    if draw(st.booleans()):
        name = st.sampled_from(PARAMETERS)
        p, q = draw(name), draw(name)
        return [line.format(p=p, q=q) for line in draw(snippets)]
    kind = draw(st.integers(0, 6 if depth else 3))
    value = draw(expressions())
    if kind <= 1:
        return [f"{draw(targets)} = {value}"]
    if kind == 2:
        return [f"{draw(targets)} += {value}"]
    if kind == 3:
        return [f"tl.store(x + {draw(st.integers(0, 9))}, {value})"]
    body = ["    " + line for line in draw(blocks(depth=depth - 1))]
    if kind == 4:
        return [f"for i in range({draw(leaves)}):", *body]
    condition = draw(st.sampled_from(["tl.load(x) > 0", "a > 1", "True", "E > 0", "P > 2"]))
    if kind == 5:
        return [f"if {condition}:", *body]
    other = ["    " + line for line in draw(blocks(depth=depth - 1))]
    return [f"if {condition}:", *body, "else:", *other]


@st.composite
def blocks(draw: st.DrawFn, depth: int = 1) -> list[str]:
    found = draw(st.lists(statements(depth), min_size=1, max_size=3))
    return [line for lines in found for line in lines]


heuristics = st.sampled_from(
    [
        "lambda args: 1",
        "lambda args: 1",
        "lambda args: 0",
        "lambda args: 0",
        "lambda args: args['P'] % 4",
        "lambda args: args.get('Q', 0)",
        "lambda args: sum(v for k, v in args.items() if k in 'RS')",
        "lambda args: (lambda inner: inner['R'])(args)",
    ]
)
grids = st.sampled_from(
    [
        "lambda META: (1,)",
        "lambda META: (2, 2)",
        "lambda META: (META['R'] + 1,)",
        "lambda META: (META.get('S', 1), 2)",
        "lambda META: tuple(META[name] for name in 'PQ')",
    ]
)


@st.composite
def helpers(draw: st.DrawFn) -> list[str]:
    body = draw(st.sampled_from(["n", "n + 1", "n + m", "m", "1"]))
    other = draw(st.sampled_from(["first(m, n)", "first(n, 0)", "first(1, m)", "n", "7"]))
    third = draw(st.sampled_from(["second(m=k, n=n)", "first(*(n, k))", "k", "second(n, 1)", "0"]))
    return [
        "@jit",
        "def first(n, m):",
        f"    return {body}",
        "@jit",
        "def second(n, m):",
        *draw(
            st.sampled_from([[], ["    m = n"], ["    n += 1"], ["    if n > 2:", "        m = 1"]])
        ),
        f"    return {other}",
        "@jit",
        "def third(n, m, k):",
        f"    return {third}",
    ]


@st.composite
def modules(draw: st.DrawFn) -> str:
    lines = [
        *draw(helpers()),
        f"@triton.heuristics({{'E': {draw(heuristics)}}})",
        "@jit",
        "def kernel(x, P, Q, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr):",
        "    a = tl.load(x + 10) + E",
        "    b = 1",
        *("    " + line for line in draw(blocks())),
        "    tl.store(x, a + b)",
        f"GRID = {draw(grids)}",
        "def launch(x, p, q):",
        "    kernel[GRID](x, p, q, 1, 2)",
    ]
    return "\n".join(lines) + "\n"


def results(module: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    return module.kernel.values["E"](values), module.GRID(values)


def check(oracle: Oracle, text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        module = phantom_kernels.load(Path(directory), text)
        interpreted = phantom_kernels.load(Path(directory), text, interpret=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PhantomKeyWarning)
            report = classify(module.kernel, ["x", *PARAMETERS], configs=[])
            again = classify(interpreted.kernel, ["x", *PARAMETERS], configs=[])
        assert report.dropped == again.dropped
        changed = {**BEFORE, **{name: AFTER[name] for name in report.dropped}}
        assert results(module, BEFORE) == results(module, changed)
        values = [{**v, "E": results(module, v)[0]} for v in (BEFORE, changed)]
        assert module.__file__ is not None
        before, after = oracle.compiled(module.__file__, values)
    assert before == after
    outcome = "error" if before.startswith("error") else "compiled"
    oracle.outcomes[outcome] += 1
    oracle.outcomes["dropped"] += len(report.dropped) * (outcome == "compiled")


@pytest.mark.parametrize("examples", [100, pytest.param(700, marks=pytest.mark.full)])
def test_dropped_names_change_nothing(oracle: Oracle, examples: int) -> None:
    oracle.outcomes.clear()
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize=True,
        database=None,
    )
    settings(hypothesis.given(text=modules())(lambda text: check(oracle, text)))()
    # Else the property would hold of nothing.
    assert oracle.outcomes["compiled"] > oracle.outcomes["error"]
    assert oracle.outcomes["dropped"] > examples * 2 // 7


def test_the_oracle_sees_a_difference(oracle: Oracle, tmp_path: Path) -> None:
    """A value that is read shows in the code; one that only a callee is handed does not."""
    text = """
@jit
def first(n, m):
    return n
@triton.heuristics({"E": lambda args: 1})
@jit
def kernel(x, P, Q, E: tl.constexpr):
    tl.store(x, first(Q, P))
"""
    path = phantom_kernels.load(tmp_path, text).__file__
    assert path is not None
    values = [{"P": 2, "Q": 3, "E": 1}, {"P": 4, "Q": 3, "E": 1}, {"P": 2, "Q": 4, "E": 1}]
    before, other_p, other_q = oracle.compiled(path, values)
    assert "tt.store" in before
    assert before == other_p != other_q
