"""A wrong config is not chosen, whenever its rivals were measured: real tunings, times made up.

Wrong configs are the fastest, so that they would be chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.miss import candidates
from safetune.miss.resolve import Miss
from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.requests import Progress, TuningResult
from safetune.tuning.tuner import tune
from tests import stored_rows

N = 100


@triton.jit
def add_kernel(dst, src, n, BLOCK: tl.constexpr, BAD: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n) + BAD, mask=offset < n)


def good(count: int) -> list[tuple[int, int]]:
    return [(16 << number, 0) for number in range(count)]


BAD = (1024, 1)


@triton.jit
def partial_kernel(dst, part, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + offset, mask=offset < n, other=0.0)
    tl.store(dst + offset, value, mask=offset < n)
    tl.store(part + tl.program_id(0), tl.sum(value, axis=0))


class Judged:
    """A kernel whose configs are (BLOCK, what it adds); it logs the BLOCKs that children launch."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.launched: list[int] = []

    def tune(
        self,
        configs: Sequence[tuple[int, int]],
        observe: Callable[[Progress], None] = lambda progress: None,
    ) -> TuningResult:
        """Tune as a fresh process would, and take down which BLOCKs were launched."""
        self.log.write_text("")
        request = self.miss(configs).request()
        try:
            return tune(request, open_lookup(Settings.current()).store, observe)
        finally:
            self.launched = sorted({int(line) for line in self.log.read_text().split()})

    def miss(self, configs: Sequence[tuple[int, int]]) -> Miss:
        path, current = str(self.log), {"BLOCK": 0, "BAD": 0}

        def hook(arguments: dict[str, Any]) -> None:
            current.update({name: arguments[name] for name in current})
            with open(path, "a") as file:
                file.write(f"{arguments['BLOCK']}\n")

        def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
            launch()
            return [1.0 if current["BAD"] else 2.0 + current["BLOCK"] / 100] * 3

        made = [triton.Config({"BLOCK": b, "BAD": bad}, pre_hook=hook) for b, bad in configs]
        kernel = safetune(configs=made, key=["n"], do_bench=bench)(add_kernel)
        return Miss(kernel, (torch.zeros(N), torch.ones(N), N), {"grid": (7,)})

    def rows(self) -> dict[int, tuple[str, int]]:
        """Return the verdict and the size of the group of each stored BLOCK."""
        (database,) = Path(os.environ["SAFETUNE_CACHE_DIR"]).glob("*.db")
        connection = stored_rows.connected(database)
        found = connection.execute("SELECT config, verdict, judged FROM trial").fetchall()
        connection.close()
        return {json.loads(config)["BLOCK"]: (verdict, judged) for config, verdict, judged in found}


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    return Judged(tmp_path / "log")


def adds(result: TuningResult) -> int:
    return int(result.choice.kwargs["BAD"])


