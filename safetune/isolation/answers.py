"""Outcomes as a child's answers, and back."""

from __future__ import annotations

import math
from typing import Any

from safetune.isolation.protocol import ProtocolError
from safetune.outcome import Outcome, Timing, Verdict


def outcome_reply(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON data."""
    return {
        "verdict": outcome.verdict.value,
        "timing": None if outcome.timing is None else vars(outcome.timing),
        "detail": outcome.detail,
        "message": outcome.message,
        "gpu_uuid": outcome.gpu_uuid,
        "marks": list(outcome.marks),
    }


def reply_outcome(reply: dict[str, Any]) -> Outcome:
    """Return the outcome in an answer; raises `ProtocolError` for anything else."""
    try:
        timing = reply["timing"]
        return Outcome(
            verdict=Verdict(reply["verdict"]),
            timing=None if timing is None else _timing(timing),
            detail=str(reply["detail"]),
            message=str(reply["message"]),
            gpu_uuid=str(reply["gpu_uuid"]),
            marks=tuple(str(mark) for mark in reply["marks"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an outcome: {str(reply)[:80]}") from error


def _timing(data: dict[str, Any]) -> Timing:
    times = {name: float(data[name]) for name in ("median_ms", "p20_ms", "p80_ms")}
    if not all(math.isfinite(time) and time > 0 for time in times.values()):
        raise ValueError(f"times of {times}")
    return Timing(count=int(data["count"]), stage=str(data["stage"]), **times)
