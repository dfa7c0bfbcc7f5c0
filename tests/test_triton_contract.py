"""What Triton's own tests demand of its autotuner, demanded of safetune's.

Hooks and `do_bench` run in a child, so what they do is told to a file; that they leave the caller's
objects alone is the one difference, and asserted too.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.autotuner import Autotuner as TritonAutotuner

from safetune import Autotuner, InvalidSetting, autotune, safetune
from safetune.frontend.options import Options

pytestmark = pytest.mark.internals

N = 256


@triton.jit
def copy_kernel(dst, src, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + offsets, mask=offsets < N)
    tl.store(dst + offsets, x, mask=offsets < N)


@triton.jit
def increment_kernel(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < N) + 1
    tl.store(x + offsets, value, mask=offsets < N)


@triton.jit
def optional_kernel(maybe, dst, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if maybe is None:
        tl.store(dst + offsets, tl.full([BLOCK], 5.0, tl.float32), mask=offsets < N)
    else:
        tl.store(maybe + offsets, tl.full([BLOCK], 7.0, tl.float32), mask=offsets < N)


@triton.jit
def cast_kernel(dst, src, N, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + offsets, mask=offsets < N)
    tl.store(dst + offsets, x.to(DTYPE), mask=offsets < N)


@triton.jit
def scaled_kernel(dst, src, N, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + offsets, mask=offsets < N)
    tl.store(dst + offsets, x * SCALE, mask=offsets < N)


def blocks(*sizes: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


class Buffers(SimpleNamespace):
    """A source, and a destination that holds something else."""

    src: torch.Tensor
    dst: torch.Tensor


@pytest.fixture
def buffers(device: str) -> Buffers:
    return Buffers(src=torch.randn(N, device=device), dst=torch.full((N,), -1.0, device=device))


class Log:
    """Lines that functions in this process and in children have appended to a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def writer(self) -> Callable[[object], None]:
        """Return a function that travels to a child by value."""
        path = self.path

        def write(line: object) -> None:
            with open(path, "a") as file:
                file.write(f"{line}\n")

        return write

    def lines(self) -> list[str]:
        path = Path(self.path)
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


@pytest.fixture
def autotuning_knobs() -> Iterator[Any]:
    with knobs.autotuning.scope():
        yield knobs.autotuning
        if hasattr(knobs.autotuning, "listener"):
            knobs.autotuning.listener = None


