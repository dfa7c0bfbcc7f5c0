"""Children that nobody needs at the moment, kept a little for the next tuning."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetune import forks

if TYPE_CHECKING:
    from safetune.isolation.child_handle import Child


@dataclass(frozen=True)
class _Kept:
    child: Child
    until: float


class IdleChildren:
    """Released children by what they are good for; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, list[_Kept]] = {}
        forks.register("child processes", after_in_child=self._forget, at_exit=self.drop)

    def keep(self, purpose: str, child: Child, for_s: float, most: int) -> None:
        """Keep a child that has been told to `release`, unless there are `most` already."""
        with self._lock:
            kept = self._kept.setdefault(purpose, [])
            if full := len(kept) >= most:
                oldest = kept.pop(0)
            kept.append(_Kept(child, time.monotonic() + for_s))
        if full:
            oldest.child.kill()

    def take(self, purpose: str) -> Child | None:
        """Return a kept child that is still there, the one last used first; None without one."""
        while True:
            with self._lock:
                kept = self._kept.get(purpose)
                if not kept:
                    return None
                last = kept.pop()
            if last.until > time.monotonic() and not last.child.ended:
                return last.child
            last.child.kill()

    def drop(self) -> None:
        """Let go of all: they end by themselves."""
        with self._lock:
            kept, self._kept = self._kept, {}
        for children in kept.values():
            for entry in children:
                entry.child.abandon()

    def _forget(self) -> None:
        """In a forked copy of this process, where the children are not ours."""
        self._lock = threading.Lock()
        self._kept = {}
