"""The outcome of one config: its verdict, its timing, its messages, and what it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from safetune.frozen import dataclass


class Verdict(str, Enum):
    """The verdicts of a config. Only a config with `OK` can be chosen.

    Stored verdicts are open: unknown ones from a newer version are kept.
    """

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILE_CRASH = "compile_crash"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_ERROR = "launch_error"
    ILLEGAL_ACCESS = "illegal_access"
    TIMEOUT = "timeout"
    DIED = "died"
    OUT_OF_BOUNDS = "out_of_bounds"
    WRONG_RESULT = "wrong_result"
    INVALID_TIME = "invalid_time"
    PROTOCOL_ERROR = "protocol_error"
    ORDER_DEPENDENT = "order_dependent"
    NO_MEMORY = "no_memory"
    NOT_JUDGED = "not_judged"

    @classmethod
    def _missing_(cls, value: object) -> Verdict | None:
        """Return a verdict that is unknown here, which is not OK."""
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_, unknown._value_ = value.upper(), value
        return unknown

    def __deepcopy__(self, memo: object) -> Verdict:
        return self  # Python 3.10 would look the value up, also an unknown one's


#: Clean failures: they hold for calls of the same specialisation, the second ones for those of the
#: same shapes, strides and scalars. Every other failure holds for the key, while some config works.
OF_SPECIALISATION = frozenset({Verdict.COMPILE_ERROR, Verdict.OUT_OF_RESOURCES})
OF_CALL = frozenset({Verdict.LAUNCH_ERROR, Verdict.OUT_OF_BOUNDS, Verdict.INVALID_TIME})

#: Failures that hold for some calls of a key alone.
OF_SCOPE = OF_SPECIALISATION | OF_CALL

#: Failures that leave the device as it was: a launch in the caller fails in the same way, or works.
HARMLESS = OF_SPECIALISATION | {Verdict.LAUNCH_ERROR, Verdict.INVALID_TIME}

_OF_COMPILER = {Verdict.COMPILE_TIMEOUT, Verdict.COMPILE_CRASH}

#: Verdicts after which the child is used again: the device's context was not touched.
CLEAN = OF_SPECIALISATION | _OF_COMPILER | {Verdict.OK, Verdict.INVALID_TIME}

#: Verdicts of configs that crashed or hung.
VIOLENT = frozenset({*_OF_COMPILER, Verdict.ILLEGAL_ACCESS, Verdict.TIMEOUT, Verdict.DIED})

#: Verdicts of configs that crashed, hung, or did something else than the others.
BUGS = VIOLENT | {Verdict.OUT_OF_BOUNDS, Verdict.WRONG_RESULT, Verdict.ORDER_DEPENDENT}

#: Verdicts that are not the config's fault and may pass: never stored.
TRANSIENT = frozenset({Verdict.NO_MEMORY})


class Mark(str, Enum):
    """A remark on an outcome that is not a failure. A reason may follow after `: `.

    Stored marks are open: unknown ones from a newer version are kept.

    CONTENDED: timed while the caller, or another program, used the device; never shared.
    REGENERATED: some float inputs were too large to copy and were drawn at random. UNOWNED: the
    kernel wrote bytes of a storage that no argument covers. DISPUTED: configs disagree about the
    result, and nothing shows which are right. OUTVOTED: configs disagree, and the choice was made
    among the others. VARIES: results differ between grids by design: random numbers, program ids.
    NOT_REPEATABLE: its bits differ between launches; chosen only if no other config works.
    SAME_BITS: its result has the bits of the config that the reason names, also on drawn inputs. Of
    a choice: it was made under `same_bits`, unless the reason says that this was refused. SAME_AS:
    compiled to the same code as another config, which ran for both. SEARCHED: of a choice: it was
    made among some of the configs, because a budget ended the search or the others compiled for too
    long. FIRST: the first declared config, which Triton would launch untuned. PINNED: of a choice:
    a person made it. It holds for every config list with that config.
    """

    CONTENDED = "contended"
    REGENERATED = "regenerated"
    UNOWNED = "unowned"
    DISPUTED = "disputed"
    OUTVOTED = "outvoted"
    VARIES = "varies"
    NOT_REPEATABLE = "not_repeatable"
    SAME_BITS = "same_bits"
    SAME_AS = "same_as"
    SEARCHED = "searched"
    FIRST = "first"
    PINNED = "pinned"

    def of(self, reason: str) -> str:
        """Return this mark with a reason."""
        return f"{self.value}: {reason}"

    def reason_in(self, marks: Iterable[str]) -> str:
        """Return the reason of this mark in `marks`; empty if the mark is absent."""
        found = (text.partition(": ") for text in marks)
        return next((reason or name for name, _, reason in found if name == self.value), "")


#: The mark of what was timed while a `timing.Timer` found other work on the device.
BUSY = Mark.CONTENDED.of("other work was on the device")

#: Marks that say nothing of the time.
_OF_RESULTS = (
    *(Mark.UNOWNED, Mark.DISPUTED, Mark.OUTVOTED, Mark.VARIES, Mark.NOT_REPEATABLE),
    *(Mark.SAME_BITS, Mark.SAME_AS, Mark.FIRST),
)


@dataclass(frozen=True)
class Binary:
    """The facts about a compiled config in the disk cache."""

    shared_bytes: int  # the shared memory that a launch needs
    #: Two of one digest do the same on the same grid. Empty for one that needs too much shared
    #: memory: it was not compiled to the end.
    digest: str = ""
    compile_s: float = 0.0  # how long the compiler took; 0 if it did not compile it to the end now


@dataclass(frozen=True)
class Effects:
    """The writes of a kernel and its callees, according to their text."""

    atomics: bool = False  # whether there are atomic operations
    any_order: bool = False  # whether the result of one is used, as a slot to write to
    only_stored: tuple[str, ...] = ()  # the parameters through which it stores, and never reads
    draws: bool = False  # whether it draws random numbers
    #: Whether each launch leaves the same bits unless programs race: the whole text was read, and
    #: there are no atomics, no assembly and no clock in it.
    repeats: bool = False


@dataclass(frozen=True)
class Group:
    """Configs whose results agree. The result of the first one is kept (`child.results`)."""

    number: int  # the first config
    blocks: tuple[int, ...]  # the storages that it has written
    sums: tuple[int, ...] = ()  # for each of `blocks` the checksum of what it holds then
    written: tuple[int, ...] = ()  # see `OutputReport`


class Difference(NamedTuple):
    """The difference of two tensors; all fields are 0 if they are equal."""

    elements: int = 0  # that are further apart than right results may be
    common: int = 0  # of these, the ones that both configs have written
    fine: int = 0  # elements of both that are more than a few units in the last place apart
    excess: float = 0.0  # the largest distance beyond the tolerance, over the typical size


@dataclass(frozen=True)
class GroupDifference:
    """The difference of a result from a group's."""

    group: int
    tensors: tuple[Difference, ...]  # one for each compared tensor


