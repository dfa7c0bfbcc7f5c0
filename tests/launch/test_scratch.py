"""Scratch memory for kernels with device-side tensor descriptors, as far as it goes without a GPU.

Which configs need it is read off kernels compiled for cards that are not here; who gets which
allocator is tried on real launches in the interpreter, which ask Triton for scratch on the way.
`tests/gpu/test_scratch.py` has the memory itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from triton.runtime import _allocation

import safetune
from safetune import triton_launch
from safetune.launch import scratch_memory
from tests import capturing

if TYPE_CHECKING:
    from tests.capturing import Copies
    from tests.conftest import FreshProcess

copies, driver = capturing.copies, capturing.driver  # fixtures

SCRIPT = Path(__file__).with_name("compile_scratch.py")

SOON_S = 60.0


@pytest.mark.internals
def test_metadata_says_which_configs_need_it(fresh_process: FreshProcess) -> None:
    """Not the capability alone: descriptors made on the device, their number, and the stages."""
    done = fresh_process(SCRIPT, 80, 90, 100, 120, env={"TRITON_INTERPRET": None}, warm=True)
    found = json.loads(done.stdout)
    needed = {
        "plain": [0, 1],
        "load": [128, 128],
        "copy": [256, 128],
        "branch not taken": [0, 1],
        "branch taken": [128, 128],
    }
    staged = {"two stages": [256, 128], "four stages": [512, 128]}
    if "two stages" not in found["90"]:
        staged = {}
    assert found["80"] == {name: [0, 1] for name in (*needed, *staged)}
    assert found["90"] == found["100"] == {**needed, **staged}
    fewer = {name: [size - 128, 128] for name, (size, _) in staged.items()}
    assert found["120"] == {**needed, **fewer}


@pytest.mark.internals
def test_a_resolved_kernel_says_what_its_config_needs(fresh_process: FreshProcess) -> None:
    """As it was compiled, for two configs of one kernel of which one makes descriptors."""
    done = fresh_process(SCRIPT, "resolved", 80, 90, env={"TRITON_INTERPRET": None}, warm=True)
    assert json.loads(done.stdout) == {"80": {"32": 0, "64": 0}, "90": {"32": 0, "64": 128}}


@pytest.mark.internals
class TestWhoseAllocator:
    @pytest.fixture
    def needy(self, copies: type[Copies]) -> Needy:
        return Needy(copies(None))

    def test_nothing_is_set_up_and_nothing_stays(self, needy: Needy) -> None:
        needy.copy(100)
        assert needy.given == ["failed", "ours"], "the first launch finds out"
        needy.copy(100)
        needy.copy(200)
        assert needy.given[2:] == ["ours"] * 2, "the later ones know"
        assert isinstance(_allocation._allocator.get(), _allocation.NullAllocator)

    @pytest.mark.parametrize("where", ["thread", "pool", "backward"])
    def test_launches_on_other_threads_get_scratch_memory(self, needy: Needy, where: str) -> None:
        """The user's allocator is a context variable, which they do not see."""
        needy.copy(100)
        _allocation._allocator.set(lambda *request: ("the user's", *request))
        try:
            WHERE[where](lambda: needy.copy(100))
        finally:
            _allocation._allocator.set(_allocation._NULL_ALLOCATOR)
        assert needy.given[2:] == ["the user's" if where == "backward" else "ours"]

    def test_the_user_s_own_is_used_and_stays(self, needy: Needy) -> None:
        def own(*request: Any) -> Any:
            return ("the user's", *request)

        for _ in range(2):  # before and after it is known that the kernel needs some
            token = _allocation._allocator.set(own)
            try:
                needy.copy(100)
                with safetune.scratch_allocator():
                    assert _allocation._allocator.get() is own
                assert _allocation._allocator.get() is own
            finally:
                _allocation._allocator.reset(token)
            assert needy.given == ["the user's"]
            needy.given.clear()
            needy.copy(100)
            needy.given.clear()

    def test_a_user_s_own_that_fails_is_the_user_s_to_see(self, needy: Needy) -> None:
        def own(*request: Any) -> Any:
            raise RuntimeError("no allocator was set, says the user's")

        token = _allocation._allocator.set(own)
        try:
            with pytest.raises(RuntimeError, match="says the user's"):
                needy.copy(100)
        finally:
            _allocation._allocator.reset(token)
        assert needy.launches == 1, "and is not tried twice"

    def test_another_error_is_not_taken_for_it(self, copies: type[Copies]) -> None:
        copy = copies(None)
        launches = []

        def run(*_: Any, **__: Any) -> None:
            launches.append(1)
            raise RuntimeError("Kernel requires a runtime memory allocation, but no allocator")

        copy.tuner.fn = SimpleNamespace(fn=copy.tuner.fn.fn, run=run)
        with pytest.raises(RuntimeError, match="but no allocator"):
            copy(100)
        assert len(launches) == 1
        assert not copy.tuner.needs_scratch

    def test_plain_kernels_within_the_context(self) -> None:
        with safetune.scratch_allocator():
            assert _allocation._allocator.get() is scratch_memory.allocate
        with pytest.raises(RuntimeError, match="no allocator was set"):
            _allocation._allocator.get()(12, 128, 0)


