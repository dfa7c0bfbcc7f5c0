"""A measuring child without torch, on a driver whose kernels are functions of C (tests/libcuda)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune.both.protocol import Budget, Prepare
from safetune.errors import KernelNotTransferable, WorkerUnavailable
from safetune.inputs import kernel_pickle
from safetune.inputs.call import Call, Hooks
from safetune.inputs.snapshot import Snapshot
from safetune.inputs.spans import Span
from safetune.isolation import child_handle
from safetune.isolation.measuring_child import MeasuringChild, TorchNeeded
from safetune.keys.effects import effects_of
from safetune.outcome import Outcome, OutputReport, Verdict
from safetune.triton_internals import files_hash
from safetune.tuning.bench import _NAMES_TORCH, _asks_for_torch
from tests.backends import FakeBackend, launching_on
from tests.conftest import stop_servers
from tests.libcuda import stub

pytestmark = pytest.mark.internals

N = 100


def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def spill_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset <= n)


def fail_kernel(dst, src, n, BLOCK: tl.constexpr):
    tl.store(dst + 10**12, tl.load(src + n))


def add_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(dst + offset, mask=offset < n) + tl.load(src + offset, mask=offset < n)
    tl.store(dst + offset, value, mask=offset < n)


def grid_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + offset, mask=offset < n) + tl.num_programs(0)
    tl.store(dst + offset, value, mask=offset < n)


def near_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + offset, mask=offset < n) * (1.0 + 1e-6 * tl.num_programs(0))
    tl.store(dst + offset, value, mask=offset < n)


def scratch_kernel(dst, src, n, BLOCK: tl.constexpr):
    described = tl.make_tensor_descriptor(src, [n], [1], [BLOCK])
    tl.store(dst + tl.arange(0, BLOCK), described.load([0]))


class Device:
    """Children of this process measure on the stub, and this process knows nothing of it."""

    def __init__(self) -> None:
        self._made: list[Callable[[], object]] = []

    def child(
        self,
        function: Any,
        hooks: Hooks | None = None,
        heuristics: dict[str, Any] | None = None,
        configs: int = 1,
        described: bool = False,
        shared: bool = False,
        pinned: Sequence[int] = (),
        layer: type[Heuristics] = Heuristics,
        values: tuple[Any, ...] = (),
        **options: Any,
    ) -> MeasuringChild:
        """Return the child of a call of a kernel, with a config of BLOCK=16, and further ones.

        With `shared`, it gets the arguments in memory of the device; those whose numbers are
        `pinned` are memory of the host. `layer` is what the heuristics
        are in, and the options are those of the last config.
        """
        kernel: Any = JITFunction(function)
        kernel = kernel if heuristics is None else layer(kernel, kernel.arg_names, heuristics)
        args: list[Any] = [torch.full((N,), 5.0), torch.arange(N).float(), N]
        if described:
            args[1] = TensorDescriptor.from_tensor(torch.zeros(64, 64), [16, 16])
        call = Call(
            kernel=kernel,
            arg_names=tuple(kernel.arg_names),
            args=tuple(args),
            kwargs={},
            grid=None,
            pins={},
            hooks=hooks or Hooks(),
            index=0,
            heuristics=values,
        )
        made = [triton.Config({"BLOCK": 16 << i}) for i in range(configs - 1)]
        made.append(triton.Config({"BLOCK": 16 << (configs - 1)}, **options))
        tensors = kernel_pickle.TensorTable()
        blob = kernel_pickle.pack((call, made), "a call", tensors, by_value=[function])
        on_host = [stub.pin(args[number]).data_ptr() for number in pinned]

        def span_of(tensor: torch.Tensor) -> Span:
            span = stub.span_on_a_device(tensor)
            return replace(span, device="cpu") if span.start in on_host else span

        with stub.holding_tensors(span_of):
            rooms = {"cuda:0": 1 << 30} if shared else {}
            snapshot = Snapshot(tensors.tensors, rooms=rooms, index=0)
        grids = [(8 - config,) for config in range(configs)]
        effects = effects_of(kernel)
        job = Prepare(blob, snapshot.layout, 0, grids, effects, backend="cuda")

        fds = (snapshot.fd, *snapshot.shared_fds)
        child = MeasuringChild(job, fds, 60.0, with_torch=False)
        self._made += [child.replace, snapshot.close]
        return child

    def close(self) -> None:
        for end in self._made:
            end()


@pytest.fixture(scope="module")
def servers() -> Iterator[None]:
    """Servers whose children load the stub in place of libcuda."""
    folder = str(stub.folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", folder, prepend=os.pathsep)
        patch.setenv("TRITON_LIBCUDA_PATH", folder)
        patch.delenv("TRITON_INTERPRET", raising=False)
        stop_servers()
        files_hash.begin()
        yield
    stop_servers()


@pytest.fixture
def device(servers: None) -> Iterator[Device]:
    made = Device()
    with launching_on(FakeBackend(), "cuda"):
        try:
            yield made
        finally:
            made.close()
            child_handle.idle.drop()


def measured(child: MeasuringChild, config: int = 0) -> tuple[Outcome, OutputReport | None]:
    return child.measure(config, Budget(time_ms=0.1), groups=())


def imported(path: Path, module: str = "torch") -> Callable[[Any], None]:
    """Return a hook that writes down whether its process has torch, or another module."""
    text = str(path)

    def hook(arguments: Any, **others: Any) -> None:
        import sys

        with open(text, "a") as file:
            file.write(f"{module in sys.modules}\n")

    return hook


def test_a_config_is_measured_and_checked(device: Device, tmp_path: Path) -> None:
    told = tmp_path / "told"
    child = device.child(copy_kernel, Hooks(post_hook=imported(told)))
    child.measure(0, None)  # compiles it, and what takes seconds is launched once
    outcome, report = measured(child)
    assert outcome.verdict is Verdict.OK, outcome
    assert outcome.timing is not None
    assert outcome.timing.count > 1
    assert outcome.gpu_uuid == "01010101-0101-0101-0101-010101010101"
    assert report is not None
    assert report.written == (N, 0)
    assert set(told.read_text().split()) == {"False"}
    assert not child.with_torch


def test_a_child_that_compiles_nothing_does_not_import_gluon(
    device: Device, tmp_path: Path
) -> None:
    """It takes a tenth of a second, and the first tuning of a process waits for it."""
    told = tmp_path / "told"
    compiling = device.child(copy_kernel)
    assert measured(compiling)[0].ok
    compiling.replace()
    gluon = "triton.experimental.gluon"
    child = device.child(copy_kernel, Hooks(post_hook=imported(told, gluon)))
    assert measured(child)[0].ok
    assert set(told.read_text().split()) == {"False"}


@pytest.mark.parametrize(
    ("pinned", "shared"),
    [
        ([1], True),
        pytest.param([0], True, marks=pytest.mark.full),
        pytest.param([0, 1], False, marks=pytest.mark.full),
    ],
    ids=["read", "written", "both"],
)
def test_an_argument_in_pinned_memory_is_pinned_there_too(
    device: Device, tmp_path: Path, pinned: list[int], shared: bool
) -> None:
    """Each launch finds the caller's bits in it, and a tensor that says what the caller's does."""
    told, seen = tmp_path / "told", tmp_path / "seen"
    text = str(seen)

    def describe(arguments: dict[str, Any], exception: Exception | None = None) -> None:
        parts = [arguments[name] for name in ("dst", "src")]
        with open(text, "a") as file:
            for part in parts:
                file.write(f"{part.device} {part.is_cuda}\n")

    hooks = Hooks(pre_hook=imported(told), post_hook=describe)
    child = device.child(copy_kernel, hooks, pinned=pinned, shared=shared, configs=2)
    outcome, first = measured(child)
    assert outcome.ok, outcome
    assert first is not None
    assert first.written == (N, 0)
    assert first.new_group is not None
    outcome, second = child.measure(1, None, groups=(first.new_group,))
    assert outcome.ok, outcome
    assert second is not None
    assert second.group == first.new_group.number
    on = ["cpu False" if number in pinned else "cuda:0 True" for number in (0, 1)]
    assert seen.read_text().splitlines()[:2] == on
    assert set(told.read_text().split()) == {"False"}


def test_a_write_beside_pinned_memory_is_found(device: Device) -> None:
    outcome, _ = measured(device.child(spill_kernel, pinned=[0]))
    assert outcome.verdict is Verdict.OUT_OF_BOUNDS
    assert "after the storage of dst" in outcome.message


def test_a_config_is_launched_again_beside_other_work(device: Device) -> None:
    child = device.child(copy_kernel)
    assert measured(child)[0].ok
    answer = child.repeat(0, 0.0)
    assert answer.outcome.ok, answer
    assert answer.varied == ()
    assert not child.with_torch


@pytest.mark.parametrize("pinned", [[], [0, 1]], ids=["device", "pinned"])
def test_results_that_differ_by_rounding_are_compared_without_torch(
    device: Device, pinned: list[int]
) -> None:
    child = device.child(near_kernel, pinned=pinned, configs=2)
    outcome, first = measured(child)
    assert outcome.ok, outcome
    assert first is not None
    assert first.new_group is not None
    outcome, second = child.measure(1, None, groups=(first.new_group,))
    assert outcome.ok, outcome
    assert second is not None
    assert second.sums != first.sums
    assert second.group == first.new_group.number
    assert not child.with_torch


def test_configs_that_disagree_are_compared_in_a_child_with_torch(device: Device) -> None:
    child = device.child(grid_kernel, configs=2)
    _, first = measured(child)
    assert first is not None
    assert first.new_group is not None
    with pytest.raises(TorchNeeded):
        child.measure(1, None, groups=(first.new_group,))
    assert child.with_torch


def test_other_inputs_are_drawn_in_a_child_with_torch(device: Device) -> None:
    child = device.child(copy_kernel)
    with pytest.raises(TorchNeeded):
        child.bits(0)
    assert child.with_torch


def test_a_write_beside_a_storage_is_found(device: Device) -> None:
    outcome, _ = measured(device.child(spill_kernel))
    assert outcome.verdict is Verdict.OUT_OF_BOUNDS
    assert "after the storage of dst" in outcome.message


@pytest.mark.full
def test_a_sticky_error_is_an_illegal_access(device: Device) -> None:
    outcome, _ = measured(device.child(fail_kernel))
    assert outcome.verdict is Verdict.ILLEGAL_ACCESS, outcome


@pytest.mark.parametrize("seen_by", ["", "its hook", "another's hook", "the tuner's", "a layer"])
def test_triton_prepares_a_timed_launch_once_unless_code_of_the_user_s_sees_it(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_by: str
) -> None:
    """Its work on the host takes longer than a small kernel; a hook may change the arguments."""
    log, runs = tmp_path / "log", tmp_path / "runs"
    text = str(runs)

    def block(arguments: dict[str, Any]) -> int:
        with open(text, "a") as file:
            file.write("run\n")
        return 16

    def look(arguments: dict[str, Any], **others: Any) -> None:
        pass

    class Layer(Heuristics):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return super().run(*args, **kwargs)

    hooks = Hooks(post_hook=look) if seen_by == "the tuner's" else None
    options: dict[str, Any] = {"pre_hook": look} if seen_by.endswith("hook") else {}
    options["configs"] = 2 if seen_by == "another's hook" else 1
    options["layer"] = Layer if seen_by == "a layer" else Heuristics
    monkeypatch.setenv("LIBCUDA_LOG", str(log))
    child = device.child(copy_kernel, hooks, heuristics={"BLOCK": block}, **options)
    assert measured(child)[0].ok
    log.unlink()
    runs.write_text("")
    outcome, _ = child.measure(0, Budget(least=30, time_ms=0.0))
    assert outcome.ok, outcome
    assert log.read_text().count("cuLaunchKernelEx") == 30
    assert runs.read_text().count("run") == (30 if seen_by else 0)
    assert not child.with_torch


@pytest.mark.parametrize(
    ("names", "left"),
    [("reset_to_zero", 3.0), pytest.param("restore_value", 8.0, marks=pytest.mark.full)],
)
def test_arguments_are_reset_and_restored_before_each_launch(
    device: Device, tmp_path: Path, names: str, left: float
) -> None:
    """Else the sums of a launch would contain those of the one before."""
    text = str(tmp_path / "told")

    def tell(arguments: dict[str, Any], **others: Any) -> None:
        import ctypes  # the stub's memory is that of the host

        address = arguments["dst"].data_ptr() + 3 * arguments["dst"].element_size()
        with open(text, "a") as file:
            file.write(f"{ctypes.c_float.from_address(address).value}\n")

    hooks: dict[str, Any] = {names: ("dst",)}
    child = device.child(add_kernel, Hooks(post_hook=tell, **hooks))
    assert measured(child)[0].ok
    found = Path(text).read_text().split()
    assert len(found) > 5
    assert set(map(float, found)) == {left}, "5, and what the kernel adds"
    assert not child.with_torch


def test_heuristics_and_hooks_see_stand_ins(device: Device) -> None:
    def block(arguments: dict[str, Any]) -> int:
        return 16 if arguments["src"].numel() == N and arguments["src"].is_contiguous() else 1 << 20

    def zero(arguments: dict[str, Any]) -> None:
        arguments["dst"].zero_()

    child = device.child(copy_kernel, heuristics={"BLOCK": block}, pre_hook=zero)
    outcome, spec = child.spec_of(0)
    assert outcome.ok, outcome
    assert kernel_pickle.unpack(spec)[1] == {(3,): 16}
    outcome, _ = measured(child)
    assert outcome.ok, outcome
    assert not child.with_torch


def test_hooks_may_set_the_blocks_of_descriptors(device: Device) -> None:
    def blocks(arguments: dict[str, Any]) -> None:
        arguments["src"].block_shape = [32, arguments["src"].shape.numel() // 64]

    child = device.child(described_kernel, described=True, pre_hook=blocks)
    outcome, spec = child.spec_of(0)
    assert outcome.ok, outcome
    assert kernel_pickle.unpack(spec)[0]["src"] == "tensordesc<fp32[32, 64]>"
    assert not child.with_torch


def described_kernel(dst, src, n, BLOCK: tl.constexpr):
    tl.store(dst, tl.sum(src.load([0, 0])) + n)


@pytest.mark.full
def test_a_launch_gets_its_scratch_memory(device: Device) -> None:
    outcome, _ = measured(device.child(scratch_kernel))
    assert outcome.ok, outcome


def test_arguments_in_memory_of_the_device(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second child finds the same bits."""
    log = tmp_path / "log"
    child = device.child(add_kernel, configs=2, shared=True)
    monkeypatch.setenv("LIBCUDA_LOG", str(log))
    outcome, report = measured(child)
    assert outcome.ok, outcome
    assert report is not None
    assert report.new_group is not None
    child.replace()
    outcome, again = child.measure(1, None, groups=(report.new_group,))
    assert outcome.ok, outcome
    assert again is not None
    assert again.group == report.new_group.number
    importing = {line for line in log.read_text().splitlines() if "cuMemImport" in line}
    assert len(importing) == 2


