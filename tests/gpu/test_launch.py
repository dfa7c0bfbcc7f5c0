"""A launch that is known skips Triton's own path, and does the same."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

import safetune
from tests.binding import tell_binding

pytestmark = pytest.mark.gpu


N = 4096
LAUNCHES = int(os.environ.get("SAFETUNE_TEST_LAUNCHES", "30000"))


class Strided:
    """A tuner of `strided_kernel`, whose strides are not in the key, beside Triton's own kernel.

    Attributes:
        by_triton: how many of the tuner's launches went through Triton's own path.
    """

    def __init__(self, kernels: Any) -> None:
        configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (128, 256)]
        function = kernels.strided_kernel.fn
        self.reference = JITFunction(function)
        self.jit = JITFunction(function)
        self.tuner = safetune.safetune(configs=configs, key=["n"])(self.jit)
        self.tuner._miss = self._choose  # nothing is to be measured here
        self.by_triton = 0
        tell_binding(self.jit, self._bound)

    def _bound(self) -> None:
        self.by_triton += 1

    def _choose(self, key: Any, *_: Any) -> triton.Config:
        return self.tuner.states.of(key).set_choice(self.tuner.configs[len(self.tuner.cache) % 2])

    def __call__(self, x: Any, y: Any, out: Any, n: int, *strides: int, named: bool = False) -> Any:
        grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)  # noqa: E731
        if named:
            names = dict(zip(("stride_x", "stride_y", "stride_out"), strides, strict=True))
            return self.tuner[grid](n=n, y=y, x=x, out=out, **names)
        return self.tuner[grid](x, y, out, n, *strides)

    def by_reference(self, x: Any, y: Any, out: Any, n: int, *strides: int) -> Any:
        options = self.tuner.best_config.all_kwargs()
        blocks = (triton.cdiv(n, options["BLOCK"]),)
        return self.reference[blocks](x, y, out, n, *strides, **options)


@pytest.fixture
def strided(kernels: Any) -> Strided:
    return Strided(kernels)


def memory(dtype: torch.dtype, offset: int, stride: int) -> torch.Tensor:
    """Random numbers that begin this many elements after an aligned address."""
    return torch.randn((N + 8) * stride, device="cuda").to(dtype)[offset:]


def test_the_same_binary_as_triton_s(strided: Strided) -> None:
    """200 launches that differ in dtypes, alignment, strides and the way of calling."""
    order = random.Random(0)
    dtypes = (torch.float32, torch.bfloat16)
    hashes = set()
    calls = [
        (
            order.choice((N, 1000)),
            [order.choice((1, 2, 16)) for _ in range(3)],
            [(order.choice(dtypes), order.choice((0, 0, 1))) for _ in range(3)],
        )
        for _ in range(50)
    ]
    for number in range(200):
        n, strides, kinds = order.choice(calls)
        tensors = [memory(*how, each) for how, each in zip(kinds, strides, strict=True)]
        before = tensors[2].clone()
        known = strided(*tensors, n, *strides, named=order.random() < 0.5)
        after = tensors[2].clone()
        tensors[2].copy_(before)
        expected = strided.by_reference(*tensors, n, *strides)
        what = f"launch {number}: n={n}, strides {strides}, {[str(t.dtype) for t in tensors]}"
        assert known.hash == expected.hash, what
        assert torch.equal(after, tensors[2]), what
        hashes.add(known.hash)
    assert len(hashes) > 20
    assert strided.by_triton < 150, "some were known"


def test_triton_is_asked_once(strided: Strided) -> None:
    tensors = [memory(torch.float32, 0, 1) for _ in range(3)]
    strided(*tensors, N, 1, 1, 1)
    asked = strided.by_triton
    expected = tensors[2].clone()
    for _ in range(10):
        strided(*tensors, N, 1, 1, 1)
        expected[:N] += tensors[0][:N]
        expected[:N] += tensors[1][:N]
    assert strided.by_triton == asked
    torch.testing.assert_close(tensors[2], expected)


def test_a_grid_function_that_changes_what_is_launched(strided: Strided) -> None:
    """A known launch then passes what is in its dict, tensors as they are, to Triton's launcher."""
    first, other, out = (memory(torch.float32, 0, 1) for _ in range(3))

    def grid(meta: dict[str, Any]) -> tuple[int]:
        meta["n"], meta["x"] = 16, meta["y"]
        return (triton.cdiv(N, meta["BLOCK"]),)

    for known in (False, True, True):
        asked = strided.by_triton
        expected = out.clone()
        expected[:16] += 2 * other[:16]
        strided.tuner[grid](first, other, out, N, 1, 1, 1)
        assert (strided.by_triton == asked) is known
        torch.testing.assert_close(out, expected)


def test_memory_of_the_host(strided: Strided) -> None:
    """Refused as Triton does where the device cannot reach it, and used where it can."""
    tensors = [memory(torch.float32, 0, 1) for _ in range(3)]
    for _ in range(2):
        strided(*tensors, N, 1, 1, 1)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        strided(tensors[0].cpu(), *tensors[1:], N, 1, 1, 1)
    pinned = tensors[0].cpu().pin_memory()
    before = tensors[2].clone()
    for _ in range(2):
        tensors[2].copy_(before)
        strided(pinned, *tensors[1:], N, 1, 1, 1)
        torch.cuda.synchronize()
        torch.testing.assert_close(tensors[2][:N], (before + tensors[0] + tensors[1])[:N])


def test_the_current_stream(strided: Strided) -> None:
    """Behind a long wait on a side stream, the launch is not done until the wait is."""
    tensors = [memory(torch.float32, 0, 1) for _ in range(3)]
    strided(*tensors, N, 1, 1, 1)
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    asked = strided.by_triton
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        strided(*tensors, N, 1, 1, 1)
        done.record()
    assert strided.by_triton == asked
    torch.cuda.default_stream().synchronize()
    assert not done.query(), "the wait of 0.1 s is over: the launch was not asynchronous"
    with torch.cuda.stream(side):
        before = tensors[2].clone()
    side.synchronize()
    torch.testing.assert_close(before, tensors[2])


def test_launch_hooks_are_called(strided: Strided) -> None:
    tensors = [memory(torch.float32, 0, 1) for _ in range(3)]
    strided(*tensors, N, 1, 1, 1)
    told: list[str] = []

    def note(metadata: Any) -> None:
        told.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(note)
    try:
        strided(*tensors, N, 1, 1, 1)
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    strided(*tensors, N, 1, 1, 1)
    assert told == ["strided_kernel"]


def test_no_memory_and_no_tensor_is_kept(strided: Strided) -> None:
    tensors = [memory(torch.float32, 0, 1) for _ in range(3)]
    for _ in range(100):
        strided(*tensors, N, 1, 1, 1)
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(LAUNCHES):
        strided(*tensors, N, 1, 1, 1)
    torch.cuda.synchronize()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes in Python after {LAUNCHES} launches"
    assert torch.cuda.memory_allocated() == allocated
    references = [weakref.ref(each) for each in tensors]
    del tensors
    assert [each() for each in references] == [None] * 3


@pytest.mark.two_gpus
def test_the_current_device(strided: Strided) -> None:
    for index in (0, 1, 0, 1):
        with torch.cuda.device(index):
            tensors = [memory(torch.float32, 0, 1) for _ in range(3)]
            expected = tensors[0] + tensors[1] + tensors[2]
            strided(*tensors, N, 1, 1, 1)
            torch.testing.assert_close(tensors[2][:N], expected[:N], msg=f"on device {index}")
    assert strided.by_triton == 2, "once for each device"
