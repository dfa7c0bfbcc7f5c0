"""Tuning writes nothing of the caller's: after the first call exactly one launch has happened.

Each case compares whole storages, bit for bit, with one application of the kernel by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton

from safetune import safetune

pytestmark = pytest.mark.gpu

N = 5000


@dataclass(frozen=True)
class Operands:
    """One call of `strided_kernel`: out += x + y.

    Attributes:
        storages: every tensor that x, y or out are views of, as a whole.
    """

    storages: tuple[torch.Tensor, ...]
    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor


def values(device: str, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, small enough that every sum is exact in 8 bits too."""
    generator = torch.Generator(device).manual_seed(count)
    return torch.randint(-30, 30, (count,), device=device, generator=generator).to(dtype)


def separate(device: str, dtype: torch.dtype = torch.float32) -> Operands:
    x, y, out = (values(device, N + i, dtype) for i in range(3))
    return Operands((x, y, out), x[:N], y[:N], out[:N])


def one_tensor_three_times(device: str) -> Operands:
    whole = values(device, N)
    return Operands((whole,), whole, whole, whole)


def views_of_one_storage(device: str) -> Operands:
    """x and out are the even and the odd elements, y overlaps x and starts later."""
    whole = values(device, 4 * N)
    return Operands((whole,), whole[0 : 2 * N : 2], whole[2 : 2 * N + 2 : 2], whole[1 : 2 * N : 2])


def offset_by_one_element(device: str) -> Operands:
    """Addresses that are not a multiple of 16 bytes, with bytes in front and behind."""
    x, y, out = (values(device, N + 40 + i) for i in range(3))
    return Operands((x, y, out), x[1 : N + 1], y[3 : N + 3], out[17 : N + 17])


def expanded(device: str) -> Operands:
    """Stride 0: one element of storage for all of x."""
    one, y, out = values(device, 1), values(device, N), values(device, N + 1)
    return Operands((one, y, out), one.expand(N), y, out[:N])


def columns(device: str) -> Operands:
    """Columns of matrices: strides of 7 and 9, and the columns beside them untouched."""
    x, out = values(device, 7 * N).view(N, 7), values(device, 9 * N).view(N, 9)
    return Operands((x, out), x[:, 2], x[:, 5], out[:, 8])


def wrapped_parameter(device: str) -> Operands:
    """A Parameter that needs a gradient, and a tensor that is one's view."""
    x = torch.nn.Parameter(values(device, N))
    y, out = values(device, N), values(device, N)
    return Operands((x.detach(), y, out), x, y, out)


CASES: dict[str, Callable[[str], Operands]] = {
    "separate": separate,
    "bfloat16": lambda device: separate(device, torch.bfloat16),
    "int64": lambda device: separate(device, torch.int64),
    "int8": lambda device: separate(device, torch.int8),
    "one tensor three times": one_tensor_three_times,
    "views of one storage": views_of_one_storage,
    "offset by one element": offset_by_one_element,
    "expanded": expanded,
    "columns": columns,
    "parameter": wrapped_parameter,
}


@pytest.mark.parametrize("case", CASES)
def test_the_callers_tensors_are_those_of_one_launch(
    kernels: Any, device: str, trials: Callable[[], list[Any]], case: str
) -> None:
    """The kernel adds to its output, and no restore_value says so."""
    operands = CASES[case](device)
    before = [storage.clone() for storage in operands.storages]
    addresses = [storage.data_ptr() for storage in operands.storages]
    expected = (operands.out + operands.x + operands.y).detach()
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512, 1024)]
    kernel = safetune(configs=configs, key=["n"])(kernels.strided_kernel)
    strides = [tensor.stride(0) for tensor in (operands.x, operands.y, operands.out)]
    grid = _grid_of(N)
    kernel[grid](operands.x, operands.y, operands.out, N, *strides)

    verdicts = [trial.verdict for trial in trials()]
    assert verdicts == ["ok"] * len(configs)
    assert torch.equal(operands.out, expected)
    assert [storage.data_ptr() for storage in operands.storages] == addresses
    operands.out.copy_(_same_place(operands, before))
    for storage, old in zip(operands.storages, before, strict=True):
        assert torch.equal(storage.view(torch.uint8), old.view(torch.uint8))


def _grid_of(n: int) -> Callable[[dict[str, Any]], tuple[int]]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def _same_place(operands: Operands, before: list[torch.Tensor]) -> torch.Tensor:
    """What `out` held before, taken from the copy of its storage."""
    out = operands.out
    pointer = out.untyped_storage().data_ptr()
    (old,) = [
        copy
        for storage, copy in zip(operands.storages, before, strict=True)
        if storage.untyped_storage().data_ptr() == pointer
    ]
    return torch.as_strided(old.view(-1), out.shape, out.stride(), out.storage_offset())


@pytest.mark.parametrize("hooks", ["reset_to_zero", "restore_value"])
def test_hooks_of_the_tuner_run_in_the_child_only(
    kernels: Any, device: str, trials: Callable[[], list[Any]], hooks: str
) -> None:
    """Neither zeroes nor rewrites the caller's tensor: the launch adds to what was there."""
    operands = separate(device)
    expected = operands.out + operands.x + operands.y
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512, 1024)]
    kernel = safetune(configs=configs, key=["n"], **{hooks: ["out"]})(kernels.strided_kernel)
    kernel[_grid_of(N)](operands.x, operands.y, operands.out, N, 1, 1, 1)
    assert [trial.verdict for trial in trials()] == ["ok"] * len(configs)
    assert torch.equal(operands.out, expected)


@pytest.fixture
def watched_stream(device: str) -> Iterator[Any]:
    """A stream other than the default one, current during the test; None without a GPU."""
    if device == "cpu":
        yield None
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


def test_pending_work_on_a_stream_is_seen(kernels: Any, device: str, watched_stream: Any) -> None:
    """The child gets what the caller's stream will have written, not what it has by now."""
    x = torch.zeros(1 << (22 if device == "cuda" else 12), device=device)
    for _ in range(200 if device == "cuda" else 2):
        x += 1
    y, out = torch.zeros_like(x), torch.zeros_like(x)
    configs = [triton.Config({"BLOCK": block}) for block in (512, 1024)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    kernel[_grid_of(x.numel())](x, y, out, x.numel())
    assert torch.equal(out, x)
