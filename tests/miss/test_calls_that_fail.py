"""A call with which configs fail says nothing of other calls of its key, and little for good."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources

from safetune import NoWorkingConfig, TuningWarning, safetune
from safetune.miss import failures
from safetune.miss.resolve import Miss
from safetune.outcome import Outcome, Verdict
from tests.conftest import FreshProcess

N = 200

#: The failures after which the first config may be launched in the caller.
CLEAN = {
    Verdict.COMPILE_ERROR,
    Verdict.OUT_OF_RESOURCES,
    Verdict.LAUNCH_ERROR,
    Verdict.INVALID_TIME,
}


@triton.jit
def shifted_kernel(x, y, n, eps, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= LIMIT)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offset, tl.load(x + offset, mask=offset < n) + eps, mask=offset < n)


class Shifted:
    """A tuned kernel whose key is `n` alone, and the launches of its configs."""

    def __init__(self, log: Path, *blocks: int, fails: Any = None, **options: Any) -> None:
        self._log, path = log, str(log)
        log.touch()

        def hook(arguments: dict[str, Any]) -> None:
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {arguments['BLOCK']}\n")
            if fails is not None:
                fails(arguments)

        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in blocks or (64, 128)]
        self.tuner = safetune(configs=configs, key=["n"], **options)(shifted_kernel)

    def __call__(self, eps: Any = 1.0, limit: int = 1 << 20, y: Any = None, x: Any = None) -> float:
        """Launch it, and return the sum of what it wrote."""
        y = torch.zeros(N) if y is None else y
        x = torch.zeros(N) if x is None else x
        self.tuner[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N, eps, LIMIT=limit)
        return float(y.sum())

    def launches(self) -> list[tuple[int, int]]:
        """Return the processes and blocks of the launches since the last time."""
        lines = self._log.read_text().split("\n")[:-1]
        self._log.write_text("")
        return [(int(pid), int(block)) for pid, block in map(str.split, lines)]

    @property
    def tried_here(self) -> list[int]:
        """The blocks that were launched in this process since the last time."""
        return [block for pid, block in self.launches() if pid == os.getpid()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "launches"


def dies_with(eps: Any) -> Callable[[dict[str, Any]], None]:
    def dies(arguments: dict[str, Any]) -> None:
        if arguments["eps"] in eps and os.getpid() != caller:
            os._exit(3)

    caller = os.getpid()
    return dies


def assertion() -> Exception:
    error = CompileTimeAssertionFailure.__new__(CompileTimeAssertionFailure)
    error.src = error.node = None
    error.error_message = error.message = "as the compiler says"
    return error


class TestOtherCalls:
    @pytest.mark.parametrize("wrong", [None, "text", (1.0, 2.0)])
    def test_a_value_that_no_config_takes_is_an_error_of_its_call_alone(
        self, log: Path, wrong: Any
    ) -> None:
        kernel = Shifted(log)
        with pytest.raises(Exception, match=r"\w") as caught:
            kernel(eps=wrong)
        assert not isinstance(caught.value, NoWorkingConfig)
        assert kernel.tried_here == [64], "once, and no other one"
        assert kernel(eps=1.0) == N
        assert len(kernel.tuner.cache) == 1, "it is tuned"
        assert kernel.tried_here == [kernel.tuner.best_config.kwargs["BLOCK"]]

    def test_a_choice_stays_where_no_config_more_works(self, log: Path) -> None:
        """Each value has the configs tried that failed with the others, and nothing else."""
        kernel = Shifted(log, 32, 64, 1024)
        assert kernel(limit=512) == N
        chosen, _ = kernel.tuner.best_config, kernel.launches()
        for limit in (511, 510):
            kernel.tuner.cache.clear()
            assert kernel(limit=limit) == N
            assert kernel.tuner.best_config is chosen
            tried = [block for pid, block in kernel.launches() if pid != os.getpid()]
            assert set(tried) == {1024}

    def test_an_output_that_is_too_small(self, log: Path) -> None:
        """What is out of bounds is not launched here; another output is another call."""
        kernel = Shifted(log)
        for measured in (2, 0):
            with pytest.raises(NoWorkingConfig, match="out_of_bounds") as caught:
                kernel(y=torch.zeros(20))
            assert caught.value.measured == measured
        assert kernel.tried_here == []
        assert kernel(y=torch.zeros(N)) == N
        assert kernel(y=torch.zeros(2 * N)) == N

    def test_values_for_which_few_configs_work_in_every_order(
        self, log: Path, fresh_process: FreshProcess, tmp_path: Path
    ) -> None:
        """Each process launches the best config that its first value allows."""
        script = tmp_path / "limited.py"
        script.write_text(LIMITED)
        seen = [fresh_process(script, limit, warm=True).stdout for limit in (16, 512, 16)]
        assert [line.split() for line in seen] == [
            ["16", "16,32,256"],
            ["256", "16,32,256"],
            ["16", "-"],
        ]

    def test_a_second_mistake_has_the_others_wait(self, log: Path, clock: Any) -> None:
        """Or a program whose values change and never work would tune at each step."""
        kernel = Shifted(log, fails=dies_with((1.0, 2.0, 3.0)))
        tried = []
        for eps in (1.0, 2.0, 3.0, 4.0):
            with pytest.raises(NoWorkingConfig) as caught:
                kernel(eps)
            tried.append((caught.value.measured, len(kernel.launches())))
        assert tried == [(2, 2), (2, 2), (0, 0), (0, 0)]
        assert "this one is tried in 10 s" in str(caught.value)
        clock.now += failures.RETRY_S
        assert kernel(4.0) == 4 * N
        assert len(kernel.tuner.cache) == 1


#: Prints the block that is launched, and those that were measured.
LIMITED = """
import os, sys, torch, triton, triton.language as tl
from safetune import safetune

