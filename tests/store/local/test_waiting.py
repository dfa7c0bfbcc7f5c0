"""Pauses between tries, which many processes spread out."""

from __future__ import annotations

import random
from itertools import islice

from safetune.store.local.db_files import pauses


def test_the_random_numbers_of_the_program_stay_as_they_are() -> None:
    """Ranks that have waited draw the same numbers as ranks that have not."""
    before = random.getstate()
    drawn = list(islice(pauses(1.0, 4.0), 4))
    assert random.getstate() == before
    bounds = [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0), (2.0, 4.0)]
    for pause_s, (least, most) in zip(drawn, bounds, strict=True):
        assert least <= pause_s <= most
