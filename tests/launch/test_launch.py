"""A launch that is known goes straight to the launcher; whatever is in the way, to Triton."""

from __future__ import annotations

import copy
import functools
import gc
import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from safetune import TracingError, prepare, safetune, triton_internals, triton_launch
from safetune.errors import PhantomKeyWarning
from safetune.launch import fast_path, fast_path_codegen, scratch_memory
from tests.backends import FakeBackend

if TYPE_CHECKING:
    from tests.launch.conftest import Machine, Tuned

pytestmark = pytest.mark.internals

OLD = triton_internals.version() == (3, 6)


#: Where the config's constant is in a launch of `scale`.
BLOCK = -2

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32) for warps in (1, 2)
]


@pytest.fixture
def kernel(machine: Machine, tuned: type[Tuned], kernels: Any) -> Tuned:
    with pytest.warns(PhantomKeyWarning):
        return tuned(machine.kernel_of(kernels.scale), CONFIGS, key=["n", "T"])


def call(kernel: Tuned, n: int = 32, grid: Any = (3,), **changed: Any) -> Any:
    x = changed.pop("x", X)
    return kernel.tuner[grid](x, OUT, n, 0.5, changed.pop("T", 7), D=changed.pop("D", 4), **changed)


X, OUT = torch.zeros(64), torch.zeros(64)


def goes_by_triton(kernel: Tuned, **changed: Any) -> bool:
    before = kernel.by_triton
    call(kernel, **changed)
    return kernel.by_triton > before


def test_triton_is_asked_once(kernel: Tuned, machine: Machine) -> None:
    assert goes_by_triton(kernel)
    for phantom in (7, 8, 16, 1 << 40):
        assert not goes_by_triton(kernel, T=phantom), phantom
    assert len(machine.launches) == 5
    assert len(set(machine.launches)) == 1
    assert len(machine.compiled) == 1


def test_a_bucket_is_computed_once_for_each_value(
    machine: Machine, tuned: type[Tuned], kernels: Any
) -> None:
    """A known launch looks up the exact value, and calls no function of the user's."""
    asked: list[int] = []
    bucket = lambda n: asked.append(n) or n // 100  # noqa: E731
    kernel = tuned(machine.kernel_of(kernels.scale), CONFIGS, key={"n": bucket})
    for _ in range(3):
        for n in (32, 64, 132):
            call(kernel, n)
    assert set(asked) == {32, 64, 132}
    before = len(asked)
    call(kernel, 32)
    assert len(asked) == before
    assert kernel.by_triton == 3
    assert len(kernel.tuner.cache) == 2


def test_it_returns_what_triton_returns(kernel: Tuned) -> None:
    first = call(kernel)
    assert call(kernel) is first
    assert first is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 64},
        {"n": 33},
        {"n": 1},
        {"D": 8},
        {"D": True},
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(65)[1:]},
        {"bias": torch.zeros(64)},
    ],
    ids=["n=64", "n=33", "n=1", "D=8", "D=True", "float16", "unaligned", "bias"],
)
def test_calls_that_differ_go_by_triton_once(kernel: Tuned, changed: dict[str, Any]) -> None:
    call(kernel)
    assert goes_by_triton(kernel, **changed)
    assert not goes_by_triton(kernel, **changed)
    assert not goes_by_triton(kernel)


