"""What is launched, and what is called on the way, is what triton.autotune launches and calls.

Each case runs the same calls and changes under both: with code of the user's that remembers what it
did, and with things changed after a launch is known.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
from triton import knobs
from triton.runtime.autotuner import Heuristics

from safetune import triton_internals
from safetune.errors import PhantomKeyWarning
from tests.launch.conftest import jit_function

if TYPE_CHECKING:
    from tests.launch.conftest import Machine, Tuned

pytestmark = pytest.mark.internals

X, OUT = torch.zeros(64), torch.zeros(64)

#: Uses a tuner, and adds what it has seen itself.
Script = Callable[[Any, list[Any]], None]


@pytest.fixture(params=["fast", "SAFETUNE_FAST_LAUNCH=0"])
def compared(
    request: pytest.FixtureRequest,
    machine: Machine,
    tuned: type[Tuned],
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Run a script with both tuners, and compare all launches and all that the script has seen."""
    monkeypatch.setenv("SAFETUNE_FAST_LAUNCH", "1" if request.param == "fast" else "0")

    def compare(
        script: Script, count: int = 2, function: Any = None, below: Any = None, **options: Any
    ) -> None:
        found = []
        for ours in (False, True):
            configs = [triton.Config({"BLOCK": 16 << place}) for place in range(count)]
            kernel: Any = machine.kernel_of(function or kernels.scale)
            if below is not None:
                kernel = below(kernel)
            if ours:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PhantomKeyWarning)
                    made = tuned(kernel, configs, **options).tuner
                made._miss = functools.partial(_choose_first, made)
            else:
                # Triton 3.6 measures a single config, too.
                made = triton.autotune(configs=configs, do_bench=_as_fast, **options)(kernel)
                made.prune_configs = functools.partial(_first, made)
            machine.launches, machine.device = [], 0
            seen: list[Any] = []
            script(made, seen)
            found.append((machine.launches, seen))
        stock, ours = found
        assert ours == stock
        assert stock[0], "the script launches something"

    return compare


def _as_fast(launch: Any, quantiles: Any) -> list[float]:
    return [1.0, 1.0, 1.0]


def _first(tuner: Any, kwargs: Any) -> list[triton.Config]:
    return list(tuner.configs[:1])


def _choose_first(tuner: Any, key: Any, *_: Any) -> triton.Config:
    config: triton.Config = tuner.states.of(key).set_choice(tuner.configs[0])
    return config


def call(tuner: Any, n: int = 32, grid: Any = (3,), **changed: Any) -> None:
    tuner[grid](changed.pop("x", X), OUT, n, 0.5, changed.pop("T", 7), **{"D": 4, **changed})


def heuristic_call(tuner: Any, n: int = 32, grid: Any = (3,)) -> None:
    tuner[grid](X, OUT, n, 0.5, 7)


