"""Which calls of a recorded run have a choice, and where it is from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum

from safetune.frozen import dataclass
from safetune.keys.tuning_key import KernelIdentity, TuningKey
from safetune.offline.shares import times_ms
from safetune.store.lookup import Lookup
from safetune.store.records import KeyRecord, RecordedCall
from safetune.tuning.neighbours import comparable, distance, pairs_of


class Found(str, Enum):
    """What a process that never tunes launches a call with.

    EXACT: the choice of its key in the store. PACK: that in a pack. NEAREST: the choice of another
    key of the kernel, or of another toolchain. NOTHING: no choice, so its first config.
    """

    EXACT = "exact"
    PACK = "pack"
    NEAREST = "nearest"
    NOTHING = "nothing"

    @property
    def is_of_key(self) -> bool:
        """Whether it is the choice of the call's own key."""
        return self in (Found.EXACT, Found.PACK)


@dataclass(frozen=True)
class Covered:
    """One recorded call, how often it was made, and what was found for it."""

    call: RecordedCall
    found: Found
    calls: int
    time_ms: float


def coverage(
    calls: Sequence[RecordedCall], keys: Sequence[KeyRecord], lookup: Lookup
) -> Iterator[Covered]:
    """Yield what is found for each call; `keys` are those of the calls."""
    records = {record.digest: record for record in keys}
    times = times_ms(calls)
    for call in calls:
        record = records.get(call.key)
        found = Found.NOTHING
        if record is not None:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                found = _found(call, record, lookup)  # another version may have written the call
        yield Covered(call, found, max(1, call.count.calls), times[call.key])


def shares(covered: Sequence[Covered]) -> dict[str, tuple[float, float]]:
    """Return for each kind of choice its share of the calls and of the time."""
    calls, time_ms = sum(each.calls for each in covered), sum(each.time_ms for each in covered)
    of_kind = {kind: [each for each in covered if each.found is kind] for kind in Found}
    return {
        kind.value: (
            sum(each.calls for each in found) / calls,
            sum(each.time_ms for each in found) / time_ms,
        )
        for kind, found in of_kind.items()
    }


def _found(call: RecordedCall, record: KeyRecord, lookup: Lookup) -> Found:
    # A call that cannot be made again has no grids; an older version recorded no list either.
    configs = call.arguments.get("configs") or list(call.arguments.get("grids", ()))
    declared, key = (
        call.arguments.get("declared"),
        TuningKey.of_record(
            KernelIdentity(record.kernel_name, record.kernel_digest),
            record.call,
            record.device,
            record.toolchain,
        ),
    )
    among = configs or None
    if declared is None:
        if lookup.store.choice(key.digest, None, among) is not None:
            return Found.EXACT
    elif lookup.find(key, declared, among) is not None:
        return Found.EXACT if lookup.store.choice(key.digest, declared, among) else Found.PACK
    related = comparable(dict.fromkeys(configs), record.call, lookup.related(key))
    far = (
        distance(record.call["values"], pairs_of(source.call.get("values")))
        for _, source in related
    )
    return Found.NOTHING if all(each is None for each in far) else Found.NEAREST
