"""Runs random kernels and sequences on both sides, compares, and shrinks what differs.

`differences` alone says what must be equal.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import random
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from safetune.errors import SafetuneError
from safetune.launch import fast_path_codegen
from tests.fuzz import changes, events, kernels, programs, tuned
from tests.fuzz.events import FEATURES, Call, Change
from tests.fuzz.sides import HASH, ByParameter, Record, Side

#: How long a sequence is.
LENGTH = 40

#: By mode: left out where kernels really run, as an address that is not one ends the process. On a
#: GPU so are the compiler's instrumentation, and text that is not in a file.
UNSAFE = {
    "stub": frozenset[str](),
    "tuned": frozenset[str](),
    "interpreter": frozenset({"odd values", "missing and extra arguments"}),
    "gpu": frozenset(
        {
            *("odd values", "missing and extra arguments", "launcher of CUDA", "devices"),
            *("instrumentation", "fpsan", "inspection hook", "source replaced"),
        }
    ),
}

#: Errors of Triton's for which safetune has its own: the call passes what the configs set.
REFUSED = (TypeError, ValueError, KeyError)

#: Triton has these errors for a config that cannot be launched; safetune launches another one
#: (docs/configuration.md).
NOT_COMPILED = (OutOfResources, CompilationError, PTXASError)


def differences(stock: Side, ours: Side, theirs: list[Record], found: list[Record]) -> str:
    """Return how what safetune did differs from what stock Triton did; "" if it does not.

    Equal must be, in this order: what every heuristic, hook, layer and grid was called with; the
    binary (source, types, constants, attributes, options, device), the grid, the stream and the
    arguments of the launch; the config; the type of an error; and what the kernels have written.

    Documented differences: which config wins (both sides are told), the value that the compiled
    kernel gets for a key name that nothing reads (Triton may refuse an integer that is too large),
    errors that safetune has of its own, and a config that cannot be compiled: Triton raises, and
    safetune goes on with the next one.
    """
    unread = stock.unread.intersection(stock.keys)
    stock.once_unread |= bool(unread)
    if stock.once_unread:
        unread = {*unread, HASH}
    errors = [next((each for each in log if each[0] == "error"), None) for log in (theirs, found)]
    if any(errors):
        kinds = [None if error is None else error[1] for error in errors]
        if None not in kinds and issubclass(kinds[1], SafetuneError):
            return "" if issubclass(kinds[0], REFUSED) else f"errors: {errors}"
        if kinds[0] is OverflowError and unread:
            return ""
        if kinds[0] is not None and issubclass(kinds[0], NOT_COMPILED):
            others = kinds[1] is None or issubclass(kinds[1], NOT_COMPILED)
            return "" if others else f"errors: {errors}"
    kept = [
        [_without(record, unread) for record in log if record[0] != "error"]
        for log in (theirs, found)
    ]
    for number in range(max(map(len, kept))):
        pair = [log[number] if number < len(log) else None for log in kept]
        if pair[0] != pair[1]:
            return f"record {number}\n{_unequal('', *pair)}"
    if (errors[0] and errors[0][1]) is not (errors[1] and errors[1][1]):
        return f"errors:\n    stock    {errors[0]}\n    safetune {errors[1]}"
    for name, memory in stock.memory.items():
        if memory is not ours.memory[name] and not torch.equal(memory, ours.memory[name]):
            where = torch.nonzero(memory != ours.memory[name])[:3].flatten().tolist()
            return f"outputs: {name} from {where}"
    return ""


def _unequal(where: str, stock: Any, ours: Any) -> str:
    """Return the parts that differ of two records."""
    if type(stock) is not type(ours) or not isinstance(stock, (dict, tuple)):
        return f"    {where}: stock {stock}, safetune {ours}\n"
    if isinstance(stock, tuple):
        if len(stock) != len(ours):
            return f"    {where}: stock {stock}, safetune {ours}\n"
        stock, ours = dict(enumerate(stock)), dict(enumerate(ours))
    names = [name for name in {**stock, **ours} if stock.get(name) != ours.get(name)]
    return "".join(_unequal(f"{where}.{n}", stock.get(n), ours.get(n)) for n in names)


def _without(record: Record, names: Collection[str]) -> Record:
    """Return a record without what it says of some parameters."""
    if not names:
        return record
    return tuple(
        {name: _equal(value) for name, value in part.items() if name not in names}
        if isinstance(part, ByParameter)
        else part
        for part in record
    )


def _equal(described: Any) -> Any:
    """Return what a binary has for a parameter, the same for constants that Triton takes for one.

    Triton finds a binary by constants that are equal: the one made for False also launches for 0.
    So which one it is depends on what was launched before, and that differs where a name is pinned.
    """
    if isinstance(described, dict):
        return described
    kind, *rest = described
    if kind == "list":
        return kind, *map(_equal, rest)
    if kind == "tuple":
        return kind, *(_equal(each) if isinstance(each, tuple) else each for each in rest)
    if kind == "made":  # Triton finds a binary by the texts of constants
        return kind, rest[0]
    if kind in ("bool", "int", "float"):
        number = {"True": "1", "False": "0", "-0.0": "0"}.get(rest[0], rest[0])
        return "number", number.removesuffix(".0")
    return described


@dataclass
class Counts:
    """What a run has done."""

    launches: int = 0
    known: int = 0
    errors: int = 0
    cases: int = 0


@dataclass(frozen=True)
class Case:
    """One kernel and one sequence; all of it follows from the seed.

    Attributes:
        off: features that are left out.
        kept: numbers of the events; None for all.
    """

    seed: int
    mode: str
    off: frozenset[str] = frozenset()
    kept: tuple[int, ...] | None = None

    def drawn(self) -> tuple[kernels.Spec, list[Call | Change]]:
        """Return the kernel and the sequence."""
        rng = random.Random(self.seed)
        whole = kernels.draw(rng)
        sequence = events.draw(rng, whole, LENGTH)
        if self.kept is not None:
            sequence = [sequence[number] for number in self.kept]
        spec = events.without(whole, self.off)
        if self.mode == "interpreter":  # it does not find callees in a closure
            spec = replace(spec, closure=False)
        return spec, events.allowed(sequence, spec, self.off)

    @property
    def size(self) -> int:
        """The number of events."""
        if self.mode == "tuned":
            return len(tuned.drawn(self.seed, frozenset(), self.kept)[1])
        return len(self.drawn()[1])

    def run(self, counts: Counts) -> str:
        """Run both sides; return the first difference, or ""."""
        if self.mode == "tuned":
            launches, found = tuned.run(*tuned.drawn(self.seed, self.off, self.kept))
            counts.launches += launches
            return found
        spec, sequence = self.drawn()
        device = stub_device() if self.mode == "stub" else contextlib.nullcontext()
        with device, _sides(spec, self.mode) as sides, changes.switches() as turned:
            for event in sequence:
                if isinstance(event, Change):
                    changes.apply(event, sides, turned)
                    continue
                if found := self._compare(event, sides, turned, counts):
                    return f"{event}\n  {found}"
        return ""

    def _compare(
        self, call: Call, sides: tuple[Side, Side], turned: changes.Switches, counts: Counts
    ) -> str:
        logs = []
        for side in sides:
            turned.current = side
            by_triton = side.by_triton
            logs.append(side.launch(call))
        turned.current = None
        failed = logs[1][-1][0] == "error"
        if failed and issubclass(logs[1][-1][1], SafetuneError):
            # It is raised before heuristics are called, and Triton's after that.
            sides[1].module.COUNTS.update(sides[0].module.COUNTS)
        if logs[0][-1][0] == "error" and issubclass(logs[0][-1][1], NOT_COMPILED):
            _made_alike(*sides)
        counts.launches += 1
        counts.errors += failed
        # The interpreter binds nothing.
        counts.known += self.mode != "interpreter" and not failed and side.by_triton == by_triton
        return differences(*sides, *logs)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that `str` of it has printed."""
        seed, mode, kept, off = text.split("/")
        numbers = tuple(map(int, kept.split(","))) if kept else None
        return cls(int(seed), mode, frozenset(filter(None, off.split(","))), numbers)

    def __str__(self) -> str:
        kept = "" if self.kept is None else ",".join(map(str, self.kept))
        return f"{self.seed}/{self.mode}/{kept}/{','.join(sorted(self.off))}"