class TestCalls:
    def test_keywords_may_come_in_any_order(self, buffers: Buffers) -> None:
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)
        kernel[grid](N=N // 2, src=buffers.src, dst=buffers.dst)
        assert len(kernel.cache) == 2

        kernel[grid](src=buffers.src, dst=buffers.dst, N=N)
        kernel[grid](buffers.dst, N=N // 2, src=buffers.src)
        assert len(kernel.cache) == 2, "the same values passed in another way are another key"
        assert torch.equal(buffers.dst, buffers.src)

    def test_a_tuple_is_a_grid_too(self, buffers: Buffers) -> None:
        kernel = safetune(configs=blocks(N, 2 * N), key=["N"])(copy_kernel)

        kernel[(1,)](buffers.dst, buffers.src, N)

        assert torch.equal(buffers.dst, buffers.src)

    def test_run_takes_the_grid_as_a_keyword(self, buffers: Buffers) -> None:
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        kernel.run(buffers.dst, buffers.src, N, grid=grid, warmup=False)

        assert torch.equal(buffers.dst, buffers.src)
        assert len(kernel.cache) == 1

    @pytest.mark.parametrize("dtype", [tl.float32, tl.float16])
    def test_a_dtype_may_be_in_the_key_with_cache_results(
        self, device: str, dtype: tl.dtype
    ) -> None:
        """Triton writes its result file with json, which a dtype breaks."""
        src = torch.randn(N, device=device)
        dst = torch.empty(N, device=device)
        kernel = safetune(configs=blocks(32, 128), key=["DTYPE"], cache_results=True)(cast_kernel)

        kernel[grid](dst, src, N, dtype)

        assert len(kernel.cache) == 1
        expected = src if dtype is tl.float32 else src.half().float()
        assert torch.equal(dst, expected)

    def test_without_do_bench_it_measures_by_itself(self, buffers: Buffers) -> None:
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        timings = kernel.configs_timings
        assert list(timings) == kernel.configs
        assert all(0 < p20 <= median <= p80 for median, p20, p80 in timings.values())
        assert kernel.best_config in kernel.configs
        assert list(kernel.cache.values()) == [kernel.best_config]
        assert kernel.bench_time > 0

    @pytest.mark.gpu
    def test_warmup_compiles_every_config_and_tunes_nothing(self, device: str) -> None:
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        compiled = kernel.warmup(torch.float32, torch.float32, N, grid=(1,))

        assert len(compiled) == 2
        assert len({each.hash for each in compiled}) == 2
        assert not kernel.cache

    def test_a_warmup_run_does_not_settle_the_choice(self, buffers: Buffers) -> None:
        """The config that a compile-only run used was kept as the choice, and no launch tuned."""
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        kernel.run(buffers.dst, buffers.src, N, grid=grid, warmup=True)
        assert not kernel.cache
        kernel[grid](buffers.dst, buffers.src, N)

        assert len(kernel.configs_timings) == 2


class TestArguments:
    @pytest.mark.parametrize("by_keyword", [False, True])
    def test_restore_value(self, device: str, by_keyword: bool) -> None:
        x = torch.zeros(N, device=device)
        kernel = safetune(configs=blocks(32, 128), key=["N"], restore_value=["x"])(increment_kernel)

        if by_keyword:
            kernel[grid](x=x, N=N)
        else:
            kernel[grid](x, N)

        assert torch.equal(x, torch.ones_like(x))

    def test_in_place_without_restore_value(self, device: str) -> None:
        """What triton.autotune cannot do: tuning never writes to the caller's tensors."""
        x = torch.zeros(N, device=device)
        kernel = safetune(configs=blocks(32, 128), key=["N"])(increment_kernel)

        kernel[grid](x, N)

        assert torch.equal(x, torch.ones_like(x))

    def test_every_timed_launch_of_a_restored_argument_sees_its_value(
        self, device: str, log: Log
    ) -> None:
        write = log.writer()

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(arguments["x"].max().item())

        kernel = safetune(
            configs=blocks(32, 128), key=["N"], restore_value=["x"], post_hook=post_hook
        )(increment_kernel)

        kernel[grid](torch.zeros(N, device=device), N)

        assert set(log.lines()) == {"1.0"}

    @pytest.mark.parametrize("is_none", [False, True])
    @pytest.mark.parametrize("by_keyword", [False, True])
    @pytest.mark.parametrize("parameter", ["reset_to_zero", "restore_value"])
    def test_reset_and_restore_take_none(
        self, device: str, parameter: str, by_keyword: bool, is_none: bool
    ) -> None:
        dst = torch.zeros(N, device=device)
        maybe = None if is_none else torch.zeros(N, device=device)
        kernel = safetune(configs=blocks(32, 128), key=["N"], **{parameter: ["maybe"]})(
            optional_kernel
        )

        if by_keyword:
            kernel[grid](maybe=maybe, dst=dst, N=N)
        else:
            kernel[grid](maybe, dst, N)

        written = dst if maybe is None else maybe
        assert torch.equal(written, torch.full_like(dst, 5.0 if is_none else 7.0))

    def test_reset_to_zero_happens_in_the_child_alone(self, device: str, log: Log) -> None:
        """Triton zeroes the caller's tensor once more before the first launch; see migrating."""
        write = log.writer()

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(arguments["x"].max().item())

        kernel = safetune(
            configs=blocks(32, 128), key=["N"], reset_to_zero=["x"], post_hook=post_hook
        )(increment_kernel)
        x = torch.full((N,), 10.0, device=device)

        kernel[grid](x, N)

        assert set(log.lines()) == {"1.0"}
        assert torch.equal(x, torch.full_like(x, 11.0))


class TestHooks:
    def test_called_in_pairs_and_away_from_the_caller(self, device: str, log: Log) -> None:
        write = log.writer()
        mine: dict[str, int] = {"calls": 0}
        caller = os.getpid()

        def pre_hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
            mine["calls"] += 1
            write(f"pre {arguments['BLOCK']} {os.getpid() == caller}")

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            mine["calls"] += 1
            write(f"post {arguments['BLOCK']} {os.getpid() == caller}")

        kernel = safetune(
            configs=blocks(32, 128), key=["N"], pre_hook=pre_hook, post_hook=post_hook
        )(increment_kernel)

        kernel[grid](torch.zeros(N, device=device), N)

        lines = log.lines()
        expected = {f"{when} {block} False" for when in ("pre", "post") for block in (32, 128)}
        assert set(lines) == expected
        assert [line.split()[0] for line in lines] == ["pre", "post"] * (len(lines) // 2)
        assert mine == {"calls": 0}

    def test_hooks_of_a_tuning_are_not_called_once_the_choice_is_known(
        self, device: str, log: Log
    ) -> None:
        write = log.writer()

        def pre_hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
            write("pre")

        kernel = safetune(configs=blocks(32, 128), key=["N"], pre_hook=pre_hook)(increment_kernel)
        kernel[grid](torch.zeros(N, device=device), N)
        count = len(log.lines())

        kernel[grid](torch.zeros(N, device=device), N)

        assert len(log.lines()) == count > 0

    def test_the_post_hook_gets_what_the_launch_raised(self, device: str, log: Log) -> None:
        write = log.writer()

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(f"{arguments['BLOCK']} {type(exception).__name__}")

        # tl.arange takes powers of two only.
        kernel = safetune(configs=blocks(33, 128), key=["N"], post_hook=post_hook)(copy_kernel)
        src, dst = torch.randn(N, device=device), torch.empty(N, device=device)

        kernel[grid](dst, src, N)

        assert kernel.best_config.kwargs == {"BLOCK": 128}
        assert torch.equal(dst, src)
        assert kernel.configs_timings[kernel.configs[0]] == [float("inf")] * 3
        if device == "cpu":  # on a GPU a config that does not compile is never launched
            raised = {line.split()[1] for line in log.lines() if line.startswith("33 ")}
            assert raised
            assert "NoneType" not in raised
        assert {line for line in log.lines() if line.startswith("128 ")} == {"128 NoneType"}

    def test_a_config_hook_runs_at_every_launch_in_the_caller(self, buffers: Buffers) -> None:
        calls: list[dict[str, Any]] = []

        def hook(arguments: dict[str, Any]) -> None:
            calls.append(arguments)
            arguments["dst"].zero_()

        kernel = safetune(configs=blocks(32, 128, pre_hook=hook), key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N // 2)
        kernel[grid](buffers.dst, buffers.src, N // 2)

        assert len(calls) == 2, "those of the tuning happen in the child"
        assert calls[0]["N"] == N // 2
        assert calls[0]["BLOCK"] == kernel.best_config.kwargs["BLOCK"]
        assert torch.equal(buffers.dst[N // 2 :], torch.zeros(N // 2, device=buffers.dst.device))

    def test_do_bench_decides_and_shares_its_state_with_the_hooks(
        self, buffers: Buffers, log: Log
    ) -> None:
        write = log.writer()
        current: dict[str, int] = {}

        def pre_hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
            current["block"] = arguments["BLOCK"]

        def do_bench(launch: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
            launch()
            write(quantiles)
            return [float(abs(current["block"] - 64) + 1)] * 3

        kernel = safetune(
            configs=blocks(32, 64, 128), key=["N"], pre_hook=pre_hook, do_bench=do_bench
        )(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        assert kernel.best_config.kwargs == {"BLOCK": 64}
        assert [timing[0] for timing in kernel.configs_timings.values()] == [33.0, 1.0, 65.0]
        assert set(log.lines()) == {"(0.5, 0.2, 0.8)"}
        assert current == {}

    @pytest.mark.gpu
    def test_out_of_shared_memory_reaches_the_post_hook(self, device: str, log: Log) -> None:
        """64 stages of 16 KiB: 1,032,192 bytes on sm_90, by Triton 3.6 and 3.9."""
        write = log.writer()

        @triton.jit
        def staged(x, N, BLOCK: tl.constexpr, STAGES: tl.constexpr):
            offsets = tl.arange(0, BLOCK)
            for _ in tl.range(tl.cdiv(N, BLOCK), num_stages=STAGES):
                tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N), mask=offsets < N)
                offsets += BLOCK

        def pre_hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
            write("pre")

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(f"post {arguments['STAGES']} {type(exception).__name__}")

        configs = [triton.Config({"BLOCK": 4096, "STAGES": stages}) for stages in (64, 2)]
        kernel = safetune(configs=configs, key=["N"], pre_hook=pre_hook, post_hook=post_hook)(
            staged
        )

        kernel[(1,)](torch.zeros(4096, device=device), 4096)

        kinds = Counter(line.split()[0] for line in log.lines())
        assert "post 64 OutOfResources" in log.lines(), list(kernel.configs_timings.items())
        assert kinds["pre"] == kinds["post"]
        assert kernel.best_config is configs[1]

    @pytest.mark.gpu
    def test_too_many_threads_reach_the_post_hook(self, buffers: Buffers, log: Log) -> None:
        write = log.writer()

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(exception)

        configs = [triton.Config({"BLOCK": 128}, num_warps=warps) for warps in (128, 4)]
        kernel = safetune(configs=configs, key=["N"], post_hook=post_hook)(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        assert any("out of resource: threads, Required: 4096" in line for line in log.lines())
        assert kernel.best_config is configs[1]
        assert torch.equal(buffers.dst, buffers.src)


class TestPruning:
    def test_early_prune_runs_here_and_sees_the_call(self, buffers: Buffers) -> None:
        calls: list[tuple[Any, ...]] = []

        def prune(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> Any:
            calls.append((os.getpid(), list(configs), named, kwargs))
            return configs[1:]

        kernel = safetune(
            configs=blocks(32, 64, 128), key=["N"], prune_configs_by={"early_config_prune": prune}
        )(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N=N)
        kernel[grid](buffers.dst, buffers.src, N=N)

        assert len(calls) == 1
        pid, configs, named, kwargs = calls[0]
        assert pid == os.getpid()
        assert configs == kernel.configs
        assert named.keys() == {"dst", "src"}
        assert named["dst"] is buffers.dst
        assert kwargs == {"N": N, "grid": grid, "warmup": False}
        assert list(kernel.configs_timings) == kernel.configs[1:]
        assert torch.equal(buffers.dst, buffers.src)

    def test_the_perf_model_ranks_by_all_arguments(self, buffers: Buffers) -> None:
        calls: list[dict[str, Any]] = []

        def perf_model(**arguments: Any) -> float:
            calls.append(arguments)
            return -arguments["BLOCK"]

        kernel = safetune(
            configs=blocks(32, 64, 128),
            key=["N"],
            prune_configs_by={"perf_model": perf_model, "top_k": 2},
        )(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N=N)

        assert [call["BLOCK"] for call in calls] == [32, 64, 128]
        assert {"dst", "src", "N", "BLOCK", "num_warps", "num_stages"} <= calls[0].keys()
        assert {c.kwargs["BLOCK"] for c in kernel.configs_timings} == {64, 128}

    def test_a_fraction_that_rounds_to_nothing_keeps_one(self, buffers: Buffers) -> None:
        kernel = safetune(
            configs=blocks(32, 128),
            key=["N"],
            prune_configs_by={"perf_model": lambda **a: -a["BLOCK"], "top_k": 0.3},
        )(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N=N)

        assert kernel.best_config is kernel.configs[1]
        assert torch.equal(buffers.dst, buffers.src)

    def test_a_fraction_is_of_what_early_prune_left(self) -> None:
        """Triton 3.6 takes it of all the configs. Built directly, as Triton's test does."""
        estimated: list[int] = []
        benchmarked: list[int] = []
        launched: list[int] = []

        class Kernel:
            arg_names = ("BLOCK",)  # unlike Triton's, it must have what the configs set

            def __init__(self) -> None:
                self.fn = lambda: None

            def run(self, **kwargs: Any) -> None:
                launched.append(kwargs["BLOCK"])

        def perf_model(**arguments: Any) -> int:
            estimated.append(arguments["BLOCK"])
            return arguments["BLOCK"]

        def do_bench(launch: Callable[[], None], quantiles: object) -> list[float]:
            launch()
            benchmarked.append(launched[-1])
            return [float(launched[-1])] * 3

        options = Options(
            blocks(*range(1, 11)),
            isolation="inline",
            do_bench=do_bench,
            prune_configs_by={
                "early_config_prune": lambda configs, named, **kwargs: configs[:6],
                "perf_model": perf_model,
                "top_k": 0.5,
            },
        )
        tuner = Autotuner(Kernel(), options)

        tuner.run()

        assert estimated == [1, 2, 3, 4, 5, 6]
        assert benchmarked == [1, 2, 3]
        assert launched[-1] == 1

    def test_one_config_left_is_neither_measured_nor_reported(
        self,
        buffers: Buffers,
        autotuning_knobs: Any,
        capsys: pytest.CaptureFixture[str],
        cache_dir: Path,
    ) -> None:
        told: list[Any] = []
        autotuning_knobs.print = True
        autotuning_knobs.listener = lambda **told_of: told.append(told_of)
        kernel = safetune(
            configs=blocks(32, 128),
            key=["N"],
            prune_configs_by={"perf_model": lambda **a: -a["BLOCK"], "top_k": 1},
        )(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N=N)

        assert kernel.best_config is kernel.configs[1]
        assert torch.equal(buffers.dst, buffers.src)
        assert told == []
        assert capsys.readouterr().out == ""
        assert not cache_dir.exists()
        assert not hasattr(kernel, "configs_timings")

    def test_nothing_left_is_an_error(self, buffers: Buffers) -> None:
        kernel = safetune(
            configs=blocks(32, 128),
            key=["N"],
            prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: []},
        )(copy_kernel)

        with pytest.raises(triton.TritonError) as caught:
            kernel[grid](buffers.dst, buffers.src, N=N)

        assert str(caught.value) == (
            "Autotuner error: No valid autotuner configs after pruning. "
            "`early_config_prune` should return at least one config."
        )
        assert not kernel.cache

    def test_prune_configs_alone_as_jax_calls_it(self) -> None:
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)
        kernel.early_config_prune = lambda configs, named, **kwargs: [
            config for config in configs if config.kwargs["BLOCK"] <= named["N"] + kwargs["extra"]
        ]
        kernel.nargs = {"N": 60}

        assert kernel.prune_configs({"extra": 4}) == kernel.configs[:1]


class TestTelling:
    def test_print_knob(
        self, buffers: Buffers, autotuning_knobs: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        autotuning_knobs.print = True
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        out = capsys.readouterr().out
        for config in kernel.configs:
            assert out.count(f"Autotuning kernel copy_kernel with config {config}\n") == 1
        assert "Triton autotuning for function copy_kernel,\n" in out
        assert f"with key as ({N}, 'torch.float32', 'torch.float32'),\n" in out
        assert f"finished after {kernel.bench_time:.2f}s,\nof which lookup " in out
        assert out.endswith(f"best config selected: {kernel.best_config};\n")

        kernel[grid](buffers.dst, buffers.src, N)
        assert capsys.readouterr().out == ""

    def test_print_knob_of_a_config_that_fails(
        self, buffers: Buffers, autotuning_knobs: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        autotuning_knobs.print = True
        kernel = safetune(configs=blocks(33, 128), key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        assert "Autotuning failed with " in capsys.readouterr().out

    def test_listener(self, buffers: Buffers, autotuning_knobs: Any) -> None:
        told: list[dict[str, Any]] = []
        autotuning_knobs.listener = lambda **told_of: told.append(told_of)
        kernel = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)
        kernel[grid](buffers.dst, buffers.src, N)

        assert told == [
            {
                "fn": copy_kernel,
                "key": (N, "torch.float32", "torch.float32"),
                "best_config": kernel.best_config,
                "configs_timings": kernel.configs_timings,
                "duration": kernel.bench_time,
                "cache_hit": False,
            }
        ]

    def test_a_stored_choice_is_reported_as_a_cache_hit(
        self,
        buffers: Buffers,
        autotuning_knobs: Any,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """`configs_timings` was missing from a tuner whose choice came from the store."""
        first = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)
        first[grid](buffers.dst, buffers.src, N)
        told: list[dict[str, Any]] = []
        autotuning_knobs.print = True
        autotuning_knobs.listener = lambda **told_of: told.append(told_of)
        second = safetune(configs=blocks(32, 128), key=["N"])(copy_kernel)

        second[grid](buffers.dst, buffers.src, N)

        assert second.best_config == first.best_config
        assert second.best_config in second.configs
        assert second.configs_timings == first.configs_timings
        assert second.bench_time == 0
        assert [(each["cache_hit"], each["duration"]) for each in told] == [(True, None)]
        assert capsys.readouterr().out == ""

    def test_attributes_that_torch_reads_are_there(self) -> None:
        def hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
            pass

        def prune(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> Any:
            return configs

        kernel = safetune(
            configs=blocks(32, 128),
            key=["N"],
            restore_value=["x"],
            prune_configs_by={"early_config_prune": prune, "top_k": 3},
        )(increment_kernel)
        hooked = safetune(configs=blocks(32), pre_hook=hook, post_hook=hook)(increment_kernel)

        assert isinstance(kernel, TritonAutotuner)
        assert isinstance(kernel, triton.runtime.Autotuner)
        assert kernel.fn is increment_kernel
        assert kernel.base_fn is increment_kernel.fn
        assert kernel.arg_names == ["x", "N", "BLOCK"]
        assert kernel.keys == ["N"]
        assert (kernel.restore_value, kernel.reset_to_zero) == (["x"], [])
        assert (kernel.perf_model, kernel.configs_top_k) == (None, 3)
        assert kernel.early_config_prune.__name__ == "choose"  # traced: it leaves one config
        assert kernel.pruning == (prune, None)
        assert kernel.use_cuda_graph is False
        assert (kernel.user_defined_pre_hook, kernel.user_defined_post_hook) == (False, False)
        assert (hooked.user_defined_pre_hook, hooked.user_defined_post_hook) == (True, True)
        copied = copy.deepcopy(kernel.configs)
        assert copied == kernel.configs
        assert [config.pre_hook for config in copied] == [None, None]

    @pytest.mark.skipif(
        "ir_override" not in vars(triton.Config({}, ir_override="x")), reason="added later"
    )
    def test_configs_that_differ_in_ir_override_are_two(self) -> None:
        configs = [triton.Config({"BLOCK": 32}, ir_override=name) for name in ("a.ttir", "b.ttir")]

        kernel = safetune(configs=configs, key=["N"])(copy_kernel)

        assert kernel.configs == configs

    @pytest.mark.gpu
    def test_ir_override_is_what_runs(self, buffers: Buffers, tmp_path: Path) -> None:
        @triton.jit
        def ten_times(dst, src, N, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(src + offsets, mask=offsets < N)
            tl.store(dst + offsets, x * 10, mask=offsets < N)

        file = tmp_path / "override.ttir"
        compiled = ten_times.warmup(buffers.dst, buffers.src, N, BLOCK=32, grid=(1,))
        file.write_text(compiled.asm["ttir"].replace("ten_times", "copy_kernel"))
        configs = [
            triton.Config({"BLOCK": 32, "ir_override": str(file)}, num_warps=warps)
            for warps in (2, 4)
        ]
        kernel = safetune(configs=configs, key=["N"])(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        torch.testing.assert_close(buffers.dst, buffers.src * 10)


class TestStacking:
    def test_heuristics_below(self, buffers: Buffers) -> None:
        kernel = safetune(configs=blocks(32, 128), key=["N"])(
            triton.heuristics({"SCALE": lambda arguments: arguments["N"] // 64})(scaled_kernel)
        )

        kernel[grid](buffers.dst, buffers.src, N)

        assert len(kernel.configs_timings) == 2
        assert torch.equal(buffers.dst, buffers.src * 4)

    def test_heuristics_above(self, buffers: Buffers) -> None:
        tuned = safetune(configs=blocks(32, 128), key=["N", "SCALE"])(scaled_kernel)
        kernel = triton.heuristics({"SCALE": lambda arguments: arguments["N"] // 64})(tuned)

        kernel[grid](buffers.dst, buffers.src, N)

        assert len(tuned.configs_timings) == 2
        assert torch.equal(buffers.dst, buffers.src * 4)

    def test_bare_above_autotune_takes_its_settings_over(self, device: str, log: Log) -> None:
        write = log.writer()

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(arguments["x"].max().item())

        def prune(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> Any:
            return configs[:2]

        original = triton.autotune(
            configs=blocks(32, 64, 128),
            key=["N"],
            restore_value=["x"],
            post_hook=post_hook,
            prune_configs_by={"early_config_prune": prune},
        )(increment_kernel)

        kernel = safetune(original)
        x = torch.zeros(N, device=device)
        kernel[grid](x, N)

        assert isinstance(kernel, Autotuner)
        assert kernel.configs == original.configs
        assert kernel.keys == ["N"]
        assert list(kernel.configs_timings) == original.configs[:2]
        assert set(log.lines()) == {"1.0"}
        assert torch.equal(x, torch.ones_like(x))

    def test_bare_above_autotune_with_a_warmup_works_in_the_interpreter(
        self, buffers: Buffers
    ) -> None:
        """Triton's own benchmark, which `warmup=` asks for, finds no device there."""
        with pytest.deprecated_call():
            original = triton.autotune(configs=blocks(32, 128), key=["N"], warmup=1, rep=1)(
                copy_kernel
            )

        kernel = safetune(original)
        kernel[grid](buffers.dst, buffers.src, N)

        assert len(kernel.configs_timings) == 2
        assert (kernel.num_warmups, kernel.num_reps) == (1, 1)
        assert torch.equal(buffers.dst, buffers.src)

    def test_bare_above_heuristics_over_autotune(self, buffers: Buffers) -> None:
        original = triton.heuristics({"SCALE": lambda arguments: arguments["N"] // 64})(
            triton.autotune(configs=blocks(32, 128), key=["N", "SCALE"])(scaled_kernel)
        )

        kernel = safetune(original)
        kernel[grid](buffers.dst, buffers.src, N)

        assert isinstance(kernel.fn, Autotuner)
        assert len(kernel.fn.configs_timings) == 2
        assert torch.equal(buffers.dst, buffers.src * 4)

    def test_bare_above_jit_has_tritons_default_config(self, buffers: Buffers) -> None:
        kernel = safetune(copy_kernel)

        kernel[(2,)](buffers.dst, buffers.src, N, BLOCK=128)

        assert isinstance(kernel, Autotuner)
        assert kernel.configs == [triton.Config({}, num_warps=4, num_stages=3, num_ctas=1)]
        assert torch.equal(buffers.dst, buffers.src)

    def test_bare_above_safetune_changes_nothing(self) -> None:
        kernel = safetune(configs=blocks(32), key=["N"])(copy_kernel)

        assert safetune(kernel) is kernel
        assert autotune is safetune

    @pytest.mark.parametrize("below", [triton.autotune, safetune])
    def test_a_tuner_over_a_tuner_is_refused(self, below: Any) -> None:
        tuned = below(configs=blocks(32), key=["N"])(copy_kernel)

        with pytest.raises(InvalidSetting, match="copy_kernel has a tuner already: use @safetune"):
            safetune(configs=blocks(64), key=["N"])(tuned)


class TestIsolation:
    @pytest.mark.parametrize(("isolation", "at_least"), [("worker", 1), ("config", 2)])
    def test_children_measure(
        self, buffers: Buffers, log: Log, isolation: str, at_least: int
    ) -> None:
        write = log.writer()

        def post_hook(arguments: dict[str, Any], exception: Exception | None) -> None:
            write(f"{os.getpid()} {arguments['BLOCK']}")

        kernel = safetune(
            configs=blocks(32, 128), key=["N"], post_hook=post_hook, isolation=isolation
        )(copy_kernel)

        kernel[grid](buffers.dst, buffers.src, N)

        launches = {tuple(line.split()) for line in log.lines()}
        pids = {pid for pid, _ in launches}
        assert str(os.getpid()) not in pids
        assert len(pids) >= at_least
        assert (len(launches) == len(pids)) is (isolation == "config"), "one config per process"
        assert torch.equal(buffers.dst, buffers.src)

    def test_inline_is_this_process_and_is_not_stored(
        self, device: str, cache_dir: Path, autotuning_knobs: Any
    ) -> None:
        pids: set[int] = set()
        told: list[dict[str, Any]] = []
        autotuning_knobs.listener = lambda **told_of: told.append(told_of)

        def pre_hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
            pids.add(os.getpid())
            arguments["x"].zero_()

        kernel = safetune(
            configs=blocks(32, 128), key=["N"], pre_hook=pre_hook, isolation="inline"
        )(increment_kernel)
        x = torch.full((N,), 10.0, device=device)

        kernel[grid](x, N)

        assert pids == {os.getpid()}
        assert torch.equal(x, torch.ones_like(x)), "the hook and the reset reach the caller's x"
        assert list(kernel.configs_timings) == kernel.configs
        assert kernel.bench_time > 0
        assert [(each["key"], each["cache_hit"]) for each in told] == [
            ((N, "torch.float32"), False)
        ]
        assert not cache_dir.exists()

    def test_mode_off_takes_the_first_config_and_leaves_no_trace(
        self, tmp_path: Path, cache_dir: Path, fresh_process: Any
    ) -> None:
        script = tmp_path / "off.py"
        script.write_text(MODE_OFF)

        result = fresh_process(script, env={"SAFETUNE_MODE": "off"}, warm=True)

        assert result.stderr == ""
        assert result.stdout.splitlines() == ["{'BLOCK': 128}", "copied", "children: 0"]
        assert not cache_dir.exists()


MODE_OFF = """
import os
from pathlib import Path
import torch, triton, triton.language as tl
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 32})], key=["N"])
@triton.jit
def kernel(dst, src, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < N), mask=offsets < N)

device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
src = torch.randn(256, device=device)
dst = torch.zeros(256, device=device)
kernel[lambda meta: (triton.cdiv(256, meta["BLOCK"]),)](dst, src, 256)
print(kernel.best_config.kwargs)
print("copied" if torch.equal(src, dst) else "wrong")
tasks = Path("/proc/self/task").iterdir()
children = [Path(task, "children").read_text().split() for task in tasks]
print("children:", sum(map(len, children)))
"""
