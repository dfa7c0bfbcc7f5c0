"""`safetune warm` for an H100, on a machine without one; then a program on a card that stands in.

All that the program does up to the launch is Triton's own: what it finds in the disk cache, a
program on an H100 finds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import check_json

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

PROGRAMS = Path(__file__).with_name("programs")

CHOSEN = [
    ("256 float16", "BLOCK=128 num_warps=4 num_stages=3", "stored"),
    ("301 float16", "BLOCK=128 num_warps=2 num_stages=3", "stored"),
]


@pytest.fixture
def compiled(tmp_path: Path) -> dict[str, str | None]:
    """What a frozen program has in its environment, with a compile cache that is empty at first."""
    cache = str(tmp_path / "compiled")
    return {"TRITON_INTERPRET": None, "SAFETUNE_MODE": "frozen", "TRITON_CACHE_DIR": cache}


@pytest.fixture
def card(fresh_process: FreshProcess, compiled: dict[str, str | None]) -> Any:
    """A function that runs `programs/card.py` and returns what it prints."""

    def run(*words: str, **env: str) -> Any:
        env = {**compiled, "PYTHONWARNINGS": "ignore", **env}
        done = fresh_process(PROGRAMS / "card.py", *words, env=env, warm=True)
        return json.loads(done.stdout) if done.stdout else None

    return run


#: Each line of arguments is a command; what it prints is one document of a list.
COMMANDS = """
import json, sys
from click.testing import CliRunner
from safetune.cli import main
results = [CliRunner().invoke(main, [*line.split(), "--json"]) for line in sys.argv[1:]]
print(json.dumps([{**json.loads(r.stdout), "code": r.exit_code} for r in results]))
"""


@pytest.fixture
def warm(fresh_process: FreshProcess, compiled: dict[str, str | None]) -> Any:
    """`safetune warm …`, several in a process that has no GPU and interprets nothing."""

    def run(*lines: str) -> Any:
        words = [f"warm {line}" for line in lines]
        done = fresh_process(COMMANDS, *words, env=compiled, cwd=PROGRAMS, warm=True)
        return json.loads(done.stdout)

    return run


def test_a_frozen_program_finds_every_binary_from_its_first_launch(
    card: Any, warm: Any, tmp_path: Path
) -> None:
    card("store", SAFETUNE_MODE="tune", TRITON_CACHE_DIR=str(tmp_path / "recorded"))

    declared, recorded, again, failed = warm(
        "warm_kernels.py --dtype float16 --device h100",
        "--recorded warm_kernels:fill",
        "warm_kernels.py --dtype float16",
        "--recorded warm_kernels:broken",
    )
    assert [each.pop("code") for each in (declared, recorded, again, failed)] == [0, 0, 0, 1]
    for each in (declared, recorded, again, failed):
        check_json(each, "warm")
    assert [(c["call"], c["config"], c["origin"]) for c in declared["compiled"]] == CHOSEN
    assert {c["device"] for c in declared["compiled"]} == {"NVIDIA H100 80GB HBM3"}
    assert not any(c["error"] for c in declared["compiled"])

    (call,) = recorded["compiled"]
    assert (call["call"], call["origin"]) == ("N=20 float32", "fallback")
    assert call["config"] == "BLOCK=16 num_warps=2 num_stages=3", "the choice of the nearest key"
    assert not call["was_there"]
    assert all(c["was_there"] for c in again["compiled"])

    (error,) = (c["error"] for c in failed["compiled"])
    assert error.startswith("compile_error"), error
    assert "too small" in error

    first, loaded = card("launch")
    assert first["launched"] == ["add_one 4", "add_one 2", "fill 2"]
    assert first["compilations"] == [True, True, True], "each was found in the disk cache"
    assert len(first["hooks"]) == 3, "Triton calls this hook for what it finds there, too"

    assert loaded["launched"] == first["launched"]
    assert loaded["compilations"] == [True, True, True]
    assert loaded["hooks"] == [], "none after `preload`, as for a server that refuses compilations"
    assert loaded["loaded"] == 3
