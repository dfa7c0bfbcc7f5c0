"""Two right results may differ a little; a wrong one differs more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safetune.both.device_bytes import Run
from safetune.child import compare, tolerance
from safetune.child.memory import HostBytes

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def same(mine: torch.Tensor, theirs: torch.Tensor, **options: object) -> bool:
    return not compare.difference(mine, theirs, **options).elements  # type: ignore[arg-type]


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


def test_small_elements_are_measured_by_their_row_and_column() -> None:
    """A cancellation leaves noise that is small beside its neighbours, wherever these are."""
    noisy = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    noisy[5] *= 1e6
    noisy[:, 7] *= 1e6
    for place in ((5, 3), (9, 7)):
        other = noisy.clone()
        noisy[place] = 1.0
        other[place] = -1.0
        assert same(other, noisy)
    other = noisy.clone()
    other[9, 3] += 1.0
    assert not same(other, noisy)
    assert not same(torch.tensor([1e-6, 1e-6]), torch.tensor([-1e-6, 1e-6]))


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_huge_element_hides_no_other(huge: float, dtype: torch.dtype) -> None:
    right = torch.rand(1000).to(dtype) + 1
    right[0] = huge
    zeros = torch.zeros_like(right)
    zeros[0] = huge
    assert same(right.clone(), right)
    assert not same(zeros, right)
    assert not same(right, zeros)
    one = right.clone()
    one[500] = 0
    assert compare.difference(one, right).elements == 1


def test_the_noise_of_a_sum_over_the_inputs_does_not_count() -> None:
    inputs = torch.randn(4096)
    noise = tolerance.rounding({compare.typical_size(inputs): 4096}, 1, "float32")
    assert same(torch.tensor([4e-5]), torch.tensor([-2e-5]), noise=noise)
    assert not same(torch.tensor([4e-3]), torch.tensor([-2e-5]), noise=noise)
    assert tolerance.rounding({3e38: 4096}, 1, "float32") == 0, "a mask is not a scale"
    elementwise = tolerance.rounding({1.0: 4096}, 4096, "float32")
    assert not same(torch.full((9,), 1e-4), torch.zeros(9), noise=elementwise)


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_a_few_quantised_values_may_round_the_other_way(dtype: torch.dtype) -> None:
    one = torch.arange(100).to(dtype)
    off = torch.zeros(100).to(dtype)
    off[::40] = 1
    assert same(one + off, one)
    assert not same(one + 2 * off, one)
    assert not same(one + 1, one), "all of them are another rounding mode, or a wrong offset"
    mask = (one > 50).to(dtype)
    assert not same((1 - mask) if dtype is torch.uint8 else mask * 0, mask)
    flipped = mask.clone()
    flipped[3] = 1
    assert not same(flipped, mask), "a mask of 0 and 1 is not rounded"


def test_differences_larger_than_an_integer_can_hold_are_seen() -> None:
    assert not same(torch.tensor([2**63 - 1]), torch.tensor([-1]))
    assert not same(torch.tensor([2**53 + 1]), torch.tensor([2**53]))


def test_a_byte_of_a_bool_that_is_neither_0_nor_1_differs_from_both() -> None:
    odd = torch.full((4,), 0x5A, dtype=torch.uint8).view(torch.bool)
    assert not same(odd, torch.ones(4, dtype=torch.bool))


def test_another_order_is_another_result_unless_it_may_be_any() -> None:
    one = torch.arange(5000.0)
    other = one.flip(0)
    assert not same(other, one)
    assert same(other, one, any_order=True)
    assert not same(other + (one == 7) * 99, one, any_order=True)


def test_a_difference_is_counted_and_measured_by_the_typical_size() -> None:
    one = torch.full((8,), 2.0)
    other = one.clone()
    other[:3] += 1.0
    found = compare.difference(other, one)
    assert found.elements == 3
    assert found.excess == pytest.approx(0.5, rel=0.02)
    other[0] = float("nan")
    assert compare.difference(other, one).excess == float("inf")


def test_elements_that_one_has_not_written_are_told_apart() -> None:
    one, other = torch.zeros(8), torch.ones(8)
    one[:3] = torch.nan
    assert compare.difference(one, other)[:2] == (8, 5)
    whole = torch.arange(8, dtype=torch.int32)
    assert compare.difference(whole, whole + 100, hole=2)[:2] == (8, 7)


@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float32, 0.002), (torch.float16, 0.01), (torch.bfloat16, 0.05)]
)
def test_a_few_units_in_the_last_place_are_told_from_a_small_error(
    dtype: torch.dtype, off: float
) -> None:
    one = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    nudged = (one.double() * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert compare.difference(nudged, one).fine == 0
    found = compare.difference((one.double() * (1 + off)).to(dtype), one)
    assert (found.elements, found.fine > 0) == (0, True)


def test_every_slice_is_compared() -> None:
    one = torch.randn(7, 3, 13)
    for place in (0, 100, one.numel() - 1):
        other = one.clone()
        other.view(-1)[place] += 10.0
        assert not same(other, one, slice_size=10)
    assert same(one.transpose(0, 2).clone(), one.transpose(0, 2), slice_size=10)


def checksums(runs: list[torch.Tensor]) -> list[int]:
    return HostBytes().checksums([Run(run.data_ptr(), run.numel()) for run in runs])


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
    assert checksums([(rows ^ (1 << 63) - (1 << 64)).view(-1).view(torch.uint8)]) != before
    assert checksums([rows.clone().view(-1).view(torch.uint8)]) == before


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu])
def test_types_that_torch_hardly_knows_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    one = torch.arange(1, 65, dtype=torch.uint8).view(dtype)
    other = one.clone()
    assert same(other, one)
    other.view(torch.uint8)[17] += 3
    assert not same(other, one)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5, 2)])
def test_elements_have_the_indices_that_torch_gives_them(shape: tuple[int, ...]) -> None:
    flat = torch.arange(torch.Size(shape).numel())
    found = compare._places(shape, flat.numel(), flat.device)
    assert list(map(torch.Tensor.tolist, found)) == [
        index.tolist() for index in torch.unravel_index(flat, shape)
    ]


def test_comparing_imports_nothing_large(fresh_process: FreshProcess) -> None:
    """Every measuring child would import it: sympy took seconds on a slow disk."""
    done = fresh_process(
        "import sys, torch\n"
        "from safetune.child import compare\n"
        "before = set(sys.modules)\n"
        "one = torch.rand(100, 100)\n"
        "compare.difference(one, one + 1.0)\n"
        "print(len(set(sys.modules) - before))\n"
    )
    assert int(done.stdout) < 5, done.stderr
