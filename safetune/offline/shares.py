"""The share of each key in the time of a recorded run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from safetune.store.records import RecordedCall

#: No launch takes less, though a clock may not show that it takes any time.
_LEAST_MS = 1e-6


def times_ms(calls: Sequence[RecordedCall]) -> dict[str, float]:
    """Return the total time of all launches of each key.

    A key whose launches were not timed, because it was launched once, gets the average of its
    kernel's other keys, or of all other keys.
    """
    timed = {call.key: each for call in calls if (each := call.count.each_ms) is not None}
    known = {key: max(each_ms, _LEAST_MS) for key, each_ms in timed.items()}
    of_kernel: dict[str, list[float]] = {}
    for call in calls:
        if call.key in known:
            of_kernel.setdefault(call.name, []).append(known[call.key])
    typical = statistics.mean(known.values()) if known else 1.0
    return {
        call.key: max(1, call.count.calls)
        * known.get(call.key, statistics.mean(of_kernel.get(call.name, [typical])))
        for call in calls
    }


def shares_of_time(calls: Sequence[RecordedCall]) -> dict[str, float]:
    """Return each key's share of the total, which is 1."""
    times = times_ms(calls)
    total = sum(times.values())
    return {key: time / total for key, time in times.items()}


def top(calls: Sequence[RecordedCall], share: float) -> list[RecordedCall]:
    """Return the fewest calls that account for this share of the time, longest first."""
    shares = shares_of_time(calls)
    longest = sorted(calls, key=lambda call: -shares[call.key])
    before = itertools.accumulate((shares[call.key] for call in longest), initial=0.0)
    return [call for call, sum_before in zip(longest, before, strict=False) if sum_before < share]
