"""What `install` has counted in this process, and the lines that it prints at exit."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class Installation:
    """What has gone through the replaced `triton.autotune` in this process.

    Attributes:
        tuners: every tuner of safetune that was made; a shadow tuner at its first launch.
        refused: kernels left to Triton, with the reason.
        given: how often a kernel was launched with a config that was in its tuner's own cache.
        launches, misses: of all tuners.
    """

    def __init__(self) -> None:
        self.tuners: list[Any] = []
        self.refused: dict[str, str] = {}
        self.given: dict[str, int] = {}
        self.begin(forked=False)

    def begin(self, forked: bool = True) -> None:
        """Start all counts at zero, in a new process or in one that was just forked."""
        from safetune.miss import reporting

        self.given.clear()
        self.launches = 0
        self.misses = 0
        self._tunings_before = reporting.tunings_begun()
        self._forked, self._reported = forked, False

    def count_given(self, kernel: str) -> None:
        """Count a launch with a config that safetune did not choose."""
        self.given[kernel] = self.given.get(kernel, 0) + 1

    def dropped(self) -> dict[str, tuple[str, ...]]:
        """Return the key names that were dropped, by kernel."""
        reports = [tuner.key_report for tuner in self.tuners]
        return {report.kernel: report.dropped for report in reports if report.dropped}

    def tunings(self) -> int:
        """Return how many tunings this process has begun."""
        from safetune.miss import reporting

        return reporting.tunings_begun() - self._tunings_before

    def report(self) -> None:
        """Print the counts on stderr, once, if this process had a kernel to launch."""
        worked = self.launches or self.given
        met = self.tuners or self.given or self.refused
        if met and (worked or not self._forked) and not self._reported:
            self._reported = True
            with contextlib.suppress(AttributeError, ValueError):  # the program has closed it
                sys.stderr.write(f"{self}\n")

    def __str__(self) -> str:
        stored = max(0, self.misses - self.tunings())
        kernels = {tuner.base_fn for tuner in self.tuners}
        lines = [
            f"safetune: {len(kernels)} kernels, {self.launches} launches: {self.tunings()} "
            f"tunings, {stored} keys looked up, {self.launches - self.misses} hits"
        ]
        dropped = self.dropped()
        if dropped:
            lines.append(f"safetune: key names dropped, as nothing reads them: {_listed(dropped)}")
        if self.given:
            lines.append(f"safetune: launched with configs of its own cache: {_listed(self.given)}")
        if self.refused:
            lines.append(f"safetune: left to triton.autotune: {_listed(self.refused)}")
        return "\n".join(lines)


def _listed(items: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} ({', '.join(what) if isinstance(what, tuple) else what})"
        for name, what in items.items()
    )
