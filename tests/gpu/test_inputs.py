"""What candidates run on, on a real GPU: copies beside a capture, draws, addresses, little room."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import safetune
from safetune.child.arguments import Arguments
from safetune.inputs.snapshot import Snapshot
from safetune.isolation import measuring_child
from tests import stored_rows

pytestmark = pytest.mark.gpu

N = 1 << 14
MIB = 1 << 20


@triton.jit
def grouped_kernel(out, table, n, BLOCK: tl.constexpr):
    """out[i, :] = twice what the i-th address points to."""
    row = tl.program_id(0)
    src = tl.load(table + row).to(tl.pointer_type(tl.float32))
    for start in range(0, n, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        value = tl.load(src + offset, mask=offset < n)
        tl.store(out + row * n + offset, value * 2, mask=offset < n)


@triton.jit
def address_kernel(out, address, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    src = address.to(tl.pointer_type(tl.float32))
    tl.store(out + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


@triton.jit
def tanh_kernel(x, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = libdevice.tanh(tl.load(x + offset, mask=offset < n))
    tl.store(out + offset, value, mask=offset < n)


@triton.jit
def descriptor_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    out.store([row, 0], x.load([row, 0]) + 1)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def blocks(*sizes: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


@pytest.fixture
def marks(cache_dir: Path) -> Callable[[], list[list[str]]]:
    """A function that returns the marks of every trial in the test's store."""

    def read() -> list[list[str]]:
        connection = stored_rows.connected(cache_dir / "safetune.db")
        try:
            rows = connection.execute("SELECT marks FROM trial ORDER BY rowid").fetchall()
        finally:
            connection.close()
        return [json.loads(text) for (text,) in rows]

    return read


