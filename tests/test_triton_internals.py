"""What safetune takes for granted behind Triton's public face, one test for each function.

A new Triton that changes one of these fails here, with the name of what to mend.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends import backends
from triton.backends.amd.compiler import HIPOptions
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDAOptions
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime import _allocation, autotuner, driver
from triton.runtime.jit import JITFunction

from safetune import triton_internals, triton_launch
from safetune.both import backend
from safetune.keys.tuning_key import current_index
from safetune.miss.resolve import why_not_isolated
from tests.backends import launching_on

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.internals

TARGET = GPUTarget("cuda", 90, 32)


def scale(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) * FACTOR, mask=offset < n)


FACTOR: tl.constexpr = tl.constexpr(2)


class Machine:
    """A driver of Triton's without a device."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 100

    def get_current_target(self) -> GPUTarget:
        return TARGET


@pytest.fixture
def jit() -> Any:
    """A compiled kernel's function, not an interpreted one's."""
    with launching_on(None, active=Machine()):
        yield JITFunction(scale)


def test_every_function_has_a_contract_test_here() -> None:
    """A new one is a new part of Triton that may change, so it needs a test that says so."""
    public = {
        name
        for module in (triton_internals, triton_launch)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    here = Path(__file__).read_text(encoding="utf-8")
    assert {
        name for name in public if not re.search(rf"triton_(internals|launch).{name}\(", here)
    } == set()


@pytest.mark.parametrize("options", [CUDAOptions, HIPOptions])
def test_every_option_of_the_compiler_is_known(options: Any) -> None:
    assert set(options.__dataclass_fields__) <= triton_internals.COMPILE_OPTIONS


def test_every_config_sets_some_options_of_the_compiler() -> None:
    always = set(triton.Config({}).all_kwargs())
    assert always == triton_internals.CONFIG_OPTIONS <= triton_internals.COMPILE_OPTIONS


def test_this_triton_is_supported() -> None:
    assert (3, 6) <= triton_internals.version() <= triton_internals.NEWEST


def test_a_newer_triton_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton_internals.warn_if_newer()
    monkeypatch.setattr(triton, "__version__", "3.10.0+git7f3a")
    with pytest.warns(UserWarning, match=r"Triton 3\.10 is newer than 3\.9"):
        triton_internals.warn_if_newer()


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A process whose torch uses a GPU, and in which making Triton's driver waits for the event."""
    event = threading.Event()

    def make() -> Any:
        assert event.wait(60)
        return SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="made"))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(backends["nvidia"].driver, "is_active", lambda: True)
    monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", make)
    for name in ("_active", "_default"):
        monkeypatch.setattr(driver, name, None)
    triton_internals.first_driver.start_over()
    yield event
    event.set()
    triton_internals.first_driver.wait()
    triton_internals.first_driver.start_over()