@dataclass(frozen=True)
class OutputReport:
    """What the first launches of one config have shown about its outputs.

    Fields with an entry per compared tensor are empty, or 0, if unknown.
    """

    group: int  # that it agrees with
    new_group: Group | None = None  # that group, when this config is its first
    differences: tuple[GroupDifference, ...] = ()  # from the groups that it does not agree with
    spread: tuple[float, ...] = ()  # by tensor, the `excess` of a second run of it
    written: tuple[int, ...] = ()  # by tensor, the number of elements it writes
    sums: tuple[int, ...] = ()  # by tensor, the checksum of its storage
    unowned: tuple[str, ...] = ()  # arguments beside whose elements it wrote, in bytes of none
    difference: str = ""  # from the largest group, in words; empty if it does not differ


#: An outcome names this many earlier tunings at most.
_MOST_TUNINGS = 7

#: Launches of one config differ by this ratio only where something held some of them up.
_HELD_UP = 1.4


@dataclass(frozen=True)
class Timing:
    """The time of one config, in milliseconds, over `count` launches.

    `stage` is `screen` (every config), `coarse` (a config far slower than the best), `final`
    (rounds of the best), `graph` or `hot` (the same, as replays: see `settings.MeasurePolicy`) or
    `do_bench` (the user's function).
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    count: int
    stage: str

    @property
    def is_held_up(self) -> bool:
        """Whether many launches took far longer than the fastest ones.

        The host delayed them, for example by compiling, or the device ran another process.
        """
        return self.p80_ms > _HELD_UP * self.p20_ms

    @property
    def undisturbed_ms(self) -> float:
        """The median, without launches that were held up."""
        return self.p20_ms if self.is_held_up else self.median_ms


@dataclass(frozen=True)
class Scope:
    """The call with which a config was tried, as digests: see `inputs.call.scopes_of`."""

    special: str  # its specialisation, and what heuristics set for the config
    call: str  # that, and its shapes, strides, scalars and grid


@dataclass(frozen=True)
class Outcome:
    """The result of trying one config."""

    verdict: Verdict
    timing: Timing | None = None
    detail: str = ""  # the signal (`SIGSEGV`), exit code, exception class or time limit (`30 s`)
    message: str = ""  # text for people, one line or more; may be empty
    stderr: str = ""  # the last lines that the child wrote to its standard error or output
    gpu_uuid: str = ""  # the GPU that measured it; empty in the interpreter
    marks: tuple[str, ...] = ()  # `Mark` values, with or without a reason
    judged: int = 0  # how many configs have this result, itself included; 0 until that is known
    #: The tunings that have timed it, with the median of each in milliseconds (`name=1.25`), the
    #: one that its time is from last. Only times of one tuning are compared.
    tunings: tuple[str, ...] = ()
    scope: Scope | None = None  # of the call that it was seen with; None where that is not known
    #: Its time in a final that was timed as replays. `timing` is that of its screening then: the
    #: two are never compared.
    final: Timing | None = None

    @property
    def ok(self) -> bool:
        """Whether the config may be chosen."""
        return self.verdict is Verdict.OK

    def marked(self, mark: Mark) -> bool:
        """Whether the outcome carries this mark."""
        return any(text.partition(":")[0] == mark.value for text in self.marks)

    @property
    def runs(self) -> bool:
        """Whether the config has run, even if its result has not been judged yet."""
        return self.verdict in (Verdict.OK, Verdict.NOT_JUDGED)

    @property
    def clean(self) -> bool:
        """Whether it is a failure that other calls of the key may not have."""
        return self.verdict in OF_SCOPE

    def holds_for(self, scope: Scope, some_work: bool) -> bool:
        """Whether a failure also holds for a call with this scope.

        Args:
            some_work: whether any config works for the key.
        """
        if self.scope is None:
            return True
        if self.verdict in OF_SPECIALISATION:
            return self.scope.special == scope.special
        return self.scope.call == scope.call or (some_work and not self.clean)

    @property
    def took_down(self) -> bool:
        """Whether its machine, or the caller's process, went down while it ran."""
        return self.verdict is Verdict.DIED and self.detail in ("machine", "process")

    @property
    def killed(self) -> bool:
        """Whether a signal that safetune did not send ended its process.

        It may be unrelated: from the out-of-memory killer, or from someone who stops the job.
        """
        died = self.verdict in (Verdict.DIED, Verdict.COMPILE_CRASH)
        return died and self.detail.lower().startswith("sig")  # `SIGTERM`, or `signal 35`

    @property
    def shareable(self) -> bool:
        """Whether its time is valid on other nodes; False if a mark is unknown to this version."""
        names = {text.partition(":")[0] for text in self.marks}
        return names <= {mark.value for mark in _OF_RESULTS}

    def times(self) -> dict[str, float]:
        """Return its median in each tuning that has timed it, by the tuning's name."""
        named = (entry.partition("=") for entry in self.tunings)
        times = {name: float(median_ms) for name, _, median_ms in named}
        return times or ({} if self.timing is None else {"": self.timing.median_ms})

    def timed_in(self, tuning: str) -> Outcome:
        """Return the outcome with its time attributed to a tuning; the latest earlier ones are
        kept.
        """
        assert self.timing is not None
        earlier = [entry for entry in self.tunings if not entry.startswith(f"{tuning}=")]
        now = f"{tuning}={self.timing.median_ms!r}"
        return replace(self, tunings=(*earlier[-_MOST_TUNINGS:], now))

    def with_marks(self, marks: Iterable[str]) -> Outcome:
        """Return the outcome with more marks, without duplicates."""
        return replace(self, marks=tuple(dict.fromkeys((*self.marks, *marks))))

    def without(self, mark: str) -> tuple[str, ...]:
        """Return the marks except one."""
        return tuple(text for text in self.marks if text != mark)

    def unmarked(self, *marks: Mark) -> Outcome:
        """Return the outcome without these marks."""
        return replace(self, marks=tuple(t for t in self.marks if t.partition(":")[0] not in marks))

    @property
    def label(self) -> str:
        """The verdict as tables show it, e.g. `died(SIGSEGV)`."""
        if self.verdict is Verdict.DIED and self.detail:
            return f"died({self.detail})"
        return self.verdict.value


def duration(value: float) -> str:
    """Return a time in milliseconds with three significant digits, in s, ms or us."""
    rounded = float(f"{value:.3g}")
    unit, ms = ("s", 1e3) if rounded >= 1e3 else ("ms", 1.0) if rounded >= 0.1 else ("us", 1e-3)
    number = rounded / ms
    return f"{number:.0f} {unit}" if number >= 1e3 else f"{number:.3g} {unit}"
