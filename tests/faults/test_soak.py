"""Nine tunings of the soak, here; `make soak` runs three hundred."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_soak_leaves_nothing(fresh_process: Any, tmp_path: Path) -> None:
    fresh_process(ROOT / "benchmarks/soak.py", "--tunings", 9, "--out", tmp_path, timeout_s=240)
    (path,) = tmp_path.glob("*/soak.json")
    figures = json.loads(path.read_text())["figures"]
    assert figures["tunings"] == 9
    assert figures["faulty_configs"] == 18
