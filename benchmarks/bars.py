"""Every bar and aim of bars.toml beside the measured figure: met, missed, or absent.

Exits 1 when one is missed or absent. Needs nothing installed, and Python 3.11 or newer.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recording

BARS = Path(__file__).resolve().with_name("bars.toml")
DEVICE = "NVIDIA_H100_80GB_HBM3"
BETTER = ("smaller", "greater")


@dataclass(frozen=True)
class Bar:
    """One figure of one benchmark, and what it must and should reach.

    Attributes:
        better: `smaller` or `greater`.
        bar: the value that must be reached; None where there is an aim only.
        aim: the value that is meant to be reached; None where there is a bar only.
        device: whose figure counts where the card that is asked about has none.
    """

    group: str
    bench: str
    figure: str
    better: str
    bar: float | None = None
    aim: float | None = None
    device: str = ""

    def verdict(self, value: float | None) -> str:
        """Return `met`, `missed` or `absent`; `no bar` where there is an aim only."""
        if value is None:
            return "absent"
        if self.bar is None:
            return "no bar"
        return "met" if self._reaches(value, self.bar) else "missed"

    def reached(self, value: float | None) -> str:
        """Return whether the aim is reached, as `yes` or `no`; empty without a figure or an aim."""
        if value is None or self.aim is None:
            return ""
        return "yes" if self._reaches(value, self.aim) else "no"

    def _reaches(self, value: float, limit: float) -> bool:
        return value <= limit if self.better == "smaller" else value >= limit


def load(path: Path = BARS) -> list[Bar]:
    """Return every bar of a file; raises `ValueError` naming what makes no sense in it."""
    if sys.version_info < (3, 11):
        sys.exit("the bars are in TOML, which Python reads since 3.11: make env PYTHON=python3.11")
    import tomllib

    groups = tomllib.loads(path.read_text(encoding="utf-8"))
    bars = [
        _bar(group, bench, figure, limits)
        for group, benches in groups.items()
        for bench, figures in benches.items()
        for pattern, limits in figures.items()
        for figure in expand(pattern)
    ]
    names = [(bar.bench, bar.figure) for bar in bars]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: in there more than once: {sorted(twice)}")
    return bars


def _bar(group: str, bench: str, figure: str, limits: Mapping[str, Any]) -> Bar:
    if limits.get("better") not in BETTER or not {"bar", "aim"} & set(limits):
        raise ValueError(f"{bench}.{figure}={limits} needs a bar or an aim, and better={BETTER}")
    bar = Bar(group, bench, figure, **limits)
    if bar.bar is not None and bar.aim is not None and bar.reached(bar.bar) == "yes":
        raise ValueError(f"{bench}.{figure}={limits}: the aim must be further than the bar")
    return bar


def expand(pattern: str) -> Iterator[str]:
    """Yield the names that a pattern with braces stands for, as a shell would."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", pattern)]
    return map("".join, itertools.product(*pieces))


def report(bars: Sequence[Bar], folder: Path) -> list[dict[str, Any]]:
    """Return one line for each bar, against the results in a device's folder."""
    lines = []
    for bar in bars:
        value = recording.stored_figures(folder, bar.bench).get(bar.figure)
        if value is None and bar.device:
            value = recording.stored_figures(folder.parent / bar.device, bar.bench).get(bar.figure)
        lines.append(
            {
                "group": bar.group,
                "benchmark": bar.bench,
                "figure": bar.figure,
                "value": _text(value),
                "bar": _limit(bar.better, bar.bar),
                "verdict": bar.verdict(value),
                "aim": _limit(bar.better, bar.aim),
                "reached": bar.reached(value),
            }
        )
    return lines


def _limit(better: str, value: float | None) -> str:
    return "" if value is None else f"{'<=' if better == 'smaller' else '>='} {value:g}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when a bar is missed or a figure absent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: every group")
    parser.add_argument("--results", type=Path, default=recording.RESULTS, metavar="DIR")
    parser.add_argument("--device", default=DEVICE, help="a folder in it; default: the H100's")
    options = parser.parse_args(argv)
    bars = load()
    known = list(dict.fromkeys(bar.group for bar in bars))
    if unknown := [group for group in options.groups if group not in known]:
        parser.error(f"no group {', '.join(unknown)}; there are: {', '.join(known)}")
    wanted = [bar for bar in bars if bar.group in (options.groups or known)]
    lines = report(wanted, options.results / options.device)
    print(recording.table(lines, list(lines[0])))
    counts = {
        verdict: sum(line["verdict"] == verdict for line in lines)
        for verdict in ("met", "missed", "absent")
    }
    print(f"\n{options.device}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return int(counts["missed"] + counts["absent"] > 0)


if __name__ == "__main__":
    sys.exit(main())
