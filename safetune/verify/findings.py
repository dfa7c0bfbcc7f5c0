"""Turns the record of a launch into findings: bytes become elements of arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from safetune.verify.memory import Memory, View
from safetune.verify.report import Finding, Kind, Place, Program, Written, line_text
from safetune.verify.watch import CLASHES, NEVER, Access, Stray, Times, Watch

#: How many elements a finding names; of different rows, if it has several.
_MOST_PLACES = 3


def findings_of(memory: Memory, watch: Watch, outputs: Sequence[str]) -> tuple[Finding, ...]:
    """Return the findings, worst first."""
    groups = list(_groups(memory.views))
    candidates = (
        *_outside(memory, watch),
        *(_gap(memory, watch, number) for number in range(len(memory.regions))),
        *(_clash(clash, name, view, watch) for clash in CLASHES for name, view in groups),
        *(_unwritten(name, view, watch) for name, view in groups if is_of(name, outputs)),
    )
    return tuple(finding for finding in candidates if finding is not None)


def written_by(memory: Memory, watch: Watch, outputs: Sequence[str]) -> tuple[Written, ...]:
    """Return how much was written of each output, and of each other written argument."""
    written_arguments = []
    for name, view in _groups(memory.views):
        written = int(_elements(view, watch, _is_written(watch.times[view.region])).sum())
        if written or is_of(name, outputs):
            written_arguments.append(Written(name, view.elements, written))
    return tuple(written_arguments)


def is_of(name: str, outputs: Sequence[str]) -> bool:
    """Whether an argument of a view is among `outputs`."""
    return not set(name.split(", ")).isdisjoint(outputs)


def _groups(views: Sequence[View]) -> Iterator[tuple[str, View]]:
    """Yield each different view once, with the names of all its arguments."""
    names: dict[tuple[object, ...], list[View]] = {}
    for view in views:
        key = (view.region, view.offset, view.shape, view.strides, view.itemsize)
        names.setdefault(key, []).append(view)
    for same in names.values():
        yield ", ".join(dict.fromkeys(view.name for view in same)), same[0]


def _clash(clash: Kind, name: str, view: View, watch: Watch) -> Finding | None:
    times = watch.times[view.region]
    if not times.clashes[clash].any():
        return None
    mask = _elements(view, watch, times.clashes[clash])
    places = tuple(_clash_place(clash, view, index, watch) for index in _some(mask))
    if not places:
        return None  # the clash is in another view of the same storage
    inside = np.zeros(len(times.stored), dtype=bool)
    _strided(inside, view, times.granule)[...] = True
    where, moments = _logged(clash, times, inside)
    # Of those that clashed at one granule; 0 without a log, which was full.
    pairs = np.unique(np.stack([where, watch.programs_at(moments)]), axis=1)
    most = int(np.unique(pairs[0], return_counts=True)[1].max(initial=0))
    return replace(_finding(clash, name, mask, places), most_programs=most)


def _logged(clash: Kind, times: Times, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the wanted granules that are logged for a clash, and the times of their accesses."""
    log = [(where, prior, now) for kind, where, prior, now in times.log if kind is clash]
    granules = [each for where, _, _ in log for each in (where, where)]
    moments = [each for _, prior, now in log for each in (prior, np.full(len(prior), now))]
    nothing = np.zeros(0, dtype=np.int64)
    where, when = np.concatenate([nothing, *granules]), np.concatenate([nothing, *moments])
    return where[wanted[where]], when[wanted[where]]


