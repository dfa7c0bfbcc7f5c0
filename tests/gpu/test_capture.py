"""CUDA graphs: a hit only launches, a miss launches the fallback, and every capture stays valid."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import safetune
from safetune import MissError
from safetune.miss import under_capture
from tests.binding import tell_binding

pytestmark = pytest.mark.gpu

N = 10_000
MODES = ("global", "thread_local", "relaxed")


class Adds:
    """A tuner of `add_kernel` with static tensors for a graph; BLOCK=512 is to win.

    Args:
        hooked: whether the configs have a `pre_hook`, so that each launch is Triton's own. Without,
            the tuner has one, which runs where configs are measured and nowhere else.

    Attributes:
        by_triton: how many launches of the kernel went through Triton's own path.
    """

    def __init__(self, kernels: Any, n: int = N, hooked: bool = False, **options: Any) -> None:
        config_hook, tuner_hook = (_note, None) if hooked else (None, _note)
        configs = [triton.Config({"BLOCK": block}, pre_hook=config_hook) for block in (256, 512)]
        options = {"key": ["n"], "pre_hook": tuner_hook, "do_bench": _bench, **options}
        self.tuner = safetune.safetune(configs=configs, **options)(kernels.add_kernel)
        self.by_triton = 0
        tell_binding(kernels.add_kernel, self._bound)
        self.n = n
        self.x, self.y = (torch.randn(n, device="cuda") for _ in range(2))
        self.out = torch.zeros(n, device="cuda")
        (self.x + self.y).mul_(2)  # what the tests use of torch is loaded
        torch.cuda.synchronize()

    def _bound(self) -> None:
        self.by_triton += 1

    def launch(self) -> None:
        n = self.n
        self.tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](self.x, self.y, self.out, n)

    def check(self, replay: Callable[[], None]) -> None:
        """Replay with other inputs, after others took and freed memory, and see the results."""
        for seed in range(2):
            for size in (512, 1 << 16, 1 << 22):
                taken = [torch.full((size,), -1.0, device="cuda") for _ in range(16)]
                del taken
            torch.manual_seed(seed)
            self.x.copy_(torch.randn(self.n, device="cuda"))
            self.out.zero_()
            torch.cuda.synchronize()
            replay()
            torch.cuda.synchronize()
            assert torch.equal(self.out, self.x + self.y), f"replay {seed}"

    @property
    def block(self) -> int:
        return int(self.tuner.best_config.kwargs["BLOCK"])


def _note(arguments: dict[str, Any]) -> None:
    import builtins

    builtins.safetune_test_block = arguments["BLOCK"]  # of the process that measures


def _bench(launch: Any, quantiles: Any) -> list[float]:
    import builtins

    launch()
    return [1000.0 / builtins.safetune_test_block] * 3


CAPTURES = (*(f"torch-{mode}" for mode in MODES), "side-stream", *(f"raw-{m}" for m in MODES))

#: Every kind of capture, with launches that are past Triton's own path once they are known; and
#: two with a hook that keeps them on it.
LAUNCHES = [
    *(pytest.param(way, False, id=way) for way in CAPTURES),
    *(pytest.param(way, True, id=f"{way}-hooked") for way in ("torch-global", "raw-global")),
]


@pytest.fixture
def begun(raw_graph: Any) -> Callable[[str], tuple[Any, Callable[[], None]]]:
    """A function that returns, for one of CAPTURES, a context that captures, and its replay."""

    def begin(way: str) -> tuple[Any, Callable[[], None]]:
        kind, _, mode = way.partition("-")
        if kind == "raw":
            raw = raw_graph(torch.cuda.Stream(), mode)
            return raw, raw.replay
        options = (
            {"stream": torch.cuda.Stream()} if kind == "side" else {"capture_error_mode": mode}
        )
        graph = torch.cuda.CUDAGraph()
        return torch.cuda.graph(graph, **options), graph.replay

    return begin


@pytest.fixture(autouse=True)
def _no_misses_of_other_tests() -> None:
    under_capture._misses.clear()


@pytest.mark.parametrize(("way", "hooked"), LAUNCHES)
def test_a_hit_only_launches(
    kernels: Any, begun: Any, way: str, hooked: bool, monkeypatch: pytest.MonkeyPatch, parent: Any
) -> None:
    adds = Adds(kernels, hooked=hooked)
    adds.launch()
    torch.cuda.synchronize()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a hit under capture is not a miss")

    monkeypatch.setattr(type(adds.tuner), "_miss", never)
    compiled, loaded = len(parent.compiled), len(parent.loaded)
    by_triton = adds.by_triton
    context, replay = begun(way)
    with context:
        # From in here: the process's first capture allocates torch's own random number state.
        allocated = torch.cuda.memory_allocated()
        adds.launch()
        grown = torch.cuda.memory_allocated() - allocated
    assert grown == 0
    assert (len(parent.compiled), len(parent.loaded)) == (compiled, loaded)
    assert adds.by_triton - by_triton == int(hooked), "launches by Triton's own path"
    assert adds.block == 512
    adds.check(replay)


@pytest.mark.parametrize(("way", "hooked"), LAUNCHES)
def test_a_miss_is_captured_with_the_fallback(
    kernels: Any,
    begun: Any,
    way: str,
    hooked: bool,
    trials: Callable[[], list[Any]],
    tunings: Callable[[], list[str]],
) -> None:
    """Compiled and loaded on the spot. The next call that is not captured tunes."""
    adds = Adds(kernels, hooked=hooked)
    context, replay = begun(way)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context:
            adds.launch()
            adds.launch()
    told = [str(each.message) for each in caught if "has no choice for" in str(each.message)]
    assert len(told) == 1, [str(each.message) for each in caught]
    assert f"n={N}" in told[0]
    assert adds.block == 256, "the first config"
    assert adds.by_triton == 2, "a fallback is not remembered"
    assert len(under_capture.misses()) == 1
    assert tunings() == []
    adds.check(replay)

    adds.launch()
    assert tunings() == ["add_kernel"]
    assert [trial.verdict for trial in trials()] == ["ok"] * 2
    assert adds.block == 512
    assert [miss.outdated for miss in under_capture.misses()] == [True]
    adds.check(replay)  # the graph keeps what it has

    by_triton = adds.by_triton
    adds.launch()
    assert adds.by_triton - by_triton == int(hooked), "the choice's launch is known now"


@pytest.mark.parametrize("way", ["torch-global", "raw-global"])
def test_an_error_leaves_the_capture_valid(
    kernels: Any, begun: Any, way: str, trials: Callable[[], list[Any]]
) -> None:
    adds = Adds(kernels, on_miss="error")
    ready = Adds(kernels, n=N + 1)
    ready.launch()
    torch.cuda.synchronize()
    before = len(trials())
    context, replay = begun(way)
    with context:
        with pytest.raises(MissError, match=rf"add_kernel has no choice for n={N} "):
            adds.launch()
        ready.launch()
    ready.check(replay)
    assert len(trials()) == before
    assert not adds.out.any()


def test_a_miss_in_backward(kernels: Any) -> None:
    """On autograd's thread, whose stream is the one that is captured."""
    adds = Adds(kernels)
    live = False

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            if live:
                adds.launch()
            return gradient * 2

    x = torch.ones(N, device="cuda", requires_grad=True)
    incoming = torch.ones(N, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            Double.apply(x).backward(incoming)
    torch.cuda.current_stream().wait_stream(side)
    x.grad = None
    live = True
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.warns(UserWarning, match="has no choice for"),
        torch.cuda.graph(graph),
    ):
        Double.apply(x).backward(incoming)
    assert not adds.tuner.cache
    adds.check(graph.replay)
    assert x.grad is not None
    assert torch.equal(x.grad, incoming * 2)


