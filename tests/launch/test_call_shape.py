"""A call's arguments by name, and the values that heuristics set for it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton.runtime.autotuner import Heuristics

from safetune.launch.call_shape import (
    device_index,
    heuristic_values,
    named_arguments,
    own_heuristics,
)

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def kernel(x, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    pass


class Subclass(Heuristics):  # type: ignore[misc]
    """A library's own, which may launch in another way."""


def above(below: Any, kind: type = Heuristics, **values: Any) -> Any:
    return kind(below, ["x", "n", "BLOCK", "TWICE"], values)


def test_arguments_get_their_names_from_the_kernel_and_keywords_follow() -> None:
    assert named_arguments(["x", "n", "BLOCK"], (1, 2)) == {"x": 1, "n": 2}
    assert list(named_arguments(["x", "n"], (1,), {"grid": 3, "n": 2})) == ["x", "grid", "n"]


@pytest.mark.parametrize("outer", [True, False], ids=["outer", "same"])
def test_a_heuristic_sees_the_values_of_those_before_it(outer: bool) -> None:
    block, twice = (lambda given: given["n"] + 1), (lambda given: 2 * given["BLOCK"])
    decorated = (
        above(above(kernel, TWICE=twice), BLOCK=block)
        if outer
        else above(kernel, BLOCK=block, TWICE=twice)
    )
    named = {"x": 0, "n": 4, "BLOCK": 1}

    assert heuristic_values(decorated, named) == (kernel, {"BLOCK": 5, "TWICE": 10})
    assert named == {"x": 0, "n": 4, "BLOCK": 1}


def test_a_tuners_own_heuristics_end_at_a_subclass_that_may_launch_otherwise() -> None:
    subclass = above(kernel, Subclass, TWICE=lambda given: 1)
    decorated = above(subclass, BLOCK=lambda given: 2)

    assert own_heuristics(decorated) == (subclass, [decorated])
    assert heuristic_values(decorated, {}) == (kernel, {"BLOCK": 2, "TWICE": 1})


class OnDevice(NamedTuple):
    """What is asked of a tensor on a device."""

    index: int

    def get_device(self) -> int:
        return self.index


class Pair(NamedTuple):
    """A tuple with names, as Triton takes it."""

    first: Any
    second: Any


@pytest.mark.parametrize(
    ("arguments", "index"),
    [
        ([5, OnDevice(1)], 1),
        ([(OnDevice(1), OnDevice(0)), 5], 1),
        ([Pair(7, ((), (OnDevice(1),)))], 1),
        ([SimpleNamespace(base=OnDevice(1))], 1),
        ([(SimpleNamespace(base=OnDevice(1)),)], 1),
        ([OnDevice(-1), (OnDevice(-1), OnDevice(1))], 1),  # pinned memory comes first
        ([(OnDevice(-1), 5), "text"], -1),
        ([], -1),
    ],
)
def test_the_device_of_a_call_is_that_of_the_first_tensor_on_one(
    arguments: list[Any], index: int
) -> None:
    """Where the first one is in a tuple, too: else one key in memory stood for two devices."""
    assert device_index(tuple(arguments), {}) == index
    assert device_index((), dict(enumerate(arguments))) == index  # type: ignore[arg-type]


def test_arguments_are_named_in_one_place() -> None:
    """Copies of the pairing differed in what they did with keywords."""
    places = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "safetune").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("dict(zip(")
        if "arg_names" in ast.unparse(node)
    ]
    assert places == ["safetune/launch/call_shape.py"]
