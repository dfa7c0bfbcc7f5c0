"""What `benchmarks/rocm.py` looks at, on another GPU: whether its checks hold where they should."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, sys
from safetune.isolation.cuda import Cuda
Cuda.needs_torch = True  # as those for AMD GPUs do
sys.path.insert(0, ".")
import rocm_isolation
print(json.dumps([*rocm_isolation.rows()]))
"""


def test_they_hold_with_children_that_have_torch(fresh_process: FreshProcess) -> None:
    done = fresh_process(PROGRAM, cwd=ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows
    assert [row for row in rows if not row["ok"]] == []
