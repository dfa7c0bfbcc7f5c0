"""The records of the store, exchanged by tuning, lookup and the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.outcome import Mark, Outcome, Scope

if TYPE_CHECKING:
    from typing import TypeGuard

    from safetune.keys.tuning_key import TuningKey


#: The layout of a shared store that is written, and the only one that is read.
FORMAT = 2


def namespace(device: Mapping[str, Any], toolchain: Mapping[str, Any]) -> str:
    """Return the common part of the keys that one node needs: the device and the toolchain."""
    return encoding.digest([FORMAT, dict(device), dict(toolchain)])


def space_of(key: TuningKey) -> str:
    """Return the namespace of a key."""
    return namespace(key.device.record(), key.toolchain.record())


@dataclass(frozen=True)
class KeyRecord:
    """One `TuningKey` as plain data: its digest, kernel, device, toolchain and `record()`.

    Written before its first trial, so that all other rows can refer to it.
    """

    digest: str
    kernel_name: str
    kernel_digest: str
    kernel_file: str
    kernel_line: int
    device_digest: str
    device: dict[str, Any]
    toolchain: dict[str, Any]
    call: dict[str, Any]

    @property
    def space(self) -> str:
        """The namespace of a shared store that has the key's choices."""
        return namespace(self.device, self.toolchain)

    @classmethod
    def of(cls, key: TuningKey) -> KeyRecord:
        """Return the row that the trials and the choice of a key refer to."""
        kernel, device = key.kernel, key.device
        of_kernel = (kernel.name, kernel.digest, kernel.file, kernel.line)
        of_device = (device.digest, device.record())
        return cls(key.digest, *of_kernel, *of_device, key.toolchain.record(), key.record())


@dataclass(frozen=True)
class Failure:
    """A failure seen with one call."""

    outcome: Outcome
    created: float


