"""What is measured is what the caller launches, whatever its heuristics and hooks read."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.inputs.call import can_travel

N = 256
CALLER = os.getpid()


@triton.jit
def flag_kernel(x, y, n, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offset, tl.load(x + offset, mask=offset < n) * 0 + FLAG, mask=offset < n)


class Kind(torch.Tensor):
    pass


class Mode:
    """A value without an equal in another process."""

    current = 0


def plain() -> torch.Tensor:
    return torch.ones(N)


def with_attribute() -> torch.Tensor:
    x = plain()
    x.scale_mode = 3  # type: ignore[attr-defined]
    return x


def with_owner() -> torch.Tensor:
    """Its attribute cannot be sent: a generator."""
    x = plain()
    x.owner = (i for i in range(3))  # type: ignore[attr-defined]
    return x


def negated() -> torch.Tensor:
    return torch.imag(torch.conj(torch.ones(N, dtype=torch.complex64)))


def deterministic() -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    return stack


def doubles() -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return stack


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@dataclass(frozen=True)
class Fact:
    """Something that differs in a child, and a call for which it is true."""

    read: Callable[[Any], Any]
    make: Callable[[], torch.Tensor] = plain
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


FACTS = {
    "an attribute": Fact(lambda x: x.scale_mode == 3, with_attribute),
    "an attribute's default": Fact(lambda x: getattr(x, "scale_mode", 0) == 3, with_attribute),
    "what cannot be sent": Fact(lambda x: hasattr(x, "owner"), with_owner),
    "requires_grad": Fact(lambda x: x.requires_grad, lambda: plain().requires_grad_()),
    "a leaf": Fact(lambda x: not x.is_leaf, lambda: plain().requires_grad_() * 1),
    "a parameter": Fact(
        lambda x: isinstance(x, torch.nn.Parameter), lambda: torch.nn.Parameter(plain())
    ),
    "a subclass": Fact(lambda x: type(x) is Kind, lambda: plain().as_subclass(Kind)),
    "a base": Fact(lambda x: x._base is not None, lambda: torch.ones(2 * N)[:N]),
    "an offset": Fact(lambda x: x.storage_offset() == 4, lambda: torch.ones(N + 4)[4:]),
    "a storage": Fact(lambda x: x.is_shared(), lambda: plain().share_memory_()),
    "no gradients": Fact(lambda x: not torch.is_grad_enabled(), around=torch.no_grad),
    "autocast": Fact(lambda x: torch.is_autocast_enabled("cpu"), around=autocast),
    "determinism": Fact(
        lambda x: torch.are_deterministic_algorithms_enabled(), around=deterministic
    ),
    "the default type": Fact(lambda x: torch.get_default_dtype() is torch.float64, around=doubles),
    "the process": Fact(lambda x: os.getpid() == CALLER),
}
#: What hooks, which run in the child, are told of.
TOLD = [
    *("an attribute", "an attribute's default", "requires_grad", "a parameter", "a subclass"),
    *("no gradients", "autocast", "determinism", "the default type"),
]


def launched(kernel: Any, fact: Fact) -> float:
    x, y = fact.make(), torch.zeros(N)
    with fact.around():
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N)
    return float(y[0])


def tells(path: Path) -> Callable[..., None]:
    """Return a hook that writes down what the kernel has written in the child."""
    text = str(path)

    def hook(arguments: dict[str, Any], exception: Any) -> None:
        with open(text, "a") as file:
            file.write(f"{exception or float(arguments['y'][0])}\n")

    return hook


@pytest.mark.parametrize("name", FACTS)
def test_a_heuristic_sets_in_a_child_what_it_sets_in_the_caller(name: str, tmp_path: Path) -> None:
    fact, told = FACTS[name], tmp_path / "told"
    inner = triton.heuristics({"FLAG": lambda args: 7 if fact.read(args["x"]) else 1})(flag_kernel)
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = safetune(configs=configs, key=["n"], post_hook=tells(told))(inner)
    assert launched(kernel, fact) == 7
    assert set(told.read_text().split()) == {"7.0"}


def test_a_heuristic_below_a_hook_sets_what_it_sets_in_the_caller(tmp_path: Path) -> None:
    fact, told = FACTS["what cannot be sent"], tmp_path / "told"
    inner = triton.heuristics({"FLAG": lambda args: 7 if fact.read(args["x"]) else 1})(flag_kernel)

    def zero(arguments: dict[str, Any], **options: Any) -> None:
        arguments["y"].zero_()

    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = safetune(configs=configs, key=["n"], post_hook=tells(told), pre_hook=zero)(inner)
    assert launched(kernel, fact) == 7
    assert set(told.read_text().split()) == {"7.0"}


def test_what_a_hook_of_a_config_changes_counts(tmp_path: Path) -> None:
    """At each launch the heuristic runs after it."""
    told = tmp_path / "told"
    inner = triton.heuristics({"FLAG": lambda args: float(args["y"][-1])})(flag_kernel)

    def mark(value: float) -> Callable[..., None]:
        def hook(arguments: dict[str, Any]) -> None:
            arguments["y"][-1] = value

        return hook

    configs = [triton.Config({"BLOCK": 64 << i}, pre_hook=mark(5.0 + i)) for i in range(2)]
    kernel = safetune(configs=configs, key=["n"], post_hook=tells(told))(inner)
    y = launched(kernel, Fact(lambda x: True))
    overwritten = {"nan"}  # before the launch that finds what a config writes
    assert set(told.read_text().split()) - overwritten == {"5.0", "6.0"}
    assert y in (5.0, 6.0)


def test_what_one_heuristic_sets_another_reads_and_values_may_not_be_plain(tmp_path: Path) -> None:
    """What cannot travel is set in the child, as an address of the caller's means nothing there."""
    told = tmp_path / "told"
    values = {"FLAG": lambda args: 3, "BLOCK": lambda args: 32 * args["FLAG"] - 32}
    seen = {"HERE": lambda args: args["x"].data_ptr(), **values}

    @triton.jit
    def kernel(x, y, n, HERE, FLAG: tl.constexpr, BLOCK: tl.constexpr):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        address = HERE.to(tl.pointer_type(tl.float32))
        tl.store(y + offset, tl.load(address + offset, mask=offset < n) + FLAG, mask=offset < n)

    configs = [triton.Config({}, num_warps=warps) for warps in (2, 4)]
    tuned = safetune(configs=configs, key=["n"], post_hook=tells(told))(
        triton.heuristics(seen)(kernel)
    )
    assert launched(tuned, Fact(lambda x: True)) == 4
    assert set(told.read_text().split()) == {"4.0"}


