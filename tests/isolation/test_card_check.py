"""Whether a card works at all is asked in a process of its own."""

from __future__ import annotations

from safetune.isolation import card_check


def test_a_card_that_works_has_no_reason_and_one_that_is_not_there_has() -> None:
    assert card_check.why_broken(-1) == ""
    assert card_check.why_broken(77)


def test_a_card_that_does_not_answer_is_broken() -> None:
    assert card_check.why_broken(-1, limit_s=0.01) == "no answer within 0.01 s"