def test_make_graphed_callables(kernels: Any, tunings: Callable[[], list[str]]) -> None:
    """It warms up, which tunes, then captures forward and backward."""
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512)]
    kernel = safetune.safetune(configs=configs, key=["n"])(kernels.add_kernel)

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, out, N)
        return out

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return add(x, x)

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return add(gradient, gradient)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Add.apply(x)

    sample = torch.randn(N, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(Module(), (sample,))
    assert tunings() == ["add_kernel"]
    assert under_capture.misses() == ()
    for _ in range(2):
        x = torch.randn(N, device="cuda", requires_grad=True)
        incoming = torch.randn(N, device="cuda")
        graphed(x).backward(incoming)
        assert x.grad is not None
        assert torch.equal(x.grad, incoming * 2)


class TestOurGraph:
    def test_after_prepare_it_has_nothing_to_say(self, kernels: Any, parent: Any) -> None:
        adds = Adds(kernels)
        report = safetune.prepare(adds.launch)
        assert ([key.kernel for key in report.keys], report.tunings) == (["add_kernel"], 1)
        assert report.unsettled == ()
        before = len(parent.compiled), len(parent.loaded)
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* a choice")
            with safetune.graph(graph, name="decode") as captured:
                adds.launch()
        assert captured.report.graph == "decode"
        assert (captured.report.misses, captured.report.tunings) == ((), 0)
        assert (len(parent.compiled), len(parent.loaded)) == before
        adds.check(graph.replay)

    def test_misses_are_counted_and_the_graph_named_later(
        self, kernels: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        adds = Adds(kernels)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.warns(UserWarning, match="decode had 1 key without a choice"),
            safetune.graph(graph, name="decode") as captured,
        ):
            adds.launch()
        adds.check(graph.replay)
        assert captured.report.outdated == ()
        with caplog.at_level(logging.WARNING, "safetune"):
            adds.launch()
        assert "graph 'decode' was captured with BLOCK=256" in caplog.text
        assert len(captured.report.outdated) == 1
        assert [miss.graph for miss in safetune.prepare(adds.launch).recapture] == ["decode"]

    def test_an_exception_ends_the_capture(self, kernels: Any) -> None:
        adds = Adds(kernels)
        adds.launch()
        stream = torch.cuda.current_stream()
        with (
            pytest.raises(KeyError, match="the body's"),
            safetune.graph(torch.cuda.CUDAGraph()),
        ):
            adds.launch()
            raise KeyError("the body's")
        assert torch.cuda.current_stream() == stream
        graph = torch.cuda.CUDAGraph()
        with safetune.graph(graph):
            adds.launch()
        adds.check(graph.replay)

    def test_an_exception_of_an_invalid_capture(self, fresh_process: Any, scripts: Path) -> None:
        """The end of that capture fails as well; in a process of its own, for torch's sake."""
        seen = _report(fresh_process, scripts / "invalid_capture.py")
        assert seen["error"] == 'KeyError("the body\'s")', seen
        assert seen["stream_restored"], seen
        assert seen["next_launch_right"], seen


def test_triton_autotune_makes_a_capture_invalid_and_safetune_does_not(
    fresh_process: Any, scripts: Path
) -> None:
    stock = _report(fresh_process, scripts / "first_call_captured.py", "triton")
    ours = _report(fresh_process, scripts / "first_call_captured.py", "safetune")
    assert "captur" in (stock["error"] or "").lower(), f"triton.autotune: {stock}"
    assert not stock["replay_right"], stock
    assert ours["error"] is None, ours
    assert ours["replay_right"], ours


def test_a_server_s_start(fresh_process: Any, scripts: Path) -> None:
    """Profile the memory, take 95 % of what is left, warm up, capture 20 sizes."""
    seen = _report(fresh_process, scripts / "server_start.py")
    assert seen["children_at_profiling"] == 0, seen
    assert seen["unaccounted_bytes_at_profiling"] < 64 << 20, seen
    assert seen["filled"] > 0.9, seen
    assert seen["unsettled"] == [], seen
    assert seen["captured"] == 20, seen
    assert seen["misses"] == seen["tunings_during_capture"] == seen["scratch_allocations"] == 0
    assert len(seen["warnings"]) <= 1, seen["warnings"]
    assert seen["wrong"] == [], seen


def _report(fresh_process: Any, script: Path, *arguments: str) -> dict[str, Any]:
    result = fresh_process(script, *arguments, timeout_s=300.0)
    return json.loads(result.stdout.splitlines()[-1])