@pytest.mark.internals
def test_tritons_own_launcher_gets_scratch_memory_of_the_grids_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its code, with a stand-in for the driver's launch."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver

    launched: list[tuple[Any, ...]] = []
    launcher = object.__new__(CudaLauncher)
    vars(launcher).update(
        launch=lambda *arguments: launched.append(arguments),
        num_ctas=2,
        global_scratch_size=384,
        global_scratch_align=128,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
        gsan_enabled=False,
        arg_annotations=None,
        kernel_signature=None,
    )
    monkeypatch.setattr(driver, "_active", SimpleNamespace(), raising=False)
    arguments = (3, 5, 1, 0x51, 0xF, None, None, None, None)

    with pytest.raises(RuntimeError, match="no allocator was set") as caught:
        launcher(*arguments)
    assert triton_launch.lacks_allocator(caught.value)
    assert launched == [], "nothing had run"

    with triton_launch.default_allocator(lambda *request: ("ours", *request)):
        launcher(*arguments)
    ((*passed,),) = launched
    assert ("ours", 3 * 5 * 2 * 384, 128, 0x51) in passed


class Needy:
    """A tuned kernel whose launch asks Triton for scratch, as a launcher on a GPU does.

    Attributes:
        given: whose memory each launch got, or `failed`.
    """

    def __init__(self, copy: Copies) -> None:
        self.copy = copy
        self.given: list[str] = []
        self.launches = 0
        jit = copy.tuner.fn
        copy.tuner.fn = SimpleNamespace(fn=jit.fn, run=lambda *a, **k: self._run(jit.run, *a, **k))

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.launches += 1
        allocator = _allocation._allocator.get()
        try:
            ours = allocator is scratch_memory.allocate  # which needs a device
            self.given.append("ours" if ours else allocator(128, 128, 0)[0])
        except RuntimeError:
            self.given.append("failed")
            raise
        return run(*args, **kwargs)


def _in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(SOON_S)