@pytest.mark.parametrize(
    ("error", "raised"), [(2, WorkerUnavailable), (801, KernelNotTransferable)]
)
def test_a_child_that_cannot_map_the_arguments_says_so(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: int, raised: type[Exception]
) -> None:
    """A lack of memory passes."""
    monkeypatch.setenv("LIBCUDA_FAIL", f"cuMemImportFromShareableHandle={error}")
    with pytest.raises(raised, match="cuMemImportFromShareableHandle"):
        measured(device.child(add_kernel, shared=True))


def sums(arguments: dict[str, Any]) -> None:
    arguments["src"].sum()


def catches(arguments: dict[str, Any]) -> None:
    import contextlib

    with contextlib.suppress(BaseException):
        arguments["src"].sum()


def imports(arguments: dict[str, Any]) -> None:
    import torch

    assert torch.float32 is arguments["src"].dtype


def raises(arguments: dict[str, Any]) -> None:
    arguments["src"].shape.index(N + 1)


def calls_wrongly(arguments: dict[str, Any]) -> None:
    arguments["dst"].size(0, 1)


def exits(arguments: dict[str, Any]) -> None:
    raise SystemExit("no tensor of torch's")


SLOWER = (catches, imports, calls_wrongly, exits)


@pytest.mark.parametrize(
    "hook", [sums, raises, *(pytest.param(each, marks=pytest.mark.full) for each in SLOWER)]
)
def test_a_hook_that_asks_for_more_gets_a_child_with_torch(device: Device, hook: Any) -> None:
    """No device of torch's is here: that child is only asked for."""
    child = device.child(copy_kernel, pre_hook=hook)
    for ask in (lambda: measured(child), lambda: child.spec_of(0)):
        child.with_torch = False
        with pytest.raises(TorchNeeded):
            ask()
        assert child.with_torch


