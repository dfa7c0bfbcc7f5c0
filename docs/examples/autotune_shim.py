"""`autotune` for a library: safetune's where it is installed, else Triton's. Copy this file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import triton

Kernel = TypeVar("Kernel")

try:
    _autotune: Callable[..., Any] = importlib.import_module("safetune").autotune
except ImportError:
    _autotune = triton.autotune


def autotune(
    configs: list[triton.Config], key: Iterable[str], **options: Any
) -> Callable[[Kernel], Any]:
    """Decorate a Triton kernel as `triton.autotune` does; Triton gets no `keep`, for example."""
    known = inspect.signature(_autotune).parameters
    given = key if "keep" in known else list(key)  # safetune takes buckets: {"N": function}
    options = {name: value for name, value in options.items() if name in known}
    decorate: Callable[[Kernel], Any] = _autotune(configs, given, **options)
    return decorate
