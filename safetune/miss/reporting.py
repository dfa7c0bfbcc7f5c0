"""Reports of a tuning: Triton's attributes, listener and print knob, log, terminal, warnings."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.errors import DisputeWarning, TuningWarning
from safetune.keys.kernel_digest import base_function
from safetune.messages import logger, warn

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.miss.tuner import Tuner
    from safetune.outcome import Outcome
    from safetune.tuning.requests import Observer, Progress, TuningRequest, TuningResult


def report(
    tuner: Tuner,
    key: tuple[Any, ...],
    choice: Config,
    timings: dict[Config, list[float]],
    phases: Mapping[str, float] | None = None,
) -> None:
    """Report a choice as Triton's tuner does: attributes, listener, TRITON_PRINT_AUTOTUNING.

    Args:
        key: as `keys.tuning_key.readable_key` returns it.
        phases: the seconds of the tuning; None if the choice was known.
    """
    seconds = None if phases is None else sum(phases.values())
    tuner.configs_timings = timings
    tuner.bench_time = seconds or 0.0
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
    if knobs.autotuning.print and phases is not None:
        spent = ", ".join(f"{name} {part:.2f}s" for name, part in phases.items())
        sys.stdout.write(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {seconds:.2f}s,\nof which {spent},\nbest config selected: {choice};\n"
        )


def report_result(tuner: Tuner, request: TuningRequest, result: TuningResult) -> None:
    """Report a finished tuning: in the log, and as Triton's tuner does."""
    log_result(request, result)
    tuner.tuning_phases = dict(result.phases)
    phases = result.phases if result.measured else None
    report(tuner, request.readable_key, result.choice, timings_of(result.outcomes), phases)


def timings_of(outcomes: Iterable[tuple[Config, Outcome]]) -> dict[Config, list[float]]:
    """Return outcomes as Triton's tuner keeps them: median, 20th, 80th percentile, or infinity."""
    return {
        config: [float("inf")] * 3
        if outcome.timing is None
        else [outcome.timing.median_ms, outcome.timing.p20_ms, outcome.timing.p80_ms]
        for config, outcome in outcomes
    }


_tunings = itertools.count(1)
_tunings_begun = 0


def count_tuning() -> None:
    """Count a tuning that begins."""
    global _tunings_begun
    _tunings_begun = next(_tunings)


def tunings_begun() -> int:
    """Return the number of tunings that this process has begun."""
    return _tunings_begun


@contextlib.contextmanager
def observing(kernel: str, quiet: bool = False) -> Iterator[Observer]:
    """Yield the observer of a tuning's steps.

    It writes to the log and, with TRITON_PRINT_AUTOTUNING, to standard output; otherwise it shows
    a line on standard error if that is a terminal, unless `quiet`.
    """
    count_tuning()
    if knobs.autotuning.print:
        yield both(log_config, print_config)
        return
    if not quiet and _is_terminal(sys.stderr):
        from safetune.miss import progress  # imports rich

        if progress.can_move_cursor():
            with progress.late_line(kernel) as show:
                yield both(log_config, show)
            return
    yield log_config


def _is_terminal(stream: Any) -> bool:
    """Whether this is a terminal; programs close standard error, or replace it by a writer."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def both(first: Observer, second: Observer) -> Observer:
    """Return an observer that passes each step to both."""

    def observe(step: Progress) -> None:
        first(step)
        second(step)

    return observe


def log_config(progress: Progress) -> None:
    """Log the outcome of a config, at DEBUG."""
    outcome = progress.outcome
    if outcome is not None and logger.isEnabledFor(logging.DEBUG):
        time = f" {outcome.timing.median_ms:.4g} ms" if outcome.timing is not None else ""
        reason = f": {outcome.message.splitlines()[0]}" if outcome.message else ""
        logger.debug(
            "%s: %s: %s %s%s%s",
            progress.kernel,
            progress.stage,
            config_text(progress.config),
            outcome.label,
            time,
            reason,
        )


def log_result(request: TuningRequest, result: TuningResult) -> None:
    """Log a finished tuning, at INFO: its time, its choice, and how many configs failed and why.

    The notes of the result are warnings, and so is a dispute.
    """
    for note in result.notes:
        warn(f"{request.key.kernel.name}: {note}", TuningWarning)
    warn_of_dispute(request.key, result.stored.dispute)
    counts = Counter(outcome.verdict.value for _, outcome in result.outcomes if not outcome.ok)
    failures = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    logger.info(
        "%s tuned for %s in %.2f s: %s; %d of %d configs measured%s",
        request.key.kernel.name,
        request.key,
        result.seconds,
        config_text(result.choice),
        result.measured,
        len(request.configs),
        f", failed: {failures}" if failures else "",
    )


def warn_of_dispute(key: TuningKey, dispute: str) -> None:
    """Warn, once per process and key, that the choice for a key may compute a wrong result."""
    if dispute:
        _warn_of_dispute(key.kernel.name, str(key), dispute)


@functools.cache
def _warn_of_dispute(kernel: str, key: str, dispute: str) -> None:
    warn(
        f"{kernel}: its configs disagree about the result for {key}, and its choice may compute a "
        f"wrong one ({dispute}). Say what is right with reference=, or name the arguments that "
        "need not agree in scratch=[...], and tune it again",
        DisputeWarning,
    )


def print_config(progress: Progress) -> None:
    """Print a step as Triton's tuner does under TRITON_PRINT_AUTOTUNING."""
    if progress.outcome is None and progress.stage == "screen":
        sys.stdout.write(f"Autotuning kernel {progress.kernel} with config {progress.config}\n")
    elif progress.outcome is not None and not progress.outcome.ok:
        sys.stdout.write(
            f"Autotuning failed with {progress.outcome.label}: {progress.outcome.message}\n"
        )


def warn_of_grid(tuner: Tuner, names: Iterable[str]) -> None:
    """Warn, once per name, that a launch grid reads a name that was dropped from the key."""
    if new := [name for name in sorted(names) if tuner.first_time(f"grid reads {name}")]:
        warn(
            f"{tuner.base_fn.__name__}: the launch grid reads {', '.join(new)}, dropped from the "
            "key because nothing seemed to read it; one choice now serves every value. "
            f"Add it to keep={new} to tune for each",
            TuningWarning,
        )