@pytest.mark.parametrize("hook", ["do_bench", "inputs", "reference"])
def test_hooks_that_return_tensors_are_never_tried_without_torch(device: Device, hook: str) -> None:
    call = SimpleNamespace(interpreted=False, hooks=Hooks(**{hook: print}))
    assert _asks_for_torch(call)  # type: ignore[arg-type]


def test_a_triton_that_is_not_known_is_given_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    call: Any = SimpleNamespace(interpreted=False, hooks=Hooks())
    with launching_on(FakeBackend()):
        assert not _asks_for_torch(call)
        monkeypatch.setattr(triton, "__version__", "4.0.0")
        assert _asks_for_torch(call)


def reads_rows(arguments: dict[str, Any]) -> int:
    raise AssertionError("the caller has run it")


def test_a_child_takes_the_values_of_the_caller_s_heuristics(device: Device) -> None:
    child = device.child(copy_kernel, heuristics={"BLOCK": reads_rows}, values=({"BLOCK": 64},))
    outcome, spec = child.spec_of(0)
    assert outcome.ok, outcome
    assert kernel_pickle.unpack(spec)[1] == {(3,): 64}
    assert not child.with_torch


def test_a_child_runs_heuristics_after_the_hook_of_a_config(device: Device) -> None:
    def blocks(arguments: dict[str, Any]) -> None:
        arguments["src"].block_shape = [32, 16]

    def reads(arguments: dict[str, Any]) -> int:
        return int(arguments["src"].block_shape[0])

    child = device.child(
        described_kernel,
        heuristics={"BLOCK": reads},
        described=True,
        pre_hook=blocks,
        values=(None,),
    )
    outcome, spec = child.spec_of(0)
    assert outcome.ok, outcome
    assert 32 in kernel_pickle.unpack(spec)[1].values()
    assert not child.with_torch


