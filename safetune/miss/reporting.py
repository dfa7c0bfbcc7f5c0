"""Reports of a tuning: Triton's attributes, listener and print knob, log, terminal, warnings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from triton import knobs

from safetune.config import config_text
from safetune.errors import DisputeWarning, TuningWarning
from safetune.messages import EVERY_S, FIRST_S, is_first_of_node, logger, tell, warn, warn_once
from safetune.outcome import VIOLENT, Verdict, duration

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.miss.tuner import Tuner
    from safetune.store.local.store import Store
    from safetune.tuning.requests import Observer, Phases, Progress, TuningRequest, TuningResult

#: The configs of one verdict that a line names.
_MOST_NAMED = 5

#: What a tuning does in those of its phases that are not named after a config.
_DOING = {
    "lookup": "looks for a choice",
    "wait": "waits for its turn",
    "transfer": "copies the arguments",
    "resolve": "prepares the compilation",
    "compile": "waits for the compiler",
    "start": "waits for a measuring process",
    "torch": "waits for a measuring process with torch",
    "store": "stores the outcomes",
}


class Tally:
    """An observer that knows how far a tuning is. Another thread may show it meanwhile.

    Attributes:
        done, total: configs tried in this tuning, and to be tried.
        failed: the number of configs that failed.
        best_ms: the best time so far; infinite before the first.
        waits_for: the process that this one waits for, as text.
    """

    def __init__(
        self,
        request: TuningRequest,
        phases: Phases | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request, self._phases, self._clock = request, phases, clock
        self.observers: list[Observer] = []
        self.begun = clock()
        self.done, self.total = 0, len(request.configs)
        self.best_ms = math.inf
        self.waits_for = self._step = ""
        self._failed: set[str] = set()

    def __call__(self, step: Progress) -> None:
        """Count a step, and pass it on."""
        self.done, self.total = step.done, step.total
        self._step = step.doing
        if step.outcome is not None and not step.outcome.ok:
            self._failed.add(step.text)
        if step.outcome is not None and step.outcome.timing is not None:
            self.best_ms = min(self.best_ms, step.outcome.timing.median_ms)
        for observe in self.observers:
            observe(step)

    def wait_for(self, what: str) -> None:
        """Note which process is waited for; none if empty."""
        self.waits_for = what

    @property
    def failed(self) -> int:
        """The number of configs that failed."""
        return len(self._failed)

    @property
    def steps(self) -> tuple[object, ...]:
        """What changes whenever something happens in it."""
        return id(self), self.done, self._step, self._phases and self._phases.entered

    @property
    def seconds(self) -> float:
        """The time since it began."""
        return self._clock() - self.begun

    @property
    def doing(self) -> str:
        """What the tuning does or waits for now."""
        if self.waits_for:
            return f"waits for {self.waits_for}"
        return _DOING.get(self._phases.name if self._phases else "", "") or self._step


_tunings, _failed, _adopted = itertools.count(1), itertools.count(1), itertools.count(1)
_tunings_begun = _tunings_failed = _tunings_adopted = 0


def count_tuning() -> None:
    """Count a tuning that begins."""
    global _tunings_begun
    _tunings_begun = next(_tunings)


def tunings_begun() -> int:
    """Return the number of tunings that this process has begun."""
    return _tunings_begun


def tunings_failed() -> int:
    """Return how many of them have ended with an exception, and so without a choice."""
    return _tunings_failed


def tunings_adopted() -> int:
    """Return how many of them have ended with the choice of another process, and tuned nothing."""
    return _tunings_adopted


def tunings_made() -> int:
    """Return how many of them are under way, or have ended with a choice of their own."""
    return _tunings_begun - _tunings_failed - _tunings_adopted


@contextlib.contextmanager
def observing(
    request: TuningRequest, store: Store, phases: Phases | None = None, quiet: bool = False
) -> Iterator[Tally]:
    """Yield the observer of a tuning's steps.

    It writes to the log and, with TRITON_PRINT_AUTOTUNING, to standard output. Otherwise it shows a
    live line on a terminal, and lines now and then elsewhere, unless `quiet`.
    """
    count_tuning()
    tally = Tally(request, phases)
    tally.observers.append(log_config)
    try:
        with contextlib.nullcontext() if quiet else _shown(tally):
            yield tally
    except BaseException as error:
        global _tunings_failed
        _tunings_failed = next(_failed)
        if isinstance(error, KeyboardInterrupt) and not tally.waits_for:
            tell(_interrupted(tally, store))
        raise


def _shown(tally: Tally) -> contextlib.AbstractContextManager[None]:
    if knobs.autotuning.print:
        tally.observers.append(print_config)
        return contextlib.nullcontext()
    if not logger.isEnabledFor(logging.WARNING):
        return contextlib.nullcontext()
    if _is_terminal(sys.stderr):
        from safetune.miss import progress  # imports rich

        if progress.can_move_cursor():
            first = is_first_of_node()
            return progress.late_line(lambda: how_far(tally)) if first else contextlib.nullcontext()
    return lines(tally)


@contextlib.contextmanager
def lines(tally: Tally, ended: threading.Event | None = None) -> Iterator[None]:
    """Tell how far a tuning is after `FIRST_S`, and then every `EVERY_S`: one process of a node."""
    ended = ended or threading.Event()

    def tell_now_and_then() -> None:
        for pause_s in itertools.chain([FIRST_S], itertools.repeat(EVERY_S)):
            if ended.wait(pause_s) or not is_first_of_node():
                return
            tell(how_far(tally))

    thread = threading.Thread(target=tell_now_and_then, name="safetune-progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process cannot start another thread
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


def how_far(tally: Tally) -> str:
    """Return how far a tuning is, as a line."""
    request = tally.request
    best = f", best {duration(tally.best_ms)}" if tally.best_ms < math.inf else ""
    return (
        f"tuning {request.key.kernel.name} for {request.key}: {tally.done}/{tally.total} configs, "
        f"{tally.failed} failed{best}, {tally.seconds:.0f} s; {tally.doing}"
    )


def _interrupted(tally: Tally, store: Store) -> str:
    name = f"{tally.request.key.kernel.name} for {tally.request.key}"
    if not tally.done or store.path is None:
        return f"interrupted; nothing is stored for {name}"
    return (
        f"interrupted; {tally.done} of {tally.total} configs of {name} are stored, and the next "
        "tuning goes on from there"
    )


def _is_terminal(stream: Any) -> bool:
    """Whether this is a terminal; programs close standard error, or replace it by a writer."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


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