def test_the_switch_sends_every_launch_through_triton(
    machine: Machine, tuned: type[Tuned], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launches(switch: str) -> tuple[int, list[Any]]:
        monkeypatch.setenv("SAFETUNE_FAST_LAUNCH", switch)
        kernel = tuned(machine.kernel_of(kernels.scale), CONFIGS, key=["n"], phantom="keep")
        machine.launches.clear()
        for n in (32, 32, 33, 32, 33, 64):
            call(kernel, n=n)
        return kernel.by_triton, list(machine.launches)

    by_triton, launched = launches("0")
    assert by_triton == 6
    assert launches("1") == (3, launched)


def test_each_device_has_its_own(kernel: Tuned, machine: Machine) -> None:
    call(kernel)
    machine.device = 1
    assert goes_by_triton(kernel)
    assert not goes_by_triton(kernel)
    machine.device = 0
    assert not goes_by_triton(kernel)
    assert [launch[2] for launch in machine.launches] == [100, 101, 101, 100]
    machine.stream = 200
    assert not goes_by_triton(kernel)
    assert machine.launches[-1][2] == 200


def test_the_grid_sees_every_argument(kernel: Tuned, machine: Machine) -> None:
    """The caller's own values, those of dropped names too."""
    seen: list[dict[str, Any]] = []

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        seen.append(dict(meta))
        return meta["T"], meta["BLOCK"]

    for _ in range(2):
        call(kernel, grid=grid, T=9)
    first, second = seen
    assert list(first) == list(second)
    assert all(first[name] is second[name] for name in first)
    assert [launch[1] for launch in machine.launches] == [(9, 16, 1)] * 2


@pytest.mark.parametrize("grid", [(2,), [2, 3], (2, 3, 4)], ids=str)
def test_grids(kernel: Tuned, machine: Machine, grid: Any) -> None:
    call(kernel, grid=grid)
    call(kernel, grid=grid)
    assert [launch[1] for launch in machine.launches] == [(*grid, 1, 1)[:3]] * 2


class TestInTheWay:
    """What makes Triton's own path necessary, and its end."""

    def test_launch_hooks(self, kernel: Tuned) -> None:
        call(kernel)
        for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            told: list[Any] = []
            chain.add(told.append)
            try:
                assert goes_by_triton(kernel)
            finally:
                chain.remove(told.append)
            assert [each.get()["name"] for each in told] == ["kernel"]
            assert not goes_by_triton(kernel)

    def test_a_hook_instead_of_the_chain(
        self, kernel: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call(kernel)
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert goes_by_triton(kernel)
        assert goes_by_triton(kernel, n=64)
        assert goes_by_triton(kernel, n=64)

    def test_a_hook_is_over_once_the_chain_is_back(self, kernel: Tuned) -> None:
        call(kernel)
        chain = knobs.runtime.launch_enter_hook
        with knobs.runtime.scope():
            knobs.runtime.launch_enter_hook = lambda metadata: None
            for _ in range(4):
                assert goes_by_triton(kernel)
            knobs.runtime.launch_enter_hook = chain  # set, though it is the default
            assert not goes_by_triton(kernel)
            chain.add(print)
            try:
                assert goes_by_triton(kernel)
            finally:
                chain.remove(print)
            assert not goes_by_triton(kernel)
        assert not goes_by_triton(kernel)

    def test_a_setting_that_no_launch_depends_on(self, kernel: Tuned) -> None:
        call(kernel)
        with knobs.runtime.scope():
            for hook in (print, None):
                knobs.runtime.jit_post_compile_hook = hook
                assert not goes_by_triton(kernel)

    def test_a_hook_of_the_compiler_from_before_the_first_launch(self, kernel: Tuned) -> None:
        stages: list[Any] = []
        with knobs.runtime.scope():
            knobs.runtime.add_stages_inspection_hook = lambda *a, **k: (str(stages), "")
            for _ in range(4):
                assert goes_by_triton(kernel)
        for _ in range(3):
            call(kernel)
        assert not goes_by_triton(kernel)

    def test_pre_run_hooks(self, kernel: Tuned) -> None:
        call(kernel)
        told: list[Any] = []
        kernel.jit.add_pre_run_hook(lambda *args, **kwargs: told.append(kwargs["BLOCK"]))
        call(kernel)
        assert told == [16]
        kernel.jit.pre_run_hooks.clear()
        assert not goes_by_triton(kernel)

    @pytest.mark.parametrize(
        ("place", "name", "value"),
        [
            (knobs.runtime, "debug", True),
            (knobs.compilation, "instrumentation_mode", "iisan"),
        ],
        ids=["debug", "instrumentation"],
    )
    def test_switches_of_the_compiler(
        self,
        kernel: Tuned,
        machine: Machine,
        monkeypatch: pytest.MonkeyPatch,
        place: Any,
        name: str,
        value: Any,
    ) -> None:
        if not hasattr(place, name):
            pytest.skip("this Triton has no such switch")
        call(kernel)
        with monkeypatch.context() as patch:
            patch.setitem(vars(place), name, value)
            assert goes_by_triton(kernel)
            assert len(machine.compiled) == 2
        assert not goes_by_triton(kernel)
        assert machine.launches[-1] == machine.launches[0]

    def test_a_switch_that_was_on_for_one_launch(
        self, kernel: Tuned, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call(kernel)
        monkeypatch.setattr(knobs.runtime, "debug", True)

        def off(meta: dict[str, Any]) -> tuple[int]:
            knobs.runtime.debug = False
            return (1,)

        call(kernel, n=64, grid=off)
        assert goes_by_triton(kernel, n=64)
        _, second, third = machine.launches
        assert second[0] != third[0]

    def test_a_global_that_has_changed(
        self, kernel: Tuned, kernels: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call(kernel)
        assert [name for name, _ in kernel.jit.used_global_vals] == ["SCALE"]
        monkeypatch.setitem(vars(kernels), "SCALE", tl.constexpr(3))
        with pytest.raises(RuntimeError, match="Global variable SCALE has changed"):
            call(kernel)

    def test_triton_s_run_replaced(self, kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
        """As tools do that watch every launch."""
        call(kernel)
        run, seen = JITFunction.run, []

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["BLOCK"])
            return run(self, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "run", watched)
        call(kernel)
        assert seen == [16]

    def test_triton_s_run_replaced_before_safetune_was_imported(
        self, kernel: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, seen = JITFunction.run, []

        @functools.wraps(run)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["BLOCK"])
            return run(self, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "run", watched)
        monkeypatch.setattr(fast_path, "_JIT_RUN", triton_launch.own_jit_run())
        for _ in range(3):
            call(kernel)
        assert seen == [16] * 3

    def test_another_back_end(
        self, kernel: Tuned, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "get_current_target", lambda: GPUTarget("hip", "gfx942", 64))
        kernel.jit.device_caches = {0: kernel.jit.device_caches[0]}  # for a compiler that is here
        for _ in range(2):
            call(kernel)
        assert list(kernel.tuner._launches.values()) == [None]

    def test_a_triton_that_is_newer_than_those_known(
        self, kernel: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triton, "__version__", "3.10.0")
        for _ in range(2):
            assert goes_by_triton(kernel)
        assert list(kernel.tuner._launches.values()) == [None]

    def test_another_driver(self, kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in range(2):
            call(kernel)
        monkeypatch.setattr(driver, "_active", type(driver._active)())
        assert goes_by_triton(kernel)

    def test_arguments_that_only_triton_takes(self, kernel: Tuned) -> None:
        class Pointer:
            dtype = torch.float32

            def data_ptr(self) -> int:
                return 64

        for _ in range(2):
            assert goes_by_triton(kernel, x=Pointer())

    @pytest.mark.parametrize("name", ["n", "factor"])
    def test_a_tensor_for_a_number(
        self, machine: Machine, tuned: type[Tuned], kernels: Any, name: str
    ) -> None:
        """Triton's launcher takes the number out of it; an address would be another number."""
        kernel = tuned(machine.kernel_of(kernels.annotated), CONFIGS, key=[])
        given = {"n": 32, "factor": 0.5}
        for _ in range(2):
            kernel.tuner[(1,)](X, OUT, **given)
        assert kernel.by_triton == 1
        for _ in range(2):
            kernel.tuner[(1,)](X, OUT, **{**given, name: torch.tensor(given[name])})
        assert kernel.by_triton == 3

    def test_a_tensor_of_vmap_s(self, kernel: Tuned) -> None:
        """It says that it is a tensor, and has no address: Triton's path refuses it by name."""
        x = torch.zeros(4, 64)
        for _ in range(2):
            call(kernel, x=x[0])
        with pytest.raises(TracingError, match=r"torch\.vmap"):
            torch.vmap(lambda each: call(kernel, x=each))(x)

    def test_memory_that_no_device_is_known_to_reach(
        self, kernel: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fast_path_codegen, "ON_DEVICE", "is_cuda")
        for _ in range(2):
            assert goes_by_triton(kernel)

    def test_any_number_of_arguments(
        self, machine: Machine, tuned: type[Tuned], kernels: Any
    ) -> None:
        jit = machine.kernel_of(kernels.several)
        if OLD:
            pytest.skip("this Triton has no such kernels")
        kernel = tuned(jit, [triton.Config({}, num_warps=1), triton.Config({})], key=[])
        for _ in range(2):
            kernel.tuner[(1,)](OUT, X)
        assert machine.launches[0] == machine.launches[1]
        assert kernel.by_triton == 2

    def test_options_in_the_call(self, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
        with pytest.warns(PhantomKeyWarning):
            kernel = tuned(
                machine.kernel_of(kernels.scale), [triton.Config({"BLOCK": 16})], key=["T"]
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                assert goes_by_triton(kernel, maxnreg=64)

    def test_a_config_s_hook(self, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
        told: list[int] = []
        configs = [
            triton.Config({"BLOCK": 16}, pre_hook=lambda named: told.append(named["n"])),
            triton.Config({"BLOCK": 32}),
        ]
        kernel = tuned(machine.kernel_of(kernels.scale), configs, key=["n"])
        for _ in range(3):
            call(kernel)
        assert told == [32] * 3

    @pytest.mark.parametrize("given", [{"warmup": True}, {"grid": (1,)}], ids=["warmup", "grid"])
    def test_keywords_that_the_brackets_set_are_refused(
        self, kernel: Tuned, machine: Machine, given: dict[str, Any]
    ) -> None:
        with pytest.raises(
            TypeError, match=f"multiple values for keyword argument '{next(iter(given))}'"
        ):
            kernel.tuner[(1,)](X, OUT, 32, 0.5, 7, D=4, **given)
        assert machine.launches == []

    def test_warm_up_launches_nothing(self, kernel: Tuned, machine: Machine) -> None:
        call(kernel)
        kernel.tuner.run(X, OUT, 32, 0.5, 7, D=4, grid=(1,), warmup=True)
        assert len(machine.launches) == 1


class TestChanges:
    """Of what a launch depends on, on the tuner."""

    @pytest.mark.parametrize("how", ["clear", "assign", "pop", "del", "update"])
    def test_the_choices_are_taken_away(self, kernel: Tuned, how: str) -> None:
        call(kernel)
        tuner = kernel.tuner
        (key,) = tuner.cache
        if how == "clear":
            tuner.cache.clear()
        elif how == "assign":
            tuner.cache = {}
        elif how == "pop":
            tuner.cache.pop(key)
        elif how == "del":
            del tuner.cache[key]
        else:
            tuner.cache.update({key: CONFIGS[1]})
        call(kernel)
        assert tuner.best_config is CONFIGS[1], "the next one of the turn"

    def test_all_configs_but_one_taken_away(self, kernel: Tuned, machine: Machine) -> None:
        """In place, of which a tuner is not told: as Triton does, the one left is launched."""
        for _ in range(2):
            call(kernel)
        kernel.tuner.configs[:] = CONFIGS[3:]
        for _ in range(2):
            call(kernel)
            assert machine.launches[-1][BLOCK] == CONFIGS[3].kwargs["BLOCK"] == 32
        kernel.tuner.configs[:] = CONFIGS
        for _ in range(2):
            call(kernel)
            assert machine.launches[-1] == machine.launches[0]

    @pytest.mark.parametrize("count", [1, 2])
    def test_configs_replaced_again_and_again(
        self, machine: Machine, kernels: Any, count: int
    ) -> None:
        """A new config may be where a dead one was in memory."""
        configs = [triton.Config({"BLOCK": 1 << place}) for place in range(count)]
        tuner = safetune(configs=configs, key=["n"])(machine.kernel_of(kernels.scale))
        del configs
        tuner._miss = lambda key, *_: tuner.states.of(key).set_choice(tuner.configs[0])
        for block in (16, 32, 64, 128, 256, 512):
            tuner.configs = [triton.Config({"BLOCK": block << place}) for place in range(count)]
            tuner.cache.clear()
            for _ in range(2):
                tuner[(1,)](X, OUT, 32, 0.5, 7, D=4)
                assert machine.launches[-1][BLOCK] == block

    def test_another_kernel(self, kernel: Tuned, machine: Machine, kernels: Any) -> None:
        """Its choices are not stored as those of the one before."""
        before = kernel.tuner.identity
        kernel.tuner.fn = machine.kernel_of(kernels.mixed)
        assert kernel.tuner.identity.name == "mixed"
        assert kernel.tuner.identity.digest != before.digest

    def test_the_binaries_are_taken_away(self, kernel: Tuned, machine: Machine) -> None:
        """Triton compiles again, and so does a tuner that knows the launch."""
        for other in ({}, {"n": 64}):  # Triton makes the device's entry again for the second
            call(kernel)
            kernel.jit.device_caches.clear()
            compiled = len(machine.compiled)
            if other:
                call(kernel, **other)
                compiled = len(machine.compiled)
            assert call(kernel) is call(kernel)
            assert len(machine.compiled) == compiled + 1
            assert not goes_by_triton(kernel)

    def test_a_copy_of_a_tuner(self, kernel: Tuned, machine: Machine) -> None:
        """It shares the choices, whichever of the two makes or changes them."""
        call(kernel)
        original, other = kernel.tuner, copy.copy(kernel.tuner)
        (key,) = original.cache
        for number, maker in enumerate((original, other, original), 1):
            for tuner in (original, other) * 2:
                kernel.tuner = tuner
                call(kernel)
                assert tuner.best_config is tuner.cache[key] is CONFIGS[number - 1]
                assert machine.launches[-1][BLOCK] == tuner.best_config.kwargs["BLOCK"]
            maker.states.of(key).set_choice(CONFIGS[number])

    def test_best_config_is_the_last_launch_s(self, kernel: Tuned) -> None:
        for n in (32, 64, 32, 64):
            call(kernel, n=n)
            assert kernel.tuner.best_config is CONFIGS[n == 64]

    def test_a_fallback_under_capture_is_not_remembered(
        self, kernel: Tuned, back_end: FakeBackend
    ) -> None:
        running = [7]
        choose = kernel.tuner._miss
        kernel.tuner._miss = lambda *call: CONFIGS[3] if running[0] else choose(*call)
        back_end.capture_id = lambda stream: running[0]
        collecting = []
        kernel.jit.add_pre_run_hook(lambda *_, **__: collecting.append(gc.isenabled()))
        call(kernel)
        assert collecting == [False], "a graph that is collected would end the capture"
        assert gc.isenabled()
        kernel.jit.pre_run_hooks.clear()
        call(kernel)
        assert kernel.tuner.best_config is CONFIGS[3]
        running[0] = 0
        call(kernel)
        assert kernel.tuner.best_config is CONFIGS[0]


def test_a_launch_of_prepare_is_known_afterwards(
    kernel: Tuned, machine: Machine, back_end: FakeBackend
) -> None:
    """So that a capture afterwards compiles, loads and asks for nothing."""
    assert [key.settled for key in prepare(call, kernel).keys] == [True]
    compiled = len(machine.compiled)
    assert not goes_by_triton(kernel)
    assert len(machine.compiled) == compiled == 1


class TestUnderCapture:
    @pytest.fixture
    def asked(self, back_end: FakeBackend) -> list[int]:
        """Gets a line each time that the driver is asked for a capture; there is one."""
        asked: list[int] = []
        back_end.capture_id = lambda stream: asked.append(7) or 7
        return asked

    def test_a_known_launch_asks_the_driver_nothing(self, kernel: Tuned, asked: list[int]) -> None:
        kernel.tuner._miss(kernel_key(kernel), (), {})
        call(kernel)
        asked.clear()
        assert not goes_by_triton(kernel)
        assert asked == []

    @pytest.mark.parametrize("hook", [None, lambda named: None], ids=["plain", "pre_hook"])
    def test_a_compilation_for_a_choice_that_is_known(
        self, machine: Machine, tuned: type[Tuned], kernels: Any, asked: list[int], hook: Any
    ) -> None:
        """An older graph that is collected meanwhile would make the capture invalid."""
        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32)]
        kernel = tuned(machine.kernel_of(kernels.scale), configs, key=["n"])
        call(kernel)
        collecting = []
        kernel.jit.add_pre_run_hook(lambda *_, **__: collecting.append(gc.isenabled()))
        call(kernel, D=8)
        assert len(machine.compiled) == 2
        assert collecting == [False]
        assert gc.isenabled()


def test_scratch_memory(kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that asks for some gets an allocator for each launch, and no other kernel does."""
    from triton.runtime import _allocation

    visible: list[bool] = []

    def launcher(*_: Any) -> None:
        visible.append(_allocation._allocator.get() is scratch_memory.allocate)

    compiled = call(kernel)
    compiled.metadata.global_scratch_size = 128
    compiled._run = launcher
    kernel.tuner.cache[next(iter(kernel.tuner.cache))] = CONFIGS[1]
    kernel.tuner.cache[next(iter(kernel.tuner.cache))] = CONFIGS[0]
    kernel.tuner.needs_scratch = True
    call(kernel)
    assert not goes_by_triton(kernel)
    assert visible == [True, True]


def test_attributes_that_report_a_tuning_do_not_forget_launches(
    machine: Machine, tuned: type[Tuned], kernels: Any
) -> None:
    """Else the first launch after each tuning, and those of every other key, are Triton's again."""
    kernel = tuned(machine.kernel_of(kernels.scale), CONFIGS, key=["n"])
    choose = kernel.tuner._miss

    def as_tuned(key: Any, *call: Any) -> triton.Config:
        config: triton.Config = choose(key, *call)
        kernel.tuner.identity
        kernel.tuner.report(key, config, {config: [1.0] * 3}, {"screen": 1.0})
        kernel.tuner.tuning_phases = {"screen": 1.0}
        return config

    kernel.tuner._miss = as_tuned
    for n in (32, 48):
        assert goes_by_triton(kernel, n=n)
    for n in (32, 48):
        assert not goes_by_triton(kernel, n=n)


def test_a_kernel_without_parameters_but_its_config_s(
    machine: Machine, tuned: type[Tuned], kernels: Any
) -> None:
    kernel = tuned(machine.kernel_of(kernels.nothing), CONFIGS, key=[])
    for _ in range(2):
        kernel.tuner[(1,)]()
    assert kernel.by_triton == 1
    assert len(machine.launches) == 2


def test_heuristics_above(machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
    kernel = tuned(machine.kernel_of(kernels.scale), CONFIGS, key=["n"])
    above = triton.heuristics({"D": lambda named: 4 if named["n"] % 2 == 0 else 5})(kernel.tuner)
    for n in (32, 33, 32, 33):
        above[(1,)](X, OUT, n, 0.5, 7)
    assert kernel.by_triton == 2
    assert machine.launches[:2] == machine.launches[2:]


class TestHeuristicsBelow:
    """They see what the config sets, and what they say decides the binary."""

    def tuned(self, machine: Machine, tuned: type[Tuned], kernels: Any, values: Any) -> Tuned:
        jit = machine.kernel_of(kernels.scale)
        with pytest.warns(PhantomKeyWarning):
            kernel = tuned(jit, CONFIGS, key=["n", "T"])
        kernel.tuner.fn = triton.heuristics(values)(jit)
        return kernel

    @staticmethod
    def launch(kernel: Tuned, n: int = 32, eps: Any = 0.5, grid: Any = (1,)) -> bool:
        before = kernel.by_triton
        kernel.tuner[grid](X, OUT, n, eps, 7)
        return kernel.by_triton > before

    def test_known(self, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
        seen: list[dict[str, Any]] = []

        def even(named: dict[str, Any]) -> int:
            seen.append(named)
            return named["BLOCK"] * named["num_warps"] + named["n"]

        kernel = self.tuned(machine, tuned, kernels, {"D": even})
        assert self.launch(kernel)
        by_triton = seen[0]
        assert by_triton["T"] == 7, (
            "a heuristic that passes all on may read it, so it is not pinned"
        )
        seen.clear()
        assert not self.launch(kernel)
        (known,) = seen
        assert known.keys() == by_triton.keys()
        assert all(known[name] is by_triton[name] for name in known)
        assert self.launch(kernel, n=48)
        assert not self.launch(kernel, n=48)
        first, second, third, fourth = machine.launches
        assert first == second != third == fourth
        assert [launch[8] for launch in (first, third)] == [16 + 32, 16 * 2 + 48]

    def test_another_heuristic_value_launches_another_binary(
        self, machine: Machine, tuned: type[Tuned], kernels: Any
    ) -> None:
        """For arguments that are otherwise the same, as one that looks at a tensor's shape."""
        said = [3]
        kernel = self.tuned(machine, tuned, kernels, {"D": lambda named: said[0]})
        for value in (3, 3.0, 4, True, 1):
            said[0] = value
            assert self.launch(kernel), value
            assert not self.launch(kernel), value
            assert type(machine.launches[-1][8]) is type(value)
        said[0] = 3
        assert not self.launch(kernel)
        assert machine.launches[-1] == machine.launches[0]

    def test_one_after_the_other(self, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
        values = {"D": lambda named: named["n"] // 8, "bias": lambda named: named["D"] + 1}
        kernel = self.tuned(machine, tuned, kernels, values)
        assert self.launch(kernel)
        assert not self.launch(kernel)
        assert [launch[8:] for launch in machine.launches] == [(4, 16, 5)] * 2

    def test_a_heuristic_overrides_the_calls_own_value(
        self, machine: Machine, tuned: type[Tuned], kernels: Any
    ) -> None:
        """The heuristic has the last word, in Triton."""
        kernel = self.tuned(machine, tuned, kernels, {"D": lambda named: 9})
        for _ in range(2):
            assert goes_by_triton(kernel)
        assert [launch[8] for launch in machine.launches] == [9, 9]

    def test_heuristic_values_of_the_launch_itself_are_remembered(
        self, machine: Machine, tuned: type[Tuned], kernels: Any
    ) -> None:
        """And not what they would say after it, as when another thread sets what they read."""
        said = [4]
        kernel = self.tuned(machine, tuned, kernels, {"D": lambda named: said[0]})

        def grid(named: dict[str, Any]) -> tuple[int]:
            said[0] = 16
            return (1,)

        assert self.launch(kernel, grid=grid)
        assert self.launch(kernel), "this one is not known yet"
        said[0] = 4
        assert not self.launch(kernel)
        first, second, third = machine.launches
        assert [launch[8] for launch in (first, second)] == [4, 16]
        assert first[0] == third[0] != second[0]

    def test_they_are_not_asked_after_the_launch(
        self, machine: Machine, tuned: type[Tuned], kernels: Any
    ) -> None:
        """Nothing of theirs is raised for a kernel that has run."""
        asked = []

        def once(named: dict[str, Any]) -> int:
            asked.append(named["n"])
            if len(asked) > 1:
                raise ValueError("the heuristic's own")
            return 4

        kernel = self.tuned(machine, tuned, kernels, {"D": once})
        self.launch(kernel)
        assert asked == [32]
        with pytest.raises(ValueError, match="the heuristic's own"):
            self.launch(kernel)
        assert len(machine.launches) == 1

    def test_options_and_the_grid(self, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
        """A heuristic may set a name that is not an argument; the grid sees what they say."""
        configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
        jit = machine.kernel_of(kernels.scale)
        kernel = tuned(jit, configs, key=["n"])
        options = {"D": lambda named: 5, "maxnreg": lambda named: 64 if named["n"] > 32 else 32}
        kernel.tuner.fn = triton.heuristics(options)(jit)
        for n in (32, 64, 32, 64):
            self.launch(kernel, n=n, grid=lambda meta: (meta["D"],))
        first, second, third, fourth = machine.launches
        assert first == third
        assert second == fourth
        assert "'maxnreg': '32'" in first[0]
        assert "'maxnreg': '64'" in second[0]
        assert first[1] == (5, 1, 1)
        assert kernel.by_triton == 2

    def test_a_tensor_is_not_kept(self, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
        made: list[Any] = []

        def bias(named: dict[str, Any]) -> torch.Tensor:
            tensor = torch.zeros(64)
            made.append(weakref.ref(tensor))
            return tensor

        jit = machine.kernel_of(kernels.scale)
        kernel = tuned(jit, CONFIGS, key=["n"])
        kernel.tuner.fn = triton.heuristics({"D": lambda named: 1, "bias": bias})(jit)
        machine.launches = _Nowhere()
        for _ in range(3):
            assert self.launch(kernel)
        assert [reference() for reference in made] == [None] * len(made)


def test_a_fork_asks_triton_again(kernel: Tuned) -> None:
    """By way of torch, which says that a fork cannot use CUDA; the driver says less."""
    for _ in range(2):
        call(kernel)
    if not (child := os.fork()):
        asked = False
        try:
            asked = goes_by_triton(kernel)
        finally:
            os._exit(0 if asked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not goes_by_triton(kernel)


def test_a_key_that_is_not_a_number(machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
    """No two are equal, and still they are one key."""
    kernel = tuned(machine.kernel_of(kernels.scale), CONFIGS, key=["eps"])
    for _ in range(3):
        kernel.tuner[(1,)](X, OUT, 32, float("nan"), 7, D=4)
    assert len(kernel.tuner.cache) == 1
    assert len({launch[0] for launch in machine.launches}) == 1


def test_no_tensor_is_kept(kernel: Tuned) -> None:
    for _ in range(2):
        x = torch.zeros(64)
        reference = weakref.ref(x)
        call(kernel, x=x, bias=x)
        del x
        assert reference() is None


def test_remembered_launches_have_a_limit(kernel: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_MOST_LAUNCHES", 8)
    for number in range(30):
        assert goes_by_triton(kernel, D=number)
        assert not goes_by_triton(kernel, D=number)
    (launch,) = kernel.tuner._launches.values()
    assert len(launch.fast_path._known) <= 8


class _Nowhere(list[Any]):
    def append(self, _: Any) -> None:
        pass


def test_threads_launch_their_own(kernel: Tuned, machine: Machine) -> None:
    """Each its own argument, while another thread changes the choice."""
    (over, failed) = threading.Event(), []
    sizes = (16, 32, 33, 1)

    def work(n: int) -> None:
        try:
            x = torch.zeros(64)
            for _ in range(300):
                call(kernel, n=n, x=x, grid=(n,))
        except BaseException as error:
            failed.append(error)

    def change() -> None:
        while not over.is_set():
            for key, config in list(kernel.tuner.cache.items()):
                kernel.tuner.states.of(key).set_choice(CONFIGS[config is CONFIGS[0]])

    threads = [threading.Thread(target=work, args=(n,)) for n in sizes]
    changer = threading.Thread(target=change)
    for thread in (*threads, changer):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    changer.join()
    assert failed == []
    assert len(machine.launches) == 300 * len(sizes)
    by_binary: dict[str, set[bool]] = {}
    for launch in machine.launches:
        n = launch[1][0]
        assert launch[5] == n
        by_binary.setdefault(launch[0], set()).add(n % 16 == 0)
    assert all(len(kinds) == 1 for kinds in by_binary.values()), "a binary for multiples of 16"
    call(kernel)
    assert kernel.tuner.best_config is kernel.tuner.cache[kernel_key(kernel)]


def kernel_key(kernel: Tuned) -> Any:
    args, kwargs = (X, OUT, 32, 0.5, 7), {"D": 4}
    return kernel.tuner.shapes.of(args, kwargs).key(args, kwargs)
