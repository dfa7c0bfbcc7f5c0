"""What offline tuning runs: named launches that a kernel's author declares in code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One launch to tune a kernel for.

    Attributes:
        name: what `safetune tune --shape NAME` selects, e.g. `4096x1024`.
        grid: as in `kernel[grid](...)`: a tuple, or a function of the arguments.
        args, kwargs: exactly those of the launch, without what the configs set.
        outputs: names of arguments of which each element must be written, for `safetune verify`.
    """

    name: str
    grid: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()


WorkloadFunction = Callable[..., Iterable[Workload]]


@dataclass(frozen=True)
class DeclaredWorkload:
    """A workload function as registered by `@kernel.workload`.

    Attributes:
        function: called with a torch device and dtype, yields `Workload`s.
        dtypes: names of the torch dtypes that it is meant for; empty means the default one.
    """

    function: WorkloadFunction
    dtypes: tuple[str, ...] = ()