@dataclass(frozen=True)
class TrialRecord:
    """The outcome of one config (by digest, and for people) for one key (by digest).

    A generation is 1, or more after `--force`; `created` is in seconds since the epoch. `elsewhere`
    has failures with calls other than that of `outcome`, oldest first. `flight` is empty, or says
    where the config has begun to run: see `local.in_flight`.
    """

    key: str
    config_digest: str
    config: dict[str, Any]
    generation: int
    outcome: Outcome
    created: float
    elsewhere: tuple[Failure, ...] = ()
    flight: str = ""

    @property
    def verdict(self) -> str:
        """The outcome's verdict."""
        return self.outcome.verdict.value

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All failures, oldest first."""
        ended = not (self.outcome.runs or self.flight)
        own = (Failure(self.outcome, self.created),) if ended else ()
        return self.elsewhere + own

    def seen_with(self, scope: Scope, some_work: bool) -> Failure | TrialRecord | None:
        """Return the result that holds for a call: a failure, a success, or None if unknown."""
        for failure in reversed(self.failures):
            if failure.outcome.holds_for(scope, some_work):
                return failure
        return self if self.outcome.runs else None

    def after(self, before: TrialRecord) -> TrialRecord:
        """Return the row with this outcome for a config whose row was `before`.

        A config that runs still counts as running if another call fails cleanly.
        """
        outcome, scope = self.outcome, self.outcome.scope
        if scope is None:
            return self
        others = tuple(
            each for each in before.failures if each.outcome.scope and not _is_over(each, self)
        )
        ran = before.outcome.scope if before.outcome.runs else None
        if outcome.clean and ran is not None and not outcome.holds_for(ran, some_work=False):
            failures = (*others, Failure(outcome, self.created))
            return replace(before, elsewhere=failures[-_MOST_SCOPES:])
        most = _MOST_SCOPES - (not outcome.runs)
        return replace(self, elsewhere=others[-most:])


#: The failures of one config for one key that are kept.
_MOST_SCOPES = 8


def _is_over(failure: Failure, now: TrialRecord) -> bool:
    """Whether a later outcome takes the place of a failure."""
    outcome, scope = failure.outcome, now.outcome.scope
    assert scope is not None
    assert outcome.scope is not None
    if now.outcome.runs:
        return outcome.holds_for(scope, some_work=True)
    return outcome.scope.call == scope.call or (
        outcome.verdict is now.outcome.verdict and outcome.holds_for(scope, some_work=False)
    )


@dataclass(frozen=True)
class ChoiceRecord:
    """The config that a key launches with. The first valid one of a generation wins.

    Attributes:
        declared: digest of the config list that it was chosen from.
        median_ms, measured: its time then, and the number of configs measured to choose it.
        marks: what users must know about it: `Mark.DISPUTED`, with a reason.
    """

    key: str
    generation: int
    config_digest: str
    config: dict[str, Any]
    declared: str
    median_ms: float
    measured: int
    created: float
    marks: tuple[str, ...] = ()

    @property
    def dispute(self) -> str:
        """Why the result of this config is uncertain; empty if it is certain."""
        return Mark.DISPUTED.reason_in(self.marks)

    @property
    def pinned(self) -> bool:
        """Whether a person made this choice, so that no measurement replaces it."""
        return Mark.PINNED.value in self.marks


#: In place of the list of configs of a choice that is pinned: it holds for every list.
PINNED_LIST = encoding.digest("pinned")


@dataclass(frozen=True)
class CallCount:
    """How often a recorded call was made, and how long some of its launches took together.

    `captured` launches became part of a CUDA graph, whose replays are not counted.
    """

    key: str
    calls: int
    timed: int = 0
    timed_ms: float = 0.0
    captured: int = 0

    def plus(self, other: CallCount) -> CallCount:
        """Return the sum of both counts."""
        timed, timed_ms = self.timed + other.timed, self.timed_ms + other.timed_ms
        calls, captured = self.calls + other.calls, self.captured + other.captured
        return CallCount(self.key, calls, timed, timed_ms, captured)

    @property
    def each_ms(self) -> float | None:
        """The time of one launch; None if none was timed."""
        return self.timed_ms / self.timed if self.timed else None


def _is_count(found: object) -> TypeGuard[list[Any]]:
    """Whether it has the numbers of a count: another program may have written it."""
    if not (isinstance(found, list) and 1 <= len(found) <= 4):
        return False
    return all(type(each) in (int, float) and abs(each) < math.inf for each in found)


@dataclass(frozen=True)
class RecordedCall:
    """A launch in a recorded run, described so that it can be tuned offline."""

    key: str
    name: str
    place: str  # `module:qualname` of the kernel's function
    #: The description of the call that `miss.record` makes, as plain JSON data.
    arguments: dict[str, Any]
    created: float

    @property
    def count(self) -> CallCount:
        """How often it was made; 0 if it was not counted, as under torch.compile."""
        found = self.arguments.get("count")
        return CallCount(self.key, *found) if _is_count(found) else CallCount(self.key, 0)

    def counted(self, count: CallCount) -> RecordedCall:
        """Return this call with another count."""
        numbers = [count.calls, count.timed, count.timed_ms, count.captured]
        return replace(self, arguments={**self.arguments, "count": numbers})

    @property
    def completeness(self) -> int:
        """How much of the call can be rebuilt; the larger of two descriptions is kept."""
        if "problem" in self.arguments:
            return 0
        return 1 + len(self.arguments.get("integers", ()))


@dataclass(frozen=True)
class RelatedChoice:
    """A choice for a key of the same kernel on the same device, with that key's call and toolchain.

    `pack` is the path of its pack; empty for a store's own choice.
    """

    toolchain: dict[str, Any]
    call: dict[str, Any]
    choice: ChoiceRecord
    pack: str = ""


@dataclass(frozen=True)
class StoredChoice:
    """A choice together with its key."""

    key: KeyRecord
    choice: ChoiceRecord
    #: The pack of this choice alone that it was decoded from. A choice that is only passed on is
    #: written from it, so that all values stay as they are.
    source: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    #: Fields of it, or around it, that only a newer version knows. Such a choice is passed on, and
    #: never launched or stored.
    unknown: tuple[str, ...] = ()


def precedence(choice: ChoiceRecord) -> tuple[Any, ...]:
    """Return a sort key for choices of one key and config list; the first one is used.

    Pinned choices come first, then later generations, then earlier choices of a generation,
    whichever is faster: processes agree the same way, and times from two machines are not
    comparable.
    """
    made = choice.generation, choice.created, choice.config_digest, choice.median_ms
    return not choice.pinned, -made[0], *made[1:]


def wins(choice: ChoiceRecord, other: ChoiceRecord) -> bool:
    """Return whether `choice` is used over `other`, for one key and config list."""
    return precedence(choice) < precedence(other)
