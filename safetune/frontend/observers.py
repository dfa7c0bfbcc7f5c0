"""Observers of every launch and every miss in this process.

`install`, `prepare` and `SAFETUNE_MODE=record` add them.

Without an observer, a launch checks an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetune import forks

_lock = forks.lock()

#: All observers, in the order of registration. Replaced, never changed in place.
active: tuple[Observer, ...] = ()


class Observer:
    """Base class that does nothing; any thread may call its methods."""

    def launch(
        self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Run before a launch; may return a function to run after it."""

    def miss(self, tuner: Any) -> None:
        """Called when a key has no choice in memory."""


def add(observer: Observer) -> None:
    """Call an observer at every launch, starting now."""
    global active
    with _lock:
        active = (*active, observer)


def remove(observer: Observer) -> None:
    """Stop calling an observer."""
    global active
    with _lock:
        active = tuple(other for other in active if other is not observer)


def observed(
    launch: Callable[..., Any], tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return `launch(*args, **kwargs)`, and call all observers."""
    after = [observer.launch(tuner, args, kwargs) for observer in active]
    result = launch(*args, **kwargs)
    for function in after:
        if function is not None:
            function()
    return result
