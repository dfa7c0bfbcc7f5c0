"""A pytest plugin: each test's outcome and seconds as a line of PROOF_REPORT, once it has ended.

With PROOF_QUICK Triton times each config for 5 ms, not for 100.
"""

from __future__ import annotations

import json
import os
from typing import Any

_seconds: dict[str, float] = {}
_outcome: dict[str, str] = {}


def pytest_collection_finish() -> None:
    """Let Triton time quickly."""
    if os.environ.get("PROOF_QUICK"):
        import triton

        parameters = triton.testing.do_bench.__defaults__
        triton.testing.do_bench.__defaults__ = (1, 5, *parameters[2:])


def pytest_runtest_logreport(report: Any) -> None:
    """Add a phase; the last one of a test writes its line."""
    name = report.nodeid.partition("::")[2]
    _seconds[name] = _seconds.get(name, 0.0) + report.duration
    expected = report.skipped and hasattr(report, "wasxfail")
    if report.when == "call" or not report.passed:
        _outcome[name] = "expected" if expected else report.outcome
    if report.when == "teardown":
        line = [name, _outcome.get(name, "failed"), round(_seconds[name], 3)]
        with open(os.environ["PROOF_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