def _clash_place(clash: Kind, view: View, index: tuple[int, ...], watch: Watch) -> Place:
    """Return an element with the programs and lines that the log has for it."""
    times = watch.times[view.region]
    offset = view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=True))
    wanted = np.zeros(len(times.stored), dtype=bool)
    wanted[offset // times.granule : -(-(offset + view.itemsize) // times.granule)] = True
    _, moments = _logged(clash, times, wanted)
    return _place(index, np.unique(moments).tolist(), watch)


def _place(index: tuple[int, ...], moments: Sequence[int], watch: Watch, where: str = "") -> Place:
    programs = watch.programs_at(np.array(moments, dtype=np.int64)) if moments else ()
    ids: list[Program] = [watch.ids(int(program)) for program in dict.fromkeys(programs)]
    lines = dict.fromkeys(line_text(watch.lines[moment]) for moment in moments)
    return Place(index, where, tuple(ids), tuple(lines))


def _unwritten(name: str, view: View, watch: Watch) -> Finding | None:
    mask = ~_elements(view, watch, _is_written(watch.times[view.region]))
    if not mask.any():
        return None
    return _finding(Kind.UNWRITTEN, name, mask, tuple(Place(index) for index in _some(mask)))


def _outside(memory: Memory, watch: Watch) -> Iterator[Finding]:
    """Group accesses outside all storages by kind of access and by the storage they missed."""
    grouped: dict[tuple[Access, int], list[Stray]] = {}
    for stray in watch.strays:
        grouped.setdefault((stray.access, stray.region), []).append(stray)
    for (access, number), strays in grouped.items():
        touched = np.concatenate([stray.offsets for stray in strays])
        offsets, first = np.unique(touched, return_index=True)
        owners = np.repeat(np.arange(len(strays)), [len(stray.offsets) for stray in strays])
        places = [
            _stray_place(memory, watch, strays[owners[position]], int(offset))
            for offset, position in zip(offsets[:_MOST_PLACES], first, strict=False)
        ]
        name = _region_name(memory, number)
        yield Finding(Kind.OUTSIDE, name, len(offsets), 1, tuple(places), access.value)


def _stray_place(memory: Memory, watch: Watch, stray: Stray, offset: int) -> Place:
    if stray.region < 0:
        return _place((offset,), [stray.time], watch, f"address {offset:#x}")
    nbytes = memory.regions[stray.region].nbytes
    past = offset + stray.itemsize - nbytes
    where = f"{-offset} bytes before its storage" if offset < 0 else f"{past} bytes past its end"
    return _place(_counted(memory, stray.region, offset), [stray.time], watch, where)


def _gap(memory: Memory, watch: Watch, number: int) -> Finding | None:
    """Return writes inside a storage, but outside the arguments that share it."""
    times = watch.times[number]
    covered = np.zeros(len(times.stored), dtype=bool)
    views = [view for view in memory.views if view.region == number]
    for view in views:
        _strided(covered, view, times.granule)[...] = True
    stray = np.flatnonzero(_is_written(times) & ~covered)
    if not stray.size:
        return None
    size = max(1, views[0].itemsize // times.granule)
    elements = np.unique(stray // size * size)
    places = []
    for granule in elements[:_MOST_PLACES]:
        index = _counted(memory, number, int(granule) * times.granule)
        touched = sorted({int(times.stored[granule]), int(times.last_update[granule])} - {NEVER})
        places.append(_place(index, touched, watch, "in its storage, outside every argument"))
    name = _region_name(memory, number)
    return Finding(Kind.GAP, name, len(elements), 1, tuple(places))


def _counted(memory: Memory, number: int, offset: int) -> tuple[int, ...]:
    """Return a byte of a region as an element index, from the start of its first argument."""
    view = next(view for view in memory.views if view.region == number)
    return ((offset - view.offset) // view.itemsize,)


def _region_name(memory: Memory, number: int) -> str:
    names = [view.name for view in memory.views if view.region == number]
    return ", ".join(dict.fromkeys(names))


def _is_written(times: Times) -> np.ndarray:
    return (times.stored != NEVER) | (times.last_update != NEVER)


def _elements(view: View, watch: Watch, flags: np.ndarray) -> np.ndarray:
    """Return flags per granule as flags per element: set if any of its granules is set."""
    return np.asarray(_strided(flags, view, watch.times[view.region].granule).any(axis=-1))


def _strided(flags: np.ndarray, view: View, granule: int) -> np.ndarray:
    """Return flags per granule in the shape of an argument, with another axis for granules."""
    if not view.elements:
        return np.zeros((*view.shape, 1), dtype=bool)
    return np.lib.stride_tricks.as_strided(
        flags[view.offset // granule :],
        (*view.shape, view.itemsize // granule),
        (*(stride // granule for stride in view.strides), 1),
    )


def _some(mask: np.ndarray) -> list[tuple[int, ...]]:
    """Return the first element in each of the first few rows that have one."""
    found = np.argwhere(mask)
    _, first = np.unique(found[:, :-1], axis=0, return_index=True)
    return [tuple(map(int, found[row])) for row in np.sort(first)[:_MOST_PLACES]]


def _finding(kind: Kind, name: str, mask: np.ndarray, places: tuple[Place, ...]) -> Finding:
    rows = int(mask.reshape(-1, mask.shape[-1]).any(axis=1).sum()) if mask.ndim > 1 else 1
    return Finding(kind, name, int(mask.sum()), rows, places)
