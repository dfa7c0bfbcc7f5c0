"""Where right configs are the largest group none of them is rejected, and no other is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from safetune.both.device_bytes import DeviceBytes
from safetune.child import memory
from safetune.outcome import Effects
from tests.libcuda import stub
from tests.tuning import planted
from tests.tuning.planted import (
    BLIND,
    FAULTS,
    KINDS,
    RIGHT,
    SMALL,
    Case,
    Tally,
    judged,
    possible,
)

PAGE = Path(__file__).parents[2] / "docs" / "contracts" / "judge.md"
CELLS = [(kind, fault) for kind in KINDS for fault in FAULTS if possible(kind, fault)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """More would wait for each other: the tensors are small."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_not_chosen_and_a_right_config_not_rejected(kind: str) -> None:
    for number, (_, fault) in enumerate(cell for cell in CELLS if cell[0] == kind):
        tally = Tally()
        tally.add(Case.drawn(kind, fault, 1000 + number))
        assert (tally.caught, tally.condemned) == (tally.cases, 0), fault


@pytest.mark.parametrize(
    "kind", [k if k == "in place" else pytest.param(k, marks=pytest.mark.full) for k in KINDS]
)
def test_the_judgement_is_the_same_where_results_are_compared_on_a_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(fault, 1000 + n) for n, (of, fault) in enumerate(CELLS) if of == kind]
    on_the_host = [Case.drawn(kind, *case).judged() for case in cases]
    monkeypatch.setattr(DeviceBytes, "tensor", stub.tensor)
    with stub.holding_tensors():
        on_a_device = [Case.drawn(kind, *case).judged() for case in cases]
    memory.bytes_on.cache_clear()
    assert on_a_device == on_the_host


@pytest.mark.parametrize("fault", SMALL)
def test_a_race_is_not_chosen_and_a_small_error_condemns_nothing(fault: str) -> None:
    tally = Tally()
    for seed in range(3):
        SMALL[fault].add_to(tally, seed)
    assert tally.condemned == 0
    seen = fault.startswith("race") or fault in ("5 % off, fp32", "1 % off, fp32", "5 % off, fp16")
    assert tally.caught == tally.cases or not seen


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_is_not_condemned(kind: str) -> None:
    found = [RIGHT[kind].judged(seed)[1] for seed in range(5)]
    assert not any(judgement.rejected for judgement in found)


@pytest.mark.full
def test_the_page_says_what_is_caught() -> None:
    assert PAGE.read_text(encoding="utf-8") == planted.document(), "run `make judge`"


def test_the_page_says_that_nothing_right_is_condemned_and_every_race_caught() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    for name, cases, caught, *others in (row for row in rows if len(row) > 3):
        if name in KINDS:
            assert (cases, others[0], others[2]) == (caught, "none", "0"), name
        if name in SMALL:
            assert others[1] == "0", name
            assert int(caught) >= 0.99 * int(cases) or not name.startswith("race"), name
        if name in RIGHT:
            assert others[0] == "0", name


def test_the_page_names_every_kind_and_what_is_not_seen() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if "|" in line]
    named = [row for row in rows if row not in ("kernel", "fault", "---")]
    assert named == [*KINDS, *SMALL, *RIGHT]
    assert all(f"- {words}\n" in text for words in BLIND.values())
    assert ", ".join(FAULTS) in text


class TestBlind:
    """What the page says is not seen: the wrong config is the last of four, or of three."""

    def test_all_have_a_test(self) -> None:
        tests = {
            name.removeprefix("test_") for name in dir(type(self)) if name != "test_all_have_a_test"
        }
        assert BLIND.keys() <= tests

    def test_below_the_tolerance(self) -> None:
        tensors = {"x": torch.ones(64), "out": torch.zeros(64)}
        steps = [lambda t, by=by: t["out"].copy_(t["x"] * by) for by in (1, 1, 1, 1.003)]
        assert 3 in judged(tensors, steps).candidates

    def test_races_in_what_not_all_write(self) -> None:
        tensors, runs = {"x": torch.ones(64), "out": torch.zeros(64)}, iter(range(100))

        def racy(t: dict[str, torch.Tensor]) -> None:
            t["out"].fill_(1 + 1e-5 * next(runs))

        def repeats(effects: Effects) -> bool:
            found: list[bool] = []
            judged(
                tensors, [racy], effects=effects, repeats=lambda _, again: found.append(again(0))
            )
            return found[0]

        assert not repeats(planted.ONLY_STORED)
        assert repeats(Effects(atomics=True, only_stored=("out",)))

    def test_below_the_rounding_of_a_sum(self) -> None:
        tensors = {"x": torch.randn(1 << 16), "out": torch.zeros(1)}
        steps = [lambda t, by=by: t["out"].fill_(by) for by in (1e-5, 1e-5, 1e-5, -1e-5)]
        assert 3 in judged(tensors, steps).candidates

    def test_any_order_of_slots(self) -> None:
        tensors = {"x": torch.randn(64), "out": torch.zeros(64)}
        steps = [lambda t: t["out"].copy_(t["x"])] * 3 + [lambda t: t["out"].copy_(t["x"].flip(0))]
        effects = Effects(atomics=True, any_order=True)
        assert 3 in judged(tensors, steps, effects=effects).candidates
        assert 3 not in judged(tensors, steps, effects=Effects(atomics=True)).candidates

    def test_partials_of_one_grid_each(self) -> None:
        tensors = {"x": torch.randn(64) + 3, "out": torch.zeros(64)}

        def sums(programs: int, by: float = 1.0):
            def launch(t):
                parts = [part.sum() for part in t["x"].chunk(programs)]
                t["out"][:programs] = torch.stack(parts) * by

            return launch

        steps = [sums(4), sums(8), sums(16), sums(32, by=2.0)]
        assert 3 in judged(tensors, steps, grids=[4, 8, 16, 32]).candidates

    def test_scratch(self) -> None:
        tensors = {"x": torch.ones(64), "out": torch.zeros(64)}
        steps = [lambda t, by=by: t["out"].fill_(by) for by in (1, 1, 1, 2)]
        assert 3 in judged(tensors, steps, scratch=["out"]).candidates

    def test_stale_where_it_is_read(self) -> None:
        tensors = {"x": torch.ones(64), "out": torch.ones(64)}
        steps = [lambda t: t["out"].clamp_(max=1)] * 3 + [lambda t: None]
        assert 3 in judged(tensors, steps, effects=Effects()).candidates
        steps = [lambda t: t["out"].fill_(1)] * 3 + [lambda t: None]
        assert 3 not in judged(tensors, steps).candidates

    def test_wrong_alike(self) -> None:
        tensors = {"x": torch.ones(64), "out": torch.zeros(64)}
        steps = [lambda t, by=by: t["out"].fill_(by) for by in (1, 2, 2, 2)]
        assert judged(tensors, steps).candidates == {1, 2, 3}

    def test_faults_of_other_inputs(self) -> None:
        tensors = {"x": torch.ones(64), "out": torch.zeros(64)}
        steps = [lambda t: t["out"].copy_(t["x"])] * 3 + [lambda t: t["out"].copy_(t["x"].abs())]
        assert 3 in judged(tensors, steps).candidates
