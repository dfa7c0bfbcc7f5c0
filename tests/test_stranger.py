"""What someone does who meets safetune for the first time, in one script: `tests/stranger.sh`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.slow]


def test_the_path_of_a_stranger() -> None:
    pytest.importorskip("sphinx", reason="Sphinx 9 needs Python 3.11")
    command = ["bash", str(Path(__file__).with_name("stranger.sh")), sys.executable]

    done = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if not name.startswith("SAFETUNE_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
