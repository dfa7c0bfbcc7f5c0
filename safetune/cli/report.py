"""The final output of `safetune tune`: the tunings of its process and of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from safetune.cli.display import counts_of
from safetune.cli.emit import emit
from safetune.cli.output import counted, describe, echo
from safetune.cli.workers import Event
from safetune.errors import NoWorkingConfig, SafetuneError
from safetune.outcome import Mark, Outcome
from safetune.show.choices import Row, Summary, failures, summary_blocks
from safetune.show.tables import Block, heading
from safetune.show.words import config_words, date, origin_words, outcome_data
from safetune.store.schema import time_text

if TYPE_CHECKING:
    from triton import Config

    from safetune.offline.plan import Planned
    from safetune.offline.replay import LeftOut
    from safetune.offline.tasks import Task
    from safetune.tuning.requests import TuningResult

OF_TITLE = ("kernel", "shape", "dtype")


def planned_event(tunings: Sequence[Planned], left_out: Sequence[LeftOut]) -> Event:
    """Return the work of a process, and the recorded calls that are not tuned."""
    names = ("words", "reason", "failed")
    left = [{name: getattr(each, name) for name in names} for each in left_out]
    return {"plan": counts_of(tunings), "left_out": left}


def tuned_event(planned: Planned, result: TuningResult) -> Event:
    """Return a finished tuning."""
    from safetune.config import config_record
    from safetune.offline.tasks import open_tuning_store

    stored, config = result.stored, config_record(result.choice)
    facts = {
        "choice": config_words(config),
        "disputed": stored.dispute,
        "pinned": stored.pinned,
        "created": stored.created,
        "phases": dict(result.phases),
        "config": config,
        "median_ms": stored.median_ms,
        "origin": open_tuning_store().origin(stored),
    }
    return _event(planned, facts, result.outcomes, result.measured, result.choice)


def failed_event(planned: Planned, task: Task, error: NoWorkingConfig) -> Event:
    """Return the event for a tuning in which no config works."""
    from safetune.config import config_text

    declared = {config_text(config): config for config in task.kernel.tuner.configs}
    outcomes = [(declared[text], o) for text, o in error.outcomes if text in declared]
    facts: dict[str, Any] = {"choice": None, "disputed": "", "created": None, "phases": {}}
    return _event(planned, facts, outcomes, error.measured)


def not_begun_event(planned: Planned, error: Exception) -> Event:
    """Return a tuning that could not begin."""
    return {"not_begun": {**_title(planned), "key": planned.key, "reason": describe(error)}}


def _title(planned: Planned) -> dict[str, str]:
    return {name: getattr(planned, name) for name in OF_TITLE}


def _event(
    planned: Planned,
    facts: Mapping[str, Any],
    outcomes: Iterable[tuple[Config, Outcome]],
    measured: int,
    choice: Config | None = None,
) -> Event:
    from safetune.config import config_record

    rows = []
    for number, (config, outcome) in enumerate(outcomes):  # in the order of the declared ones
        marked = outcome.unmarked(Mark.FIRST).with_marks([Mark.FIRST.value] * (number == 0))
        rows.append(Row(config_record(config), marked, config is choice))
    names = {**_title(planned), "device": planned.request.key.device.name, "key": planned.key}
    return {"facts": {**names, "measured": measured, **facts}, "trials": rows}


class Report:
    """Collects the events of all tunings and prints a row for each tuning at the end."""

    def __init__(self, allow_disputed: bool) -> None:
        self._allow_disputed = allow_disputed
        self.tuned: list[tuple[dict[str, Any], list[Row]]] = []
        #: Recorded calls, each in `words`, with the `reason`, and whether they `failed`.
        self.left_out: list[dict[str, Any]] = []
        self.left = 0  # to other processes, which tune them
        self.not_begun: list[dict[str, str]] = []

    def take(self, event: Event, name: str = "") -> None:
        """Record an event of this process, or of a worker with a name; print what cannot wait."""
        for left in event.get("left_out", ()):  # it may take hours until the end says it
            if left not in self.left_out:
                self.left_out.append(left)
                if event["plan"] or name:
                    echo(_left_out_words(left), err=True)
        self.left += "left" in event
        if "not_begun" in event:
            self.not_begun.append(event["not_begun"])
            words = " ".join(event["not_begun"][each] for each in OF_TITLE)
            echo(f"not tuned: {words}: {event['not_begun']['reason']}", err=True)
        if "facts" in event:
            self.tuned.append((event["facts"], msgspec.convert(event["trials"], list[Row])))
            if name:
                _tell_tuned(name, event["facts"])

    def check_begun(self) -> None:
        """Raise `SafetuneError` if a tuning could not begin."""
        if words := [" ".join(map(told.__getitem__, OF_TITLE)) for told in self.not_begun]:
            raise SafetuneError(
                f"{counted(len(words), 'tuning')} could not start, for the reasons above: "
                f"{', '.join(words)}; all others are done and stored"
            )

    def print(self) -> int:
        """Print everything; return the exit code."""
        tunings = [tuning for tuning, _ in self.tuned]
        failed = sum(tuning["choice"] is None for tuning in tunings)
        refused = any(left["failed"] for left in self.left_out)
        disputed = sum(bool(tuning["disputed"]) for tuning in tunings)
        nothing = self.left_out and not tunings
        emit(self._data(), self._blocks(failed, disputed))
        wrong = failed or refused or nothing or (disputed and not self._allow_disputed)
        return 1 if wrong else 0

    def _data(self) -> dict[str, Any]:
        trials = [
            {
                **{name: tuning[name] for name in OF_TITLE},
                "config": config_words(row.config),
                "chosen": row.chosen,
                **outcome_data(row.outcome),
            }
            for tuning, rows in self.tuned
            for row in rows
        ]
        tunings = [
            {**tuning, "created": tuning["created"] and time_text(tuning["created"])}
            for tuning, _ in self.tuned
        ]
        return {
            "measured": self._measured,
            "tunings": tunings,
            "trials": trials,
            "not_begun": self.not_begun,
            "left_out": [
                {"call": left["words"], "reason": left["reason"]} for left in self.left_out
            ],
        }

    @property
    def _measured(self) -> int:
        return sum(tuning["measured"] for tuning, _ in self.tuned)

    def _blocks(self, failed: int, disputed: int) -> Iterator[Block]:
        for kernel in dict.fromkeys(tuning["kernel"] for tuning, _ in self.tuned):
            of_kernel = [each for each in self.tuned if each[0]["kernel"] == kernel]
            devices = {tuning["device"] for tuning, _ in of_kernel}
            names = ("shape", "dtype", "device")[: 2 + (len(devices) > 1)]
            yield heading(kernel)
            yield from summary_blocks([_summary(*each, names) for each in of_kernel])
        verdicts = failures([row for _, rows in self.tuned for row in rows])
        if verdicts:
            causes = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            yield f"configs that failed: {causes}; `safetune show KERNEL` says why"
        known = sum(bool(_news(tuning)) for tuning, _ in self.tuned)
        stored = sum(not (tuning["choice"] or tuning["measured"]) for tuning, _ in self.tuned)
        by_stored = f" ({stored} by stored outcomes: --force to measure again)" * bool(stored)
        parts = (
            (known, "already tuned (--force to measure again)"),
            (failed, f"without a working config{by_stored}"),
            (disputed, "with a disputed result"),
            (len(self.not_begun) + sum(left["failed"] for left in self.left_out), "not begun"),
            (self.left, "left to other processes, which tune them"),
        )
        done = f"{counted(len(self.tuned), 'tuning')}, {counted(self._measured, 'config')} measured"
        yield ", ".join([done, *(f"{count} {what}" for count, what in parts if count)])
        yield from map(_left_out_words, self.left_out)


def _left_out_words(left: Mapping[str, Any]) -> str:
    return f"not tuned: {left['words']}: {left['reason']}"


def _tell_tuned(name: str, facts: Mapping[str, Any]) -> None:
    words = "  ".join(facts[each] for each in (*OF_TITLE, "choice") if facts[each])
    news = _news(facts) or f"{facts['measured']} measured"
    echo(f"{name}: {words}  ({news})", err=True)


def _summary(tuning: Mapping[str, Any], rows: list[Row], names: Iterable[str]) -> Summary:
    call = {name: str(tuning[name]) for name in names}
    if tuning["choice"] is None:
        return Summary(call, rows, None, note="no config works")
    source = "" if any(row.chosen for row in rows) else origin_words(tuning["origin"])
    note = ", ".join(filter(None, (_news(tuning), source, "disputed" * bool(tuning["disputed"]))))
    return Summary(call, rows, tuning["config"], tuning["median_ms"], note)


def _news(tuning: Mapping[str, Any]) -> str:
    """The date of the tuning, if it was before this command."""
    is_old = tuning["choice"] is not None and not tuning["measured"]
    if is_old and tuning["pinned"]:
        return f"pinned {date(tuning['created'])}"
    return f"already tuned {date(tuning['created'])}" if is_old else ""
