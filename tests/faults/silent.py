"""Configs that compute, and are wrong, or only look wrong: kernels, and a case for each fault.

A case runs on a GPU and in Triton's interpreter alike; `test_silent.py` here and
`tests/gpu/test_silent_faults.py` run all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune

#: Not a multiple of any block below.
N = 1000
GOOD, ALSO_GOOD, BAD = 64, 128, 256

CASES: dict[str, tuple[str, Callable[..., None]]] = {}


def case(row: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a case of a row in `rows.py`."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        CASES[run.__name__] = (row, run)
        return run

    return register


def parameters() -> list[Any]:
    """Return every case as a test parameter, marked with its row."""
    return [
        pytest.param(run, marks=pytest.mark.fault(row), id=name)
        for name, (row, run) in CASES.items()
    ]


@triton.jit
def stray_kernel(x, out, n, STRAY: tl.constexpr, BLOCK: tl.constexpr):
    """out = x + 1, and beside it what STRAY says."""
    program = tl.program_id(0)
    offset = program * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask, other=0.0) + 1
    if STRAY == "after":
        tl.store(out + offset, value)
    elif STRAY == "before":
        tl.store(out + offset, value, mask=mask)
        if program == 0:
            tl.store(out - 4 + tl.arange(0, 4), tl.full((4,), 7.0, tl.float32))
    elif STRAY == "last":
        tl.store(out + offset, value, mask=mask)
        if program == tl.num_programs(0) - 1:
            tl.store(out + n, 7.0)
    elif STRAY == "unowned":
        tl.store(out + offset, value, mask=mask)
        if program == 0:
            tl.store(out + n + 3, 7.0)
    else:
        tl.store(out + offset, value, mask=mask)


@triton.jit
def power_kernel(x, out, n, ROUNDS: tl.constexpr, ID: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * 1.01 ** ROUNDS: fewer rounds are faster, and wrong."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask, other=0.0)
    for _ in range(ROUNDS):
        value = value * 1.01
    tl.store(out + offset, value, mask=mask)


@triton.jit
def half_kernel(x, out, n, UPTO, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """out = x + 1; not WHOLE, its elements from UPTO on are left as they are."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask, other=0.0) + 1
    if not WHOLE:
        mask = mask & (offset < UPTO)
    tl.store(out + offset, value, mask=mask)


@triton.jit
def split_kernel(x, out, n, depth, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """out[j] = sum of x[:, j], by SPLIT programs each, added with atomics in out's type."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(1), depth, SPLIT):
        total += tl.load(x + row * n + column, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(out + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def total_kernel(x, out, n, BLOCK: tl.constexpr):
    """out[0] = the sum of x, with one atomic per program."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + offset, mask=offset < n, other=0.0), axis=0))


@triton.jit
def partial_kernel(x, out, partials, n, BLOCK: tl.constexpr):
    """out = x + 1, and a partial sum for each program."""
    program = tl.program_id(0)
    offset = program * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask, other=0.0)
    tl.store(out + offset, value + 1, mask=mask)
    tl.store(partials + program, tl.sum(value, axis=0))