@pytest.mark.parametrize("held", [threading.Lock(), (i for i in range(3)), sys._getframe()])
def test_a_heuristic_that_cannot_be_sent_is_none_of_a_child_s(held: Any) -> None:
    inner = triton.heuristics({"FLAG": lambda args: 7 if held is not None else 1})(flag_kernel)
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = safetune(configs=configs, key=["n"])(inner)
    assert launched(kernel, Fact(lambda x: True)) == 7
    assert len(kernel.configs_timings) == 2


def test_only_plain_values_travel() -> None:
    assert all(map(can_travel, (None, True, 3, -1.5, "sum", tl.float16, (1, (2, "a")))))
    address = torch.zeros(1).data_ptr()
    refused: tuple[Any, ...] = (address, (1, address), torch.zeros(1), Mode(), torch.float16, [1])
    assert not any(map(can_travel, refused))


def test_a_heuristic_runs_once_for_each_config_and_launch(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = str(log)

    def counted(arguments: dict[str, Any]) -> int:
        with open(text, "a") as file:
            file.write(f"{os.getpid()} {arguments['BLOCK']}\n")
        return 2

    configs = [triton.Config({"BLOCK": 32 << i}) for i in range(3)]
    kernel = safetune(configs=configs, key=["n"])(triton.heuristics({"FLAG": counted})(flag_kernel))
    launched(kernel, Fact(lambda x: True))
    lines = log.read_text().splitlines()
    assert {line.split()[0] for line in lines} == {str(os.getpid())}
    assert sorted({line.split()[1] for line in lines}) == ["128", "32", "64"]
    assert len(lines) == 3 + 1, "for each config, and in the launch"


@pytest.mark.parametrize("name", TOLD)
def test_a_hook_in_a_child_sees_what_the_caller_s_tensors_have(name: str, tmp_path: Path) -> None:
    fact, told = FACTS[name], str(tmp_path / "told")

    def look(arguments: dict[str, Any], **options: Any) -> None:
        with open(told, "a") as file:
            file.write(f"{bool(fact.read(arguments['x']))}\n")

    configs = [triton.Config({"FLAG": 1, "BLOCK": 64}), triton.Config({"FLAG": 1, "BLOCK": 128})]
    kernel = safetune(configs=configs, key=["n"], pre_hook=look)(flag_kernel)
    assert launched(kernel, fact) == 1
    assert set(Path(told).read_text().split()) == {"True"}


def test_a_hook_changes_a_tensor_that_is_no_leaf(tmp_path: Path) -> None:
    """Autograd refuses that of a leaf alone."""
    told = tmp_path / "told"
    path = str(told)

    def zero(arguments: dict[str, Any], **options: Any) -> None:
        arguments["y"].zero_()
        with open(path, "a") as file:
            file.write(f"{arguments['y'].is_leaf} {arguments['y'].requires_grad}\n")

    configs = [triton.Config({"FLAG": 1, "BLOCK": 64}), triton.Config({"FLAG": 1, "BLOCK": 128})]
    kernel = safetune(configs=configs, key=["n"], pre_hook=zero)(flag_kernel)
    y = torch.ones(N, requires_grad=True) * 2
    kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](plain(), y, N)
    assert y.tolist() == [1.0] * N
    assert len(kernel.cache) == 1, "it is tuned"
    assert set(told.read_text().splitlines()) == {"False True"}


@pytest.mark.parametrize("names", ["reset_to_zero", "restore_value"])
def test_tensors_that_require_gradients_are_reset(names: str, tmp_path: Path) -> None:
    def look(arguments: dict[str, Any], exception: Any) -> None:
        assert arguments["y"].requires_grad
        assert exception is None

    configs = [triton.Config({"FLAG": 1, "BLOCK": 64}), triton.Config({"FLAG": 1, "BLOCK": 128})]
    given: dict[str, Any] = {names: ["y"], "post_hook": look}
    kernel = safetune(configs=configs, key=["n"], **given)(flag_kernel)
    y = torch.nn.Parameter(torch.zeros(N))
    kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](plain(), y, N)
    assert y.tolist() == [1.0] * N
