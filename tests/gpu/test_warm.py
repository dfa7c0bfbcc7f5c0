"""A frozen program after `safetune warm` compiles nothing, from its first launch on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.gpu

KERNELS = Path(__file__).parents[1] / "offline" / "programs"


@pytest.fixture
def command(fresh_process: FreshProcess) -> Any:
    """`safetune …` in a process of its own, with --json."""

    def run(*words: object, **env: str) -> Any:
        done = fresh_process(
            "import sys; from safetune.cli import main; sys.argv[0] = 'safetune'; main()",
            *(*words, "--json"),
            env=env,
            cwd=KERNELS,
        )
        return json.loads(done.stdout)

    return run


@pytest.fixture
def frozen(fresh_process: FreshProcess, scripts: Path) -> Any:
    def run(*words: object, **env: str) -> Any:
        env = {"SAFETUNE_MODE": "frozen", "PYTHONWARNINGS": "ignore", **env}
        done = fresh_process(scripts / "frozen_after_warm.py", KERNELS, *words, env=env)
        found = json.loads(done.stdout)
        assert found["right"] == [True, True]
        assert found["tunings"] == 0
        return found

    return run


def test_a_program_that_was_compiled_without_a_gpu_compiles_nothing(
    command: Any, frozen: Any, tmp_path: Path
) -> None:
    command("tune", "warm_kernels.py", "--dtype", "float16")
    frozen(SAFETUNE_MODE="record", TRITON_CACHE_DIR=str(tmp_path / "recorded"))
    cold = frozen(TRITON_CACHE_DIR=str(tmp_path / "cold"))
    assert cold["compilations"] == [False] * 3, "the binaries are not there by chance"

    warm_cache = {"TRITON_CACHE_DIR": str(tmp_path / "warm")}
    without_gpu = {**warm_cache, "CUDA_VISIBLE_DEVICES": ""}
    declared = command("warm", "warm_kernels.py", "--dtype", "float16", **without_gpu)["compiled"]
    assert [(c["origin"], c["was_there"], c["error"]) for c in declared] == [
        ("stored", False, "")
    ] * 2
    (recorded,) = command("warm", "--recorded", "warm_kernels:fill", **without_gpu)["compiled"]
    assert recorded["origin"] == "fallback"

    first = frozen(**warm_cache)
    assert first["compilations"] == [True] * 3, "0 compilations: each is found in the disk cache"
    served = frozen("--preload", **warm_cache)
    assert served["compilations"] == [True] * 3
    assert served["hooks"] == [], "nothing to refuse once a server watches for compilations"