class TestDriver:
    def test_none_is_active_without_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(driver, "_active", None)
        if torch.cuda.is_initialized():
            pytest.skip("this process uses a GPU")
        assert triton_internals.active_driver() is None
        assert triton_internals.target_name() is None

    def test_the_target_is_that_of_the_driver_now(self) -> None:
        with launching_on(None, "first"):
            assert triton_internals.target_name() == "first"
        with launching_on(None, "second"):
            assert triton_internals.target_name() == "second"

    def test_its_name_is_known_while_a_thread_makes_it(
        self, monkeypatch: pytest.MonkeyPatch, making: threading.Event
    ) -> None:
        """A C compiler builds a part of it; a tuning begins meanwhile, a launch waits for it."""
        assert triton_internals.target_name() == "cuda"
        assert triton_internals.first_driver.begin(), "the same one"
        assert driver._active is None
        making.set()
        assert triton_internals.active_driver() is driver._active is not None
        assert not triton_internals.first_driver.begin()
        assert triton_internals.target_name() == "made"

    def test_triton_waits_for_the_one_that_a_thread_makes(
        self, monkeypatch: pytest.MonkeyPatch, making: threading.Event
    ) -> None:
        """Launches of a stored choice, and of kernels that safetune does not know, go by Triton."""
        made: list[Any] = []
        launch = threading.Thread(target=lambda: driver.active)

        def make() -> Any:
            made.append(SimpleNamespace())
            if len(made) == 1:
                launch.start()
                launch.join(0.2)  # ends at once where the launch makes its own
            return made[0]

        monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", make)
        assert triton_internals.first_driver.begin()
        triton_internals.first_driver.wait()
        launch.join()
        assert [driver._active] == made

    def test_a_driver_that_is_set_meanwhile_stays(
        self, monkeypatch: pytest.MonkeyPatch, making: threading.Event
    ) -> None:
        begun, own = threading.Event(), SimpleNamespace()
        make = sys.modules[type(driver).__module__]._create_driver

        def note_and_make() -> Any:
            begun.set()
            return make()

        monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", note_and_make)
        assert triton_internals.first_driver.begin()
        assert begun.wait(60)
        driver.set_active(own)
        making.set()
        triton_internals.first_driver.wait()
        assert driver.active is own

    def test_a_tuning_begins_while_a_thread_makes_it(
        self, monkeypatch: pytest.MonkeyPatch, making: threading.Event
    ) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        call: Any = SimpleNamespace(interpreted=False)
        assert triton_internals.target_name() == "cuda"
        assert current_index() == 3
        assert why_not_isolated(call) == backend.why_missing("cuda")
        assert driver._active is None, "nothing has waited for it, and nothing made a second one"

    def test_where_it_cannot_be_made_a_launch_says_so(
        self, monkeypatch: pytest.MonkeyPatch, making: threading.Event
    ) -> None:
        def refuse() -> Any:
            raise RuntimeError("no C compiler")

        monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", refuse)
        triton_internals.target_name()
        triton_internals.first_driver.wait()
        assert triton_internals.target_name() is None
        with pytest.raises(RuntimeError, match="no C compiler"):
            _ = driver.active

    @pytest.mark.parametrize(
        "reason",
        ["another back end", "no back end for NVIDIA", "a Triton without a C compiler", "newer"],
    )
    def test_it_is_asked_where_it_alone_knows(
        self, monkeypatch: pytest.MonkeyPatch, making: threading.Event, reason: str
    ) -> None:
        if reason == "another back end":
            monkeypatch.setattr(backends["amd"].driver, "is_active", lambda: True)
        elif reason == "no back end for NVIDIA":
            monkeypatch.delitem(backends, "nvidia")
            monkeypatch.setitem(sys.modules, "triton.backends.nvidia", None)
        elif reason == "newer":
            monkeypatch.setattr(triton, "__version__", "3.10.0")
        else:
            monkeypatch.delattr(nvidia, "CudaUtils")
        assert not triton_internals.first_driver.begin()
        making.set()
        assert triton_internals.target_name() == "made"

    def test_a_back_end_has_a_hash(self) -> None:
        text = triton_internals.backend_hash(TARGET)
        assert "90" in text
        assert text != triton_internals.backend_hash(GPUTarget("cuda", 80, 32))

    def test_switches_of_the_code_generation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = triton_internals.code_generation_switches()
        assert {"default_fp_fusion"} <= set(before)
        assert all(isinstance(text, str) for pair in before.items() for text in pair)
        monkeypatch.setitem(vars(knobs.language), "default_fp_fusion", False)
        assert triton_internals.code_generation_switches() != before

    @pytest.mark.parametrize(
        ("group", "name", "value"),
        [
            ("runtime", "debug", True),
            ("compilation", "override", True),
            ("compilation", "fpsan_homomorphic_casts", True),
            ("nvidia", "mock_ptx_version", "8.0"),
        ],
    )
    def test_a_knob_that_changes_the_code_is_a_switch_once_it_is_set(
        self, monkeypatch: pytest.MonkeyPatch, group: str, name: str, value: Any
    ) -> None:
        """A kernel with checks of overflows (TRITON_DEBUG) shared its choices with the one
        without.
        """
        if not hasattr(getattr(knobs, group), name):
            pytest.skip("this Triton has no such knob")
        before = triton_internals.code_generation_switches()
        monkeypatch.setitem(vars(getattr(knobs, group)), name, value)
        assert triton_internals.code_generation_switches() == {**before, name: str(value)}

    def test_another_libdevice_is_a_switch_wherever_it_lies(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        switches = []
        for name, content in (("a.bc", "1"), ("b.bc", "1"), ("c.bc", "2")):
            (tmp_path / name).write_text(content)
            monkeypatch.setitem(vars(knobs.nvidia), "libdevice_path", str(tmp_path / name))
            switches.append(triton_internals.code_generation_switches())
        assert switches[0] == switches[1] != switches[2]

    def test_options_of_ptxas_are_a_switch_that_triton_itself_does_not_list(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unset it is not in the key, so that keys of before are the same."""
        monkeypatch.delenv("PTXAS_OPTIONS", raising=False)
        before = triton_internals.code_generation_switches()
        monkeypatch.setenv("PTXAS_OPTIONS", "--maxrregcount 64")
        now = triton_internals.code_generation_switches()
        assert now == {**before, "ptxas_options": "--maxrregcount 64"}
        assert "ptx_options" in {field.name for field in dataclasses.fields(CUDAOptions)}

    def test_the_hash_of_its_own_files_can_come_from_another_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from triton.runtime import cache

        monkeypatch.setattr(cache, "triton_key", cache.triton_key)
        found = cache.triton_key()
        source = SimpleNamespace(hash=lambda: "source")
        keys = []
        for known in (found, "another"):
            triton_internals.use_files_hash(known)
            keys.append(cache.get_cache_key(source, source, source, {}))
        assert keys[0].startswith(found)
        assert keys[1].startswith("another-source-")

    def test_the_hash_of_its_own_files_is_computed_once_for_all_who_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from triton.runtime import cache

        computed, go = [], threading.Event()

        @functools.lru_cache
        def triton_key() -> str:
            go.wait(10)
            computed.append(threading.current_thread().name)
            return "the hash"

        monkeypatch.setattr(cache, "triton_key", triton_key)
        made = triton_internals.FilesHash()
        assert made.get() == "", "nothing has asked for it"
        made.begin()
        made.begin()
        threading.Timer(0.1, go.set).start()
        source = SimpleNamespace(hash=lambda: "source")
        assert cache.get_cache_key(source, source, source, {}).startswith("the hash-source")
        assert made.get() == "the hash"
        assert computed == ["safetune-hash"]


def compiled(run: Any, **metadata: int) -> Any:
    sizes = {"global_scratch_size": 0, "profile_scratch_size": 0, **metadata}
    return SimpleNamespace(
        run=run, function=7, packed_metadata=(4, 1, 0), metadata=SimpleNamespace(**sizes)
    )


@pytest.fixture
def calls() -> list[Any]:
    """The arguments that a stand-in is called with."""
    return []


class TestLauncher:
    @pytest.fixture
    def run(self, calls: list[Any]) -> CudaLauncher:
        """Triton's launcher, above a stand-in for its compiled part."""
        run = CudaLauncher.__new__(CudaLauncher)
        vars(run).update(
            launch=lambda *arguments: calls.append(arguments),
            num_ctas=1,
            launch_cooperative_grid=False,
            launch_pdl=True,
            **dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0),
            **dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1),
        )
        if triton_internals.version() >= (3, 7):
            vars(run).update(arg_annotations="annotations", kernel_signature=b"signature")
        if triton_internals.version() >= (3, 8):
            run.gsan_enabled = False
        return run

    def test_its_arguments_are_those_of_triton_s_own(
        self, run: CudaLauncher, calls: list[Any]
    ) -> None:
        with launching_on(None):
            found = triton_launch.launcher(compiled(run), lambda *_: None)
            assert found is not None
            assert found.run is run.launch
            found.run(1, 2, 3, 100, *found.head, *([(5, 6)] if found.together else (5, 6)))
            run(1, 2, 3, 100, 7, (4, 1, 0), None, None, None, 5, 6)
        first, second = calls
        assert first == second

    def test_scratch_memory_is_provided_around_it(self, run: CudaLauncher) -> None:
        seen = []
        kernel = compiled(run, global_scratch_size=128)
        found = triton_launch.launcher(kernel, lambda *call: seen.append(call))
        assert found is not None
        found.run(1, 2)
        assert seen == [(run, 1, 2)]

    def test_a_tool_in_its_place_is_called(
        self, run: CudaLauncher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CudaLauncher, "__call__", lambda *_: None)
        found = triton_launch.launcher(compiled(run), lambda *_: None)
        assert found is not None
        assert found.run is run

    def test_an_instrumented_kernel_is_left_to_triton(self, run: CudaLauncher) -> None:
        kernel = compiled(run, profile_scratch_size=128)
        assert triton_launch.launcher(kernel, lambda *_: None) is None


