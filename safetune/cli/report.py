"""What `safetune tune` prints at the end: the tunings of its process and of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from safetune.cli.output import (
    config_words,
    counted,
    date,
    describe,
    echo,
    left_out_data,
    outcome_data,
    print_json,
    source_words,
    stdout_console,
)
from safetune.cli.trials import Row, Summary, failures, print_summary, print_trials
from safetune.cli.workers import Event
from safetune.errors import NoWorkingConfig, SafetuneError
from safetune.outcome import Mark, Outcome

if TYPE_CHECKING:
    from triton import Config

    from safetune.offline.plan import Plan, Planned
    from safetune.offline.shards import Turn
    from safetune.offline.tasks import Task
    from safetune.tuning.requests import TuningResult

OF_TITLE = ("kernel", "shape", "dtype")

_name = itemgetter("key", "shape", "dtype")


class Report:
    """The finished tunings, printed at the end: for each its facts, and a row for each config.

    With `everything`, every config is printed. A worker has a function that tells its parent.
    """

    def __init__(
        self,
        allow_disputed: bool,
        everything: bool = False,
        tell: Callable[[Event], None] | None = None,
    ) -> None:
        self._allow_disputed = allow_disputed
        self._everything = everything
        self.tell = tell
        self.tuned: list[tuple[dict[str, Any], list[Row]]] = []
        #: Recorded calls, each in `words`, with the `reason`, and whether they `failed`.
        self.left_out: list[Any] = []
        self.left = 0  # to other shards
        self._not_begun: dict[tuple[str, ...], dict[str, str]] = {}
        self._planned = 0

    def begin(self, plan: Plan) -> None:
        """Note how many tunings there are, and which recorded calls are not among them."""
        self._planned = len(plan.tunings)
        if self.tell is not None:
            names = ("words", "reason", "failed")
            left_out = [{name: getattr(left, name) for name in names} for left in self.left_out]
            self.tell({"planned": self._planned, "new": plan.new, "left_out": left_out})
        elif plan.tunings:  # it may take hours until the end says it
            _tell_left_out(self.left_out)

    def take(self, name: str, event: Event) -> None:
        """Note what a worker tells.

        A tuning that one worker began and another one finished is one, with the configs of both.
        """
        if "planned" in event:
            self._planned = event["planned"]
            told = [SimpleNamespace(**each) for each in event["left_out"]]
            _tell_left_out(left for left in told if left not in self.left_out)
            self.left_out = told
        if "not_begun" in event:
            self._not_begun[_name(event["not_begun"])] = event["not_begun"]
        if "facts" not in event:
            return
        import msgspec

        told = event["facts"]
        rows = [Row(c, msgspec.convert(o, Outcome), chosen) for c, o, chosen in event["trials"]]
        same = [each for each in self.tuned if _name(each[0]) == _name(told)]
        best, rows = max([*same, (told, rows)], key=lambda each: each[0]["measured"])
        measured = told["measured"] + sum(each["measured"] for each, _ in same)
        facts = {**best, "measured": measured}
        self.tuned = [each for each in self.tuned if _name(each[0]) != _name(told)]
        self.tuned.append((facts, rows))
        if told["measured"] or not same:
            words = "  ".join(facts[each] for each in (*OF_TITLE, "choice") if facts[each])
            news = _news(facts) or f"{measured} measured"
            echo(f"{len(self.tuned)}/{self._planned} {name}: {words}  ({news})", err=True)

    def add(self, turn: Turn[Planned], result: TuningResult) -> None:
        """Note a finished tuning, also of another shard."""
        from safetune.config import config_record
        from safetune.offline.tasks import open_tuning_store

        stored, config = result.stored, config_record(result.choice)
        facts = {
            "choice": config_words(config),
            "disputed": stored.dispute,
            "created": stored.created,
            "phases": dict(result.phases),
            "config": config,
            "median_ms": stored.median_ms,
            "origin": open_tuning_store().origin(stored),
        }
        self._add(turn, facts, result.outcomes, result.measured, result.choice)

    def add_failed(self, turn: Turn[Planned], task: Task, error: NoWorkingConfig) -> None:
        """Note a tuning without a working config."""
        from safetune.config import config_text

        declared = {config_text(config): config for config in task.kernel.tuner.configs}
        outcomes = [(declared[text], o) for text, o in error.outcomes if text in declared]
        facts: dict[str, Any] = {"choice": None, "disputed": "", "created": None, "phases": {}}
        self._add(turn, facts, outcomes, error.measured)

    def add_not_begun(self, turn: Turn[Planned], error: Exception) -> None:
        """Note a tuning that could not begin; another worker may still make it."""
        sketch, reason = turn.item.sketch, describe(error)
        echo(f"not tuned: {sketch.words}: {reason}", err=True)
        names = {name: getattr(sketch, name) for name in OF_TITLE}
        told = {**names, "key": turn.item.key, "reason": reason}
        self._not_begun[_name(told)] = told
        if self.tell is not None:
            self.tell({"not_begun": told})

    @property
    def not_begun(self) -> list[dict[str, str]]:
        """The tunings that no process could begin, and why."""
        tuned = {_name(facts) for facts, _ in self.tuned}
        return [told for name, told in self._not_begun.items() if name not in tuned]

    def check_begun(self) -> None:
        """Raise `SafetuneError` if no worker could begin a tuning."""
        if words := [" ".join(map(told.__getitem__, OF_TITLE)) for told in self.not_begun]:
            raise SafetuneError(
                f"{counted(len(words), 'tuning')} could not begin, for the reasons above: "
                f"{', '.join(words)}; the rest of the list is done and stored"
            )

    def _add(
        self,
        turn: Turn[Planned],
        facts: Mapping[str, Any],
        outcomes: Iterable[tuple[Config, Outcome]],
        measured: int,
        choice: Config | None = None,
    ) -> None:
        """A shard notes its own, and what it has tuned; a worker all: the one that has tuned a key
        may have died before it could tell.
        """
        if not (measured or turn.is_own or self.tell):
            return
        from safetune.config import config_record

        sketch, rows = turn.item.sketch, []
        names = {name: getattr(sketch, name) for name in OF_TITLE}
        names |= {"device": sketch.request.key.device.name, "key": turn.item.key}
        for number, (config, outcome) in enumerate(outcomes):  # in the order of the declared ones
            marked = outcome.unmarked(Mark.FIRST).with_marks([Mark.FIRST.value] * (number == 0))
            rows.append(Row(config_record(config), marked, config is choice))
        of_turn = {**names, "measured": measured, **facts}
        self.tuned.append((of_turn, rows))
        if self.tell is not None:
            trials = [[row.config, outcome_data(row.outcome), row.chosen] for row in rows]
            self.tell({"facts": of_turn, "trials": trials})

    def print(self, as_json: bool) -> int:
        """Print everything; return the exit code."""
        tunings = [tuning for tuning, _ in self.tuned]
        failed = sum(tuning["choice"] is None for tuning in tunings)
        refused = any(left.failed for left in self.left_out)
        disputed = sum(bool(tuning["disputed"]) for tuning in tunings)
        nothing = self.left_out and not tunings
        if self.tell is None and as_json:
            print_json(self._data())
        elif self.tell is None:
            self._print(stdout_console(), failed, disputed)
            _tell_left_out(self.left_out, err=False)
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
        return {
            "measured": self._measured,
            "tunings": [tuning for tuning, _ in self.tuned],
            "trials": trials,
            "not_begun": self.not_begun,
            "left_out": left_out_data(self.left_out),
        }

    @property
    def _measured(self) -> int:
        return sum(tuning["measured"] for tuning, _ in self.tuned)

    def _print(self, console: Console, failed: int, disputed: int) -> None:
        if self._everything:
            for tuning, rows in self.tuned:
                _print_all(console, tuning, rows)
        else:
            for kernel in dict.fromkeys(tuning["kernel"] for tuning, _ in self.tuned):
                of_kernel = [each for each in self.tuned if each[0]["kernel"] == kernel]
                devices = {tuning["device"] for tuning, _ in of_kernel}
                names = ("shape", "dtype", "device")[: 2 + (len(devices) > 1)]
                print_summary(console, kernel, [_summary(*each, names) for each in of_kernel])
        verdicts = failures([row for _, rows in self.tuned for row in rows])
        if verdicts:
            causes = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            hint = "" if self._everything else "; --all says why"
            console.print(f"configs that failed: {causes}{hint}")
        known = sum(bool(_news(tuning)) for tuning, _ in self.tuned)
        stored = sum(not (each["choice"] or each["measured"]) for each, _ in self.tuned)
        not_begun = len(self.not_begun) + sum(left.failed for left in self.left_out)
        console.print(
            f"{counted(len(self.tuned), 'tuning')}, {counted(self._measured, 'config')} measured"
            + (f", {known} already tuned (--force to measure again)" if known else "")
            + (f", {failed} without a working config" if failed else "")
            + (f" ({stored} by stored outcomes: --force to measure again)" if stored else "")
            + (f", {disputed} with a disputed result" if disputed else "")
            + (f", {not_begun} not begun" if not_begun else "")
            + (f", {self.left} left to other shards" if self.left else "")
        )


def _tell_left_out(left_out: Iterable[Any], err: bool = True) -> None:
    for left in left_out:
        echo(f"not tuned: {left.words}: {left.reason}", err=err)


def _print_all(console: Console, tuning: Mapping[str, Any], rows: list[Row]) -> None:
    summary = _summary(tuning, rows)
    title = "  ".join(summary.call.values())
    note = summary.note or f"{tuning['measured']} measured"
    console.print(f"{title}  ({note})", style="bold", soft_wrap=True)
    if tuning["choice"] and not any(row.chosen for row in rows):
        print_summary(console, "", [summary])
    print_trials(console, rows)


def _summary(
    tuning: Mapping[str, Any], rows: list[Row], names: Iterable[str] = OF_TITLE
) -> Summary:
    call = {name: str(tuning[name]) for name in names}
    if tuning["choice"] is None:
        return Summary(call, rows, None, note="no config works")
    made_here = any(row.chosen for row in rows)
    source = "" if made_here else source_words(tuning["origin"])
    note = ", ".join(filter(None, (_news(tuning), source, "disputed" * bool(tuning["disputed"]))))
    return Summary(call, rows, tuning["config"], tuning["median_ms"], note)


def _news(tuning: Mapping[str, Any]) -> str:
    """When it was tuned, if before this command."""
    is_old = tuning["choice"] is not None and not tuning["measured"]
    return f"already tuned {date(tuning['created'])}" if is_old else ""
