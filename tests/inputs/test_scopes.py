"""Which calls share the failures of their configs."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.inputs.call import Hooks, Scopes
from safetune.miss.resolve import Miss

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]


def scaled(x, y, n, eps, MODE: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offset, tl.load(x + offset, mask=offset < n) + eps, mask=offset < n)


def wide(x, y, n, eps, MODE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offset, tl.load(x + offset, mask=offset < n) + eps, mask=WIDE)


class Kinds:
    """Makes the scopes of calls of one kernel."""

    def __init__(self, kernel: Any = None) -> None:
        self.tuner = safetune(configs=CONFIGS, key=["n"])(kernel or triton.jit(scaled))

    def __call__(
        self,
        x: Any = None,
        n: Any = 64,
        eps: Any = 2.0,
        MODE: Any = "a",
        grid: Any = (4,),
        **more: Any,
    ) -> Scopes:
        x = torch.zeros(256) if x is None else x
        args = (x, torch.zeros(256), n, eps)
        return Miss(self.tuner, args, {"MODE": MODE, "grid": grid, **more}).request().scopes


Point = namedtuple("Point", "a b")
BASE = torch.zeros(1024)


@pytest.mark.parametrize(
    ("changes", "special", "call"),
    [
        ({}, True, True),
        ({"eps": 3.0}, True, False),
        ({"eps": None}, False, False),
        ({"eps": "text"}, False, False),
        ({"eps": 1}, False, False),
        ({"MODE": "b"}, False, False),
        ({"MODE": None}, False, False),
        ({"n": 80}, True, False),
        ({"n": 1}, False, False),
        ({"n": 2**40}, False, False),
        ({"x": BASE[16:272]}, True, True),
        ({"x": BASE[1:257]}, False, False),
        ({"x": torch.zeros(256, dtype=torch.float16)}, False, False),
        ({"x": torch.zeros(512)}, True, False),
        ({"x": BASE[:512:2]}, True, False),
        ({"x": torch.zeros(16, 16)}, True, False),
        ({"grid": (5,)}, True, False),
        ({"grid": lambda meta: (4,)}, True, True),
        ({"grid": lambda meta: (meta["n"] // 8,)}, True, False),
        ({"enable_fp_fusion": False}, False, False),
        ({"eps": (1.0, 2)}, False, False),
        ({"eps": Point(1.0, BASE)}, False, False),
    ],
)
def test_what_is_another_specialisation_and_what_another_call(
    changes: dict[str, Any], special: bool, call: bool
) -> None:
    kinds = Kinds()
    plain, other = kinds(), kinds(**changes)
    assert (plain.of[0].special == other.of[0].special) is special
    assert (plain.of[0].call == other.of[0].call) is call
    assert (plain.call == other.call) is call


def test_tuples_are_compared_by_what_they_hold() -> None:
    kinds = Kinds()
    pair = kinds(eps=Point(1.0, torch.zeros(8)))
    assert pair == kinds(eps=Point(1.0, torch.ones(8)))
    assert pair.call != kinds(eps=Point(1.5, torch.zeros(8))).call
    assert pair.call != kinds(eps=Point(1.0, torch.zeros(9))).call


def test_values_of_heuristics_count_for_each_config() -> None:
    """And a heuristic that raises is no error here: the launch of its config is."""
    limit = {"of": 64}

    def is_wide(arguments: dict[str, Any]) -> bool:
        if limit["of"] == 0:
            raise KeyError("limit")
        return bool(arguments["BLOCK"] * limit["of"] > 1024)

    kinds = Kinds(triton.heuristics({"WIDE": is_wide})(triton.jit(wide)))
    before = kinds()
    limit["of"] = 32
    after = kinds()
    assert before.of[0] == after.of[0]
    assert before.of[1].special != after.of[1].special
    limit["of"] = 0
    grid_fails = kinds(grid=(4,))
    assert {scope.special for scope in grid_fails.of}.isdisjoint(s.special for s in after.of)


def test_a_call_that_passes_an_argument_twice_is_another_call() -> None:
    kinds = Kinds()
    assert kinds().call != kinds(y=torch.zeros(256)).call


@pytest.mark.parametrize("device", ["meta", "sparse"])
def test_a_call_on_tensors_without_memory_has_a_scope(device: str) -> None:
    x = torch.zeros(256, device="meta") if device == "meta" else torch.eye(16).to_sparse()
    assert Kinds()(x=x).call


def test_hooks_are_identified_in_the_order_of_stored_keys() -> None:
    order = "pre_hook post_hook do_bench reset_to_zero restore_value scratch reference inputs"
    given: dict[str, Any] = {name: name for name in reversed(order.split())}
    assert Hooks(**given).identity_parts() == tuple(order.split())
