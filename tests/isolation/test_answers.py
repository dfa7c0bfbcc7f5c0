"""What a child answers is checked before anything believes it."""

from __future__ import annotations

from typing import Any

import pytest

from safetune.isolation.answers import outcome_reply, reply_outcome
from safetune.isolation.protocol import ProtocolError
from safetune.outcome import Mark, Outcome, Timing, Verdict

TIMING = Timing(median_ms=2.0, p20_ms=1.5, p80_ms=3.0, count=7, stage="screen")


def test_an_outcome_survives_the_pipe() -> None:
    outcome = Outcome(
        Verdict.OK, timing=TIMING, message="m", gpu_uuid="u", marks=(Mark.UNOWNED.of("x"),)
    )
    assert reply_outcome(outcome_reply(outcome)) == outcome


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "fine"},
        {"verdict": None},
        {"timing": 3.0},
        {"timing": {"median_ms": 1.0}},
        {"marks": None},
        *(
            {"timing": vars(TIMING) | {name: value}}
            for name in ("median_ms", "p20_ms", "p80_ms")
            for value in (0.0, -1.0, float("nan"), float("inf"), "soon", None)
        ),
    ],
    ids=str,
)
def test_anything_else_is_a_protocol_error(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="not an outcome"):
        reply_outcome(outcome_reply(Outcome(Verdict.OK, timing=TIMING)) | change)


@pytest.mark.parametrize("name", ["verdict", "timing", "message", "gpu_uuid", "marks"])
def test_a_missing_field_is_a_protocol_error(name: str) -> None:
    reply = outcome_reply(Outcome(Verdict.OK, timing=TIMING))
    del reply[name]
    with pytest.raises(ProtocolError, match="not an outcome"):
        reply_outcome(reply)