measured = []

def bench(launch, quantiles):
    launch()
    return [1000.0 / int(os.environ["BLOCK"])] * 3

def hook(arguments):
    os.environ["BLOCK"] = str(arguments["BLOCK"])

@safetune(configs=[triton.Config({"BLOCK": b}, pre_hook=hook) for b in (16, 32, 256)], key=["n"],
          do_bench=bench)
@triton.jit
def kernel(x, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= LIMIT)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) + 1, mask=offset < n)

import safetune.miss.reporting as reporting

tell = reporting.report_result
def told(tuner, request, result):
    measured.extend(c.kwargs["BLOCK"] for c, _ in result.outcomes if result.measured)
    tell(tuner, request, result)
reporting.report_result = told
x = torch.zeros(200)
kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, 200, LIMIT=int(sys.argv[1]))
assert x.eq(1).all()
config = kernel.best_config
print(config.kwargs["BLOCK"], ",".join(map(str, measured)) or "-")
"""


class TestThisVeryCall:
    """That no config works for a call is final in this process, and for who waited for it."""

    def test_a_later_process_tries_again_and_tune_does_not(
        self, log: Path, fresh_process: FreshProcess, tmp_path: Path
    ) -> None:
        """What the tensors held may have changed; a sweep that is resumed goes on behind it."""
        script, broken = tmp_path / "broken.py", tmp_path / "broken"
        script.write_text(BROKEN)
        broken.touch()
        first, again = (fresh_process(script, broken, log, "-", warm=True) for _ in range(2))
        assert first.stdout.split() == again.stdout.split() == ["2", "0"], "then the same process"
        assert len(log.read_text().split()) == 4
        resumed = fresh_process(script, broken, log, "offline", warm=True)
        assert resumed.stdout.split() == ["0", "0"]
        broken.unlink()
        repaired = fresh_process(script, broken, log, "-", warm=True)
        assert repaired.stdout.split() == ["ok", "ok"]

    def test_a_process_that_waited_for_it_does_not_try_it(
        self, log: Path, cache_dir: Path, tmp_path: Path
    ) -> None:
        script, broken, go = tmp_path / "broken.py", tmp_path / "broken", tmp_path / "go"
        script.write_text(BROKEN)
        broken.touch()
        os.mkfifo(go)
        command = [sys.executable, script, broken, log]
        environment = {**os.environ, "SAFETUNE_LOG": "info"}
        with run([*command, go], environment) as owner:
            assert owner.stderr is not None
            gate = os.open(go, os.O_WRONLY)  # once a config runs, which then waits for a line
            with run([*command, "-"], environment) as waiter:
                assert waiter.stderr is not None
                assert any("waiting for process" in line for line in waiter.stderr)
                os.write(gate, b"go")
                assert waiter.communicate(timeout=100)[0].split() == ["0", "0"]
            assert owner.communicate(timeout=100)[0].split() == ["2", "0"]
        os.close(gate)
        assert len(log.read_text().split()) == 2

    def test_the_same_call_with_a_config_more(self, log: Path) -> None:
        kernel = Shifted(log, 64, 128, fails=dies_with((1.0,)))
        with pytest.raises(NoWorkingConfig):
            kernel()
        more = Shifted(log, 64, 128, 32)
        more.tuner.configs[0].pre_hook = more.tuner.configs[1].pre_hook = None
        kernel.launches()
        assert more() == N


def run(command: list[Any], environment: dict[str, str]) -> subprocess.Popen[str]:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command)], env=environment, **pipes)


#: Launches a call twice and prints how many configs each has measured before no config worked.
BROKEN = """
import dataclasses, os, sys, torch, triton, triton.language as tl
from safetune import NoWorkingConfig, safetune

