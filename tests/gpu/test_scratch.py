"""Kernels that make tensor descriptors on the device: their memory, wherever they are launched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import _allocation

import safetune
from safetune.launch import scratch_memory

pytestmark = pytest.mark.gpu

SOON_S = 60.0
ROWS, COLUMNS = 4096, 64


@triton.jit
def tile_kernel(x, y, M, TMA: tl.constexpr, BLOCK: tl.constexpr):
    """y = 2 x in tiles of BLOCK x 64, with descriptors or without."""
    start = tl.program_id(0) * BLOCK
    if TMA:
        source = tl.make_tensor_descriptor(x, [M, 64], [64, 1], [BLOCK, 64])
        target = tl.make_tensor_descriptor(y, [M, 64], [64, 1], [BLOCK, 64])
        target.store([start, 0], source.load([start, 0]) * 2)
    else:
        row = start + tl.arange(0, BLOCK)
        offset = row[:, None] * 64 + tl.arange(0, 64)[None, :]
        mask = (row < M)[:, None]
        tl.store(y + offset, tl.load(x + offset, mask=mask) * 2, mask=mask)


@pytest.fixture(autouse=True)
def _no_allocator() -> Iterator[None]:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("descriptors made on the device need no memory before sm_90")
    token = _allocation._allocator.set(_allocation._NULL_ALLOCATOR)
    yield
    _allocation._allocator.reset(token)


class Tiles:
    """A tuner of `tile_kernel` whose configs are all with descriptors, or not all."""

    def __init__(self, *uses: bool) -> None:
        blocks = (32, 64, 128)
        self.tuner = safetune.safetune(
            configs=[
                triton.Config({"TMA": use, "BLOCK": block})
                for use, block in zip(uses, blocks, strict=False)
            ],
            key=["M"],
        )(tile_kernel)

    def launch(self, x: torch.Tensor, y: torch.Tensor) -> None:
        rows = x.shape[0]
        self.tuner[lambda meta: (triton.cdiv(rows, meta["BLOCK"]),)](x, y, rows)

    def check(self, rows: int = ROWS, device: str = "cuda") -> None:
        """Launch on new tensors on the current stream, and see that the result is right."""
        x = torch.randn(rows, COLUMNS, device=device, dtype=torch.float16)
        y = torch.zeros_like(x)
        self.launch(x, y)
        assert torch.equal(y, x * 2)


def _main(work: Callable[[], None]) -> None:
    work()


def _thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # a thread's exception is the test's
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def _pool(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(SOON_S)


def _backward(work: Callable[[], None]) -> None:
    threads = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            work()
            return gradient

    Function.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()
    assert threads != [threading.get_ident()], "autograd has threads of its own for a GPU"


WHERE = {"main": _main, "thread": _thread, "pool": _pool, "backward": _backward}


def test_configs_with_and_without_it_are_both_measured(trials: Callable[[], list[Any]]) -> None:
    """In the child, too, no program has set an allocator."""
    Tiles(True, False).check()
    assert [(trial.verdict, trial.message) for trial in trials()] == [("ok", "")] * 2


@pytest.mark.parametrize("then", WHERE)
@pytest.mark.parametrize("first", ["main", "backward"])
def test_launches_anywhere(first: str, then: str) -> None:
    tiles = Tiles(True, True)
    WHERE[first](tiles.check)
    WHERE[then](tiles.check)
    assert tiles.tuner.needs_scratch
    assert isinstance(_allocation._allocator.get(), _allocation.NullAllocator)


def test_a_user_s_own_is_used_where_it_is_visible() -> None:
    asked: list[tuple[int, int]] = []

    def own(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        asked.append((size, alignment))
        return torch.empty(size, dtype=torch.int8, device="cuda")

    tiles = Tiles(True)
    token = _allocation._allocator.set(own)
    try:
        tiles.check()
        assert asked == [(ROWS // 32 * 256, 128)]
        _thread(tiles.check)
        assert len(asked) == 1
        assert _allocation._allocator.get() is own
    finally:
        _allocation._allocator.reset(token)


def test_plain_triton_kernels_within_the_context() -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    y = torch.zeros_like(x)

    def launch() -> None:
        with safetune.scratch_allocator():
            tile_kernel[(ROWS // 32,)](x, y, ROWS, TMA=True, BLOCK=32)

    with pytest.raises(RuntimeError, match="no allocator was set"):
        tile_kernel[(ROWS // 32,)](x, y, ROWS, TMA=True, BLOCK=32)
    _thread(launch)
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize("alignment", [128, 256, 512, 1024, 2048, 4096])
def test_alignment(alignment: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    blocks = [scratch_memory.allocate(size, alignment, stream) for size in (1, 384, 5000, 3 << 20)]
    assert [block.data_ptr() % alignment for block in blocks] == [0] * 4


@pytest.mark.parametrize("side", [False, True])
def test_the_launch_s_device_and_stream(side: bool) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    block = scratch_memory.allocate(3 << 20, 128, stream.cuda_stream)
    segment = _segment(block.data_ptr())
    assert segment["device"] == torch.cuda.current_device()
    assert segment["stream"] == stream.cuda_stream


def test_it_is_not_reused_before_the_kernel_is_done() -> None:
    """The launcher lets go of the memory at once; the kernel comes to it much later."""
    tiles = Tiles(True)
    tiles.check()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    with _observed() as sizes, torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        tiles.launch(x, y)
    assert sizes == [ROWS // 32 * 256]
    taken = []
    for elsewhere in (other, torch.cuda.default_stream()):  # whose memory it is not
        with torch.cuda.stream(elsewhere):
            for _ in range(256):
                taken.append(torch.full((sizes[0],), 255, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
    del taken


class TestUnderCapture:
    def test_memory_of_a_graph_is_its_own(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            block = scratch_memory.allocate(4096, 128, stream)
            pool = _segment(block.data_ptr())["segment_pool_id"]
            del block
        assert tuple(pool) == tuple(graph.pool())

    @pytest.mark.parametrize("kind", ["torch", "raw"])
    def test_replays_after_others_took_and_freed_memory(self, kind: str, raw_graph: Any) -> None:
        tiles = Tiles(True, True)
        x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        tiles.check()
        torch.cuda.synchronize()
        graph: Any
        if kind == "torch":
            graph = torch.cuda.CUDAGraph()
            context: Any = torch.cuda.graph(graph)
        else:
            graph = context = raw_graph(torch.cuda.Stream())
        with context:
            tiles.launch(x, y)
            tiles.launch(y, z)
        for seed in range(3):
            _churn()
            torch.manual_seed(seed)
            x.copy_(torch.randn_like(x))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(z, x * 4), f"replay {seed} of a {kind} graph"

    def test_a_capture_without_scratch_memory_succeeds_where_none_can_be_reserved(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a graph needs none of does not stop it, and the refusal leaves it valid."""
        tiles = Tiles(False)
        x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
        y = torch.zeros_like(x)
        tiles.launch(x, y)
        monkeypatch.setitem(scratch_memory._largest, torch.cuda.current_device(), 1 << 46)
        graph = torch.cuda.CUDAGraph()
        with safetune.graph(graph):
            tiles.launch(x, y)
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x * 2)

    def test_prepare_reserves_enough_scratch_memory(self) -> None:
        tiles = Tiles(True, True)
        x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
        y = torch.zeros_like(x)
        safetune.prepare(tiles.launch, x, y)
        graph = torch.cuda.CUDAGraph()
        with safetune.graph(graph) as captured:
            held = [torch.empty(1 << 12, device="cuda") for _ in range(64)]
            for _ in range(8):
                tiles.launch(x, y)
        assert (captured.report.misses, captured.report.scratch_allocations) == ((), 0)
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x * 2)
        del held


