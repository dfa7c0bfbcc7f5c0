"""What a tuning tells the world: Triton's attributes, listener and print knob, and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Config

from safetune.kernel_source import base_function

if TYPE_CHECKING:
    from safetune.autotuner import Autotuner
    from safetune.outcome import Outcome
    from safetune.tuning.tuner import Progress


def report(
    tuner: Autotuner,
    arguments: Mapping[str, Any],
    choice: Config,
    timings: dict[Config, list[float]],
    seconds: float | None = None,
) -> None:
    """Tell the world what Triton's tuner would: attributes, listener, TRITON_PRINT_AUTOTUNING.

    `seconds` is what tuning took; None when the choice was known.
    """
    tuner.configs_timings = timings
    tuner.bench_time = seconds or 0.0
    key = _readable_key(tuner, arguments)
    listener = getattr(knobs.autotuning, "listener", None)
    if listener is not None:
        listener(
            fn=base_function(tuner.fn)[0],
            key=key,
            best_config=choice,
            configs_timings=timings,
            duration=seconds,
            cache_hit=seconds is None,
        )
    if knobs.autotuning.print and seconds is not None:
        sys.stdout.write(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {seconds:.2f}s,\nbest config selected: {choice};\n"
        )


def _readable_key(tuner: Autotuner, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key as Triton writes it: the values, then the dtypes."""
    known = {name: value for name, value in arguments.items() if name in tuner.arg_names}
    dtypes = {name: str(value.dtype) for name, value in known.items() if hasattr(value, "dtype")}
    values = (dtypes.get(name, known[name]) for name in tuner.keys if name in known)
    return (*values, *dtypes.values())


def timings_of(outcomes: Iterable[tuple[Config, Outcome]]) -> dict[Config, list[float]]:
    """Outcomes as Triton's tuner keeps them: median, 20th and 80th percentile, or infinities."""
    return {
        config: [float("inf")] * 3
        if outcome.timing is None
        else [outcome.timing.median_ms, outcome.timing.p20_ms, outcome.timing.p80_ms]
        for config, outcome in outcomes
    }


def print_config(progress: Progress) -> None:
    """Print a step as Triton's tuner does under TRITON_PRINT_AUTOTUNING."""
    if progress.outcome is None and progress.stage == "screen":
        sys.stdout.write(f"Autotuning kernel {progress.kernel} with config {progress.config}\n")
    elif progress.outcome is not None and not progress.outcome.ok:
        sys.stdout.write(
            f"Autotuning failed with {progress.outcome.label}: {progress.outcome.message}\n"
        )


def silent(progress: Progress) -> None:
    """Tell nobody."""


def warn_of_grid(tuner: Autotuner, names: set[str]) -> None:
    """Warn, once per name, that a launch grid reads what was dropped from the key."""
    told = tuner.__dict__.setdefault("_grid_names_told", set())
    if new := sorted(names - told):
        told.update(new)
        warnings.warn(
            f"{tuner.base_fn.__name__}: the launch grid reads {', '.join(new)}, dropped from the "
            "key because nothing seemed to read it; one choice now serves every value. "
            f"Add it to keep={new} to tune for each",
            stacklevel=2,
        )
