"""The same tunings in children with and without torch end with the same results and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import safetune
from safetune.isolation import child_handle
from safetune.tuning import bench

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 256, 512


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(out + offset, tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask), mask)


@triton.jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(out + offset, tl.load(x + offset, mask=mask).to(tl.float32), mask)


@triton.jit
def tuple_kernel(pair, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    total = tl.load(pair[0] + offset, mask=mask) + tl.load(pair[1] + offset, mask=mask)
    tl.store(out + offset, total, mask)


@triton.jit
def sum_kernel(x, total, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total, tl.sum(tl.load(x + offset, mask=offset < n, other=0.0)))


@triton.jit
def described_kernel(source, target, BM: tl.constexpr, BN: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def made_descriptor_kernel(x, out, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def spill_kernel(x, out, n, SPILL: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n), mask=offset < n + SPILL)


@dataclass(frozen=True)
class Case:
    """A tuned kernel, a launch of it, and what it should leave."""

    kernel: Any
    arguments: tuple[Any, ...]
    grid: Callable[[dict[str, Any]], tuple[int, ...]]
    output: torch.Tensor
    expected: torch.Tensor
    asks: bool = False  # whether its hooks ask for more than stand-ins have


def blocks(hook: Any = None, **more: Any) -> list[Any]:
    return [triton.Config({"BLOCK": b, **more}, pre_hook=hook) for b in (128, 256, 1024)]


def tiles(hook: Any = None) -> list[Any]:
    return [triton.Config({"BM": m, "BN": n}, pre_hook=hook) for m, n in ((16, 64), (32, 64))]


def flat(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def tiled(meta: dict[str, Any]) -> tuple[int, ...]:
    return (ROWS // meta["BM"], COLUMNS // meta["BN"])


def vectors(device: str) -> Case:
    x, y = torch.randn(2, 100_000, device=device)
    out = torch.empty_like(x)
    kernel = safetune(configs=blocks(), key=["n"])(add_kernel)
    return Case(kernel, (x, y, out, out.numel()), flat, out, x + y)


def views(device: str) -> Case:
    whole = torch.randn(100_003, device=device)
    x, y, out = whole[1:50_001], whole[3:50_003], torch.empty(50_001, device=device)[1:]
    kernel = safetune(configs=blocks(), key=["n"])(add_kernel)
    return Case(kernel, (x, y, out, out.numel()), flat, out, x + y)


def heuristics(device: str) -> Case:
    x, y = torch.randn(2, 100_000, device=device)
    out = torch.empty_like(x)
    chosen = {"BLOCK": lambda args: 256 if args["x"].numel() > 1000 else 128}
    inner = triton.heuristics(chosen)(add_kernel)
    configs = [triton.Config({}, num_warps=warps) for warps in (2, 4, 8)]
    kernel = safetune(configs=configs, key=["n"])(inner)
    return Case(kernel, (x, y, out, out.numel()), lambda meta: (391,), out, x + y)


def fp8(device: str) -> Case:
    x = torch.randn(100_000, device=device).to(torch.float8_e4m3fn)
    out = torch.empty(x.shape, device=device)
    kernel = safetune(configs=blocks(), key=["n"])(cast_kernel)
    return Case(kernel, (x, out, out.numel()), flat, out, x.float())


def tuples(device: str) -> Case:
    x, y = torch.randn(2, 100_000, device=device)
    out = torch.empty_like(x)
    kernel = safetune(configs=blocks(), key=["n"])(tuple_kernel)
    return Case(kernel, ((x, y), out, out.numel()), flat, out, x + y)


def reset(device: str) -> Case:
    x, total = torch.ones(100_000, device=device), torch.full((1,), 5.0, device=device)
    kernel = safetune(configs=blocks(), key=["n"], reset_to_zero=["total"])(sum_kernel)
    return Case(kernel, (x, total, x.numel()), flat, total, torch.full_like(total, 100_005.0))


def restored(device: str) -> Case:
    x, total = torch.ones(100_000, device=device), torch.full((1,), 5.0, device=device)
    kernel = safetune(configs=blocks(), key=["n"], restore_value=["total"])(sum_kernel)
    return Case(kernel, (x, total, x.numel()), flat, total, torch.full_like(total, 100_005.0))


def zeroing(arguments: dict[str, Any]) -> None:
    arguments["total"].zero_()


def hooked(device: str) -> Case:
    x, total = torch.ones(100_000, device=device), torch.full((1,), 5.0, device=device)
    kernel = safetune(configs=blocks(zeroing), key=["n"])(sum_kernel)
    return Case(kernel, (x, total, x.numel()), flat, total, torch.full_like(total, 100_000.0))


def filling(arguments: dict[str, Any]) -> None:
    arguments["total"].fill_(7.0)


def hooked_with_torch(device: str) -> Case:
    x, total = torch.ones(100_000, device=device), torch.full((1,), 5.0, device=device)
    kernel = safetune(configs=blocks(filling), key=["n"])(sum_kernel)
    expected = torch.full_like(total, 100_007.0)
    return Case(kernel, (x, total, x.numel()), flat, total, expected, asks=True)


def shaping(arguments: dict[str, Any]) -> None:
    for name in ("source", "target"):
        arguments[name].block_shape = [arguments["BM"], arguments["BN"]]


def descriptors(device: str) -> Case:
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.float16)
    out = torch.empty_like(x)
    described = [TensorDescriptor.from_tensor(each, [1, 1]) for each in (x, out)]
    kernel = safetune(configs=tiles(shaping), key=[])(described_kernel)
    return Case(kernel, tuple(described), tiled, out, x * 2)


def scratch(device: str) -> Case:
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.float16)
    out = torch.empty_like(x)
    kernel = safetune(configs=tiles(), key=["rows"])(made_descriptor_kernel)
    return Case(kernel, (x, out, ROWS, COLUMNS), tiled, out, x * 2)


CASES = (
    *(vectors, views, heuristics, fp8, tuples, reset, restored, hooked, hooked_with_torch),
    *(descriptors, scratch),
)


@pytest.fixture(params=[True, False], ids=["light", "full"])
def without_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    child_handle.idle.drop()  # the child of another test may have torch
    if not request.param:
        monkeypatch.setattr(bench, "_asks_for_torch", lambda call: True)
    return bool(request.param)


@pytest.mark.parametrize("make", CASES)
def test_a_call_is_tuned(make: Callable[[str], Case], without_torch: bool, device: str) -> None:
    case = make(device)
    case.kernel[case.grid](*case.arguments)
    torch.cuda.synchronize()
    torch.testing.assert_close(case.output, case.expected)
    timings = case.kernel.configs_timings.values()
    assert all(0 < times[0] < float("inf") for times in timings)
    assert ("torch" in case.kernel.tuning_phases) == (case.asks or not without_torch)


@triton.jit
def flag_kernel(x, out, n, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n) * 0 + FLAG, mask=offset < n)


def with_mode(device: str) -> torch.Tensor:
    x = torch.zeros(4096, device=device)
    x.scale_mode = 3  # type: ignore[attr-defined]
    return x


def parameter(device: str) -> torch.Tensor:
    return torch.nn.Parameter(torch.zeros(4096, device=device))


def rows(device: str) -> torch.Tensor:
    return torch.zeros(64, 64, device=device)


FACTS: tuple[tuple[Callable[[Any], Any], Callable[[str], torch.Tensor]], ...] = (
    (lambda x: x.scale_mode == 3, with_mode),
    (lambda x: x.requires_grad, parameter),
    (lambda x: isinstance(x, torch.nn.Parameter), parameter),
    (lambda x: type(x).__name__ == "Parameter", parameter),
    (lambda x: x.shape[:-1].numel() == 64, rows),
    (lambda x: str(x.shape) == "torch.Size([64, 64])", rows),
    (lambda x: getattr(x.dtype, "name", "none") == "none", rows),
    (lambda x: float(x.sum()) == 0, rows),
)


@pytest.mark.parametrize("number", range(len(FACTS)))
@pytest.mark.parametrize("hooked", [False, True])
def test_a_heuristic_s_value_is_the_caller_s(
    number: int, hooked: bool, without_torch: bool, device: str, tmp_path: Path
) -> None:
    """The binary that the child times is the one that the caller launches."""
    (read, make), told = FACTS[number], str(tmp_path / "told")

    def tell(arguments: dict[str, Any], exception: Any) -> None:
        value = arguments["out"].detach()[:1].tolist()  # asks for torch
        with open(told, "a") as file:
            file.write(f"{exception or value[0]}\n")

    flag = triton.heuristics({"FLAG": lambda args: 7 if read(args["x"]) else 1})(flag_kernel)
    given: dict[str, Any] = {"post_hook": tell} if hooked else {}
    kernel = safetune(configs=blocks(), key=["n"], **given)(flag)
    x, out = make(device), torch.zeros(4096, device=device)
    kernel[flat](x, out, out.numel())
    assert out.tolist() == [7.0] * 4096
    assert all(times[0] < float("inf") for times in kernel.configs_timings.values())
    if hooked:
        before_launch = "0.0"  # hooks also run where a config is only specified for the compiler
        assert {*Path(told).read_text().split()} - {before_launch} == {"7.0"}
    else:  # no heuristic runs in the child, so none asks it for torch
        assert ("torch" in kernel.tuning_phases) == (not without_torch)


def test_a_hook_that_fails_on_a_stand_in_runs_on_a_tensor(without_torch: bool, device: str) -> None:
    """A method that stand-ins have, called as only a tensor can be."""

    def hook(arguments: dict[str, Any]) -> None:
        arguments["total"].zero_()
        if type(arguments["total"]).__mro__[1].__name__ == "_Limited":
            raise ValueError("not a tensor")

    x, total = torch.ones(100_000, device=device), torch.full((1,), 5.0, device=device)
    kernel = safetune(configs=blocks(hook), key=["n"])(sum_kernel)
    kernel[flat](x, total, x.numel())
    assert total.tolist() == [100_000.0]
    assert "torch" in kernel.tuning_phases


def test_a_write_beside_a_storage_is_found(
    without_torch: bool, device: str, trials: Callable[[], list[Any]]
) -> None:
    x = torch.randn(4096, device=device)
    out = torch.empty_like(x)
    configs = [triton.Config({"BLOCK": 1024, "SPILL": spill}) for spill in (0, 8)]
    kernel = safetune(configs=configs, key=["n"])(spill_kernel)
    kernel[lambda meta: (5,)](x, out, out.numel())
    torch.cuda.synchronize()
    assert torch.equal(x, out)
    assert kernel.best_config.kwargs["SPILL"] == 0
    assert sorted(trial.verdict for trial in trials()) == ["ok", "out_of_bounds"]
