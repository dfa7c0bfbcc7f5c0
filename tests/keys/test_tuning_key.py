"""The tuning key has one builder, and Triton's own key one more."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import safetune
from safetune.keys import tuning_key as key_module
from safetune.keys.identity import encode, kernel_identity
from safetune.keys.tuning_key import KernelIdentity, tuning_key
from tests.backends import FakeBackend, launching_on

ROOT = Path(__file__).resolve().parents[2]


def constructions(name: str) -> list[str]:
    """Return the product files that call `name`, once for each call."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in ("safetune", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


def test_a_tuning_key_is_made_in_one_place() -> None:
    """A second builder that forgets a part of the key makes other digests, silently."""
    assert constructions("TuningKey") == ["safetune/keys/tuning_key.py"]


@safetune(configs=[triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n"])
@triton.jit
def twice(x, n, BLOCK: tl.constexpr):
    tl.store(x, n * BLOCK)


def keys_of(argument: Any) -> tuple[Any, str]:
    """The memory key and the stored key of a call."""
    call = (argument, 4)
    stored = tuning_key(
        KernelIdentity("twice", "0"), ["n"], ["x", "n", "BLOCK"], {"x": argument, "n": 4}, -1
    )
    return twice.shapes.of(call, {}).key(call, {}), stored.digest


def described(dtype: torch.dtype, *order: int) -> TensorDescriptor:
    """A descriptor of a 16 x 32 x 64 tensor whose dimensions lie in memory in this order."""
    sizes = (16, 32, 64)
    tensor = torch.zeros([sizes[dimension] for dimension in order], dtype=dtype)
    back = [order.index(dimension) for dimension in range(3)]
    return TensorDescriptor.from_tensor(tensor.permute(back), [16, 16, 16])


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda dtype: described(dtype, 0, 1, 2),
        lambda dtype: (described(dtype, 0, 1, 2), 1),
        lambda dtype: (1, torch.zeros(4, dtype=dtype)),
        lambda dtype: triton.reinterpret(torch.zeros(4, dtype=torch.int32), dtype),
        lambda dtype: torch.zeros(4, dtype=dtype),
    ],
    ids=["descriptor", "tuple with a descriptor", "tuple", "reinterpreted", "tensor"],
)
def test_a_dtype_is_part_of_the_key_wherever_the_argument_has_it(
    wrapped: Callable[[torch.dtype], Any],
) -> None:
    """A config for float32 is not one for bfloat16, and `key` need not have a name for it."""
    first, second = keys_of(wrapped(torch.float32)), keys_of(wrapped(torch.bfloat16))
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first == keys_of(wrapped(torch.float32))


def test_a_launch_option_of_a_call_is_in_both_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another binary is launched: one choice for both would be measured with one of them."""
    monkeypatch.setenv("SAFETUNE_MODE", "off")  # nothing is looked up or tuned
    call = (torch.zeros(4), 4)
    options = [{}, {"enable_fp_fusion": False}, {"enable_fp_fusion": True}]
    stored = [twice.resolve(*call, grid=(1,), **each).key_digest for each in options]
    in_memory = [twice.shapes.of(call, each).key(call, each) for each in options]
    assert len({*stored}) == len({*in_memory}) == len(options)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A constant of a user's own, with attributes that arguments of Triton have too."""

    block_shape: Any = (16, 16)
    base: Any = 1
    dtype: Any = None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Tile(), Tile(base=2)),
        (Tile(dtype=["float16"]), Tile(dtype=["float32"])),
        (Tile(dtype=()), Tile(dtype=("float32",))),
    ],
    ids=["block_shape and base", "a list as dtype", "a tuple as dtype"],
)
def test_a_constant_is_no_tensor_or_descriptor_for_an_attribute_that_those_have(
    one: Any, other: Any
) -> None:
    """A launch raised AttributeError, TypeError or IndexError, which stock Triton does not."""
    first, second = keys_of(one), keys_of(other)
    hash((first, second))
    if one.dtype is not None:
        assert first[0] != second[0]
        assert first[1] != second[1]
    assert encode(one, of_call=True) != encode(other, of_call=True)


def test_a_constant_with_a_dtype_has_a_key_of_its_own_in_memory_as_in_the_store() -> None:
    """The second dtype launched the choice of the first, and its own in the next process."""

    def scaled(x, scale: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x, scale)

    configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
    tuner = safetune(configs=configs, key=[])(JITFunction(scaled))
    calls = [((torch.zeros(1), np.dtype(dtype).type(2)), {}) for dtype in ("float32", "float64")]
    in_store = [
        tuning_key(KernelIdentity("scaled", "0"), [], tuner.arg_names, {"scale": args[1]}, -1)
        for args, _ in calls
    ]
    in_memory = [tuner.shapes.of(args, kwargs).key(args, kwargs) for args, kwargs in calls]
    assert in_store[0] != in_store[1]
    assert in_memory[0] != in_memory[1]


