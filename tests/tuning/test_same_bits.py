"""`same_bits`: the choice is among the configs whose results have the bits of the first one.

Children are real, and so are all results; the times are made up, by the place of a config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Config

import safetune as package
from safetune import safetune, settings
from safetune.both.protocol import Budget
from safetune.errors import InvalidSetting, TuningWarning
from safetune.miss import candidates
from safetune.miss.resolve import Miss
from safetune.outcome import Mark, Outcome, OutputReport, Timing, Verdict
from safetune.settings import Settings
from safetune.store.local.store import Store
from safetune.store.lookup import open_lookup
from safetune.tuning.bench import LaunchBench
from safetune.tuning.requests import Plan, Progress, TuningRequest, TuningResult
from safetune.tuning.tuner import tune

ROWS, N = 4, 100

pytestmark = pytest.mark.usefixtures("cache_dir")


@triton.jit
def sum_kernel(dst, src, n, BLOCK: tl.constexpr):
    """Add the rows of a matrix, in an order that depends on the block."""
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + columns < n
        total += tl.load(src + row * n + start + columns, mask=inside, other=0.0)
    tl.store(dst + row, tl.sum(total))


@triton.jit
def atomic_kernel(dst, src, n, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + columns < n
        values = tl.load(src + row * n + start + columns, mask=inside, other=0.0)
        tl.atomic_add(dst + row, tl.sum(values))


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test configures."""
    monkeypatch.setattr(settings, "_configured", settings._configured)


def config(block: int, num_warps: int = 4, **options: Any) -> Config:
    return Config({"BLOCK": block}, num_warps=num_warps, **options)


#: In the interpreter the number of warps changes nothing, and the block does. The last is fastest.
CONFIGS = [config(16), config(64), config(16, 8), config(64, 8), config(128)]


class Planted(LaunchBench):
    """A bench in which each config is faster than all that were declared before it."""

    def measure(
        self, index: int, budget: Budget | None, *args: Any, **kwargs: Any
    ) -> tuple[Outcome, OutputReport | None]:
        outcome, report = super().measure(index, budget, *args, **kwargs)
        return (_timed(outcome, index) if outcome.ok and budget else outcome), report

    def in_turn(self, budgets: Mapping[int, Budget]) -> dict[int, Outcome]:
        return {i: _timed(self.measure(i, None)[0], i) for i in budgets}


def _timed(outcome: Outcome, index: int) -> Outcome:
    ms = 10.0 - index
    return replace(outcome, timing=Timing(ms, ms, ms, 10, "screen"))


def open_store() -> Store:
    return open_lookup(Settings.current()).store


def random_rows() -> torch.Tensor:
    return torch.randn(ROWS, N, generator=torch.Generator().manual_seed(0))


def request_of(
    src: torch.Tensor | None = None,
    configs: Sequence[Config] = CONFIGS,
    kernel: Any = sum_kernel,
    **options: Any,
) -> TuningRequest:
    made = safetune(configs=list(configs), key=["n"], **{"same_bits": True, **options})(kernel)
    arguments = torch.zeros(ROWS), random_rows() if src is None else src, N
    return Miss(made, arguments, {"grid": (ROWS,)}).request()


def tuned(
    request: TuningRequest, observe: Callable[[Progress], None] = lambda progress: None
) -> TuningResult:
    return tune(request, open_store(), observe, bench=Planted(request))


def chosen(result: TuningResult) -> tuple[int, int]:
    return result.choice.kwargs["BLOCK"], result.choice.num_warps


def same(result: TuningResult) -> list[tuple[int, int]]:
    """Return the configs that were found to have the bits of the first one."""
    marked = [c for c, outcome in result.outcomes if outcome.marked(Mark.SAME_BITS)]
    return [(c.kwargs["BLOCK"], c.num_warps) for c in marked]


