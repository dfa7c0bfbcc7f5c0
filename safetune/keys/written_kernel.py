"""A kernel as written, in the shape of Triton's object after the import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import FunctionType
from typing import Any

from safetune.frozen import dataclass


@dataclass(frozen=True)
class WrittenFunction:
    """A function below `@triton.jit`; its code is compiled and never run."""

    fn: FunctionType
    raw_src: tuple[str, ...]  # the lines in the file, decorators too
    starting_line_number: int
    do_not_specialize: Any = None
    launch_metadata: Any = None
    _repr: Any = None


@dataclass(frozen=True)
class WrittenHeuristics:
    """`@triton.heuristics` above a kernel."""

    fn: Any
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenLayer:
    """An unknown decorator above a kernel."""

    fn: Any


#: Like Triton's own classes, these run a kernel as it is written.
KNOWN = (WrittenFunction, WrittenHeuristics)
