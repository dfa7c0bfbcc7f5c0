"""When Triton itself binds the arguments of a kernel: never for a launch that safetune knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tell_binding(jit: Any, tell: Callable[[], None]) -> None:
    """Have a function called whenever Triton binds the arguments of a kernel."""
    create_binder = jit.device_caches.default_factory

    def create() -> Any:
        *rest, binder = create_binder()

        def bound(*args: Any, **kwargs: Any) -> Any:
            tell()
            return binder(*args, **kwargs)

        return *rest, bound

    jit.device_caches.default_factory = create
