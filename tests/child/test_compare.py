"""Two right results may differ a little; a wrong one differs more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safetune.child import compare
from safetune.child.arguments import checksums
from safetune.child.compare import Scale, agree

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def same(mine: torch.Tensor, theirs: torch.Tensor, **options: object) -> bool:
    return agree(mine, theirs, Scale(rms=compare.rms(theirs)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounding_does_not_count_as_a_difference_and_an_error_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(64, 64, dtype=torch.float64, generator=generator)
    right = exact.to(dtype)
    nudged = (exact * (1 + torch.finfo(dtype).eps / 2)).to(dtype)
    assert same(nudged, right)
    wrong = right.clone()
    wrong[63, 63] = 3.0 if abs(float(right[63, 63])) < 1.5 else 0.0
    assert not same(wrong, right)


def test_sums_of_sixteen_in_half_precision_agree_in_any_order() -> None:
    parts = torch.randn(16, 4096, generator=torch.Generator().manual_seed(1)).half()
    forwards, backwards = torch.zeros(4096).half(), torch.zeros(4096).half()
    for index in range(16):
        forwards += parts[index]
        backwards += parts[15 - index]
    assert not torch.equal(forwards, backwards)
    assert same(forwards, backwards)


def test_small_elements_are_measured_by_their_tensor() -> None:
    large = torch.tensor([1000.0, 1e-6])
    assert same(torch.tensor([1000.0, -1e-6]), large), "a cancellation leaves noise"
    assert not same(torch.tensor([1e-6, 1e-6]), torch.tensor([-1e-6, 1e-6]))


def test_nan_and_infinity_agree_with_themselves_alone() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert same(odd.clone(), odd)
    for place in range(4):
        other = odd.clone()
        other[place] = 7.0
        assert not same(other, odd)
        assert not same(odd, other)


def test_complex_numbers_are_compared_by_their_parts() -> None:
    one = torch.tensor([1 + 2j, 3 - 1j])
    assert same(one.clone(), one)
    assert not same(one.conj().resolve_conj(), one)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    one = torch.tensor([0, 1, 1, 0]).to(dtype)
    other = torch.tensor([0, 1, 1, 1]).to(dtype)
    assert same(one.clone(), one)
    assert not same(other, one)


def test_a_quantised_value_may_round_the_other_way() -> None:
    one = torch.tensor([0, 100, -7], dtype=torch.int8)
    assert same(one + torch.tensor([1, 0, -1], dtype=torch.int8), one)
    assert not same(one + torch.tensor([2, 0, 0], dtype=torch.int8), one)


def test_another_order_is_another_result_unless_it_may_be_any() -> None:
    one = torch.arange(5000.0)
    other = one.flip(0)
    assert not same(other, one)
    assert same(other, one, any_order=True)
    assert not same(other + (one == 7) * 99, one, any_order=True)


def test_results_that_vary_from_run_to_run_may_vary_between_configs() -> None:
    one = torch.zeros(8)
    assert not agree(one + 0.5, one, Scale(rms=0.01))
    assert agree(one + 0.5, one, Scale(rms=0.01, spread=0.2))
    assert not agree(one + 5.0, one, Scale(rms=0.01, spread=0.2))


def test_every_slice_is_compared() -> None:
    one = torch.randn(7, 3, 13)
    for place in (0, 100, one.numel() - 1):
        other = one.clone()
        other.view(-1)[place] += 10.0
        assert not same(other, one, slice_size=10)
        assert compare.spread(other, one, slice_size=10) == pytest.approx(10.0)
    assert same(one.transpose(0, 2).clone(), one.transpose(0, 2), slice_size=10)
    assert compare.rms(one, slice_size=10) == pytest.approx(
        float(one.square().mean().sqrt()), rel=1e-6
    )


@settings(max_examples=60)
@given(st.data())
def test_a_checksum_sees_every_change(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    begin = data.draw(st.integers(0, 9))
    room = torch.randint(0, 256, (size + begin,), dtype=torch.uint8)
    run = room[begin:]
    before = checksums([run, torch.empty(0, dtype=torch.uint8)])
    assert checksums([run.clone()])[0] is not None
    place = data.draw(st.integers(0, size - 1))
    run[place] ^= data.draw(st.integers(1, 255))
    assert checksums([run])[0] != before[0]


def test_a_checksum_sees_a_swap_of_rows() -> None:
    rows = torch.randint(0, 1 << 60, (3, 1 << 20))
    before = checksums([rows.view(-1).view(torch.uint8)])
    swapped = rows[[1, 0, 2]].contiguous()
    assert checksums([swapped.view(-1).view(torch.uint8)]) != before
    assert checksums([rows.clone().view(-1).view(torch.uint8)]) == before


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu])
def test_types_that_torch_hardly_knows_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    one = torch.arange(1, 65, dtype=torch.uint8).view(dtype)
    other = one.clone()
    assert same(other, one)
    other.view(torch.uint8)[17] += 3
    assert not same(other, one)
    assert compare.spread(other, one) > 0
