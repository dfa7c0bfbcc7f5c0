"""`safetune coverage` and `tune --recorded --top`: by how often calls run, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.offline import shares
from safetune.store.records import CallCount, RecordedCall

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


@pytest.fixture
def recorded(fresh_process: FreshProcess, targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six launches of `targets/recorded.py`: two of one key of `scale`, one of five other keys."""
    env = {"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"}
    done = fresh_process("import recorded; recorded.call_all()", env=env, cwd=targets)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(targets)


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

    assert safetune("pack", tmp_path / "packs").exit_code == 0
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
    assert "66.7 % / 66.7 % 0 % / 0 % 33.3 % / 33.3 %" in " ".join(" ".join(lines).split())
    assert rows["scale"][1:3] == ["2", "3"]
    assert rows["all"][1:3] == ["5", "6"]
    assert any(line.startswith("nearest: scale n=200 ") for line in lines)
    assert sum(line.startswith("nothing: ") for line in lines) == 3


def test_without_recorded_calls(safetune: Any) -> None:
    assert safetune.error("coverage") == (
        "Error: no call is recorded; run the program with SAFETUNE_MODE=record"
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
