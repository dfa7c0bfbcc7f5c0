"""From a card to files and back: recorded, tuned offline, exported, launched frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.packs import exchange

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys
starts = []
sys.addaudithook(lambda event, args: starts.append(str(args)) if event in (
    "subprocess.Popen", "os.fork", "os.posix_spawn") and "worker_main" in str(args) else None)
import torch, triton, triton.language as tl
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"])
@triton.jit
def copied_kernel(out, x, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < n)
    tl.store(out + offset, value.to(DTYPE), mask=offset < n)

if __name__ == "__main__":
    n = 4096
    memory = torch.randn(n + 64, device="cuda")
    out = torch.empty(n, device="cuda", dtype=torch.float16)
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
    copied_kernel[grid](out, memory[16 : n + 16], n, DTYPE=tl.float16)
    assert torch.equal(out, memory[16 : n + 16].half())
    print(json.dumps([copied_kernel.best_config.kwargs["BLOCK"], starts]))
"""


def test_recorded_tuned_exported_and_frozen(
    fresh_process: FreshProcess, tmp_path: Path, cache_dir: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(what: Any, *args: object, **env: str) -> str:
        done = fresh_process(what, *args, env=env, ends=None)
        assert done.returncode == 0, f"{what} {args} {env}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    assert json.loads(run(script, SAFETUNE_MODE="record")) == [128, []]
    command = "import sys; from safetune.cli import main; main(sys.argv[1:])"
    tuned = json.loads(run(command, "tune", "--recorded", script, "--json"))
    assert tuned["left_out"] == []
    assert [tuning["measured"] for tuning in tuned["tunings"]] == [3], tuned
    verdicts = [trial["label"] for trial in tuned["trials"]]
    assert verdicts == ["ok"] * 3, tuned["trials"]

    (choice,) = exchange.collect(cache_dir).entries
    assert choice.key.device["name"] != "interpreter"
    run(command, "export", tmp_path / "packs")
    (pack,) = (tmp_path / "packs").iterdir()

    nowhere = tmp_path / "nowhere"
    frozen = {"SAFETUNE_MODE": "frozen", "SAFETUNE_CACHE_DIR": str(nowhere)}
    block, starts = json.loads(run(script, SAFETUNE_PACKS=str(tmp_path / "packs"), **frozen))
    assert (block, starts) == (choice.choice.config["BLOCK"], []), pack.read_text()
    assert not nowhere.exists()