@pytest.mark.two_gpus
class TestTwoCards:
    def test_scratch_is_on_the_card_that_is_made_current(self) -> None:
        tiles = Tiles(True, True)
        before = torch.cuda.current_device()
        with torch.cuda.device(1):
            tiles.check(device="cuda:1")
            block = scratch_memory.allocate(4096, 128, torch.cuda.current_stream().cuda_stream)
            assert _segment(block.data_ptr())["device"] == 1
        assert torch.cuda.current_device() == before

    def test_a_launch_on_a_card_that_is_not_current_gets_scratch_it_can_use(self) -> None:
        """Triton launches on the current one, which sees the other's memory once torch says so."""
        tiles = Tiles(True, True)
        x = torch.randn(ROWS, COLUMNS, device="cuda:1", dtype=torch.float16)
        y = torch.zeros_like(x)
        x[:1].to("cuda:0").to("cuda:1")
        torch.cuda.synchronize(1)
        with _observed() as sizes:
            tiles.launch(x, y)
        torch.cuda.synchronize(0)
        assert len(sizes) == 1
        assert torch.equal(y.cpu(), (x * 2).cpu())


@contextlib.contextmanager
def _observed() -> Iterator[list[int]]:
    """Collect the bytes of each request."""
    sizes: list[int] = []
    allocate = scratch_memory.allocate

    def noted(size: int, *rest: Any) -> scratch_memory.Block:
        sizes.append(size)
        return allocate(size, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch_memory, "allocate", noted)
        yield sizes


def _segment(address: int) -> dict[str, Any]:
    """What torch's allocator says of the memory at an address."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return dict(segment)
    raise AssertionError(f"{address:#x} is not of torch's allocator")


def _churn() -> None:
    """Take memory of many sizes, fill it with bytes that are not a descriptor, and free it."""
    for size in (512, 4096, 32_768, 100_000, 1 << 20, 1 << 24):
        taken = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(32)]
        del taken
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
