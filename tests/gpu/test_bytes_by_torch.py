"""What children on an AMD GPU do, on another one: torch works on memory, inputs go by the host."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.gpu

#: The driver takes no PTX, so the kernels of `device_bytes` do not run.
WITHOUT_PTX = {"CUDA_DISABLE_PTX_JIT": "1"}
PROGRAM = """
import json, sys
from safetune.isolation.cuda import Cuda
Cuda.needs_torch = True
sys.path.insert(0, ".")
import rocm_isolation
rows = [*rocm_isolation.rows()]
from safetune.isolation import backend
try:
    rows.append(backend.required().bytes_of(0).works())
except Exception as error:
    rows.append(type(error).__name__)
print(json.dumps(rows))
"""


def test_the_checks_for_a_card_of_amd_hold(fresh_process: FreshProcess) -> None:
    done = fresh_process(PROGRAM, env=WITHOUT_PTX, cwd=ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    *rows, works = json.loads(done.stdout)
    assert [row for row in rows if not row["ok"]] == []
    assert works == "DriverError", "the kernels in PTX would have run"
