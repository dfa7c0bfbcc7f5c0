"""The calls of a recorded run that a frozen process launches with a choice, and their origins.

Each call is rebuilt as today's program would make it, with tensors that have no memory: with the
kernel, config list and key names that can be imported, and this toolchain, for the recorded device.
Then the choice for such a launch is looked up. If the kernel cannot be imported, its recorded key
is looked up, and the call counts as not compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

from safetune.config import config_digest, declared_digest
from safetune.frozen import dataclass
from safetune.keys import tuning_key
from safetune.keys.identity import KernelIdentity
from safetune.keys.tuning_key import TuningKey
from safetune.miss.resolve import stored_choice
from safetune.offline import replay, tasks
from safetune.offline.replay import LeftOut
from safetune.offline.shares import times_ms
from safetune.offline.tasks import OfflineKernel
from safetune.offline.warm import Described, as_device
from safetune.settings import Settings
from safetune.store.lookup import Lookup
from safetune.store.records import KeyRecord, RecordedCall
from safetune.tuning.search import comparable, distance


class Found(str, Enum):
    """The config with which a process that never tunes launches a call.

    EXACT: the stored choice of its key. PACK: its choice in a pack. NEAREST: the choice of another
    key of the kernel, or of another toolchain. NOTHING: no choice, so its first config. CHANGED:
    the call no longer exists, because its kernel was edited, rejects it, or is gone.
    """

    EXACT = "exact"
    PACK = "pack"
    NEAREST = "nearest"
    NOTHING = "nothing"
    CHANGED = "changed"

    @property
    def is_of_key(self) -> bool:
        """Whether this is the choice of the call's own key."""
        return self in (Found.EXACT, Found.PACK)


@dataclass(frozen=True)
class Covered:
    """One recorded call, its counts, also in CUDA graphs, and the choice for it.

    `problem`: why its kernel has changed or was not compared with the call; empty otherwise.
    """

    call: RecordedCall
    found: Found
    calls: int
    time_ms: float
    captured: int = 0
    problem: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether it has the choice of its own key with today's code."""
        return self.found.is_of_key and not self.problem


def coverage(
    calls: Sequence[RecordedCall],
    keys: Sequence[KeyRecord],
    kernels: Sequence[OfflineKernel],
    lookup: Lookup,
) -> Iterator[Covered]:
    """Yield the coverage of each call, by the recorded device.

    Args:
        keys: of the calls.
        kernels: where to look for the calls' kernels; if empty, in their defining modules.
    """
    records = {record.digest: record for record in keys}
    times = times_ms(calls)
    left_out: list[LeftOut] = []
    with_kernels = replay.with_kernels(calls, kernels, left_out)
    kernel_of = {call.key: kernel for call, kernel in with_kernels}
    reasons = {left.call.key: left for left in left_out}
    by_device: dict[Described | None, list[RecordedCall]] = {}
    for call in calls:
        record = records.get(call.key)
        described = None if record is None else Described.of(record)
        by_device.setdefault(described, []).append(call)
    for described, of_device in by_device.items():
        with contextlib.nullcontext() if described is None else as_device(described):
            for call in of_device:
                record, left, count = records.get(call.key), reasons.get(call.key), call.count
                kernel = kernel_of.get(call.key)
                found, problem = _looked_up(call, record, kernel, left, lookup)
                number, time_ms = max(1, count.calls), times[call.key]
                yield Covered(call, found, number, time_ms, count.captured, problem)


def shares(covered: Sequence[Covered]) -> dict[str, tuple[float, float]]:
    """Return each choice kind's share of the calls and of the time."""
    calls, time_ms = sum(each.calls for each in covered), sum(each.time_ms for each in covered)
    of_kind = {kind: [each for each in covered if each.found is kind] for kind in Found}
    return {
        kind.value: (
            sum(each.calls for each in found) / calls,
            sum(each.time_ms for each in found) / time_ms,
        )
        for kind, found in of_kind.items()
    }


def certain_share(covered: Sequence[Covered]) -> float:
    """Return the share of calls that have a choice of their own key with today's code."""
    calls = sum(each.calls for each in covered)
    return sum(each.calls for each in covered if each.is_certain) / calls


