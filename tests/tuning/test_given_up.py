"""Tunings that leave out a config which never ends to compile.

Compile children are real, and compile a kernel of `test_compile_pool`; what a tuning measures, it
measures in the interpreter.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from safetune import NoWorkingConfig
from safetune.config import config_text
from safetune.inputs.compile_spec import pack_for_compiler
from safetune.isolation import child_handle
from safetune.isolation.compile_pool import Compiled, CompilePool
from safetune.miss.resolve import Miss
from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.show.keys import keys_of
from safetune.store.lookup import open_lookup
from safetune.tuning.bench import LaunchBench
from safetune.tuning.requests import TuningResult
from safetune.tuning.tuner import tune
from tests.isolation.test_compile_pool import JIT, spec
from tests.tuning.test_budget import CONFIGS, InOrder, N, decorated, grid, launched, stored_marks

FEW = CONFIGS[:4]


def fail(launch: Callable[[], None], quantiles: Any) -> list[float]:
    """Time no config."""
    raise RuntimeError("a config that does not run")


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile children are started within: their kernels are compiled, not interpreted."""
    before, os.environ["TRITON_INTERPRET"] = os.environ["TRITON_INTERPRET"], "0"
    try:
        yield
    finally:
        os.environ["TRITON_INTERPRET"] = before


class CompilingBench(LaunchBench):
    """Also compiles, for each config, a kernel of its own; that of `hanging` never ends."""

    hanging: int

    def _results(
        self, configs: Sequence[int], timeout_s: float, may_give_up: Callable[[int], bool]
    ) -> Iterator[Compiled]:
        kernel = pack_for_compiler(JIT)

        def only_hanging(config: int) -> bool:  # the others may be slow on a busy machine
            return config == self.hanging and may_give_up(config)

        options = {"size": 2, "may_give_up": only_hanging, "least_s": 0.0}
        with CompilePool(lambda: kernel, timeout_s, **options) as pool:
            with compiling():
                for config in configs:
                    pool.add(config, spec("hang" if config == self.hanging else "ok", config))
            results = pool.results()
            while True:
                with compiling():
                    result = next(results, None)
                if result is None:
                    return
                yield result


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TuningResult]]:
    """A function that tunes a kernel, of which a config never ends to compile."""
    monkeypatch.setenv("POOL_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def run(kernel: Any, hanging: int, goes_on: bool = False, n: int = N) -> TuningResult:
        args = (torch.zeros(n), torch.zeros(n), n)
        request = replace(Miss(kernel, args, {"grid": grid}).request(False), goes_on=goes_on)
        bench = CompilingBench(request)
        bench.hanging = hanging
        return tune(request, open_lookup(Settings.current()).store, bench=bench)

    yield run
    child_handle.idle.drop()


def stored_configs() -> set[int]:
    """Return the configs that have a trial in the store, by their place in `CONFIGS`."""
    (key,) = keys_of(open_lookup(Settings.current()).store, "copy_kernel")
    return {int(trial.config["TAG"]) for trial in key.trials}


def test_it_is_left_out_and_the_choice_says_so(tuned: Callable[..., TuningResult]) -> None:
    result = tuned(decorated(FEW), hanging=2)

    assert [config for config, _ in result.outcomes] == [FEW[0], FEW[1], FEW[3]]
    assert stored_configs() == {0, 1, 3}, "nothing is stored for it"
    assert stored_marks() == [("searched: 3 of 4 configs; 1 given up while compiling",)]
    (key,) = keys_of(open_lookup(Settings.current()).store, "copy_kernel")
    assert dict(key.facts())["searched"] == "among 3 of 4 configs; 1 given up while compiling"


def test_no_other_key_waits_for_it(tuned: Callable[..., TuningResult], tmp_path: Path) -> None:
    for n in (N, N + 1):
        result = tuned(decorated(FEW), hanging=2, n=n)  # a tuner that knows of no other
        assert [config for config, _ in result.outcomes] == [FEW[0], FEW[1], FEW[3]]
        assert Mark.SEARCHED.reason_in(result.stored.marks).endswith("1 given up while compiling")
    began = [ast.literal_eval(line)[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert began.count(2) == 1


def test_another_key_waits_for_it_where_nothing_else_works(
    tuned: Callable[..., TuningResult],
) -> None:
    tuned(decorated(FEW), hanging=2)
    failing = decorated(FEW, do_bench=fail, compile_timeout_s=5.0)
    with pytest.raises(NoWorkingConfig) as error:
        tuned(failing, hanging=2, n=N + 1)
    assert [config for config, _ in error.value.outcomes] == [*map(config_text, FEW)]


def test_later_launches_take_the_choice_and_an_offline_tuning_measures_the_rest(
    tuned: Callable[..., TuningResult],
) -> None:
    tuned(decorated(FEW), hanging=2)
    later = decorated(FEW)
    launched(later)
    assert not later.tuning_phases, "tuned again"
    rest = tuned(decorated(FEW, compile_timeout_s=3.0), hanging=2, goes_on=True)
    assert [config for config, _ in rest.outcomes] == FEW
    assert rest.outcomes[2][1].label == "compile_timeout"
    assert stored_marks() == [()]


@pytest.mark.parametrize(
    ("hanging", "options", "goes_on"),
    [
        pytest.param(0, {}, False, id="the first declared"),
        pytest.param(2, {"same_bits": True}, False, id="same bits"),
        pytest.param(2, {}, True, id="offline"),
    ],
)
def test_some_are_never_given_up(
    tuned: Callable[..., TuningResult], hanging: int, options: dict[str, Any], goes_on: bool
) -> None:
    result = tuned(decorated(FEW, compile_timeout_s=5.0, **options), hanging, goes_on)
    assert [config for config, _ in result.outcomes] == FEW
    assert result.outcomes[hanging][1].label == "compile_timeout"
    assert not Mark.SEARCHED.reason_in(result.stored.marks)


def test_a_search_does_not_ask_for_it_again(tuned: Callable[..., TuningResult]) -> None:
    options = {"budget": 6, "proposer": InOrder(), "compile_timeout_s": 5.0}
    result = tuned(decorated(CONFIGS[:8], **options), hanging=2)
    assert FEW[2] not in [config for config, _ in result.outcomes]
    assert len(result.outcomes) == 5


def test_none_is_given_up_before_one_works(tuned: Callable[..., TuningResult]) -> None:
    """Else there might be no choice at all."""
    kernel = decorated(FEW, do_bench=fail, compile_timeout_s=5.0)
    with pytest.raises(NoWorkingConfig) as error:
        tuned(kernel, hanging=2)
    assert error.value.outcomes[2][1].label == "compile_timeout"