@pytest.mark.parametrize(
    ("configs", "after"),
    [
        ([BAD, *good(4)], 3),
        pytest.param([*good(4), BAD], 2, marks=pytest.mark.full),
        pytest.param([*good(4), BAD], 4, marks=pytest.mark.full),
        pytest.param([*good(2), BAD, *good(5)[2:]], 3, marks=pytest.mark.full),
    ],
)
def test_what_an_interrupted_tuning_has_timed_is_judged_with_the_rest(
    judged: Judged, configs: list[tuple[int, int]], after: int
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.outcome is None and progress.done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged.tune(configs, interrupt)
    assert set(judged.rows().values()) == {("not_judged", 0)}
    assert next(iter(judged.rows())) == configs[0][0]
    assert adds(judged.tune(configs)) == 0
    right = len(configs) - 1
    assert judged.rows() == {
        block: ("wrong_result", 0) if bad else ("ok", right) for block, bad in configs
    }


def test_a_config_that_is_added_is_judged_by_all_that_are_stored(judged: Judged) -> None:
    assert adds(judged.tune(good(5))) == 0
    assert adds(judged.tune([*good(5), (512, 0)])) == 0
    assert judged.launched == [16, 32, 512], "it agrees with those that race it"
    assert judged.rows()[512] == ("ok", 6)
    result = judged.tune([*good(5), (512, 0), BAD])
    assert adds(result) == 0
    assert result.stored.dispute == ""
    assert judged.rows()[1024] == ("wrong_result", 0)
    assert judged.launched == [16, 32, 64, 128, 256, 512, 1024], "it disagrees: all vote"


@pytest.mark.full
def test_a_config_that_is_added_loses_to_a_stored_group_that_cannot_be_launched(
    judged: Judged,
) -> None:
    """Another program has the list of five; of those, this one has the first only: with one tile
    launched, the other one's may explain the difference, so that it is outvoted and no more.
    """
    judged.tune(good(5))
    result = judged.tune([BAD, *good(1)])
    assert adds(result) == 0
    (outcome,) = [outcome for config, outcome in result.outcomes if config.kwargs["BAD"]]
    assert (outcome.verdict.value, outcome.marked(Mark.OUTVOTED)) == ("ok", True)


def test_a_dispute_is_settled_and_ends_when_there_are_enough_configs(judged: Judged) -> None:
    first = judged.tune([*good(1), BAD])
    assert adds(first) == 0, "declared first"
    assert first.stored.dispute == "1 of 2 configs have this result"
    request = judged.miss([*good(1), BAD]).request()
    others = candidates.best_first(request, open_lookup(Settings.current()).store, True)
    assert [config.kwargs["BAD"] for config in others] == [0, 1], "the slower one comes first"
    second = judged.tune([BAD, *good(4)])
    assert (adds(second), second.stored.dispute) == (0, "")
    assert judged.rows()[1024] == ("wrong_result", 0)


@pytest.mark.full
def test_of_a_list_that_was_disputed_all_are_launched_again(judged: Judged) -> None:
    """Another program has chosen the wrong one, and cannot know better."""
    first = judged.tune([BAD, *good(1)])
    assert (adds(first), bool(first.stored.dispute)) == (1, True)
    second = judged.tune([BAD, *good(5)])
    assert (adds(second), second.stored.dispute) == (0, "")
    assert judged.launched == [16, 32, 64, 128, 256, 1024]


def test_partial_results_that_a_hook_resets_are_no_dispute() -> None:
    """As in Liger's dynamic tanh: five configs with one grid, two with another."""
    configs = [triton.Config({"BLOCK": 16}, num_warps=1 << i) for i in range(5)]
    configs += [triton.Config({"BLOCK": 32}, num_warps=1 << i) for i in range(2)]
    kernel = safetune(configs=configs, key=["n"], reset_to_zero=["part"])(partial_kernel)
    arguments = torch.zeros(N), torch.zeros(7), torch.randn(N), N
    request = Miss(kernel, arguments, {"grid": lambda meta: (-(-N // meta["BLOCK"]),)}).request()
    result = tune(request, open_lookup(Settings.current()).store)
    assert {(outcome.verdict.value, outcome.marks) for _, outcome in result.outcomes} == {
        ("ok", ())
    }
    assert {outcome.judged for _, outcome in result.outcomes} == {7}


@triton.jit
def scaled_kernel(dst, src, scale, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + offset, mask=offset < n) * tl.load(scale)
    tl.store(dst + offset, value, mask=offset < n)


@pytest.mark.parametrize("steady", [(), (16, 64)], ids=["none repeats", "two repeat"])
def test_a_config_whose_launches_leave_other_bits_is_chosen_only_where_no_other_works(
    tmp_path: Path, steady: tuple[int, ...]
) -> None:
    """What changes is far below the tolerance, and such configs are the fastest."""
    counter, current = str(tmp_path / "count"), {"BLOCK": 0}

    def hook(arguments: dict[str, Any]) -> None:
        current["BLOCK"] = arguments["BLOCK"]
        with open(counter, "a+") as file:
            file.write(".")
            count = file.tell()
        arguments["scale"].fill_(1.0 if arguments["BLOCK"] in steady else 1.0 + count * 1e-6)

    def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
        launch()
        return [10.0 + current["BLOCK"] if current["BLOCK"] in steady else 1.0] * 3

    configs = [triton.Config({"BLOCK": 16 << i}, pre_hook=hook) for i in range(4)]
    kernel = safetune(configs=configs, key=["n"], do_bench=bench)(scaled_kernel)
    arguments = torch.zeros(N), torch.randn(N), torch.ones(1), N
    result = tune(
        Miss(kernel, arguments, {"grid": lambda meta: (-(-N // meta["BLOCK"]),)}).request(),
        open_lookup(Settings.current()).store,
    )
    assert result.choice.kwargs["BLOCK"] == 16
    marked = {c.kwargs["BLOCK"] for c, o in result.outcomes if o.marked(Mark.NOT_REPEATABLE)}
    assert not marked.intersection(steady)
    assert 16 in {*marked, *steady}
    assert ("not_repeatable: dst, scale" in result.stored.marks) == (not steady)


@triton.jit
def drawn_kernel(dst, n, seed, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.rand(seed + tl.program_id(0), tl.arange(0, BLOCK))
    tl.store(dst + offset, value, mask=offset < n)


def test_numbers_that_a_tile_draws_are_right_in_every_config() -> None:
    """Two of the three, with one warp count each, were rejected without a word."""
    configs = [triton.Config({"BLOCK": 16}, num_warps=1 << i) for i in range(3)]
    configs += [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]
    kernel = safetune(configs=configs, key=["n"])(drawn_kernel)
    arguments = torch.zeros(N), N, 3
    request = Miss(kernel, arguments, {"grid": lambda meta: (-(-N // meta["BLOCK"]),)}).request()
    result = tune(request, open_lookup(Settings.current()).store)
    assert {(outcome.verdict.value, outcome.judged) for _, outcome in result.outcomes} == {
        ("ok", 5)
    }
    assert all(outcome.marked(Mark.VARIES) for _, outcome in result.outcomes)
    assert sum("depends on the tile" in note for note in result.notes) == 1