# In the environment, as what a hook refers to is a part of the kernel's identity.
names = "BROKEN", "LOG", "GATE", "CALLER"
os.environ.update(zip(names, [*sys.argv[1:4], str(os.getpid())]))

def hook(arguments):
    if str(os.getpid()) == os.environ["CALLER"] or not os.path.exists(os.environ["BROKEN"]):
        return
    with open(os.environ["LOG"], "a") as file:
        print(arguments["BLOCK"], file=file)
    if os.path.exists(os.environ["GATE"]):
        os.read(os.open(os.environ["GATE"], os.O_RDONLY), 1)
    os._exit(3)

@safetune(configs=[triton.Config({"BLOCK": b}, pre_hook=hook) for b in (16, 32)], key=["n"])
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) + 1, mask=offset < n)

if sys.argv[3] == "offline":
    from safetune.miss import resolve
    made = resolve.Miss.request
    resolve.Miss.request = lambda miss: dataclasses.replace(made(miss), goes_on=True)
for _ in range(2):
    try:
        kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](torch.zeros(200), 200)
        print("ok")
    except NoWorkingConfig as error:
        print(error.measured)
"""


class TestTheFirstConfig:
    """It is launched here where that can do no harm, and what it raises comes out."""

    @pytest.mark.parametrize(
        "error",
        [
            pytest.param(lambda: ValueError("of a hook"), id="launch_error"),
            pytest.param(assertion, id="compile_error"),
            pytest.param(lambda: OutOfResources(9, 1, "shared memory"), id="out_of_resources"),
        ],
    )
    def test_its_own_error_comes_out_and_later_launches_work(
        self, log: Path, error: Callable[[], Exception]
    ) -> None:
        def fails(arguments: dict[str, Any]) -> None:
            if isinstance(arguments["eps"], int):  # which is another specialisation
                raise error()

        kernel = Shifted(log, fails=fails)
        for _ in range(2):
            kernel.launches()
            with pytest.raises(type(error())) as caught:
                kernel(3)
            assert kernel.tried_here == [64], "no other config is tried here"
            assert caught.value.__context__ is None
            if sys.version_info >= (3, 11):
                (note,) = caught.value.__notes__
                assert note.startswith("safetune: none of the 2 configs of shifted_kernel works")
        assert kernel(1.0) == N
        assert len(kernel.tuner.cache) == 1, "it is tuned"

    def test_a_corrected_list_is_tried_at_once(self, log: Path) -> None:
        kernel = Shifted(log, 128, 256)
        for blocks in ((128, 256), (128, 256), (512, 1024)):
            kernel.tuner.configs[:] = [triton.Config({"BLOCK": block}) for block in blocks]
            with pytest.raises(Exception, match="AssertionError"):
                kernel(limit=64)
        kernel.tuner.configs[:] = [triton.Config({"BLOCK": block}) for block in (16, 32)]
        assert kernel(limit=64) == N
        assert kernel.tuner.best_config in kernel.tuner.configs

    def test_a_time_that_is_none_is_no_reason_not_to_launch(self, log: Path) -> None:
        kernel = Shifted(log, do_bench=lambda launch, quantiles: [math.nan] * 3)
        with pytest.warns(
            TuningWarning, match="(?s)runs with its first config .*invalid_time"
        ) as said:
            assert kernel() == kernel() == N
        assert len(said) == 1
        assert kernel.tried_here == [64, 64]
        assert not kernel.tuner.cache

    @pytest.mark.parametrize("how", ["exit", "signal", "hang", "out of bounds", "one of two"])
    def test_what_may_do_harm_is_not_launched(self, log: Path, how: str) -> None:
        def fails(arguments: dict[str, Any]) -> None:
            if arguments["eps"] != 3.0 or os.getpid() == caller or how == "out of bounds":
                return
            if how == "one of two" and arguments["BLOCK"] == 64:
                raise ValueError("harmless")
            if how == "hang":
                while True:
                    pass
            if how == "signal":
                os.abort()
            os._exit(3)

        caller = os.getpid()
        kernel = Shifted(log, fails=fails, run_timeout_s=3 if how == "hang" else 30)
        with pytest.raises(NoWorkingConfig):
            kernel(3.0, y=torch.zeros(20 if how == "out of bounds" else N))
        assert kernel.tried_here == []
        assert kernel(1.0) == N

    @pytest.mark.parametrize(
        ("outcomes", "launched"),
        [
            ([Verdict.COMPILE_ERROR, Verdict.OUT_OF_RESOURCES], True),
            ([Verdict.LAUNCH_ERROR, Verdict.INVALID_TIME], True),
            *(([Verdict.LAUNCH_ERROR, each], False) for each in Verdict if each not in CLEAN),
            ([Outcome(Verdict.COMPILE_ERROR, detail="memory")], False),
        ],
    )
    def test_every_verdict(self, log: Path, outcomes: list[Any], launched: bool) -> None:
        kernel = Shifted(log)
        call = torch.zeros(N), torch.zeros(N), N, 1.0
        request = Miss(kernel.tuner, call, {"LIMIT": 512, "grid": (4,)}).request()
        given = [each if isinstance(each, Outcome) else Outcome(each) for each in outcomes]
        error = NoWorkingConfig("shifted_kernel", "n=200", [("BLOCK", each) for each in given])
        first = failures.first_config(request, error)
        assert first is (request.configs[0] if launched else None)

    def test_resolve_returns_it_and_does_not_launch(self, log: Path) -> None:
        def fails(arguments: dict[str, Any]) -> None:
            raise ValueError("of a hook")

        kernel = Shifted(log, fails=fails)
        with pytest.warns(TuningWarning, match="using the first config anyway"):
            resolved = kernel.tuner.resolve(
                torch.zeros(N), torch.zeros(N), N, 1.0, LIMIT=512, grid=(4,)
            )
        assert (resolved.config.kwargs, resolved.provenance) == ({"BLOCK": 64}, "fallback")
        assert kernel.tried_here == []

    def test_resolve_leaves_out_a_choice_that_fails_with_this_call(self, log: Path) -> None:
        kernel = Shifted(log, 16, 256)
        kernel(limit=16)
        kernel.tuner.cache.clear()
        kernel(limit=512)
        assert kernel.tuner.best_config.kwargs == {"BLOCK": 256}
        grid = lambda meta: (triton.cdiv(N, meta["BLOCK"]),)  # noqa: E731 - that of the launches
        for limit, block in ((16, 16), (512, 256)):
            resolved = kernel.tuner.resolve(
                torch.zeros(N), torch.zeros(N), N, 1.0, LIMIT=limit, grid=grid
            )
            assert (resolved.config.kwargs, resolved.provenance) == ({"BLOCK": block}, "stored")

    def test_resolve_raises_where_it_may_do_harm(self, log: Path) -> None:
        kernel = Shifted(log, fails=dies_with((1.0,)))
        with pytest.raises(NoWorkingConfig):
            kernel.tuner.resolve(torch.zeros(N), torch.zeros(N), N, 1.0, LIMIT=512, grid=(4,))


class Wrapper(torch.Tensor):
    """A tensor without a storage of its own, as torchao's and DTensor are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return int(self.inner.data_ptr())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args))


