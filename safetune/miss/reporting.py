"""Reports of a tuning, and of a key without a choice: Triton's attributes, listener and print knob,
log, terminal, warnings.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from triton import knobs

from safetune.config import config_text
from safetune.errors import DisputeWarning, MissError, TuningWarning
from safetune.keys.encoding import visible
from safetune.keys.identity import base_function
from safetune.messages import (
    EVERY_S,
    FIRST_S,
    counted,
    is_first_of_node,
    logger,
    notebook,
    tell,
    warn,
    warn_once,
)
from safetune.miss.how_far import DELAY_S, HowFar, repeated, seconds_left
from safetune.outcome import BUGS, Mark, duration
from safetune.settings import MissPolicy, Mode, Settings

if TYPE_CHECKING:
    from triton.runtime.autotuner import Config

    from safetune.keys.tuning_key import TuningKey
    from safetune.launch.call_shape import Tuner
    from safetune.outcome import Outcome
    from safetune.store.local.store import Store
    from safetune.tuning.requests import Observer, Phases, Progress, TuningRequest, TuningResult

#: The configs that a line names: more would fill a terminal.
_MOST_NAMED = 2

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
    """An observer that tracks the progress of a tuning. Another thread may display it meanwhile.

    Attributes:
        done, total: configs tried in this tuning, and to be tried.
        failed: the number of configs that failed.
        best_ms: the best time so far; infinite before the first.
        first_ms: the time of the first declared config; infinite before it has one.
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
        self.best_ms = self.first_ms = math.inf
        self.waits_for = self._step = ""
        self._failed: set[str] = set()

    def __call__(self, step: Progress) -> None:
        """Count a step, and pass it on."""
        self.total = step.total
        self.done = min(step.done, step.total)  # the final counts its configs again
        self._step = step.doing
        if step.outcome is not None and not step.outcome.ok:
            self._failed.add(step.text)
        if step.outcome is not None and step.outcome.timing is not None:
            self.best_ms = min(self.best_ms, step.outcome.timing.median_ms)
            if step.config is self.request.configs[0]:
                self.first_ms = step.outcome.timing.median_ms
        for observe in self.observers:
            observe(step)

    def wait_for(self, what: str) -> None:
        """Record the process that this one waits for; empty for none."""
        self.waits_for = what

    @property
    def failed(self) -> int:
        """The number of configs that failed."""
        return len(self._failed)

    def how_far(self) -> HowFar:
        """Return the progress of a launch's tuning."""
        seconds, key = self._clock() - self.begun, self.request.key
        return HowFar(
            key.kernel.name,
            self.done,
            self.total,
            self.failed,
            self.best_ms,
            self.first_ms,
            seconds,
            seconds_left(seconds, self.done, self.total),
            str(key),
            self.doing,
        )

    @property
    def doing(self) -> str:
        """The current step of the tuning, or the process that it waits for."""
        if self.waits_for:
            return f"waits for {self.waits_for}"
        return _DOING.get(self._phases.name if self._phases else "", "") or self._step


class Tunings:
    """The numbers of tunings that this process has begun and ended.

    Attributes:
        failed: ended with an exception, and so without a choice.
        adopted: took another process's choice; nothing was measured.
    """

    def __init__(self) -> None:
        self.begun = self.failed = self.adopted = 0

    @property
    def made(self) -> int:
        """The tunings that are running or have ended with their own choice."""
        return self.begun - self.failed - self.adopted


tunings = Tunings()


@contextlib.contextmanager
def observing(
    request: TuningRequest, store: Store, phases: Phases | None = None, quiet: bool = False
) -> Iterator[Tally]:
    """Yield the observer of a tuning's steps.

    It writes to the log and, with TRITON_PRINT_AUTOTUNING, to standard output. Unless `quiet`, it
    also shows a moving line on a terminal, and a line now and then elsewhere.
    """
    tunings.begun += 1
    tally = Tally(request, phases)
    prints = knobs.autotuning.print and not quiet
    tally.observers += [log_config, *[print_config] * prints]
    try:
        with contextlib.nullcontext() if quiet or prints else showing(tally.how_far):
            yield tally
    except BaseException as error:
        tunings.failed += 1
        if isinstance(error, KeyboardInterrupt) and not tally.waits_for:
            tell(_interrupted(tally, store))
        raise