@pytest.fixture
def tells(device: str) -> Iterator[list[str]]:
    """What launches warn of, but for tunings; empty at the end of a test that expects nothing."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(each.message) for each in caught if "is not tuned" in str(each.message)]
    assert told == []


def test_over_the_limit_floats_are_drawn_on_the_device(
    kernels: Any,
    device: str,
    marks: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tells: list[str],
) -> None:
    """The same bits in every child, like the caller's in mean and spread; the caller's stay."""
    monkeypatch.setenv("SAFETUNE_COPY_LIMIT", "64K")
    path, parent = str(tmp_path / "log"), os.getpid()

    def tell(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            x, y = arguments["x"].cpu(), arguments["y"].cpu()
            digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()
            same = hashlib.sha256(y.numpy().tobytes()).hexdigest()
            with open(path, "a") as file:
                facts = [os.getpid(), digest, same, x.mean().item(), x.std().item()]
                file.write(json.dumps(facts) + "\n")

    count = 16 * N
    x = torch.randn(count, device=device) * 2 + 10
    y = torch.arange(N // 4, device=device, dtype=torch.float32)
    out = torch.zeros(count, device=device)
    x_before, y_before = x.clone(), y.clone()
    configs = blocks(512, 1024, pre_hook=tell)
    kernel = safetune(configs=configs, key=["n"], isolation="config")(kernels.add_kernel)
    kernel[grid](x, y, out, N // 4)
    assert torch.equal(out[: N // 4], x[: N // 4] + y)
    assert torch.equal(x, x_before)
    assert torch.equal(y, y_before)
    assert sorted(marks()) == [["regenerated: x, out"], ["regenerated: x, out", "first"]]

    told = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len({pid for pid, *_ in told}) >= 2
    assert len({digest for _, digest, *_ in told}) == 1
    theirs = {y_digest for _, _, y_digest, *_ in told}
    assert theirs == {hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()}
    for _, digest, _, mean, std in told:
        assert digest != hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()
        assert mean == pytest.approx(10, abs=0.2)
        assert std == pytest.approx(2, abs=0.2)


class TestAddresses:
    def rows(self, device: str) -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(5)
        return [torch.randn(N, device=device, generator=generator) for _ in range(4)]

    def test_a_grouped_kernel_given_addresses_is_not_tuned(
        self, device: str, context_answers: Callable[[], None]
    ) -> None:
        rows = self.rows(device)
        table = torch.tensor([row.data_ptr() for row in rows], device=device)
        out = torch.zeros(4, N, device=device)
        kernel = safetune(configs=blocks(512, 1024), key=["n"])(grouped_kernel)
        with pytest.warns(UserWarning, match="not tuned.*table holds an address.*`inputs=`"):
            kernel[(4,)](out, table, N)
        assert torch.equal(out, torch.stack(rows) * 2)
        assert kernel.best_config is kernel.configs[0]
        context_answers()

    def test_addresses_that_inputs_makes_are_allowed(
        self, device: str, trials: Callable[[], list[Any]], tells: list[str]
    ) -> None:
        held: list[torch.Tensor] = []

        def factory(arguments: dict[str, Any]) -> dict[str, Any]:
            n = arguments["n"]
            held.extend(torch.randn(n, device=device) for _ in range(4))
            table = torch.tensor([row.data_ptr() for row in held], device=device)
            return {"out": torch.zeros(4, n, device=device), "table": table}

        rows = self.rows(device)
        table = torch.tensor([row.data_ptr() for row in rows], device=device)
        out = torch.zeros(4, N, device=device)
        kernel = safetune(configs=blocks(512, 1024), key=["n"], inputs=factory)(grouped_kernel)
        kernel[(4,)](out, table, N)
        assert torch.equal(out, torch.stack(rows) * 2)
        assert [trial.verdict for trial in trials()] == ["ok", "ok"]
        assert held == []

    def test_an_address_as_an_integer_is_not_tuned(self, device: str) -> None:
        x = self.rows(device)[0]
        out = torch.zeros(N, device=device)
        kernel = safetune(configs=blocks(512, 1024), key=["n"])(address_kernel)
        with pytest.warns(UserWarning, match="not tuned.*address holds an address"):
            kernel[grid](out, x.data_ptr() + 16, N - 4)
        assert torch.equal(out[: N - 4], x[4:])

    def test_large_indices_are_not_taken_for_addresses(
        self, kernels: Any, device: str, trials: Callable[[], list[Any]], tells: list[str]
    ) -> None:
        """A hash may be any number; the driver knows which ones are addresses."""
        generator = torch.Generator(device).manual_seed(9)
        x = torch.randint(0, 1 << 62, (N,), device=device, generator=generator)
        x[: N // 2] >>= 20
        y, out = torch.zeros_like(x), torch.zeros_like(x)
        kernel = safetune(configs=blocks(512, 1024), key=["n"])(kernels.add_kernel)
        kernel[grid](x, y, out, N)
        assert torch.equal(out, x)
        assert [trial.verdict for trial in trials()] == ["ok", "ok"]


def test_copies_beside_a_capture(device: str, context_answers: Callable[[], None]) -> None:
    """They see what the current stream will have written, take no memory on the device, and the
    graph that another thread captures in global mode replays what it captured.
    """
    if device == "cpu":
        pytest.skip("needs a GPU: there is nothing to capture")
    captured = torch.ones(1000, device=device)
    captured.add_(1).mul_(2).fill_(1)  # their kernels are loaded
    x = torch.zeros(1 << 22, device=device)
    x += 1
    graph = torch.cuda.CUDAGraph()
    capturing, copied = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, capture_error_mode="global"):
                captured.add_(1)
                capturing.set()
                assert copied.wait(60)
                captured.mul_(2)
        except BaseException as error:  # a thread's exception is the test's
            errors.append(error)
        finally:
            capturing.set()

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert capturing.wait(60)
        with torch.cuda.stream(stream):
            for _ in range(200):
                x += 1
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            snapshot = Snapshot([x, x[1:]], ["x", "x"])
            drawn = Snapshot([x], ["x"], limit=0)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
    finally:
        copied.set()
        thread.join(60)
    assert not errors, errors
    assert after == before
    assert drawn.regenerated == ("x",)
    noise = drawn.layout.blocks[0].noise
    assert noise is not None
    assert (noise.low, noise.high) == (201.0, 201.0)
    for each in (snapshot, drawn):
        copies = Arguments(each.layout, os.dup(each.fd)).tensors
        each.close()
        assert all((copy == 201).all() for copy in copies)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, torch.full_like(captured, 4.0))
    context_answers()


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_alignment_is_the_caller_s(
    kernels: Any,
    device: str,
    tmp_path: Path,
    trials: Callable[[], list[Any]],
    tells: list[str],
    shift: int,
) -> None:
    path, parent = str(tmp_path / "log"), os.getpid()

    def tell(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            with open(path, "a") as file:
                file.write(f"{arguments['x'].data_ptr() % 16} {arguments['x'].data_ptr() % 512}\n")

    whole = torch.randn(N + 8, device=device)
    x, y, out = whole[shift : shift + N], torch.randn(N, device=device), torch.zeros_like(whole)
    kernel = safetune(configs=blocks(512, 1024, pre_hook=tell), key=["n"])(kernels.add_kernel)
    kernel[grid](x, y, out, N)
    assert torch.equal(out[:N], x + y)
    assert [trial.verdict for trial in trials()] == ["ok", "ok"]
    told = set(Path(path).read_text().splitlines())
    assert told == {f"{4 * shift} {x.data_ptr() % 512}"}


def test_a_descriptor_whose_block_a_hook_sets(
    device: str, trials: Callable[[], list[Any]], tells: list[str]
) -> None:
    def set_block(arguments: dict[str, Any]) -> None:
        for name in ("x", "out"):
            arguments[name].block_shape = [arguments["BLOCK"], 64]

    x = torch.randn(1024, 64, device=device)
    out = torch.zeros_like(x)
    pair = [TensorDescriptor.from_tensor(each, [1, 64]) for each in (x, out)]
    kernel = safetune(configs=blocks(32, 64, pre_hook=set_block), key=["n"])(descriptor_kernel)
    kernel[grid](*pair, 1024)
    assert torch.equal(out, x + 1)
    assert [trial.verdict for trial in trials()] == ["ok", "ok"]


def test_libdevice(device: str, trials: Callable[[], list[Any]], tells: list[str]) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: the interpreter has no libdevice")
    x = torch.randn(N, device=device)
    out = torch.zeros_like(x)
    kernel = safetune(configs=blocks(512, 1024), key=["n"])(tanh_kernel)
    kernel[grid](x, out, N)
    assert torch.allclose(out, torch.tanh(x), atol=1e-6)
    assert [trial.verdict for trial in trials()] == ["ok", "ok"]


class TestLittleRoom:
    """x takes 1 GiB, of which the kernel reads the first N elements; it is drawn, not copied."""

    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        if device == "cpu":
            pytest.skip("needs a GPU: it is about its memory")
        monkeypatch.setenv("SAFETUNE_COPY_LIMIT", "1MiB")
        measuring_child.drop_idle(torch.cuda.current_device())
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()

    def call(self, kernel: Any, x: torch.Tensor, n: int = N) -> list[str]:
        y, out = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel[grid](x, y, out, n)
        assert torch.equal(out, x[:n] + y)
        return [str(each.message) for each in caught if "not tuned" in str(each.message)]

    def fill(self, left: int) -> torch.Tensor:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        size = torch.cuda.mem_get_info()[0] - left
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def test_without_memory_for_the_arguments_nothing_is_tuned(
        self, kernels: Any, trials: Callable[[], list[Any]], context_answers: Callable[[], None]
    ) -> None:
        kernel = safetune(configs=blocks(512, 1024), key=["n"])(kernels.add_kernel)
        x = torch.randn(256 * MIB, device="cuda")
        held = self.fill(1200 * MIB)
        (text,) = self.call(kernel, x)
        assert "needs 1.5 GiB of memory on device" in text
        assert "x (1 GiB)" in text
        assert "`inputs=`" in text
        del held
        assert self.call(kernel, x, N // 2) == []
        assert [trial.verdict for trial in trials()] == ["ok", "ok"]
        context_answers()

    def test_cached_blocks_that_are_free_count_as_free_memory(
        self, kernels: Any, trials: Callable[[], list[Any]]
    ) -> None:
        kernel = safetune(configs=blocks(512, 1024), key=["n"])(kernels.add_kernel)
        x = torch.randn(256 * MIB, device="cuda")
        held = self.fill(1200 * MIB)
        del held  # the caching allocator keeps it
        reserved = torch.cuda.memory_reserved()
        assert self.call(kernel, x) == []
        assert torch.cuda.memory_reserved() < reserved // 2
        assert [trial.verdict for trial in trials()] == ["ok", "ok"]

    def test_an_idle_child_gives_its_memory_back_for_the_next_tuning(
        self, kernels: Any, trials: Callable[[], list[Any]]
    ) -> None:
        kernel = safetune(configs=blocks(512, 1024), key=["n"])(kernels.add_kernel)
        x = torch.randn(256 * MIB, device="cuda")
        held = self.fill(2800 * MIB)
        for n in (N, N // 2):
            assert self.call(kernel, x, n) == []
        assert [trial.verdict for trial in trials()] == ["ok"] * 4
        del held
