"""What `safetune tune` prints at the end: the tunings of its process and of its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from safetune.cli import workers
from safetune.cli.output import (
    Elsewhere,
    Row,
    counted,
    date,
    echo,
    outcome_data,
    print_json,
    print_outcomes,
    stdout_console,
)

if TYPE_CHECKING:
    from safetune.offline.plan import Planned
    from safetune.offline.replay import LeftOut
    from safetune.offline.shards import Turn
    from safetune.tuning.requests import TuningResult

OF_TITLE = ("kernel", "shape", "dtype")


class Report:
    """The finished tunings, printed at the end."""

    def __init__(
        self, allow_disputed: bool, tell: Callable[[workers.Event], None] | None = None
    ) -> None:
        """Collect; a worker has a function that tells its parent."""
        self._allow_disputed = allow_disputed
        self._tell = tell
        self.tuned: list[workers.Tuned] = []
        self.left_out: list[LeftOut] = []
        self._told: list[workers.LeftOut] = []
        self.left = 0  # to other shards
        self._planned = 0

    def begin(self, planned: int) -> None:
        """Note how many tunings there are, and which recorded calls are not among them."""
        self._planned = planned
        if self._tell is not None:
            left_out = [{"words": left.words, "reason": left.reason} for left in self.left_out]
            self._tell({"planned": planned, "left_out": left_out})

    def take(self, name: str, event: workers.Event) -> None:
        """Note what a worker tells."""
        if "planned" in event:
            self._planned = event["planned"]
            self._told = [workers.LeftOut(**each) for each in event["left_out"]]
            return
        known = len(self.tuned)
        self.tuned = workers.merged(self.tuned, workers.tuned_in(event))
        facts = self.tuned[-1][0]
        if len(self.tuned) > known or event["facts"]["measured"]:
            words = "  ".join(facts[each] for each in (*OF_TITLE, "choice") if facts[each])
            echo(f"{len(self.tuned)}/{self._planned} {name}: {words}  ({_news(facts)})", err=True)

    def add(
        self,
        turn: Turn[Planned],
        rows: list[Row],
        measured: int,
        result: TuningResult | None = None,
    ) -> None:
        """Note a finished tuning; without a result no config works.

        A shard notes its own, and what it has tuned; a worker all: the one that has tuned a key may
        have died before it could tell.
        """
        if not (measured or turn.is_own or self._tell):
            return
        from safetune.config import config_text
        from safetune.offline.tasks import open_tuning_store

        sketch = turn.item.sketch
        facts: dict[str, Any] = {name: getattr(sketch, name) for name in OF_TITLE}
        facts |= {"device": sketch.request.key.device.name, "key": turn.item.key}
        facts |= {"measured": measured, "choice": None, "disputed": ""}
        facts["created"] = None if result is None else result.stored.created
        facts["phases"] = {} if result is None else dict(result.phases)
        elsewhere = None
        if result is not None:
            choice, stored = config_text(result.choice), result.stored
            facts |= {"choice": choice, "disputed": stored.dispute}
            if not any(chosen for _, _, chosen in rows):
                origin = open_tuning_store().origin(stored)
                elsewhere = Elsewhere(choice, origin, stored.median_ms)
        self.tuned.append((facts, rows, elsewhere))
        if self._tell is not None:
            self._tell(workers.event_of(self.tuned[-1]))

    def print(self, as_json: bool) -> int:
        """Print everything; return the exit code."""
        tunings = [tuning for tuning, _, _ in self.tuned]
        measured = sum(tuning["measured"] for tuning in tunings)
        failed = sum(tuning["choice"] is None for tuning in tunings)
        disputed = sum(bool(tuning["disputed"]) for tuning in tunings)
        every_left_out: list[LeftOut | workers.LeftOut] = [*self.left_out, *self._told]
        nothing = every_left_out and not tunings
        code = 1 if failed or nothing or (disputed and not self._allow_disputed) else 0
        if self._tell is not None:
            return code
        if as_json:
            trials = [
                {
                    **{name: tuning[name] for name in OF_TITLE},
                    "config": config,
                    "chosen": chosen,
                    **outcome_data(outcome),
                }
                for tuning, rows, _ in self.tuned
                for config, outcome, chosen in rows
            ]
            left_out = [{"call": left.words, "reason": left.reason} for left in every_left_out]
            data = {"measured": measured, "tunings": tunings, "trials": trials}
            print_json({**data, "left_out": left_out})
            return code
        console = stdout_console()
        alike = len({tuning["device"] for tuning in tunings}) == 1
        for tuning, rows, elsewhere in self.tuned:
            names = OF_TITLE if alike else (*OF_TITLE, "device")
            title = "  ".join((*(tuning[name] for name in names), f"({_news(tuning)})"))
            print_outcomes(console, title, rows, elsewhere)
        already = sum(_is_already_tuned(tuning) for tuning in tunings)
        console.print(
            f"{counted(len(tunings), 'tuning')}, {counted(measured, 'config')} measured"
            + (f", {already} already tuned" if already else "")
            + (f", {failed} without a working config" if failed else "")
            + (f", {disputed} with a disputed result" if disputed else "")
            + (f", {self.left} left to other shards" if self.left else "")
        )
        for left in every_left_out:
            console.print(f"not tuned: {left.words}: {left.reason}")
        return code


def _is_already_tuned(tuning: Mapping[str, Any]) -> bool:
    return tuning["choice"] is not None and not tuning["measured"]


def _news(tuning: Mapping[str, Any]) -> str:
    """What this run did for a tuning."""
    if not _is_already_tuned(tuning):
        return f"{tuning['measured']} measured"
    return f"already tuned {date(tuning['created'])}, --force to measure again"