def _looked_up(
    call: RecordedCall,
    record: KeyRecord | None,
    kernel: OfflineKernel | None,
    left: LeftOut | None,
    lookup: Lookup,
) -> tuple[Found, str]:
    """Return what is found for a call, and why it has changed or was not compared."""
    if record is None:
        return Found.NOTHING, "its key is not stored"
    if kernel is not None:
        failed: list[LeftOut] = []
        with replay.leaving_out(call, failed, "it cannot be prepared"):
            return _found_now(call, record, kernel, lookup), ""
        (left,) = failed
    problem = "" if left is None else left.reason
    if left is not None and left.changed:
        return Found.CHANGED, problem
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        return _found_as_recorded(call, record, lookup), problem  # of another version, perhaps
    return Found.NOTHING, problem


def _found_now(
    call: RecordedCall, record: KeyRecord, kernel: OfflineKernel, lookup: Lookup
) -> Found:
    """Return what is found for a call as it is made now, on the device of its record."""
    interpreted = record.device["name"] == tuning_key.INTERPRETER
    if interpreted is not kernel.interpreted:
        where = "in Triton's interpreter" if interpreted else f"on {record.device['name']}"
        switch = "set TRITON_INTERPRET=1" if interpreted else "unset TRITON_INTERPRET"
        raise replay.NotComparable(f"it was recorded {where}: {switch}")
    if call.arguments.get("problem"):  # there is no more of it than its key
        return _found_without_call(record, kernel, interpreted, lookup)
    request = tasks.miss_of(replay.task_of(call, kernel, "meta")).request()
    if len(request.configs) == 1:
        return Found.EXACT
    if stored_choice(request, lookup) is None:
        if request.same_bits:  # no other key's choice has the bits of the first config
            return Found.NOTHING
        return _found_near(request.key, request.by_digest, lookup)
    return _store_or_pack(request.key, request.declared, request.by_digest, lookup)


def _found_without_call(
    record: KeyRecord, kernel: OfflineKernel, interpreted: bool, lookup: Lookup
) -> Found:
    tuner = kernel.tuner
    here, toolchain = tuning_key.interpreter() if interpreted else tuning_key.detect(0)
    key = TuningKey.of_record(tuner.identity, record.call, here.record(), toolchain.record())
    configs = [config_digest(config) for config in tuner.configs]
    same_bits = Settings.current().same_bits_of(tuner.same_bits)
    found = _found(key, declared_digest(tuner.configs, same_bits), configs, lookup)
    return Found.NOTHING if same_bits and found is Found.NEAREST else found


def _found_as_recorded(call: RecordedCall, record: KeyRecord, lookup: Lookup) -> Found:
    # A call that cannot be made again has no grids.
    configs = call.arguments.get("configs") or list(call.arguments["grids"])
    kernel = KernelIdentity(record.kernel_name, record.kernel_digest)
    key = TuningKey.of_record(kernel, record.call, record.device, record.toolchain)
    return _found(key, call.arguments["declared"], configs, lookup)


def _found(key: TuningKey, declared: str, configs: Collection[str], lookup: Lookup) -> Found:
    if lookup.find(key, declared, configs or None) is None:
        return _found_near(key, configs, lookup)
    return _store_or_pack(key, declared, configs, lookup)


def _store_or_pack(
    key: TuningKey, declared: str, configs: Collection[str], lookup: Lookup
) -> Found:
    stored, shared = lookup.store.choice(key.digest, declared, configs or None), lookup.store.shared
    if stored is None and shared is not None:  # what a frozen process pulls stays in its memory
        stored = shared.choice(key.digest, declared)
    return Found.PACK if stored is None else Found.EXACT


def _found_near(key: TuningKey, configs: Collection[str], lookup: Lookup) -> Found:
    call = key.record()
    far = (
        distance(call["values"], source.call["values"])
        for _, source in comparable(dict.fromkeys(configs), call, lookup.related(key))
    )
    return Found.NOTHING if all(each is None for each in far) else Found.NEAREST
