"""The report of a check of write ownership, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from enum import Enum
from typing import Any

from safetune.frozen import dataclass

#: A program's ids along the three axes of the grid.
Program = tuple[int, int, int]


class Kind(Enum):
    """The kinds of findings."""

    OVERLAP = "overlap"
    MIXED = "mixed"
    READ_WRITE = "read_write"
    OUTSIDE = "outside"
    GAP = "gap"
    UNWRITTEN = "unwritten"


#: The text after the number of elements of a finding.
_WORDS = {
    Kind.OVERLAP: "stored by several programs",
    Kind.MIXED: "stored and atomically updated by different programs",
    Kind.READ_WRITE: "read and written by different programs",
    Kind.GAP: "written inside its storage, but outside every argument",
    Kind.UNWRITTEN: "never written",
}


#: The most programs that are named when an element is printed.
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Place:
    """One element of a finding."""

    #: In the argument; outside of it one number, in elements from the argument's first.
    index: tuple[int, ...]
    where: str = ""  # outside of a view, the position relative to the storage; else empty
    programs: tuple[Program, ...] = ()
    lines: tuple[str, ...] = ()  # the kernel's source lines, as `file:line`

    def __str__(self) -> str:
        parts = [f"[{', '.join(map(str, self.index))}]"]
        parts += [f"({self.where})"] if self.where else []
        if self.programs:
            noun = "program" if len(self.programs) == 1 else "programs"
            more = len(self.programs) - _MOST_SHOWN
            shown = ", ".join(map(_ids, self.programs[:_MOST_SHOWN]))
            parts.append(f"{noun} {shown}" + (f" and {more} more" if more > 0 else ""))
        if self.lines:
            parts.append(f"at {', '.join(self.lines)}")
        return " ".join(parts)


@dataclass(frozen=True)
class Finding:
    """A finding about one argument."""

    kind: Kind
    #: Its name, or several names, joined by a comma, for the same view of one storage; empty for
    #: addresses outside every argument.
    argument: str
    elements: int
    rows: int  # the number of different indices without the last dimension
    places: tuple[Place, ...]
    access: str = ""  # for `OUTSIDE`, the access that was tried: read, store, atomic
    most_programs: int = 0  # if several programs access an element, the most at one element

    def __str__(self) -> str:
        count = "1 element" if self.elements == 1 else f"{self.elements} elements"
        if self.rows > 1:
            count += f" in {self.rows} rows"
        what = _WORDS.get(self.kind, "")
        if self.kind is Kind.OUTSIDE:
            what = {"read": "read", "poll": "read", "store": "stored"}.get(self.access, "updated")
            what += " outside its storage" if self.argument else " outside every argument"
        if self.most_programs > 2:
            what += f", up to {self.most_programs} of them"
        first = f"{self.argument or 'no argument'}: {count} {what}"
        return "\n    ".join([first, *map(str, self.places)])


@dataclass(frozen=True)
class Written:
    """How much of an argument was written."""

    argument: str
    elements: int
    written: int


@dataclass(frozen=True)
class OverlapReport:
    """The result of `check_overlap`."""

    kernel: str
    config: str  # of a tuner, the config as text; else empty
    grid: Program
    findings: tuple[Finding, ...]
    written: tuple[Written, ...]  # the arguments that were written, or are in `outputs`
    idle_programs: tuple[Program, ...]  # programs that wrote nothing, which may be right
    allowed: tuple[Finding, ...] = ()  # accesses of several programs that `allow` names

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def find(self, kind: Kind | str, argument: str | None = None) -> Finding | None:
        """Return the first finding of a kind, about an argument if one is named."""
        for finding in self.findings:
            names = finding.argument.split(", ")
            if finding.kind is Kind(kind) and (argument is None or argument in names):
                return finding
        return None

    def data(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        plain = json.dumps(dataclasses.asdict(self), default=lambda kind: kind.value)
        return {"ok": self.ok, **json.loads(plain)}

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.grid))
        config = f" [{self.config}]" if self.config else ""
        verdict = "every write has one owner" if self.ok else f"{len(self.findings)} findings"
        verdict = "1 finding" if len(self.findings) == 1 else verdict
        lines = [f"{self.kernel}{config}, grid {sizes}: {verdict}"]
        lines += [f"  {line}" for f in self.findings for line in str(f).splitlines()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def notes(self) -> tuple[str, ...]:
        """Possible mistakes: arguments written in part, programs that write nothing."""
        unwritten = {f.argument for f in self.findings if f.kind is Kind.UNWRITTEN}
        notes = [
            f"{item.argument}: {item.written} of {item.elements} elements are written"
            for item in self.written
            if item.written < item.elements and item.argument not in unwritten
        ]
        notes += [f"allowed: {str(finding).splitlines()[0]}" for finding in self.allowed]
        if math.prod(self.grid) and not any(item.written for item in self.written):
            notes.append("no argument is written")
        if idle := len(self.idle_programs):
            programs = f"{idle} of {math.prod(self.grid)} programs"
            first = _ids(self.idle_programs[0])
            notes.append(f"{programs} write nothing, the first of them {first}")
        return tuple(notes)


def line_text(line: tuple[str, int]) -> str:
    """Return a source line as `file:line`, the file without its folders."""
    return f"{os.path.basename(line[0])}:{line[1]}"


def _ids(program: Program) -> str:
    """Return a program's ids without trailing axes of 0."""
    ids = list(program)
    while len(ids) > 1 and not ids[-1]:
        ids.pop()
    return str(ids[0]) if len(ids) == 1 else f"({', '.join(map(str, ids))})"
