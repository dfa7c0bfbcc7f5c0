"""Outcomes as a child's answers, and back."""

from __future__ import annotations

from typing import Any

from safetune.outcome import CLEAN, Outcome, Timing, Verdict
from safetune.tuning.wire import ProtocolError


def outcome_reply(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON data; `dirty` means that the child must be replaced."""
    return {
        "verdict": outcome.verdict.value,
        "timing": None if outcome.timing is None else vars(outcome.timing),
        "detail": outcome.detail,
        "message": outcome.message,
        "gpu_uuid": outcome.gpu_uuid,
        "dirty": outcome.verdict not in CLEAN,
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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an outcome: {str(reply)[:80]}") from error


def _timing(data: dict[str, Any]) -> Timing:
    return Timing(
        median_ms=float(data["median_ms"]),
        p20_ms=float(data["p20_ms"]),
        p80_ms=float(data["p80_ms"]),
        count=int(data["count"]),
        stage=str(data["stage"]),
    )