def _in_pool(work: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(SOON_S)


def _in_backward(work: Callable[[], Any]) -> None:
    """On the CPU, autograd's thread is the caller's."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            work()
            return gradient

    Function.apply(torch.ones(3, requires_grad=True)).sum().backward()


WHERE = {"thread": _in_thread, "pool": _in_pool, "backward": _in_backward}


class TestMemory:
    """With a stand-in for torch's allocator, which has none on this machine."""

    @pytest.fixture
    def memory(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
        stub = Memory()
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "caching_allocator_alloc", stub.alloc)
        monkeypatch.setattr(cuda, "caching_allocator_delete", stub.delete)
        monkeypatch.setattr(cuda, "memory_stats", lambda: {"num_device_alloc": stub.segments})
        monkeypatch.setattr(cuda, "memory_snapshot", stub.snapshot)
        for name in ("_largest", "_driver_calls", "_pooled", "_kept"):
            monkeypatch.setattr(scratch_memory, name, type(getattr(scratch_memory, name))())
        yield stub
        scratch_memory._kept.clear()

    @pytest.mark.parametrize("alignment", [1, 128, 256, 512, 1024, 4096])
    def test_alignment_and_stream(self, memory: Memory, alignment: int) -> None:
        for size in (1, 384, 70_000):
            block = scratch_memory.allocate(size, alignment, 0x51)
            assert block.data_ptr() % alignment == 0
            ((base, taken, stream),) = memory.live
            assert base <= block.data_ptr()
            assert block.data_ptr() + size <= base + taken
            assert stream == 0x51
            del block
            assert memory.live == [], "the launcher has let go of it, and so is it free again"

    def test_a_graph_of_torch_s_keeps_its_own(self, memory: Memory, driver: Any) -> None:
        memory.pool = (0, 7)
        with driver.capturing(3):
            first = scratch_memory.allocate(100, 128, 1)
            del first
            assert memory.live == [], "back to the graph's pool"
            scratch_memory.allocate(200, 128, 1)
        assert memory.snapshots == 1, "asked once for a capture"
        assert scratch_memory.driver_calls(3) == 2

    def test_reserved_memory_serves_the_capture(self, memory: Memory, driver: Any) -> None:
        memory.pool = (0, 7)
        scratch_memory.allocate(1000, 128, 1)
        with driver.capturing(3):
            scratch_memory.reserve(3, 1)
            ((base, *_),) = memory.live
            addresses = [scratch_memory.allocate(s, 256, 1).data_ptr() for s in (10, 1000)]
            assert {address // 8192 for address in addresses} == {base // 8192}
            assert scratch_memory.driver_calls(3) == 0
            assert scratch_memory.allocate(10, 256, 2).data_ptr() not in addresses, "another stream"
            assert scratch_memory.driver_calls(3) == 1
            scratch_memory.release(3)
        assert memory.live == []

    def test_a_full_card_reserves_nothing_and_does_not_raise(
        self, memory: Memory, driver: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which a graph whose kernels need no scratch is captured without."""

        def full(*_: Any, **__: Any) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

        memory.pool = (0, 7)
        scratch_memory.allocate(1000, 128, 1)
        with driver.capturing(3):
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "caching_allocator_alloc", full)
                scratch_memory.reserve(3, 1)
                with pytest.raises(torch.OutOfMemoryError):
                    scratch_memory.allocate(10, 128, 1)
            scratch_memory.allocate(10, 128, 1)
            scratch_memory.release(3)
        assert memory.live == []

    def test_a_capture_that_torch_does_not_know_keeps_its_memory(
        self, memory: Memory, driver: Any
    ) -> None:
        """Nothing says when its graph ends; its launches follow each other, and share a block."""
        memory.pool = (0, 0)
        with driver.capturing(3):
            addresses = [scratch_memory.allocate(s, 128, 1).data_ptr() for s in (100, 50, 400, 100)]
            scratch_memory.release(3)
        assert len(memory.live) == 2
        assert addresses[0] == addresses[1] == addresses[3] != addresses[2]

    def test_a_grid_of_no_programs_says_nothing_of_a_capture(
        self, memory: Memory, driver: Any
    ) -> None:
        """Triton asks for no bytes then, and torch gives no address."""
        memory.pool = (0, 0)
        with driver.capturing(3):
            assert scratch_memory.allocate(0, 128, 1).data_ptr() == 0
            scratch_memory.allocate(100, 128, 1)
            scratch_memory.release(3)
        assert len(memory.live) == 1, "torch does not know of this capture"


class Memory:
    """Stands for torch's allocator: addresses that are multiples of 256 and of nothing more."""

    def __init__(self) -> None:
        self.live: list[tuple[int, int, int]] = []
        self.pool = (0, 0)
        self.segments = self.snapshots = 0
        self._next = 0x10000 + 256

    def alloc(self, size: int, device: Any = None, stream: Any = None) -> int:
        if not size:
            return 0
        address, self._next = self._next, self._next + (size // 8192 + 2) * 8192
        self.segments += 1
        self.live.append((address, size, stream))
        return address

    def delete(self, address: int) -> None:
        self.live = [entry for entry in self.live if entry[0] != address]

    def snapshot(self) -> list[dict[str, Any]]:
        self.snapshots += 1
        return [
            {"address": base, "total_size": size, "segment_pool_id": self.pool}
            for base, size, _ in self.live
        ]
