"""The argument values at which a kernel's choice changes, from the stored keys."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from safetune.errors import InvalidSetting
from safetune.keys.tuning_key import Bucket
from safetune.store.records import RelatedChoice
from safetune.tuning.requests import TuningRequest
from safetune.tuning.search import comparable

#: Dynamo compiles a function at most 8 times (`recompile_limit`), and two are for the first, static
#: shapes.
_MOST_REGIONS = 6

#: In which a value with a bucket is looked for. There are n of them up to n.
_VALUES = range(1, 1 << 40)

#: (upper bound, a stored value below it) pairs, rising; the last bound is None.
Regions = tuple[tuple[Any, Any], ...]


def regions(
    request: TuningRequest,
    names: Sequence[str],
    related: Iterable[RelatedChoice],
    buckets: Mapping[str, Bucket],
) -> tuple[Regions, ...]:
    """Return the regions of each name, from stored keys that differ only in these names.

    Neighbouring values with equal choices form one region. A name has no region without such a key,
    or if its buckets do not increase with its value.
    """
    points = _points(request, names, related)
    merged = [_merged(points, index) for index in range(len(names))]
    return tuple(
        _values_of(found, buckets[name]) if name in buckets else found
        for name, found in zip(names, merged, strict=True)
    )


def _points(
    request: TuningRequest, names: Sequence[str], related: Iterable[RelatedChoice]
) -> dict[tuple[Any, ...], str]:
    """Return the choices of the keys that differ from the request's in `names` only, by value."""
    request_values, toolchain = dict(request.key.values), request.key.toolchain.record()
    points: dict[tuple[Any, ...], str] = {}
    for _, source in comparable(request.by_digest, request.key.record(), related):
        values = dict(source.call["values"])
        point = tuple(values.pop(name, None) for name in names)
        numbers = all(type(value) in (int, float) for value in point)
        if numbers and values == request_values and source.toolchain == toolchain:
            points.setdefault(point, source.choice.config_digest)  # a store is before packs
    return points


def _merged(points: dict[tuple[Any, ...], str], index: int) -> Regions:
    """Return the stored values of one name, neighbours with the same choices merged."""
    columns: dict[Any, set[Any]] = {}
    for values, choice in points.items():
        others = (*values[:index], *values[index + 1 :])
        columns.setdefault(values[index], set()).add((others, choice))
    groups: list[list[Any]] = []
    for value in sorted(columns):
        if groups and columns[groups[-1][-1]] == columns[value]:
            groups[-1].append(value)
        else:
            groups.append([value])
    while len(groups) > _MOST_REGIONS:
        near = min(
            range(1, len(groups)), key=lambda i: (groups[i][0] + 1) / (groups[i - 1][-1] + 1)
        )
        groups[near - 1] += groups.pop(near)
    bounds = [_between(low[-1], high[0]) for low, high in itertools.pairwise(groups)]
    return (
        tuple(zip([*bounds, None], (group[0] for group in groups), strict=True)) if groups else ()
    )


def _values_of(regions: Regions, bucket: Bucket) -> Regions:
    """Return regions of buckets as regions of the values in them."""
    with contextlib.suppress(InvalidSetting, TypeError, IndexError):
        pairs = tuple(
            (
                None if upper is None else bisect.bisect_right(_VALUES, upper, key=bucket),
                _VALUES[bisect.bisect_left(_VALUES, first, key=bucket)],
            )
            for upper, first in regions
        )
        if [bucket(value) for _, value in pairs] == [first for _, first in regions]:
            return pairs
    return ()


def _between(low: float, high: float) -> int:
    """Half-way by ratio, as `neighbours.distance` measures."""
    if low <= 0:
        return math.floor((low + high) / 2)
    return math.floor(math.sqrt(low * high))
