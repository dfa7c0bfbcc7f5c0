"""The counts of `install` in this process, and the report that it prints at exit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from safetune.frontend.observers import Observer
from safetune.messages import counted, prefix

#: Why a kernel that SAFETUNE_LEAVE names is not safetune's.
LEFT = "by SAFETUNE_LEAVE or leave="


class Installation(Observer):
    """The use of the replaced `triton.autotune` in this process.

    Attributes:
        tuners: every safetune tuner that was made; a shadow tuner counts from its first launch.
        refused: kernels left to Triton, with the reason.
        launches, misses: of all tuners.
    """

    def __init__(self) -> None:
        self.tuners: list[Any] = []
        self._launched: set[Any] = set()
        self.refused: dict[str, str] = {}
        self.begin(forked=False)

    def begin(self, forked: bool = True) -> None:
        """Start all counts at zero, in a new process or in one that was just forked."""
        self.launches = self.misses = 0
        self._launched.clear()
        self._before = _tunings()
        self._forked, self._reported = forked, False

    def refuse(self, fn: Any, reason: object) -> None:
        """Record that a kernel is left to Triton, with the reason in one line."""
        text = str(reason).partition("\n")[0]
        self.refused[kernel_name(fn)] = text.removeprefix(prefix())  # of a warning made an error

    def launch(self, tuner: Any, *_: Any) -> None:
        """Count a launch, and remember its kernel."""
        self.launches += 1
        self._launched.add(tuner)

    def miss(self, *_: Any) -> None:
        """Count a miss."""
        self.misses += 1

    def report(self) -> None:
        """Print the counts on stderr, once, if this process had a kernel to launch."""
        met = self.tuners or self.refused
        if met and (self.launches or not self._forked) and not self._reported:
            self._reported = True
            with contextlib.suppress(AttributeError, ValueError):  # the program has closed it
                sys.stderr.write(f"{self}\n")

    def __str__(self) -> str:
        counts = zip(_tunings(), self._before, strict=True)
        begun, failed, adopted = (now - before for now, before in counts)
        launched = {tuner.base_fn for tuner in [*self._launched]}  # other threads may add more
        kernels = launched.union(tuner.base_fn for tuner in self.tuners)
        kernels_text = counted(len(kernels), "kernel")
        if len(launched) < len(kernels):
            kernels_text = f"{len(launched)} of {kernels_text}"
        fallbacks = _fallbacks()
        looked_up = max(0, self.misses - begun) + min(failed, fallbacks) + adopted
        fallbacks = min(looked_up, fallbacks)
        without = f" ({fallbacks} without a choice)" if fallbacks else ""
        lines = [
            f"safetune: {kernels_text}, "
            f"{counted(self.launches, 'launch', 'launches')}: {begun - failed - adopted} tuned, "
            f"{looked_up} looked up{without}, {self.launches - self.misses} known"
        ]
        keys = [key for tuner in self.tuners if (key := tuner.lazy_key.last_report) is not None]
        dropped = {key.kernel: ", ".join(key.dropped) for key in keys if key.dropped}
        written: dict[str, str] = {}
        for tuner in self.tuners:
            if keys_written := sum(state.written is not None for state in tuner.states):
                written[tuner.base_fn.__name__] = counted(keys_written, "key")
        lists: list[tuple[str, Mapping[str, object]]] = [
            ("key names dropped, as nothing reads them", dropped),
            ("launched with configs that were written into its cache", written),
            ("left to triton.autotune", self.refused),
        ]
        lines += [
            f"safetune: {title}: {'; '.join(f'{name} ({text})' for name, text in items.items())}"
            for title, items in lists
            if items
        ]
        return "\n".join(lines)


def kernel_name(fn: Any) -> str:
    """Return the name of the function below all decorators."""
    while hasattr(fn, "fn"):
        fn = fn.fn
    return str(getattr(fn, "__name__", fn))


def _fallbacks() -> int:
    """The number of keys of this process that launch a fallback now."""
    from safetune.launch.key_state import Reason, all_states  # which imports triton

    known = (state.decision(capture=None) for state in all_states())
    return sum(each is not None and each.reason is Reason.FALLBACK for each in known)


def _tunings() -> tuple[int, int, int]:
    from safetune.miss import reporting

    tunings = reporting.tunings
    return tunings.begun, tunings.failed, tunings.adopted