def calls_torch(arguments: dict[str, Any]) -> None:
    torch.cuda.synchronize()


def test_a_hook_that_names_torch_is_known_before_it_runs() -> None:
    def names_torch(value: Any) -> bool:
        packed = kernel_pickle.pack(value, "a call", by_value=[calls_torch])
        return _NAMES_TORCH.search(packed) is not None

    assert all(map(names_torch, [calls_torch, imports, torch.float16, torch.nn.functional.relu]))
    assert not any(map(names_torch, [sums, "not torch", torch.zeros(2).shape]))


@pytest.mark.full
def test_the_target_is_the_devices_own(device: Device) -> None:
    outcome, spec = device.child(copy_kernel).spec_of(0)
    assert outcome.ok, outcome
    assert kernel_pickle.unpack(spec)[4] == GPUTarget("cuda", 90, 32)


LAUNCHERS = """
import sys
import threading
from types import SimpleNamespace
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction
from safetune import triton_compile

def kernel(x, n, f, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), f)

target = GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(get_current_target=lambda: target))
signature = {"x": sys.argv[1], "n": "i32", "f": "fp32", "BLOCK": "constexpr"}
jit, constants, attributes = JITFunction(kernel), {(3,): 64}, {(0,): [["tt.divisibility", 16]]}
compiled = SimpleNamespace(**vars(triton_compile._NO_SCRATCH), tensordesc_meta=None)
if "tensordesc" in sys.argv[1]:  # as the compiler says of it
    compiled.tensordesc_meta = [{"swizzle": 3, "elem_size": 2, "elem_type": 6}]
triton_compile.begin_launcher(jit, (signature, constants, attributes, {}, target))
for thread in threading.enumerate():
    if thread.name == "safetune-launcher":
        thread.join()
if hasattr(nvidia, "make_launcher"):
    def compiler(*_):
        raise AssertionError("it is built already")
    build._build = compiler
    source = ASTSource(jit, signature, constants, attributes)
    nvidia.CudaLauncher(source, compiled)
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["*fp32", "tensordesc<fp16[64, 64]>"])
def test_the_launcher_of_an_older_triton_is_built_while_its_kernels_compile(
    servers: None, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "launchers.py"
    script.write_text(LAUNCHERS)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, script, kind], env=environment, check=True)


@pytest.mark.full
def test_a_card_without_memory_for_a_context_blames_no_config(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBCUDA_FAIL", "cuDevicePrimaryCtxRetain=2")
    with pytest.raises(WorkerUnavailable, match="too little free memory: the CUDA driver failed"):
        device.child(copy_kernel).wait()


class TestReplays:
    """Which configs are timed as replays of a graph; the others are timed between events."""

    @staticmethod
    def stage(child: MeasuringChild, config: int = 0) -> tuple[str, str]:
        child.measure(config, None, groups=())
        outcome, _ = child.measure(config, Budget(least=3, time_ms=0.0, way="graph"))
        assert outcome.ok, outcome
        assert outcome.timing is not None
        assert not child.with_torch
        return outcome.timing.stage, outcome.message

    @pytest.mark.parametrize("kernel", [copy_kernel, add_kernel, scratch_kernel])
    def test_a_plain_launch(self, device: Device, kernel: Any) -> None:
        assert self.stage(device.child(kernel)) == ("graph", "")

    def test_launches_are_replayed(
        self, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LIBCUDA_LOG", str(tmp_path / "log"))
        child = device.child(copy_kernel)
        assert self.stage(child) == ("graph", "")
        graphs = (tmp_path / "log").read_text().count("cuGraphLaunch")
        assert graphs == 1 + 2 * 3, "one at the end of the capture; one before each that is timed"

    def test_a_hook_that_sets_a_descriptor(self, device: Device) -> None:
        def set_blocks(arguments: dict[str, Any]) -> None:
            arguments["src"].block_shape = [16, 16]

        child = device.child(copy_kernel, configs=2, described=True, pre_hook=set_blocks)
        assert child.measure(1, None, groups=())[0].verdict is not Verdict.PROTOCOL_ERROR

    def test_a_hook_that_writes_nothing_or_something(self, device: Device) -> None:
        def looks(arguments: dict[str, Any]) -> None:
            assert arguments["n"] == N

        def clears(arguments: dict[str, Any]) -> None:
            arguments["dst"].zero_()

        assert self.stage(device.child(copy_kernel, Hooks(pre_hook=looks))) == ("graph", "")
        stage, why = self.stage(device.child(copy_kernel, Hooks(pre_hook=clears)))
        assert stage == "screen"
        assert "a hook writes to the arguments" in why

    @pytest.mark.parametrize(
        "hooks",
        [
            Hooks(reset_to_zero=("dst",)),
            Hooks(restore_value=("dst",)),
            Hooks(post_hook=lambda arguments, exception: None),
        ],
        ids=["reset_to_zero", "restore_value", "post_hook"],
    )
    def test_what_needs_something_beside_each_launch(self, device: Device, hooks: Hooks) -> None:
        stage, why = self.stage(device.child(add_kernel, hooks))
        assert stage == "screen"
        assert "each launch needs" in why

    def test_where_the_driver_captures_nothing(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LIBCUDA_FAIL", "cuStreamEndCapture=901")
        stage, why = self.stage(device.child(copy_kernel))
        assert stage == "screen"
        assert "cuStreamEndCapture returned CUDA_ERROR_901" in why
