"""Random kernels and calls: the same outputs and the same binaries as with stock Triton."""

from __future__ import annotations

import random
import warnings

import pytest

from tests.fuzz.events import NOT_YET
from tests.fuzz.fuzzer import fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FRESH = random.SystemRandom().randrange(1 << 32)


@pytest.mark.parametrize("seed", [1, FRESH], ids=["fixed", "fresh"])
def test_launches_are_as_by_stock_triton(seed: int) -> None:
    """About ten kernels, most of whose binaries are compiled once and found once."""
    print(f"seed {seed}: make fuzz FUZZ_SEED={seed} FUZZ_LAUNCHES=400 FUZZ_MODE=gpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = fuzz(seed, 400, "gpu", NOT_YET)
    assert counts.launches >= 400
    assert counts.known > 0, "some were known"
    assert counts.errors < counts.launches