def showing(
    how_far: Callable[[], HowFar | None],
    of_command: bool = False,
    ended: threading.Event | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Show progress during the body, in one process of a node.

    On a terminal and in a notebook a bar moves. Elsewhere there is a line after `FIRST_S` and then
    every `EVERY_S`.

    Args:
        how_far: returns the progress, or None to show nothing.
        of_command: the process is a command of safetune.
    """
    if not logger.isEnabledFor(logging.WARNING):
        return contextlib.nullcontext()
    if _is_watched():
        from safetune.miss import progress  # imports rich

        if not is_first_of_node():
            return contextlib.nullcontext()
        if notebook() is not None:
            return progress.in_notebook(how_far)
        if progress.can_move_cursor():
            return progress.moving_line(how_far, of_command)

    def tell_how_far() -> None:
        if is_first_of_node() and (far := how_far()) is not None:
            tell(visible(f"tuning {far}"))

    return repeated(tell_how_far, FIRST_S, EVERY_S, ended)


def _interrupted(tally: Tally, store: Store) -> str:
    name = f"{tally.request.key.kernel.name} for {tally.request.key}"
    if not tally.done or store.path is None:
        return f"interrupted; nothing is stored for {name}"
    return (
        f"interrupted; {tally.done} of {tally.total} configs of {name} are stored, and the next "
        "tuning continues from there"
    )


def _is_watched() -> bool:
    """Whether a person watches: in a notebook, or with standard error on a terminal.

    Programs may close standard error, or replace it by a writer.
    """
    try:
        return notebook() is not None or bool(sys.stderr.isatty())
    except (AttributeError, ValueError):
        return False


def log_config(progress: Progress) -> None:
    """Log the outcome of a config, at DEBUG."""
    outcome = progress.outcome
    if outcome is not None and logger.isEnabledFor(logging.DEBUG):
        timing = (progress.stage == "final" and outcome.final) or outcome.timing
        time = f" {timing.median_ms:.4g} ms" if timing is not None else ""
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
    """Report a finished tuning: in the log at INFO, else in a line if it took long.

    Warns of a dispute and of the result's notes.

    Args:
        shown: whether the caller shows the result.
    """
    if result.adopted:
        tunings.adopted += 1
    shown = shown or knobs.autotuning.print
    tell_of_skipped(request.key, dict(result.outcomes))
    if result.measured and not shown:
        _tell_of_bugs(request, result)
    _tell_of_left_out(request.key, result.left_out)
    for note in result.notes:
        warn(f"{request.key.kernel.name}: {note}", TuningWarning)
    warn_of_dispute(request.key, result.stored.dispute)
    took_long = result.seconds >= FIRST_S or (result.seconds >= DELAY_S and _is_watched())
    if logger.isEnabledFor(logging.INFO) or (took_long and not shown and is_first_of_node()):
        tell(_as_line(request, result))


#: The lines that this process has said, by kernel and by what they are about.
_said: set[tuple[str, str]] = set()


def _say_once(key: TuningKey, about: str, line: str) -> None:
    """Log a line about a kernel at WARNING, once in this process; it is never an error."""
    if (key.kernel.digest, about) not in _said:
        _said.add((key.kernel.digest, about))
        logger.warning("%s: %s", key.kernel.name, line)


def tell_of_skipped(key: TuningKey, outcomes: Mapping[Config, Outcome]) -> None:
    """Name the configs that are skipped because the machine or a process went down with them."""
    for config, outcome in outcomes.items():
        if outcome.took_down:
            text = config_text(config)
            command = f"`safetune clear --failures {key.kernel.name}`"
            _say_once(
                key, text, f"skipping {text}: {outcome.message}. To try it now, run {command}"
            )


def _tell_of_bugs(request: TuningRequest, result: TuningResult) -> None:
    """Count the configs that showed a bug, and name one. Needing too many resources is no bug."""
    bugs = [(config, bug) for config, outcome in result.outcomes if (bug := _bug_of(outcome))]
    if bugs:
        labels = Counter(bug for _, bug in bugs)
        counts = ", ".join(f"{count} {label}" for label, count in labels.items())
        _say_once(
            request.key,
            "bugs",
            f"{len(bugs)} of {counted(len(request.configs), 'config')} crashed, hung or gave a "
            f"different result ({counts}): {config_text(bugs[0][0])}{', …' * (len(bugs) > 1)}; "
            f"`safetune show {request.key.kernel.name}` has the details",
        )


def _bug_of(outcome: Outcome) -> str:
    """Return the name of the bug that an outcome shows; empty for none."""
    if outcome.ok and outcome.marked(Mark.NOT_REPEATABLE):
        return Mark.NOT_REPEATABLE.value
    return outcome.label if outcome.verdict in BUGS and not outcome.took_down else ""


def _tell_of_left_out(key: TuningKey, configs: Mapping[Config, float]) -> None:
    """Name the configs that were faster than the choice, and rejected for their results."""
    if not configs:
        return
    fastest = sorted(configs, key=lambda config: -configs[config])
    named = [f"{config_text(c)} ({configs[c]:.2f} times as fast)" for c in fastest[:_MOST_NAMED]]
    more = f"; and {len(configs) - _MOST_NAMED} more" if len(configs) > _MOST_NAMED else ""
    _say_once(
        key,
        "left out",
        f"faster configs are left out, because their results differ from the others': "
        f"{'; '.join(named)}{more}. If they are right, give the right result with reference=, or "
        "name the arguments that may differ in scratch=[...]",
    )


def _as_line(request: TuningRequest, result: TuningResult) -> str:
    """Return a result as a line."""
    name, choice = request.key.kernel.name, config_text(result.choice)
    if result.adopted:
        return (
            f"{name} uses the choice of another process for {request.key} after "
            f"{result.seconds:.2f} s: {choice}"
        )
    failed = Counter(outcome.verdict.value for _, outcome in result.outcomes if not outcome.ok)
    failures = ", ".join(f"{count} {verdict}" for verdict, count in failed.items())
    how = f"tuned for {request.key} in {result.seconds:.2f} s"
    measured = f"{result.measured} of {len(request.configs)} configs measured"
    if not result.measured:
        how, measured = f"for {request.key}", "chosen from stored trials, none measured"
    return (
        f"{name} {how}: {choice} ({duration(result.stored.median_ms)}); {measured}"
        f"{f', failed: {failures}' if failures else ''}"
    )


def warn_of_dispute(key: TuningKey, dispute: str) -> None:
    """Warn, once per process and key, that the choice for a key may compute a wrong result."""
    if dispute:
        warn_once(
            f"{key.kernel.name}: its configs give different results for {key}, so its choice may "
            f"be wrong ({dispute}). Give the right result with reference=, or list arguments that "
            "may differ in scratch=[...], and tune it again",
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
            f"{tuner.base_fn.__name__}: the launch grid reads {', '.join(new)}, which safetune "
            "dropped from the key because nothing seemed to read it; one choice now serves every "
            f"value. Pass keep={new} to tune each value",
            TuningWarning,
        )


def check_policy(
    tuner: Tuner, request: TuningRequest, settings: Settings, capture: int = 0
) -> None:
    """Follow `on_miss` for a key without a choice: warn, once for each key, or raise `MissError`.

    Args:
        capture: the number of the CUDA graph capture under way, or 0.
    """
    policy = tuner.on_miss or settings.on_miss
    if policy not in (MissPolicy.WARN, MissPolicy.ERROR):
        return
    missing = f"{request.key.kernel.name} has no choice for {request.key}"
    offline = offline_commands(tuner, recorded=settings.mode is Mode.RECORD)
    advice = f"To tune it, run {offline}" if offline else "Tune it in a run without on_miss"
    if policy is MissPolicy.ERROR:
        raise MissError(
            f"{missing} on {request.key.device.name}, and on_miss is 'error': nothing was tuned or "
            f"launched. {advice}"
        )
    if not tuner.first_time(f"missed {request.key.digest} {request.declared}"):
        return
    follows = "it launches a fallback"
    if settings.tunes(tuner.on_miss) and not capture:
        follows = "it is tuned" + " in the background" * (settings.mode is Mode.BACKGROUND)
    warn(f"{missing}: {follows}. {advice}", TuningWarning)


def offline_commands(tuner: Tuner, recorded: bool) -> str:
    """Return the shell commands that tune a kernel offline; empty if its file is unknown.

    Args:
        recorded: whether the call is recorded already.
    """
    _, function = base_function(tuner.fn)
    target, script = function.__module__, ""
    if target == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        target = shlex.quote(spec.name if spec else os.path.abspath(file) if file else "")
        script = f" {target}"
    if target in ("", "''"):
        return ""
    replay = f"`safetune tune --recorded{script}`"
    recording = f"the program with SAFETUNE_MODE=record and then {replay}"
    first = f"{replay} for this call" if recorded else recording
    of_workloads = f", or `safetune tune {target}:{function.__name__}` for its workloads"
    return first + of_workloads * bool(tuner.workloads)


def report_result(tuner: Tuner, request: TuningRequest, result: TuningResult) -> None:
    """Report a finished tuning: to the user, and as Triton's tuner does."""
    tell_result(request, result)
    tuner.tuning_phases = dict(result.phases)
    phases = result.phases if result.measured else None
    tuner.report(request.readable_key, result.choice, result.timings, phases)
