"""The outcome of one config: its verdict, its timing, its messages, and what it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum

from safetune.frozen import dataclass


class Verdict(str, Enum):
    """The verdicts that a config can end with. Only a config with `OK` can be chosen.

    Stored verdicts are open: `read` keeps a verdict that only a newer version knows.
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
    def read(cls, text: str) -> Verdict:
        """Return the verdict that was stored as `text`; an unknown one is kept, and is not OK."""
        try:
            return cls(text)
        except ValueError:
            unknown = str.__new__(cls, text)
            unknown._name_, unknown._value_ = text.upper(), text
            return unknown

    def __deepcopy__(self, memo: object) -> Verdict:
        return self  # Python 3.10 would look the value up, also an unknown one's


#: Verdicts after which the child is used again: the device's context was not touched.
CLEAN = frozenset(
    {
        Verdict.OK,
        Verdict.COMPILE_ERROR,
        Verdict.COMPILE_TIMEOUT,
        Verdict.COMPILE_CRASH,
        Verdict.OUT_OF_RESOURCES,
        Verdict.INVALID_TIME,
    }
)

#: Verdicts of configs that crashed or hung.
VIOLENT = frozenset(
    {
        Verdict.COMPILE_TIMEOUT,
        Verdict.COMPILE_CRASH,
        Verdict.ILLEGAL_ACCESS,
        Verdict.TIMEOUT,
        Verdict.DIED,
    }
)

#: Verdicts that are not the config's fault and may pass: never stored.
TRANSIENT = frozenset({Verdict.NO_MEMORY})


#: Verdicts that a wrong argument of the call may have caused: where no config works, a later
#: process tries these configs again.
OF_THE_CALL = frozenset({Verdict.LAUNCH_ERROR, Verdict.ILLEGAL_ACCESS, Verdict.OUT_OF_BOUNDS})


class Mark(str, Enum):
    """A remark on an outcome that is not a failure. A reason may follow it after `: `.

    Stored marks are open: a mark that only a newer version knows stays as it is.

    CONTENDED: timed while the caller used the device; never shared.
    REGENERATED: some float inputs were too large to copy and were drawn at random.
    UNOWNED: the kernel wrote bytes of a storage that no argument covers.
    DISPUTED: configs disagree about the result, and nothing shows which are right.
    OUTVOTED: of configs that disagree, the choice was made among others.
    SAME_AS: compiled to the same code as another config, which was run for both.
    SEARCHED: of a choice: it was made among some of the configs, because a budget ended the search.
    FIRST: the first of the configs that were declared, which Triton would launch untuned.
    """

    CONTENDED = "contended"
    REGENERATED = "regenerated"
    UNOWNED = "unowned"
    DISPUTED = "disputed"
    OUTVOTED = "outvoted"
    SAME_AS = "same_as"
    SEARCHED = "searched"
    FIRST = "first"

    def of(self, reason: str) -> str:
        """Return this mark with a reason."""
        return f"{self.value}: {reason}"

    def reason_in(self, marks: Iterable[str]) -> str:
        """Return the reason of this mark among others; empty where it is not among them."""
        found = (text.partition(": ") for text in marks)
        return next((reason or name for name, _, reason in found if name == self.value), "")


#: Marks that say nothing of the time.
_OF_RESULTS = (Mark.UNOWNED, Mark.DISPUTED, Mark.OUTVOTED, Mark.SAME_AS, Mark.FIRST)


@dataclass(frozen=True)
class Binary:
    """What the disk cache says of a compiled config."""

    shared_bytes: int  # the shared memory that a launch needs
    #: Two of one digest do the same on the same grid. Empty for one that needs too much shared
    #: memory: it was not compiled to the end.
    digest: str = ""


@dataclass(frozen=True)
class Effects:
    """What a kernel's text says of its writes, and of those of what it calls."""

    atomics: bool = False  # whether there are atomic operations
    any_order: bool = False  # whether the result of one is used, as a slot to write to
    only_stored: tuple[str, ...] = ()  # the parameters through which it stores, and never reads


@dataclass(frozen=True)
class Group:
    """Configs whose results agree. The result of the first of them is kept (`child.results`)."""

    number: int  # the first config
    slot: int  # its place, in the file if it is small
    blocks: tuple[int, ...]  # the storages that it has written
    #: For each compared tensor, which of a sample of its elements the first config writes, as bytes
    #: in hexadecimal digits; empty where that is not known.
    writes: tuple[str, ...] = ()
    sums: tuple[int, ...] = ()  # for each of `blocks` the checksum of what it holds then


@dataclass(frozen=True)
class GroupDifference:
    """How a result differs from a group's, for each compared tensor: see `compare.Difference`."""

    group: int
    excess: tuple[float, ...]
    elements: tuple[int, ...]
    #: How many of the sampled elements that both write differ; empty where that is not known.
    common: tuple[int, ...] = ()


@dataclass(frozen=True)
class OutputReport:
    """What the first launches of one config have shown of its outputs.

    What has an entry for each compared tensor is empty, or 0, where it is not known.
    """

    group: int | None  # that it agrees with; None if no more groups could be kept
    new_group: Group | None = None  # that group, when this config is its first
    differences: tuple[GroupDifference, ...] = ()  # from the groups that it does not agree with
    spread: tuple[float, ...] = ()  # by tensor, the `excess` of a second run of it
    stale: tuple[int, ...] = ()  # by tensor, over 0 if elements depend on what outputs held before
    written: tuple[int, ...] = ()  # by tensor, the number of elements it writes
    unowned: tuple[str, ...] = ()  # arguments beside whose elements it wrote, in bytes of none
    difference: str = ""  # from the largest group, in words; empty if it does not differ


#: Launches of one config differ by this ratio only where something held some of them up.
_HELD_UP = 1.4


@dataclass(frozen=True)
class Timing:
    """The time of one config, in milliseconds, over `count` launches.

    `stage` is `screen` (all configs), `coarse` (of one that is far slower than the best), `final`
    (rounds of the best) or `do_bench` (the user's own).
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    count: int
    stage: str

    @property
    def undisturbed_ms(self) -> float:
        """The median; that of the fast launches where the host held some up, as by compiling."""
        return self.p20_ms if self.p80_ms > _HELD_UP * self.p20_ms else self.median_ms


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

    @property
    def ok(self) -> bool:
        """Whether the config may be chosen."""
        return self.verdict is Verdict.OK

    def marked(self, mark: Mark) -> bool:
        """Whether the outcome carries this mark."""
        return any(text.partition(":")[0] == mark.value for text in self.marks)

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended its process. safetune did not send it, and one may be by chance."""
        return self.detail == "SIGKILL"

    @property
    def shareable(self) -> bool:
        """Whether its time holds on other nodes, too; not if it has a mark that is unknown here."""
        names = {text.partition(":")[0] for text in self.marks}
        return names <= {mark.value for mark in _OF_RESULTS}

    def with_marks(self, marks: Iterable[str]) -> Outcome:
        """Return the outcome with more marks; those that it has already are not repeated."""
        return replace(self, marks=tuple(dict.fromkeys((*self.marks, *marks))))

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