def test_the_order_of_a_descriptors_dimensions_is_part_of_the_key() -> None:
    row_major, swapped = described(torch.float32, 0, 1, 2), described(torch.float32, 1, 0, 2)
    assert row_major.shape == swapped.shape
    first, second = keys_of(row_major), keys_of(swapped)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_column_major_tensor_described_as_a_row_major_one_has_a_key_of_its_own() -> None:
    """As in FlagGems, where a flag tells the kernel to transpose the blocks."""
    matrix = torch.zeros(32, 32)
    row_major = TensorDescriptor(matrix, matrix.shape, matrix.stride(), [16, 16])
    turned = matrix.T
    column_major = TensorDescriptor(turned, turned.T.shape, turned.T.stride(), [16, 16])
    first, second = keys_of(row_major), keys_of(column_major)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_the_key_of_a_descriptor_does_not_depend_on_what_a_config_sets_in_it() -> None:
    """A config's pre_hook writes the block shape into the caller's descriptor."""
    descriptor = described(torch.float32, 0, 1, 2)
    before = keys_of(descriptor)
    descriptor.block_shape = [16, 16, 32]
    assert keys_of(descriptor) == before
    assert tuning_key(KernelIdentity("twice", "0"), [], ["x"], {"x": descriptor}, -1).dtypes == (
        ("x", "float32[012]"),
    )


PROPERTIES = {"multiprocessor_count": 132, "max_shared_mem": 232448}


@pytest.mark.parametrize(
    ("variable", "value"), [("DISABLE_LLVM_OPT", "1"), ("PTXAS_OPTIONS", "--maxrregcount 64")]
)
def test_a_switch_that_changes_the_code_is_in_the_key_also_after_the_first_miss(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Of a driver without a card: the switches and the hash of the back end are Triton's own."""
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: target,
        utils=SimpleNamespace(get_device_properties=lambda index: PROPERTIES),
    )
    with launching_on(FakeBackend(), target.backend, active=driver):
        first, again = key_module.detect(0), key_module.detect(0)
        monkeypatch.setenv(variable, value)
        changed = key_module.detect(0)
        monkeypatch.delenv(variable)
    key_module._detected.cache_clear()
    assert first is again
    assert (changed[0], changed[1] == first[1]) == (first[0], False)


def test_each_of_two_kinds_of_cards_has_its_own_target() -> None:
    targets, current = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)], [0]
    driver = SimpleNamespace(
        get_current_device=lambda: current[0],
        set_current_device=lambda index: current.__setitem__(0, index),
        get_current_target=lambda: targets[current[0]],
        utils=SimpleNamespace(get_device_properties=lambda index: PROPERTIES),
    )
    with launching_on(FakeBackend(), "cuda", active=driver):
        found = [key_module._described(index) for index in (0, 1)]
    assert [(target, device.capability) for target, device in found] == [
        (targets[0], "80"),
        (targets[1], "90"),
    ]
    assert current == [0]


def adder(amount: float) -> JITFunction:
    amount = tl.constexpr(amount)

    def add(value):
        return value + amount

    return JITFunction(add)


@pytest.mark.parametrize("where", ["alone", "in a tuple", "in a partial", "held by an object"])
def test_a_function_that_a_call_passes_is_in_the_key_by_its_text_though_key_does_not_name_it(
    where: str,
) -> None:
    class Policy:
        def __init__(self, function: Any) -> None:
            self.function = function

    held = {
        "alone": lambda function: function,
        "in a tuple": lambda function: (1, (function, 2)),
        "in a partial": lambda function: functools.partial(function, 1),
        "held by an object": Policy,
    }[where]
    one, other = keys_of(held(adder(1.0))), keys_of(held(adder(2.0)))
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert keys_of(held(adder(1.0))) == one


def test_functions_of_one_factory_are_two_values_of_a_key() -> None:
    found = [
        tuning_key(KernelIdentity("k", "0"), ["f"], ["f"], {"f": f}, -1).digest
        for f in (adder(1.0), adder(1.0), adder(2.0))
    ]
    assert found[0] == found[1] != found[2]
    assert kernel_identity(adder(1.0)).digest != kernel_identity(adder(2.0)).digest
