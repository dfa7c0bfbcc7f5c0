"""`safetune coverage` and `tune --recorded --top`: by how often calls run, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safetune.cli.coverage import _blocks
from safetune.offline.coverage import Covered, Found
from safetune.show.tables import print_blocks
from safetune.store.local.store import Store
from safetune.store.records import CallCount, RecordedCall


def sixths(of: dict[str, float]) -> dict[str, int]:
    return {kind: round(share * 6) for kind, share in of.items() if share}


def test_a_recorded_run_is_covered_step_by_step(
    recorded: None, safetune: Any, cache_dir: Path, tmp_path: Path
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
    safetune.use_store("new")
    safetune.set(SAFETUNE_PACKS=tmp_path / "packs")
    packed = safetune.json("coverage", "--calls", cache_dir / "safetune.db")
    assert sixths(packed["by_calls"]) == {"pack": 2, "nearest": 1, "nothing": 3}
    assert not (tmp_path / "new").exists()


def test_the_table(recorded: None, safetune: Any) -> None:
    safetune.json("tune", "--recorded", "--top", "0.3")

    lines = safetune("coverage").stdout.splitlines()

    rows = [" ".join(line.split()) for line in lines]
    assert rows[1] == "kernel keys calls time exact nearest nothing", "no call is of a pack"
    assert rows[3].startswith("scale 2 3 ")
    assert rows[3].endswith(" 66.7 % 33.3 % 0 %")
    assert rows[6].startswith("all 5 6 ")
    assert rows[7].startswith("all, by time 5 6 ")
    assert rows[7].endswith(" 33.3 % 16.7 % 50 %")
    assert any(line.startswith("nearest: scale n=200 ") for line in lines)
    assert sum(line.startswith("nothing: ") for line in lines) == 3


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_long_names_are_cut_and_shares_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Regression: with every kind of choice, each cell of a terminal's table was an ellipsis."""
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ["chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "_layer_norm_fwd_1pass_kernel"]
    arguments = {"call": {"values": [], "dtypes": [], "options": []}}
    covered = [
        Covered(RecordedCall(name, name, "m:k", arguments, 0.0), kind, 1, 1.0, problem="edited")
        for name in names
        for kind in (*Found, Found.EXACT)
    ]

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
        as_json = safetune.json("coverage", "--fail-under", percent, code=code)
        assert sixths(as_json["by_calls"])["exact"] == 2


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