ELSEWHERE = torch.zeros(8)
CANNOT_BE_SENT: dict[str, Callable[[], dict[str, Any]]] = {
    "meta": lambda: {"x": torch.zeros(N, device="meta")},
    "wrapper": lambda: {"x": Wrapper(torch.zeros(N))},
    "sparse": lambda: {"x": torch.eye(N).to_sparse()},
    "address": lambda: {"eps": ELSEWHERE.data_ptr()},
}


class TestCallsThatCannotBeSent:
    @pytest.mark.parametrize("kind", CANNOT_BE_SENT)
    def test_only_calls_of_their_kind_have_the_fallback(self, log: Path, kind: str) -> None:
        kernel = Shifted(log)
        with pytest.warns(TuningWarning, match="calls with other kinds of arguments are tried"):
            _whatever(lambda: kernel(**CANNOT_BE_SENT[kind]()))
        with warnings.catch_warnings():
            warnings.simplefilter("error", TuningWarning)
            _whatever(lambda: kernel(**CANNOT_BE_SENT[kind]()))
        assert not kernel.tuner.cache
        assert {pid for pid, _ in kernel.launches()} == {os.getpid()}
        assert kernel() == N
        assert len(kernel.tuner.cache) == 1, "it is tuned"

    def test_a_call_of_the_kind_is_tried_again_after_a_while(self, log: Path, clock: Any) -> None:
        """A table may hold addresses once, and numbers the next time."""
        kernel, table = Shifted(log), torch.full((N,), ELSEWHERE.data_ptr())
        with pytest.warns(TuningWarning, match="is not tuned"):
            kernel(x=table)
        table.zero_()
        assert kernel(x=table) == N
        assert not kernel.tuner.cache
        clock.now += failures.RETRY_S
        assert kernel(x=table) == N
        assert len(kernel.tuner.cache) == 1

    def test_a_heuristic_need_not_be_sent(self) -> None:
        lock = threading.Lock()

        def warps(arguments: dict[str, Any]) -> int:
            with lock:
                return 1

        configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
        below = triton.heuristics({"num_warps": warps})(shifted_kernel)
        kernel, y = safetune(configs=configs, key=["n"])(below), torch.zeros(N)
        for eps in (ELSEWHERE.data_ptr(), 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TuningWarning)
                kernel[(4,)](torch.zeros(N), y, N, eps, LIMIT=512)
        assert len(kernel.cache) == 1, "it is tuned"

    def test_a_kernel_that_can_never_be_sent_keeps_its_fallback(self, log: Path) -> None:
        lock = threading.Lock()
        kernel = Shifted(log, fails=lambda arguments: lock.locked())
        with pytest.warns(TuningWarning, match="is not tuned"):
            assert kernel() == N
        (state,) = kernel.tuner.states
        assert state.hit is not None


def _whatever(launch: Callable[[], Any]) -> None:
    """Launch what the interpreter may not be able to run: stock Triton raises, too."""
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
        launch()