@triton.jit
def compact_kernel(x, out, count, n, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """The positive elements of x, in the order in which programs come."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    offset = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < n, other=0.0)
    kept = value > 0
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    start = tl.atomic_add(count, tl.sum(kept.to(tl.int32), axis=0))
    tl.store(out + start + place, value, mask=kept)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def values(device: str, *shape: int) -> torch.Tensor:
    """Return random values that are the same each time."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).to(device)


@contextmanager
def no_complaint() -> Iterator[None]:
    """Fail where safetune warns of the results."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(warning.message) for warning in caught]
    findings = ("give different results", "wrote into")
    assert not [text for text in said if any(words in text for words in findings)], said


def unmarked(trials: dict[Any, Any]) -> bool:
    """Whether no trial qualifies its result."""
    return not any(
        "disputed" in mark or "unowned" in mark for t in trials.values() for mark in t.marks
    )


def strays(harmless: Any, device: str, stray: str) -> None:
    """Tune with one config that writes outside, declared first."""
    configs = [
        triton.Config({"BLOCK": block, "STRAY": stray if block == BAD else "no"})
        for block in (BAD, GOOD, ALSO_GOOD)
    ]
    kernel = safetune(configs=configs, key=["n"])(stray_kernel)
    x, out = values(device, N), torch.zeros(N, device=device)
    trials = harmless.check(
        lambda: kernel[grid](x, out, N),
        {BAD: "out_of_bounds", GOOD: "ok", ALSO_GOOD: "ok"},
        after={"out": (out, x + 1), "x": (x, x.clone())},
    )
    assert kernel.best_config.kwargs["STRAY"] == "no"
    assert "out" in trials[BAD].message, "the message names the argument"


@case("write-after")
def a_mask_is_missing(harmless: Any, device: str) -> None:
    strays(harmless, device, "after")


@case("write-before")
def a_write_before(harmless: Any, device: str) -> None:
    strays(harmless, device, "before")


@case("write-last-program")
def the_last_program_alone(harmless: Any, device: str) -> None:
    strays(harmless, device, "last")


@case("write-unowned")
def bytes_between_the_views(harmless: Any, device: str) -> None:
    """The storage goes on behind the argument: what lies there is the caller's, too."""
    configs = [
        triton.Config({"BLOCK": block, "STRAY": "unowned" if block == BAD else "no"})
        for block in (GOOD, BAD, ALSO_GOOD)
    ]
    kernel = safetune(configs=configs, key=["n"])(stray_kernel)
    x, buffer = values(device, N), torch.zeros(2 * N, device=device)
    out = buffer[:N]
    with pytest.warns(UserWarning, match=r"\bout\b"):
        trials = harmless.check(
            lambda: kernel[grid](x, out, N),
            {GOOD: "ok", BAD: "ok", ALSO_GOOD: "ok"},
            after={"out": (out, x + 1), "x": (x, x.clone())},
        )
    marks = {block: trial.marks for block, trial in trials.items()}
    assert [mark.partition(":")[0] for mark in marks[BAD]] == ["unowned"]
    assert "out" in marks[BAD][0]
    assert marks[GOOD] == marks[ALSO_GOOD] == []


ROUNDS = 200


@case("wrong-result")
def one_of_eight(harmless: Any, device: str) -> None:
    """It does a fraction of the work, so it is the fastest, and it is declared first."""
    size = N if device == "cpu" else 1 << 22
    rounds = 20 if device == "cpu" else ROUNDS
    blocks = [256, 128, 512, 1024] if device == "cpu" else [256, 512, 1024, 2048]
    configs = [triton.Config({"BLOCK": blocks[0], "ROUNDS": 1, "ID": 0})]
    configs += [
        triton.Config({"BLOCK": blocks[i % 4], "ROUNDS": rounds, "ID": i}, num_warps=2 << i // 4)
        for i in range(1, 8)
    ]
    kernel = safetune(configs=configs, key=["n"])(power_kernel)
    x = values(device, size)
    out = torch.zeros_like(x)
    wanted = {0: "wrong_result"} | dict.fromkeys(range(1, 8), "ok")
    harmless.check(lambda: kernel[grid](x, out, size), wanted, by="ID", after={"x": (x, x.clone())})
    assert kernel.best_config.kwargs["ROUNDS"] == rounds
    torch.testing.assert_close(out, x * 1.01**rounds, rtol=1e-3, atol=1e-3)


@case("wrong-majority")
def a_reference_outvotes_the_majority(harmless: Any, device: str) -> None:
    configs = [
        triton.Config({"BLOCK": 64 << i, "ROUNDS": 1 if i else 9, "ID": i}) for i in range(4)
    ]

    def reference(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"out": arguments["x"].double() * 1.01**9}

    kernel = safetune(configs=configs, key=["n"], reference=reference)(power_kernel)
    x = values(device, N)
    out = torch.zeros_like(x)
    wanted = {0: "ok", 1: "wrong_result", 2: "wrong_result", 3: "wrong_result"}
    trials = harmless.check(
        lambda: kernel[grid](x, out, N), wanted, by="ID", after={"x": (x, x.clone())}
    )
    torch.testing.assert_close(out, x * 1.01**9, rtol=1e-3, atol=1e-3)
    assert "out" in trials[1].message


def stale(harmless: Any, device: str, held: int) -> None:
    """Tune where the output holds the right result from `held` on, and one config stops there."""
    blocks = (BAD, 32, 64, 128)
    configs = [triton.Config({"BLOCK": block, "WHOLE": block != BAD}) for block in blocks]
    kernel = safetune(configs=configs, key=["n"])(half_kernel)
    x = values(device, N)
    out = x + 1
    out[:held] = 0
    harmless.check(
        lambda: kernel[grid](x, out, N, N // 2),
        {block: "order_dependent" if block == BAD else "ok" for block in blocks},
        after={"out": (out, x + 1), "x": (x, x.clone())},
    )
    assert kernel.best_config.kwargs["WHOLE"]


@case("order-dependent")
def an_earlier_launch_left_the_rest(harmless: Any, device: str) -> None:
    stale(harmless, device, N // 2)


@case("order-dependent")
def an_earlier_call_left_all(harmless: Any, device: str) -> None:
    """No config changes a bit: who writes what cannot be told from the bits alone."""
    stale(harmless, device, 0)


@case("fp16-split-k")
def sums_in_half_precision(harmless: Any, device: str) -> None:
    configs = [
        triton.Config({"BLOCK": 128 if split > 2 else 64, "SPLIT": split})
        for split in (1, 2, 4, 8, 16)
    ]
    n, depth = 200, 96
    kernel = safetune(configs=configs, key=["n"], reset_to_zero=["out"])(split_kernel)
    x = values(device, depth, n).half()
    out = torch.zeros(n, dtype=torch.float16, device=device)
    with no_complaint():
        trials = harmless.check(
            lambda: kernel[lambda m: (triton.cdiv(n, m["BLOCK"]), m["SPLIT"])](x, out, n, depth),
            dict.fromkeys((1, 2, 4, 8, 16), "ok"),
            by="SPLIT",
            after={"x": (x, x.clone())},
        )
    assert unmarked(trials)
    torch.testing.assert_close(out.float(), x.float().sum(0), rtol=2e-2, atol=1e-1)


@case("float-atomics")
def one_atomic_per_program(harmless: Any, device: str) -> None:
    blocks = (16, 32, 64, 128)
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    kernel = safetune(configs=configs, key=["n"], reset_to_zero=["out"])(total_kernel)
    x, out = values(device, N), torch.zeros(1, device=device)
    with no_complaint():
        trials = harmless.check(
            lambda: kernel[grid](x, out, N),
            dict.fromkeys(blocks, "ok"),
            after={"x": (x, x.clone())},
        )
    assert unmarked(trials)
    torch.testing.assert_close(out[0], x.sum(), rtol=1e-4, atol=1e-3)


def partial_sums(harmless: Any, device: str, **options: Any) -> dict[Any, Any]:
    """Tune with another number of partial sums in each config; none may be out."""
    blocks = (64, 128, 256, 512)
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    kernel = safetune(configs=configs, key=["n"], **options)(partial_kernel)
    x, out = values(device, N), torch.zeros(N, device=device)
    partials = torch.zeros(triton.cdiv(N, min(blocks)), device=device)
    trials: dict[Any, Any] = harmless.check(
        lambda: kernel[grid](x, out, partials, N),
        dict.fromkeys(blocks, "ok"),
        after={"out": (out, x + 1), "x": (x, x.clone())},
    )
    torch.testing.assert_close(partials.sum(), x.sum(), rtol=1e-4, atol=1e-3)
    return trials


@case("partials")
def partials_by_any_name(harmless: Any, device: str) -> None:
    partial_sums(harmless, device)


@case("partials")
def partials_that_are_scratch(harmless: Any, device: str) -> None:
    with no_complaint():
        assert unmarked(partial_sums(harmless, device, scratch=["partials"]))


@case("compaction")
def places_as_programs_come(harmless: Any, device: str) -> None:
    blocks = (32, 64, 128, 256)
    configs = [triton.Config({"BLOCK": block, "REVERSE": block % 3 == 1}) for block in blocks]
    kernel = safetune(configs=configs, key=["n"], reset_to_zero=["count"])(compact_kernel)
    x, out = values(device, N), torch.zeros(N, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    with no_complaint():
        trials = harmless.check(
            lambda: kernel[grid](x, out, count, N),
            dict.fromkeys(blocks, "ok"),
            after={"x": (x, x.clone())},
        )
    assert unmarked(trials)
    positive = x[x > 0]
    assert count.item() == positive.numel()
    assert torch.equal(out[: positive.numel()].sort().values, positive.sort().values)


@case("two-differ")
def two_configs_that_differ(harmless: Any, device: str) -> None:
    """Neither is known to be wrong: the first declared is chosen, and the user hears of it."""
    configs = [triton.Config({"BLOCK": 64, "ROUNDS": 2 + 30 * i, "ID": i}) for i in range(2)]
    kernel = safetune(configs=configs, key=["n"])(power_kernel)
    x = values(device, N)
    out = torch.zeros_like(x)
    with pytest.warns(UserWarning, match="give different results"):
        trials = harmless.check(
            lambda: kernel[grid](x, out, N),
            {0: "ok", 1: "ok"},
            by="ID",
            after={"x": (x, x.clone())},
        )
    marks = {block: [m.partition(":")[0] for m in trial.marks] for block, trial in trials.items()}
    assert marks == {0: ["disputed"], 1: ["disputed", "outvoted"]}
    rounds = kernel.best_config.kwargs["ROUNDS"]
    assert rounds == 2
    torch.testing.assert_close(out, x * 1.01**rounds, rtol=1e-3, atol=1e-3)


@case("nan-outputs")
def outputs_that_are_nan(harmless: Any, device: str) -> None:
    blocks = (64, 128, 256)
    configs = [triton.Config({"BLOCK": block, "STRAY": "no"}) for block in blocks]
    kernel = safetune(configs=configs, key=["n"])(stray_kernel)
    x, out = values(device, N), torch.zeros(N, device=device)
    x[::3] = float("nan")
    x[1] = float("inf")
    with no_complaint():
        trials = harmless.check(
            lambda: kernel[grid](x, out, N),
            dict.fromkeys(blocks, "ok"),
            after={"out": (out, x + 1)},
        )
    assert unmarked(trials)
