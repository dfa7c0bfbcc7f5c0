"""The page of `show --html`: what it says, and that it needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from safetune.outcome import Outcome, Timing, Verdict
from safetune.show.keys import Entry, StoredKey
from safetune.show.page import page
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

CARD = {"name": "NVIDIA H100 80GB HBM3", "capability": 90, "sm_count": 132}


def stored(length: int, *outcomes: Outcome) -> StoredKey:
    """A key whose configs have these outcomes; the first one is chosen."""
    call = {"values": [["M", length]], "dtypes": [["x", "float16"]], "options": []}
    toolchain = {"triton": "3.9.0", "target": "cuda:90"}
    key = KeyRecord(f"{length:032x}", "gemm", "ab" * 16, "/k.py", 7, "d", CARD, toolchain, call)
    configs = [{"BLOCK": 16 << place, "num_warps": 4} for place in range(len(outcomes))]
    trials = tuple(
        TrialRecord(key.digest, f"{place}", config, 1, outcome, 1.7e9)
        for place, (config, outcome) in enumerate(zip(configs, outcomes, strict=True))
    )
    timing = outcomes[0].timing
    assert timing is not None
    chosen = ("0", configs[0], "declared", timing.median_ms, len(outcomes), 1.7e9)
    return StoredKey(key, trials, Entry(key, ChoiceRecord(key.digest, 1, *chosen), ""))


def ran(ms: float) -> Outcome:
    return Outcome(Verdict.OK, Timing(ms, ms, ms, 50, "final"))


class Page(HTMLParser):
    """The rows of its table, its bars in percent, and its other texts by class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.bars: list[float] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}, "it needs no other file"
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "i":
            self.bars.append(float(re.findall(r"[\d.]+", dict(attrs)["style"] or "")[0]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "every tag is closed"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)
        elif data.strip():
            self.texts.append(data.strip())


@pytest.fixture
def shown() -> Page:
    failed = Outcome(Verdict.COMPILE_ERROR, message="at 1:2:\nx = <script>alert(1)</script> & y")
    return Page(page("gemm", [stored(64, ran(1.0), ran(4.0)), stored(512, ran(2.0), failed)]))


def test_choices_over_shapes_times_and_failures(shown: Page) -> None:
    assert shown.rows == [
        ["M", "BLOCK", "num_warps", "time", "failed"],
        ["64", "16", "4", "1 ms"],
        ["512", "16", "4", "2 ms", "1"],
    ]
    assert "In all rows: dtype=float16" in shown.texts
    assert shown.bars == [17.5, 70.0, 70.0], "as long as each time of the key"
    assert "compile_error: x = <script>alert(1)</script> & y" in shown.texts
    assert "BLOCK=32 num_warps=4" in shown.texts
    assert "NVIDIA H100 80GB HBM3" in shown.texts
    assert shown.open == []
    assert "script" not in shown.open