class TestChoice:
    def test_it_is_the_fastest_with_the_bits_of_the_first(self) -> None:
        result = tuned(request_of())
        assert chosen(result) == (16, 8)
        assert same(result) == [(16, 4), (16, 8)]
        assert {outcome.verdict for _, outcome in result.outcomes} == {Verdict.OK}
        assert result.notes == ()
        (mark,) = result.stored.marks
        assert mark.startswith("same_bits: BLOCK=16")

    def test_without_it_all_are_candidates(self) -> None:
        result = tuned(request_of(same_bits=False))
        assert chosen(result) == (128, 4)
        assert same(result) == []

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_bits_that_only_the_callers_inputs_leave_equal_do_not_count(self, value: float) -> None:
        """Every order of a sum of ones gives the same bits."""
        assert chosen(tuned(request_of(torch.full((ROWS, N), value)))) == (16, 8)

    def test_the_first_that_works_is_the_reference(self) -> None:
        result = tuned(request_of(configs=[config(48), config(64), config(16), config(64, 8)]))
        assert result.outcomes[0][1].verdict is Verdict.LAUNCH_ERROR
        assert chosen(result) == (64, 8)
        assert same(result) == [(64, 4), (64, 8)]

    def test_the_callers_inputs_are_there_again_afterwards(self) -> None:
        request = request_of()
        with Planted(request) as bench:
            first = bench.measure(0, None, ())[1]
            bits = bench.bits(0)
            again = bench.measure(0, None, ())[1]
            assert bits == bench.bits(0)
        assert first is not None
        assert again is not None
        assert first.written == again.written  # the other inputs do not count as written
        assert first.sums == again.sums == bits[: len(first.sums)]
        assert len({bits[i :: len(first.sums)] for i in range(len(first.sums))}) > 1
        assert len(bits) == 3 * len(first.sums)


class TestRefused:
    def test_where_the_text_has_atomics(self) -> None:
        result = tuned(request_of(kernel=atomic_kernel, reset_to_zero=["dst"]))
        assert chosen(result) == (16, 4)
        (note,) = result.notes
        assert note.startswith("same_bits is refused, and BLOCK=16")
        assert "atomics" in note
        assert result.stored.marks[-1].startswith("same_bits: refused")

    def test_where_the_first_does_not_repeat(self, tmp_path: Path) -> None:
        """What changes is far below the tolerance."""
        counter = str(tmp_path / "count")

        def hook(arguments: dict[str, Any]) -> None:
            with open(counter, "a+") as file:
                file.write(".")
                arguments["src"][0, 0] += file.tell() * 1e-5

        result = tuned(request_of(configs=[config(16, pre_hook=hook), config(64), config(128)]))
        assert chosen(result) == (16, 4)
        (note,) = result.notes
        assert "other bits at each launch" in note

    def test_where_further_launches_of_the_first_show_it(self) -> None:
        class Racing(Planted):
            def repeat(self, index: int) -> tuple[Outcome, Sequence[tuple[int, int, str]]]:
                outcome, _ = super().repeat(index)
                return outcome, [(0, 0, "dst")]

        request = request_of()
        result = tune(request, open_store(), bench=Racing(request))
        assert chosen(result) == (16, 4)
        assert "other bits at each launch" in result.notes[0]
        assert result.stored.marks[0] == "not_repeatable: dst"

    def test_where_configs_are_tried_in_this_process(self) -> None:
        dst, src = torch.zeros(ROWS), random_rows()
        kernel = safetune(
            configs=[config(16), config(64)], key=["n"], isolation="inline", same_bits=True
        )(sum_kernel)
        with pytest.warns(TuningWarning, match="sum_kernel: same_bits is refused"):
            kernel[(ROWS,)](dst, src, N)
        assert kernel.best_config.kwargs == {"BLOCK": 16}