def tell_result(request: TuningRequest, result: TuningResult, shown: bool = False) -> None:
    """Tell of a finished tuning: in the log at INFO, else in a line if it took long.

    The notes of the result are warnings, and so is a dispute.

    Args:
        shown: whether the caller shows the result.
    """
    if result.adopted:
        global _tunings_adopted
        _tunings_adopted = next(_adopted)
    shown = shown or knobs.autotuning.print
    for note in result.notes:
        warn(f"{request.key.kernel.name}: {note}", TuningWarning)
    warn_of_dispute(request.key, result.stored.dispute)
    took_long = result.seconds >= FIRST_S and is_first_of_node()
    if logger.isEnabledFor(logging.INFO) or (took_long and not shown):
        tell(_as_line(request, result))


def _as_line(request: TuningRequest, result: TuningResult) -> str:
    """Return a result as a line, which names the configs that crashed or hung."""
    name, choice = request.key.kernel.name, config_text(result.choice)
    if result.adopted:
        return (
            f"{name} uses the choice of another process for {request.key} after "
            f"{result.seconds:.2f} s: {choice}"
        )
    failed: dict[Verdict, list[str]] = {}
    for config, outcome in result.outcomes:
        if not outcome.ok:
            failed.setdefault(outcome.verdict, []).append(config_text(config))
    failures = ", ".join(_failures(verdict, configs) for verdict, configs in failed.items())
    return (
        f"{name} tuned for {request.key} in {result.seconds:.2f} s: {choice} "
        f"({duration(result.stored.median_ms)}); {result.measured} of {len(request.configs)} "
        f"configs measured{f', failed: {failures}' if failures else ''}"
    )


def _failures(verdict: Verdict, configs: list[str]) -> str:
    text = f"{len(configs)} {verdict.value}"
    if verdict not in VIOLENT:
        return text
    more = f"; and {len(configs) - _MOST_NAMED} more" if len(configs) > _MOST_NAMED else ""
    return f"{text} ({'; '.join(configs[:_MOST_NAMED])}{more})"


def warn_of_dispute(key: TuningKey, dispute: str) -> None:
    """Warn, once per process and key, that the choice for a key may compute a wrong result."""
    if dispute:
        warn_once(
            f"{key.kernel.name}: its configs disagree about the result for {key}, and its choice "
            f"may compute a wrong one ({dispute}). Say what is right with reference=, or name the "
            "arguments that need not agree in scratch=[...], and tune it again",
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
