"""`restore_value`, `reset_to_zero` and pruning on what Triton takes beside tensors and lists."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import reinterpret
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import InvalidSetting, TuningWarning, safetune
from safetune.inputs.call import tensors_in

N = 64
CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]


class Buffer(NamedTuple):
    data: torch.Tensor
    step: int


class Both(NamedTuple):
    one: Buffer
    other: Buffer


@triton.jit
def add_to_tuple(xs, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(xs[0] + at, 1.0, mask=at < n)


@triton.jit
def add_to_both(xs, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(xs.one.data + at, 1.0, mask=at < n)
    tl.atomic_add(xs.other.data + at, 1.0, mask=at < n)


@triton.jit
def add_to_descriptor(xs, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * 16
    if BLOCK > 0:
        xs.store([at], xs.load([at]) + 1)


@triton.jit
def add_to_wrapped(xs, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(xs + at, 1, mask=at < n)


def argument(kind: str) -> tuple[Any, Any, list[torch.Tensor]]:
    """Return a kernel that adds 1 to its argument, the argument, and the tensors in it."""
    x, y = torch.zeros(N), torch.zeros(N)
    whole = torch.zeros(N, dtype=torch.int32)
    return {
        "tuple": (add_to_tuple, (x,), [x]),
        "named tuples": (add_to_both, Both(Buffer(x, 1), Buffer(y, 1)), [x, y]),
        "descriptor": (add_to_descriptor, TensorDescriptor.from_tensor(x, [16]), [x]),
        "wrapper": (add_to_wrapped, reinterpret(whole, tl.uint32), [whole]),
    }[kind]


@pytest.mark.parametrize("parameter", ["restore_value", "reset_to_zero"])
@pytest.mark.parametrize("kind", ["tuple", "named tuples", "descriptor", "wrapper"])
def test_an_argument_that_holds_tensors_stands_for_them(kind: str, parameter: str) -> None:
    """A hook sees each launch of a tuning begin as it should; if one did not, none would work."""
    function, value, tensors = argument(kind)
    for tensor in tensors:
        tensor.fill_(5)
    begins = 5 if parameter == "restore_value" else 0

    def check(arguments: dict[str, Any], exception: Exception | None = None) -> None:
        held = [tensor.unique().tolist() for tensor in tensors_in(arguments["xs"])]
        if exception is None and held != [[begins + 1]] * len(held):
            raise AssertionError(f"a launch left {held}")

    def launch_twice(launch: Any, quantiles: Any) -> list[float]:
        launch()
        launch()
        return [1.0, 1.0, 1.0]

    kernel = safetune(
        CONFIGS, ["n"], post_hook=check, do_bench=launch_twice, **{parameter: ["xs"]}
    )(function)
    kernel[lambda meta: (4 if kind == "descriptor" else N // meta["BLOCK"],)](value, N)

    assert [tensor.unique().tolist() for tensor in tensors] == [[6]] * len(tensors)
    assert all(times == [1.0] * 3 for times in kernel.configs_timings.values())
    assert len(kernel.configs_timings) == len(CONFIGS)


class TestPruning:
    @pytest.mark.parametrize("model", [None, lambda **named: named["BLOCK"]])
    def test_a_generator_is_a_list(self, model: Any) -> None:
        def prune(configs: Any, named: Any, **kwargs: Any) -> Any:
            yield from (config for config in configs if config.kwargs["BLOCK"] > 16)

        by = {"early_config_prune": prune, "perf_model": model, "top_k": 1}
        kernel = safetune(configs=CONFIGS, key=["n"], prune_configs_by=by)(add_to_tuple)
        x = torch.zeros(N)
        kernel[lambda meta: (N // meta["BLOCK"],)]((x,), N)

        assert kernel.best_config.kwargs == {"BLOCK": 32}
        assert x.unique().tolist() == [1]

    def test_a_generator_of_nothing_is_what_an_empty_list_is(self) -> None:
        def prune(configs: Any, named: Any, **kwargs: Any) -> Any:
            yield from ()

        def empty(configs: Any, named: Any, **kwargs: Any) -> Any:
            return []

        texts = []
        for function in (prune, empty):
            by = {"early_config_prune": function}
            kernel = safetune(configs=CONFIGS, key=["n"], prune_configs_by=by)(add_to_tuple)
            with pytest.raises(Exception, match="at least one config") as raised:
                kernel[(1,)]((torch.zeros(N),), N)
            texts.append(f"{type(raised.value).__name__}: {raised.value}")
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("top_k", [0, False, -2, -7])
    def test_a_top_k_that_leaves_nothing_names_itself(self, top_k: int) -> None:
        by = {"perf_model": lambda **named: named["BLOCK"], "top_k": top_k}
        kernel = safetune(configs=CONFIGS, key=["n"], prune_configs_by=by)(add_to_tuple)

        with pytest.raises(InvalidSetting, match=f"top_k={top_k!r} .*add_to_tuple.* none of 2"):
            kernel[(1,)]((torch.zeros(N),), N)

    @pytest.mark.parametrize("top_k", [1, -1, 0.0, 0.4])
    def test_others_leave_one(self, top_k: float) -> None:
        by = {"perf_model": lambda **named: named["BLOCK"], "top_k": top_k}
        kernel = safetune(configs=CONFIGS, key=["n"], prune_configs_by=by)(add_to_tuple)
        kernel[lambda meta: (N // meta["BLOCK"],)]((torch.zeros(N),), N)

        assert kernel.best_config.kwargs == {"BLOCK": 16}


def _ask_for_grid(arguments: dict[str, Any]) -> None:
    arguments["grid"]


def _stop(arguments: dict[str, Any]) -> None:
    raise StopIteration(3)


def _wrong_value(arguments: dict[str, Any]) -> None:
    raise ValueError("complex64")


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (_ask_for_grid, "KeyError: 'grid'"),
        (_stop, "StopIteration: 3"),
        (_wrong_value, "ValueError: complex64"),
    ],
)
def test_an_error_that_says_a_value_alone_keeps_its_type(hook: Any, text: str) -> None:
    kernel = safetune(configs=CONFIGS, key=["n"], pre_hook=_in_child(hook))(add_to_tuple)

    with pytest.warns(TuningWarning, match=f"launch_error  {re.escape(text)}\n"):
        kernel[(4,)]((torch.zeros(N),), N)


def _in_child(hook: Any) -> Any:
    def raising(arguments: dict[str, Any], reset_only: bool = False) -> None:
        hook(arguments)

    return raising