class TestHeuristicsBelow:
    """Are called once for each launch, as they are now, in their order."""

    @pytest.mark.parametrize("count", [1, 2], ids=["one config", "two"])
    @pytest.mark.parametrize(
        "values",
        [itertools.cycle([2, 3]), itertools.count(), itertools.cycle([2, torch.zeros(1), 2.0])],
        ids=["toggle", "counter", "also a tensor"],
    )
    def test_that_remember(
        self, compared: Callable[..., None], count: int, values: Iterator[Any]
    ) -> None:
        said = [next(values) for _ in range(8)]

        def below(jit: Any) -> Any:
            coming = iter(said)
            return triton.heuristics({"D": lambda named: next(coming)})(jit)

        def script(tuner: Any, seen: list[Any]) -> None:
            for _ in said:
                heuristic_call(tuner)

        compared(script, count, below=below, key=["n"])

    def test_that_see_each_other(self, compared: Callable[..., None]) -> None:
        seen_by: list[Any] = []

        def noted(value: Any) -> Any:
            def heuristic(named: dict[str, Any]) -> Any:
                seen_by.append({k: v for k, v in named.items() if not torch.is_tensor(v)})
                return value + len(seen_by) % 2

            return heuristic

        def below(jit: Any) -> Any:
            inner = triton.heuristics({"D": noted(2)})(jit)
            return triton.heuristics({"T": noted(4), "bias": noted(6)})(inner)

        def script(tuner: Any, seen: list[Any]) -> None:
            seen_by.clear()
            for n in (32, 32, 33, 32):
                tuner[(1,)](X, OUT, n, 0.5)
            seen += seen_by

        compared(script, below=below, key=["n"])

    def test_when_the_binaries_are_gone(self, compared: Callable[..., None]) -> None:
        def below(jit: Any) -> Any:
            coming = itertools.cycle([2, 3])
            return triton.heuristics({"D": lambda named: next(coming)})(jit)

        def script(tuner: Any, seen: list[Any]) -> None:
            for _ in range(3):
                heuristic_call(tuner)
                heuristic_call(tuner)
                jit_function(tuner).device_caches[0][0].clear()

        compared(script, below=below, key=["n"])

    @pytest.mark.parametrize("count", [1, 2], ids=["one config", "two"])
    def test_when_a_config_changes_in_place(
        self, compared: Callable[..., None], count: int
    ) -> None:
        """What each of their values launched before is of the config as it was."""

        def below(jit: Any) -> Any:
            coming = itertools.cycle([2, 3])
            return triton.heuristics({"D": lambda named: next(coming)})(jit)

        def script(tuner: Any, seen: list[Any]) -> None:
            for block in (16, 32, 16):
                tuner.configs[0].kwargs["BLOCK"] = block
                for _ in range(4):
                    heuristic_call(tuner)

        compared(script, count, below=below, key=["n"])

    @pytest.mark.parametrize("change", ["an item", "all", "one more", "one less", "fn", "run"])
    def test_changed_later(
        self, compared: Callable[..., None], machine: Machine, kernels: Any, change: str
    ) -> None:
        def script(tuner: Any, seen: list[Any]) -> None:
            heuristics = tuner.fn
            for _ in range(2):
                heuristic_call(tuner)
            if change == "an item":
                heuristics.values["D"] = lambda named: 8
            elif change == "all":
                heuristics.values = {"D": lambda named: named["n"]}
            elif change == "one more":
                heuristics.values["bias"] = lambda named: X
            elif change == "one less":
                del heuristics.values["bias2"]
            elif change == "fn":
                heuristics.fn = machine.kernel_of(kernels.scale_further)
            else:
                run = heuristics.run
                heuristics.run = lambda *args, **kwargs: seen.append(1) or run(*args, **kwargs)
            for _ in range(2):
                heuristic_call(tuner)

        values = {"D": lambda named: 4}
        if change == "one less":
            values["bias2"] = lambda named: None
        function = kernels.scale_further if change == "one less" else kernels.scale
        compared(
            script,
            below=lambda jit: triton.heuristics(dict(values))(jit),
            function=function,
            key=["n"],
        )

    def test_their_run_replaced_by_a_tool(
        self, compared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def script(tuner: Any, seen: list[Any]) -> None:
            heuristic_call(tuner)
            heuristic_call(tuner)
            run = Heuristics.run
            with monkeypatch.context() as patch:
                patch.setattr(Heuristics, "run", lambda *a, **k: seen.append(1) or run(*a, **k))
                heuristic_call(tuner)
                heuristic_call(tuner)
            heuristic_call(tuner)
            assert seen == [1, 1]

        compared(script, below=triton.heuristics({"D": lambda named: 4}), key=["n"])


class TestAConfigChangedInPlace:
    @pytest.mark.parametrize("count", [1, 2], ids=["one config", "two"])
    @pytest.mark.parametrize("name", ["kwargs", "num_warps", "maxnreg", "pre_hook", "an item"])
    def test_is_launched_as_it_is_now(
        self, compared: Callable[..., None], count: int, name: str
    ) -> None:
        def script(tuner: Any, seen: list[Any]) -> None:
            def grid(meta: dict[str, Any]) -> tuple[int]:
                return (64 // meta["BLOCK"],)

            for _ in range(2):
                call(tuner, grid=grid)
            config = tuner.best_config
            if name == "an item":
                config.kwargs["BLOCK"] = 32
            elif name == "kwargs":
                config.kwargs = {"BLOCK": 64}
            elif name == "pre_hook":
                config.pre_hook = lambda named: seen.append(named["n"])
            else:
                setattr(config, name, 8)
            for _ in range(3):
                call(tuner, grid=grid)

        compared(script, count, key=["n"])


class TestGridFunctions:
    @pytest.mark.parametrize("key", [["n"], ["n", "T"]], ids=["plain", "a pinned name"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda meta: meta.__setitem__("n", 5),
            lambda meta: meta.update(x=OUT),
            lambda meta: meta["x"].set_(torch.ones(128)),
            lambda meta: meta.get("n"),
        ],
        ids=["an entry", "a tensor", "its memory", "nothing"],
    )
    @pytest.mark.parametrize("wrapped", [False, True], ids=["function", "partial"])
    def test_that_change_what_is_launched(
        self,
        compared: Callable[..., None],
        machine: Machine,
        change: Callable[[dict[str, Any]], Any],
        key: list[str],
        wrapped: bool,
    ) -> None:
        def script(tuner: Any, seen: list[Any]) -> None:
            def grid(meta: dict[str, Any]) -> tuple[int]:
                change(meta)
                return (meta["T"] + meta["BLOCK"],)

            for _ in range(3):
                x = torch.zeros(64)
                call(tuner, x=x, grid=functools.partial(grid) if wrapped else grid)
                _, sizes, stream, address, out, n, eps, *_ = machine.launches.pop()
                where = [tensor.data_ptr() == address for tensor in (x, OUT)]
                seen.append((sizes, stream, where, out, n, eps))
            call(tuner, T=1)

        compared(script, key=key)

    def test_that_change_the_device(self, compared: Callable[..., None], machine: Machine) -> None:
        """A launch is for the device that was the current one before the grid was known."""

        def script(tuner: Any, seen: list[Any]) -> None:
            def moves(meta: dict[str, Any]) -> tuple[int]:
                machine.device = 1 - machine.device
                return (1,)

            for n in (16, 33, 33, 33, 16, 33):
                call(tuner, n=n, grid=moves)
            for n in (16, 33):
                call(tuner, n=n)

        compared(script, key=["n"])


def test_a_binary_that_triton_has_forgotten_is_compiled_again(
    compared: Callable[..., None], machine: Machine
) -> None:
    def script(tuner: Any, seen: list[Any]) -> None:
        before = len(machine.compiled)
        for n in (32, 64, 33):
            call(tuner, n=n)
        binaries, *_ = jit_function(tuner).device_caches[0]
        del binaries[next(iter(binaries))]
        for n in (32, 33, 32):
            call(tuner, n=n)
        jit_function(tuner).device_caches[0][0].clear()
        for n in (33, 32):
            call(tuner, n=n)
        seen.append(len(machine.compiled) - before)

    compared(script, key=["n"])


def test_a_copy_gets_another_kernel(compared: Callable[..., None]) -> None:
    """What it reads decides which names the copy drops, not what the original reads."""

    def script(tuner: Any, seen: list[Any]) -> None:
        def reads(named: dict[str, Any]) -> int:
            seen.append(named["T"])
            return 4

        call(tuner, T=1)
        copied = copy.copy(tuner)
        copied.fn = triton.heuristics({"D": reads})(tuner.fn)
        for launched in (copied, copied):
            launched[(3,)](X, OUT, 32, 0.5, 7)
        call(tuner, T=1)

    compared(script, key=["n", "T"])


def test_a_parameter_named_as_an_option(compared: Callable[..., None], kernels: Any) -> None:
    """Triton compiles with its value, although the kernel does not read it."""

    def script(tuner: Any, seen: list[Any]) -> None:
        for pdl, fusion in itertools.product((False, True), repeat=2):
            for _ in range(2):
                tuner[(1,)](X, OUT, 32, launch_pdl=pdl, enable_fp_fusion=fusion)

    compared(script, function=kernels.named_as_options, key=["n", "launch_pdl"])


@pytest.mark.parametrize("name", ["debug", "run", "kernel", "config", "args", "fn", "values"])
@pytest.mark.parametrize("count", [1, 2], ids=["one config", "two"])
def test_any_name_of_a_parameter(
    compared: Callable[..., None], kernels: Any, name: str, count: int
) -> None:
    """Also the one that Triton sets at each launch, and one that is a parameter of ours."""
    if name == "config" and count > 1 and triton_internals.version() < (3, 8):
        pytest.skip("this Triton fails with a parameter of this name")
    function = getattr(kernels, f"named_{name}")

    def script(tuner: Any, seen: list[Any]) -> None:
        passed = {} if name == "debug" else {name: 16}
        for _ in range(3):
            tuner[lambda meta: seen.append(meta[name]) or (1,)](OUT, **passed)

    compared(script, count, function=function, key=[])


@pytest.mark.parametrize("installed", ["before", "after"])
def test_a_tool_in_place_of_the_launcher_of_cuda_sees_each_launch(
    machine: Machine,
    tuned: type[Tuned],
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
    installed: str,
) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    kernel = tuned(machine.kernel_of(kernels.scale), [triton.Config({"BLOCK": 16})], key=["n"])
    launch = CudaLauncher.__call__
    for _ in range(2 if installed == "after" else 0):
        call(kernel.tuner)
    before = kernel.by_triton
    monkeypatch.setattr(CudaLauncher, "__call__", lambda *a, **k: launch(*a, **k))
    call(kernel.tuner)
    assert kernel.by_triton == before + 1


def test_a_switch_that_was_on_at_the_first_launch_does_not_slow_all_others(
    machine: Machine, tuned: type[Tuned], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tuned(machine.kernel_of(kernels.scale), [triton.Config({"BLOCK": 16})], key=["n"])
    with monkeypatch.context() as patch:
        patch.setitem(vars(knobs.runtime), "debug", True)
        call(kernel.tuner)
    for _ in range(3):
        call(kernel.tuner)
    before = kernel.by_triton
    call(kernel.tuner)
    assert kernel.by_triton == before
