"""Workloads: named launches for offline tuning, declared in code beside the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from safetune.frozen import dataclass


@dataclass(frozen=True)
class Workload:
    """One launch to tune a kernel for.

    Attributes:
        name: for `safetune tune --shape NAME`, e.g. `4096x1024`.
        grid: as in `kernel[grid](...)`: a tuple, or a function of the arguments.
        args, kwargs: of the launch, without the names that the configs set.
        outputs: for `safetune verify`, arguments whose every element must be written.
        allow: for `safetune verify`, arguments whose elements several programs may access, such as
            an inexact histogram.
    """

    name: str
    grid: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    allow: Sequence[str] = ()


WorkloadFunction = Callable[..., Iterable[Workload]]


@dataclass(frozen=True)
class DeclaredWorkload:
    """A workload function that `@kernel.workload` has registered."""

    function: WorkloadFunction  # yields `Workload`s for a torch device and dtype
    dtypes: tuple[str, ...] = ()  # by name; empty means the default dtype