class TestStored:
    def test_the_policy_identifies_a_choice(self) -> None:
        """And what was timed for the other policy is judged, not timed again."""
        free = tuned(request_of(same_bits=False))
        assert Plan.read(request_of(), open_store()).choice is None
        screened: list[Progress] = []
        result = tuned(request_of(), lambda p: screened.append(p) if p.stage == "screen" else None)
        assert (chosen(free), chosen(result)) == ((128, 4), (16, 8))
        assert screened == []
        for policy, choice in ((False, free), (True, result)):
            found = Plan.read(request_of(same_bits=policy), open_store()).choice
            assert found is not None
            assert found.config_digest == choice.stored.config_digest

    def test_without_a_choice_the_first_is_launched(self) -> None:
        """Not the choice of the other policy, which is from the same list of configs."""
        tuned(request_of(same_bits=False))
        lookup = open_lookup(Settings.current())
        assert candidates.best_known(request_of(), lookup).kwargs == {"BLOCK": 16}
        assert candidates.best_known(request_of(same_bits=False), lookup).kwargs == {"BLOCK": 128}

    def test_an_untimed_judging_needs_no_second_finalist(self) -> None:
        """The fastest by far was alone in the final of the other policy."""
        tuned(request_of(same_bits=False, configs=[config(16), config(64)]))
        assert chosen(tuned(request_of(configs=[config(16), config(64)]))) == (16, 4)

    def test_a_budget_measures_the_first(self) -> None:
        class Last:
            def propose(self, history: Any, remaining: int) -> list[Config]:
                return [history.configs[-1]]

        options: dict[str, Any] = {"budget": 2, "proposer": Last()}
        configs = [config(48), config(64), config(128), config(16)]
        result = tuned(request_of(configs=configs, **options))
        assert [outcome.ok for _, outcome in result.outcomes] == [False, True]
        assert chosen(result) == (64, 4)


class TestShown:
    def test_the_reference_and_who_has_its_bits(self, capsys: pytest.CaptureFixture[str]) -> None:
        dst, src = torch.zeros(ROWS), random_rows()
        kernel = safetune(configs=CONFIGS, key=["n"], same_bits=True)(sum_kernel)
        kernel[(ROWS,)](dst, src, N)
        kernel.show()
        lines = capsys.readouterr().out.splitlines()
        assert any("same bits" in line and "BLOCK=16" in line for line in lines)
        assert sum(line.rstrip().endswith(" same") for line in lines) == 2


class TestPolicy:
    @pytest.mark.parametrize("way", ["decorator", "environment", "configure"])
    def test_each_way_asks_for_it(
        self, way: str, monkeypatch: pytest.MonkeyPatch, configured: None
    ) -> None:
        given: dict[str, Any] = {"same_bits": None}
        match way:
            case "decorator":
                given = {"same_bits": True}
            case "environment":
                monkeypatch.setenv("SAFETUNE_SAME_BITS", "1")
            case "configure":
                package.configure(same_bits=True)
        assert request_of(**given).same_bits
        assert not request_of(same_bits=False).same_bits

    @pytest.mark.parametrize("way", ["decorator", "environment", "configure"])
    def test_another_value_is_refused(
        self, way: str, monkeypatch: pytest.MonkeyPatch, configured: None
    ) -> None:
        if way == "environment":
            monkeypatch.setenv("SAFETUNE_SAME_BITS", "yes")
        calls: dict[str, Callable[[], object]] = {
            "decorator": lambda: request_of(same_bits="yes"),
            "environment": request_of,
            "configure": lambda: package.configure(same_bits="yes"),  # type: ignore[arg-type]
        }
        with pytest.raises(InvalidSetting, match=r"(?i)same_bits='yes' is not valid; use"):
            calls[way]()

    def test_no_warning_is_given_where_it_holds(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel = safetune(configs=CONFIGS, key=["n"], same_bits=True)(sum_kernel)
            kernel[(ROWS,)](torch.zeros(ROWS), random_rows(), N)