def _made_alike(stock: Side, ours: Side) -> None:
    """Have a side that launched another config look like the one that launched none."""
    ours.module.COUNTS.clear()
    ours.module.COUNTS.update(stock.module.COUNTS)
    for name, memory in stock.memory.items():
        if memory is not ours.memory[name]:
            ours.memory[name].copy_(memory)


@contextlib.contextmanager
def _sides(spec: kernels.Spec, mode: str) -> Iterator[tuple[Side, Side]]:
    before = driver._active
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.py")
        text = kernels.text_of(spec)
        path.write_text(text, encoding="utf-8")
        code = compile(text, str(path), "exec")
        stock, ours = (Side(spec, mode, path, code, ours) for ours in (False, True))
        try:
            yield stock, ours
        finally:
            for side in (stock, ours):
                if side.machine is not None:
                    side.machine.unload()
            driver._active = before
            linecache.cache.pop(str(path), None)


def smallest(case: Case) -> Case:
    """Return a case that still differs, with fewer events and features."""

    def fails(off: Collection[str], kept: Sequence[int]) -> bool:
        try:
            return bool(Case(case.seed, case.mode, frozenset(off), tuple(kept)).run(Counts()))
        except Exception:
            return True

    kept = list(range(Case(case.seed, case.mode).size))
    size = len(kept) // 2
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer and fails(case.off, fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    off = set(case.off)
    features = tuned.FEATURES if case.mode == "tuned" else FEATURES
    for feature in sorted(features - off):
        if fails(off | {feature}, kept):
            off.add(feature)
    return Case(case.seed, case.mode, frozenset(off), tuple(kept))


def shown(case: Case) -> str:
    """Return a case as text: its kernel, its events and the difference."""
    try:
        difference = case.run(Counts())
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    if case.mode == "tuned":
        return f"{programs.shown(*tuned.drawn(case.seed, case.off, case.kept))}\n{difference}"
    spec, sequence = case.drawn()
    body = kernels.text_of(spec).partition("class Below")[2].partition("\n\n\n")[2] or ""
    lines = [body, f"key={spec.key} phantom={spec.phantom}", *map(str, spec.configs)]
    lines += [f"below={spec.below}", f"above={spec.above}", *map(str, sequence), difference]
    return "\n".join(lines)


@contextlib.contextmanager
def stub_device() -> Iterator[None]:
    """Have tensors of the CPU stand for a device's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path_codegen, "ON_DEVICE", "is_cpu")
        yield


class Different(AssertionError):
    """A case differs; the message has what replays it."""


def fuzz(seed: int, launches: int, mode: str, off: Collection[str] = ()) -> Counts:
    """Run cases until there were this many launches.

    Raises:
        Different: one differs.
    """
    counts = Counts()
    off = frozenset(off) | UNSAFE[mode]
    try:
        while counts.launches < launches:
            case = Case(seed * 1_000_003 + counts.cases, mode, off)
            counts.cases += 1
            try:
                different = case.run(counts)
            except Exception as error:
                different = repr(error)
            if different:
                found = smallest(case)
                raise Different(f"make fuzz FUZZ_CASE='{found}'\n{shown(found)}")
            if counts.cases % 200 == 0:
                gc.collect()
    finally:
        tuned.other.close()
    return counts