class TestRepeated:
    @pytest.fixture
    def kernel(self, calls: list[Any]) -> CompiledKernel:
        """A compiled kernel that was loaded before."""
        kernel = CompiledKernel.__new__(CompiledKernel)
        kernel.module = None
        kernel._run = lambda *arguments: calls.append(arguments)
        return kernel

    def test_the_launch_is_the_same_and_made_only_when_it_is_called(
        self, kernel: CompiledKernel, calls: list[Any]
    ) -> None:
        found = triton_launch.repeated(lambda: kernel.run(1, 2, 3, 100, "x"), kernel)
        assert found is not None
        assert calls == []
        found()
        found()
        kernel.run(7)
        assert calls == [(1, 2, 3, 100, "x")] * 2 + [(7,)]

    @pytest.mark.parametrize("launches", [0, 2])
    def test_what_is_not_one_launch_is_not_repeated(
        self, kernel: CompiledKernel, calls: list[Any], launches: int
    ) -> None:
        """As where a heuristic launches the kernel, or another kernel is launched."""

        def run() -> None:
            for _ in range(launches):
                kernel.run(1)

        assert triton_launch.repeated(run, kernel) is None
        assert calls == []

    def test_a_launch_that_fails_leaves_the_kernel_as_it_was(
        self, kernel: CompiledKernel, calls: list[Any]
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            triton_launch.repeated(lambda: 1 / 0, kernel)
        kernel.run(7)
        assert calls == [(7,)]


class TestInTheWay:
    """The expressions in a generated launch, evaluated against the real objects."""

    @pytest.fixture
    def in_the_way(self, jit: Any) -> Any:
        names = triton_launch.launch_names(jit, triton_launch.own_jit_run())
        return lambda: bool(eval(triton_launch.IN_THE_WAY, names))

    def test_nothing_is_in_the_way_by_default(self, in_the_way: Any) -> None:
        assert triton_launch.has_hook_chains()
        assert not in_the_way()

    def test_a_launch_hook(self, in_the_way: Any) -> None:
        knobs.runtime.launch_enter_hook.add(print)
        try:
            assert in_the_way()
        finally:
            knobs.runtime.launch_enter_hook.remove(print)
        assert not in_the_way()

    def test_a_hook_of_the_kernel(self, jit: Any, in_the_way: Any) -> None:
        assert not triton_internals.has_launch_hooks(jit)
        assert not triton_internals.is_watched(jit)
        jit.add_pre_run_hook(print)
        assert in_the_way()
        assert triton_internals.is_watched(jit)
        assert triton_internals.has_launch_hooks(jit)

    def test_a_stage_inspection_hook(
        self, jit: Any, in_the_way: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(vars(knobs.runtime), "add_stages_inspection_hook", print)
        assert in_the_way()
        assert triton_internals.has_launch_hooks(jit)

    def test_a_replaced_run(
        self, jit: Any, in_the_way: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert triton_launch.own_jit_run() is JITFunction.run
        monkeypatch.setattr(JITFunction, "run", lambda *_: None)
        assert triton_launch.own_jit_run() is None
        assert not triton_internals.has_own(JITFunction, "run")
        assert triton_internals.is_watched(jit)
        assert in_the_way()

    def test_a_replaced_launcher(self, in_the_way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert triton_internals.has_own(CudaLauncher, "__call__")
        monkeypatch.setattr(CudaLauncher, "__call__", lambda *_: None)
        assert not triton_internals.has_own(CudaLauncher, "__call__")
        assert in_the_way()

    def test_another_value_of_a_switch(self, jit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        before = triton_launch.switches(jit)
        assert triton_launch.switches(jit) == before
        monkeypatch.setitem(vars(knobs.runtime), "debug", True)
        assert triton_launch.switches(jit) != before

    def test_an_option_that_run_sets_is_the_name_of_a_parameter(self, jit: Any) -> None:
        assert not triton_launch.set_by_run(jit)

        def kernel(x, debug): ...

        assert triton_launch.set_by_run(JITFunction(kernel))

    def test_a_changed_global_is_refused(self, jit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        names = triton_launch.launch_names(jit, None)
        assert jit.cache_key  # notes the globals that the kernel uses
        assert jit.used_global_vals
        assert not eval(triton_launch.REFUSED, names)
        monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3))
        assert eval(triton_launch.REFUSED, names)


class TestCompileStep:
    def test_it_is_reached_and_nothing_is_compiled(self, jit: Any) -> None:
        x = torch.zeros(64)
        caches = jit.device_caches
        signature, constants, attributes, options, target = triton_internals.compile_arguments(
            jit, lambda: jit.run(x, 64, BLOCK=32, grid=(1,), warmup=False, num_warps=2), 0
        )
        assert signature == {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        assert constants == {(2,): 32}
        aligned = [["tt.divisibility", 16]]
        assert {place: what for place, what in attributes.items() if what} == {
            (0,): aligned,
            (1,): aligned,
        }
        assert options["num_warps"] == 2
        assert target == TARGET
        assert jit.device_caches is caches
        assert "_do_compile" not in vars(jit)
        assert not jit.device_caches[0][0]

    def test_a_binary_has_a_name_in_the_cache_of_its_device(self, jit: Any) -> None:
        binary = object()
        assert triton_launch.binary_name(jit, 0, binary) is None
        names = {"jit": jit, "device": 0, "binary": "name"}
        jit.device_caches[0][0]["name"] = binary
        assert triton_launch.binary_name(jit, 0, binary) == "name"
        assert triton_launch.binary_name(jit, 1, binary) is None
        assert eval(triton_launch.COMPILED, names) is binary

    def test_a_private_copy_shares_no_cache(self, jit: Any) -> None:
        heuristics = triton.heuristics({"BLOCK": lambda named: 16})(jit)
        copied, below = triton_internals.private_copy(heuristics)
        assert type(copied) is type(heuristics)
        assert copied.fn is below is not jit
        assert below.device_caches is not jit.device_caches
        below.device_caches[0]
        assert 0 not in jit.device_caches

    def test_a_kernel_of_another_kind_has_no_copy(self, jit: Any) -> None:
        tuner = triton.autotune(configs=[triton.Config({})], key=[])(jit)
        assert triton_internals.private_copy(tuner) == (tuner, None)


class TestScratchMemory:
    def test_the_error_of_a_missing_allocator_is_known(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            _allocation._allocator.get()(128, 16, 0)
        assert triton_launch.lacks_allocator(caught.value)

        with pytest.raises(RuntimeError) as other:
            raise RuntimeError("no allocator was set")
        assert not triton_launch.lacks_allocator(other.value)

    def test_a_default_is_visible_while_it_is_open(self) -> None:
        with triton_launch.default_allocator(lambda *request: request):
            assert _allocation._allocator.get()(128, 16, 0) == (128, 16, 0)
        assert isinstance(_allocation._allocator.get(), _allocation.NullAllocator)

    def test_the_users_allocator_wins(self) -> None:
        token = _allocation._allocator.set(lambda *request: "user")
        try:
            with triton_launch.default_allocator(lambda *request: "default"):
                assert _allocation._allocator.get()(1, 1, 0) == "user"
        finally:
            _allocation._allocator.reset(token)


class TestReplacedFunctions:
    def test_autotune_is_replaced_wherever_it_is_exported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stock = autotuner.autotune
        for module in (autotuner, triton.runtime, triton):
            assert module.autotune is stock
            monkeypatch.setattr(module, "autotune", stock)
        triton_internals.replace_autotune(lambda found: ("ours", found))
        for module in (autotuner, triton.runtime, triton):
            assert module.autotune == ("ours", stock)

    def test_an_autotune_of_a_library_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stock = autotuner.autotune
        for module, found in ((autotuner, stock), (triton.runtime, stock), (triton, print)):
            monkeypatch.setattr(module, "autotune", found)
        triton_internals.replace_autotune(lambda found: ("ours", found))
        assert triton.autotune is print
        assert autotuner.autotune == triton.runtime.autotune == ("ours", stock)

    def test_methods_of_the_tuner_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("run", "_bench"):
            monkeypatch.setattr(autotuner.Autotuner, name, getattr(autotuner.Autotuner, name))
        triton_internals.replace_tuner_methods(lambda *_, **__: "run", lambda *_: "bench")
        tuner = triton.autotune(configs=[triton.Config({})], key=[])(JITFunction(scale))
        assert (tuner[(1,)](), tuner._bench()) == ("run", "bench")

    def test_an_action_before_the_first_tuner_happens_once(self) -> None:
        acts: list[None] = []
        triton_internals.before_first_tuner(lambda: acts.append(None))
        assert not acts
        made = [triton.autotune([triton.Config({})], key=[])(triton.jit(scale)) for _ in range(2)]
        assert len(acts) == 1
        assert all(type(each) is autotuner.Autotuner for each in made)

    def test_it_happens_also_where_a_tool_has_wrapped_the_class_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        acts: list[None] = []
        monkeypatch.setattr(autotuner.Autotuner, "__init__", autotuner.Autotuner.__init__)
        triton_internals.before_first_tuner(lambda: acts.append(None))
        watched = autotuner.Autotuner.__init__
        monkeypatch.setattr(
            autotuner.Autotuner, "__init__", lambda self, *args, **kw: watched(self, *args, **kw)
        )
        for _ in range(2):
            triton.autotune([triton.Config({})], key=[])(triton.jit(scale))
        assert len(acts) == 1


class TestBackendHashes:
    def test_compiled_kernels_are_looked_up_as_by_the_process_that_sent_them(self) -> None:
        own = triton_internals.backend_hash(TARGET)
        try:
            triton_internals.use_backend_hashes({("cuda", 90): "another ptxas"})
            assert make_backend(TARGET).hash() == "another ptxas"
            assert "another ptxas" not in make_backend(GPUTarget("cuda", 80, 32)).hash()
        finally:
            triton_internals.use_backend_hashes({})
        assert make_backend(TARGET).hash() == own


class TestKnobs:
    def test_those_set_in_code_travel_and_come_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = triton_internals.knobs_set_in_code()
        monkeypatch.setitem(vars(knobs.compilation), "always_compile", True)
        changed = triton_internals.knobs_set_in_code()
        assert changed["compilation"]["always_compile"] is True
        monkeypatch.undo()

        # Triton sets the variable, too, and leaves it.
        monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "0")
        triton_internals.set_knobs({"compilation": {"always_compile": True}})
        assert knobs.compilation.always_compile is True
        triton_internals.set_knobs({})
        assert triton_internals.knobs_set_in_code() == before

    def test_one_that_the_import_has_read_travels_although_its_variable_has_changed(
        self, fresh_process: FreshProcess
    ) -> None:
        """A child imports Triton later, and measured code with checks that the caller's lacks."""
        program = (
            "import os, triton\n"
            "from safetune import triton_internals\n"
            'os.environ["TRITON_DEBUG"] = "1"\n'
            "travelling = triton_internals.knobs_set_in_code()\n"
            'print(travelling["runtime"]["debug"], triton.knobs.runtime.debug)\n'
        )
        travelling, own = fresh_process(program).stdout.split()
        assert travelling == own == "False"

    def test_a_knob_of_the_environment_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(os.environ, "TRITON_ALWAYS_COMPILE", "1")
        assert knobs.compilation.always_compile
        assert "always_compile" not in triton_internals.knobs_set_in_code().get("compilation", {})


def test_a_process_without_torch_can_specialize() -> None:
    """Up to Triton 3.6 the first argument of a process had torch imported."""
    program = (
        "import sys, triton\n"
        "from safetune import triton_launch\n"
        "from triton._C.libtriton import native_specialize_impl as specialize\n"
        "from triton.backends.nvidia.compiler import CUDABackend\n"
        "triton_launch.prepare_specializing()\n"
        "class Dtype:\n    __str__ = lambda self: 'torch.float16'\n"
        "class Tensor:\n    dtype = Dtype()\n    data_ptr = lambda self: 32\n"
        "assert specialize(CUDABackend, Tensor(), False, True, True) == ('*fp16', 'D')\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'triton.experimental.gluon' not in sys.modules\n"
        "import torch\n"
        "x = torch.zeros(64, dtype=torch.float16)\n"
        "assert specialize(CUDABackend, x, False, True, True) == ('*fp16', 'D')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_process_with_gluon_can_specialize_its_descriptors() -> None:
    """Its class is that of the module which the process has imported, in all versions."""
    program = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from triton.experimental.gluon.nvidia import hopper\n"
        "from triton.experimental.gluon import language as gl\n"
        "from safetune import triton_launch\n"
        "from triton._C.libtriton import native_specialize_impl as specialize\n"
        "from triton.backends.nvidia.compiler import CUDABackend\n"
        "triton_launch.prepare_specializing()\n"
        "assert sys.modules['triton.experimental.gluon.nvidia.hopper'] is hopper\n"
        "class Dtype:\n    __str__ = lambda self: 'torch.float16'\n"
        "class Base(SimpleNamespace):\n    data_ptr = lambda self: 32\n"
        "base = Base(dtype=Dtype(), dim=lambda: 2)\n"
        "layout = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)\n"
        "found = hopper.TensorDescriptor(base, [16, 16], [16, 1], [16, 16], layout)\n"
        "kind, _ = specialize(CUDABackend, found, False, True, True)\n"
        "assert kind == f'tensordesc<fp16[16, 16],{layout!r}>'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_process_without_torch_can_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its device's default stream; nothing of the driver is asked before a kernel is loaded."""
    from triton.backends.nvidia import driver as nvidia

    monkeypatch.setattr(nvidia, "CudaUtils", SimpleNamespace)
    monkeypatch.setattr(driver, "_active", None)
    triton_launch.use_device_without_torch(1, (9, 0))
    active = driver.active
    assert active.get_current_target() == TARGET
    assert (active.get_current_device(), active.get_current_stream(1)) == (1, 0)
    assert active.launcher_cls is nvidia.CudaLauncher
    assert not hasattr(active.utils, "load_binary")


def test_replaced_methods_are_those_of_the_class_that_are_not_tritons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dict(triton_internals.replaced_methods()) == {}
    monkeypatch.setattr(autotuner.Autotuner, "run", lambda self, *args, **kwargs: None)
    assert set(triton_internals.replaced_methods()) == {"run"}
    monkeypatch.undo()
    assert dict(triton_internals.replaced_methods()) == {}
