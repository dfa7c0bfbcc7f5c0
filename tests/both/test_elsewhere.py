"""A question to another process is answered, or given up: it never takes longer than its limit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from safetune.both import elsewhere


def test_what_is_printed_need_not_be_text() -> None:
    program = r"import os, sys; os.write(1, b'a\xffb'); os.write(2, b'\xfe'); sys.exit(3)"
    asked = elsewhere.ask([sys.executable, "-c", program], 60)
    assert (asked.returncode, asked.stdout, asked.stderr) == (3, "a\ufffdb", "\ufffd")


def test_a_process_that_no_signal_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a device in the kernel; here `kill` does nothing."""
    made: list[Any] = []
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: made.append(self))
    program = "import time; time.sleep(20)"
    with pytest.raises(TimeoutError, match="no answer within"):
        elsewhere.ask([sys.executable, "-c", program], 0.01)
    assert made[0].poll() is None, "it still runs"
    kill(made[0])
    made[0].wait()
