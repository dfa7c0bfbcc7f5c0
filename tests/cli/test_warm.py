"""What `safetune warm` refuses; tests/offline/test_warm.py has what it compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_a_kernel_of_the_interpreter_and_a_store_without_calls_are_refused(
    safetune: Any, targets: Path
) -> None:
    assert safetune.error("warm", targets / "add.py") == (
        "Error: kernel, add_one would run in Triton's interpreter, which compiles nothing: unset "
        "TRITON_INTERPRET"
    )
    assert safetune.error("warm", "--recorded") == (
        "Error: no recorded call matches; run the program with SAFETUNE_MODE=record"
    )
    assert "no workload is named 'none'" in safetune.error(
        "warm", targets / "add.py", "--shape", "none"
    )


def test_options_that_say_nothing_are_refused(safetune: Any) -> None:
    for words, problem in (
        (("warm",), "Missing argument 'TARGET...'."),
        (("warm", "--recorded", "--shape", "large"), "do not combine them with --recorded"),
    ):
        refused = safetune(*words)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert problem in refused.stderr
