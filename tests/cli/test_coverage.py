"""`safetune coverage` and `tune --recorded --top`: by how often calls run, and for how long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from safetune.cli.coverage import _blocks
from safetune.offline import shares
from safetune.offline.coverage import Covered, Found
from safetune.show.tables import print_blocks
from safetune.store.local.store import Store
from safetune.store.records import CallCount, RecordedCall


def sixths(of: dict[str, float]) -> dict[str, int]:
    return {kind: round(share * 6) for kind, share in of.items() if share}


def test_a_recorded_run_is_covered_step_by_step(
    recorded: None,
    safetune: Any,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the second launch of a key was timed, so each launch counts as long as that one."""
    before = safetune.json("coverage")
    assert sixths(before["by_calls"]) == sixths(before["by_time"]) == {"nothing": 6}
    assert [call["calls"] for call in before["calls"]] == [2, 1, 1, 1, 1]

    tuned = safetune.json("tune", "--recorded", "--top", "0.3")

    assert [t["shape"] for t in tuned["tunings"]] == ["n=100, DTYPE=float32, ZERO=True"]
    assert tuned["left_out"] == [], "nor are those named that need not be tuned"
    after = safetune.json("coverage")
    assert sixths(after["by_calls"]) == {"exact": 2, "nearest": 1, "nothing": 3}
    assert sixths(after["by_time"]) == {"exact": 2, "nearest": 1, "nothing": 3}

    assert safetune("export", tmp_path / "packs").exit_code == 0
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("SAFETUNE_PACKS", str(tmp_path / "packs"))
    packed = safetune.json("coverage", "--calls", cache_dir / "safetune.db")
    assert sixths(packed["by_calls"]) == {"pack": 2, "nearest": 1, "nothing": 3}
    assert not (tmp_path / "new").exists()


