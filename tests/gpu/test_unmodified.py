"""FLA's layers under `safetune run`, unmodified, against the same under triton.autotune."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

RUN = "import sys; from safetune.cli import main; sys.argv[0] = 'safetune'; main()"


def test_fla_forward_and_backward(fresh_process: Any, scripts: Path, tmp_path: Path) -> None:
    """Layer norm, GLA's chunks and the delta rule: the same results, all tuned in a child, and a
    second process that tunes nothing."""
    pytest.importorskip("fla", reason="needs fla-core")
    script = scripts / "fla_layers.py"
    files = {name: tmp_path / f"{name}.pt" for name in ("stock", "ours")}

    stock = fresh_process(script, files["stock"], timeout_s=400)
    assert stock.returncode == 0, stock.stderr[-4000:]
    ours = fresh_process(RUN, "run", script, files["ours"], timeout_s=400)
    assert ours.returncode == 0, ours.stderr[-4000:]
    again = fresh_process(RUN, "run", script, timeout_s=200)
    assert again.returncode == 0, again.stderr[-4000:]

    expected, got = (torch.load(files[name]) for name in ("stock", "ours"))
    assert set(expected) == set(got)
    for name, want in expected.items():
        scale = want.float().abs().max().item() or 1.0
        error = (got[name].float() - want.float()).abs().max().item() / scale
        assert error < 2e-2, f"{name}: off by {error:.1e} of its largest value"

    def tunings(done: Any) -> int:
        found = re.search(r"(\d+) tunings", done.stderr)
        assert found, f"no report on stderr:\n{done.stderr[-2000:]}"
        return int(found[1])

    assert tunings(ours) > 5, ours.stderr[-2000:]
    assert tunings(again) == 0, again.stderr[-4000:]
    print(
        json.dumps(
            {
                "stock": json.loads(stock.stdout.splitlines()[-1]),
                "ours": json.loads(ours.stdout.splitlines()[-1]),
                "again": json.loads(again.stdout.splitlines()[-1]),
                "report": re.findall(r"^safetune: .*", ours.stderr, re.MULTILINE),
            }
        )
    )