def test_the_table(recorded: None, safetune: Any) -> None:
    safetune.json("tune", "--recorded", "--top", "0.3")

    lines = safetune("coverage").stdout.splitlines()

    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["kernel"][1:4] == ["keys", "calls", "time"]
    assert "pack" not in rows["kernel"], "no call has its choice from a pack"
    assert rows["kernel"][4:] == ["exact", "nearest", "nothing"]
    assert rows["scale"][1:3] == ["2", "3"]
    assert rows["scale"][5:] == ["66.7", "%", "33.3", "%", "0", "%"]
    assert rows["all"][1:3] == ["5", "6"]
    by_time = rows["all,"]
    assert by_time[:3] == ["all,", "by", "time"]
    assert by_time[-6:] == ["33.3", "%", "16.7", "%", "50", "%"]
    assert any(line.startswith("nearest: scale n=200 ") for line in lines)
    assert sum(line.startswith("nothing: ") for line in lines) == 3


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_is_one_at_every_width(
    recorded: None, safetune: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["coverage"], ["tune", "--recorded", "--dry-run"]):
        lines = safetune(*words).stdout.splitlines()
        (rule,) = [place for place, line in enumerate(lines) if line.startswith("───")]
        assert lines[rule - 1].startswith("kernel ")
        table = lines[rule - 1 : lines.index("", rule)]
        assert len(table) == 2 + (5 if words == ["coverage"] else 4), table
        assert max(map(len, table)) <= columns


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_long_names_are_cut_and_shares_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Regression: with every kind of choice, each cell of a terminal's table was an ellipsis."""
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ["chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "_layer_norm_fwd_1pass_kernel"]
    covered = [
        Covered(call(name, 1, 1.0, name), kind, 1, 1.0, problem="edited")
        for name in names
        for kind in (*Found, Found.EXACT)
    ]
    for each in covered:
        each.call.arguments["call"] = {"values": [], "dtypes": [], "options": []}

    print_blocks(_blocks(covered, []))

    heads, _, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    assert heads.split()[-5:] == ["exact", "pack", "nearest", "nothing", "changed"]
    assert [row.split()[-10::2] for row in rows] == [["33.3", *["16.7"] * 4]] * 4
    assert [row[:9] for row in rows] == ["chunk_gat", "_layer_no", "all      ", "all, by t"]
    assert max(map(len, rows)) <= columns


def test_a_share_that_is_asked_for(recorded: None, safetune: Any) -> None:
    """Two of six calls have a choice of their own; that of a near key does not count."""
    safetune.json("tune", "--recorded", "--top", "0.3")

    for percent, code in (("33.4", 1), ("33.3", 0), ("0", 0), ("100", 1)):
        result = safetune("coverage", "--fail-under", percent)
        assert result.exit_code == code
        assert ("33.3 % of the calls have a choice of their key" in result.stderr) == bool(code)
        as_json = safetune("coverage", "--json", "--fail-under", percent)
        assert as_json.exit_code == code
        assert sixths(json.loads(as_json.stdout)["by_calls"])["exact"] == 2


def test_calls_in_a_graph_are_said_to_count_once(
    recorded: None, safetune: Any, cache_dir: Path
) -> None:
    store = Store.open(cache_dir)
    first, *_ = store.calls()
    store.count_calls(CallCount(first.key, 3, captured=2))
    store.close()

    lines = " ".join(safetune("coverage").stdout.split())

    assert "2 calls went into CUDA graphs and count once" in lines
    counts = [(call["calls"], call["captured"]) for call in safetune.json("coverage")["calls"]]
    assert (5, 2) in counts
    assert sum(captured for _, captured in counts) == 2


def test_a_share_is_a_percentage(safetune: Any) -> None:
    result = safetune("coverage", "--fail-under", "101")
    assert result.exit_code == 2
    assert "101.0 is not in the range" in result.stderr


def test_without_recorded_calls(safetune: Any) -> None:
    assert safetune.error("coverage") == (
        "Error: no recorded call matches; run the program with SAFETUNE_MODE=record"
    )


def call(key: str, calls: int, each_ms: float | None = None, name: str = "k") -> RecordedCall:
    made = RecordedCall(key, name, "m:k", {}, 0.0)
    timed = 0 if each_ms is None else 4
    return made.counted(CallCount(key, calls, timed, 4 * (each_ms or 0.0)))


class TestShares:
    def test_calls_times_the_time_of_one(self) -> None:
        calls = [call("often", 90, 1.0), call("long", 1, 10.0)]
        assert shares.shares_of_time(calls) == {"often": 0.9, "long": 0.1}

    def test_a_key_that_was_never_timed_is_as_the_others_of_its_kernel(self) -> None:
        calls = [call("a", 1, 2.0), call("b", 1, 4.0), call("other", 1, 9.0, "l"), call("c", 2)]
        assert shares.times_ms(calls)["c"] == 6.0
        assert shares.times_ms([*calls, call("d", 1, None, "m")])["d"] == 5.0, "as all"

    @pytest.mark.parametrize("each_ms", [0.0, -1.0])
    def test_where_no_clock_shows_a_time_calls_count(self, each_ms: float) -> None:
        """A median that falls after `safetune clear` leaves a time below zero."""
        calls = [call("a", 3, each_ms), call("b", 1, each_ms)]
        assert shares.shares_of_time(calls) == pytest.approx({"a": 0.75, "b": 0.25})
        assert [each.key for each in shares.top(calls, 0.7)] == ["a"]

    def test_where_nothing_was_timed_calls_count(self) -> None:
        assert shares.shares_of_time([call("a", 3), call("b", 1)]) == {"a": 0.75, "b": 0.25}

    @pytest.mark.parametrize(
        ("share", "kept"), [(0.5, "c"), (0.51, "ca"), (0.8, "ca"), (0.81, "cab"), (1.0, "cab")]
    )
    def test_the_fewest_keys_that_make_a_share(self, share: float, kept: str) -> None:
        calls = [call("a", 3, 1.0), call("b", 2, 1.0), call("c", 5, 1.0)]
        assert "".join(each.key for each in shares.top(calls, share)) == kept
