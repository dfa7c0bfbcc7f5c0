"""The list that `benchmarks/devices.py` has tuned: a matrix product of 72 configs at some heights.

Triton compiles a config once for all of them. DEVICES_KEYS sets their number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import matmul

from safetune import Workload, safetune

COUNT = int(os.environ.get("DEVICES_KEYS", "12"))
WIDTH = int(os.environ.get("DEVICES_WIDTH", "4096"))
STEP = WIDTH // 8

#: The heights that are timed, after one that has all configs compiled.
COMPILED, TIMED = STEP, [STEP * (2 + number) for number in range(COUNT)]

kernel = safetune(configs=matmul.configs(), key=matmul.KEY)(matmul.matmul_kernel)


@kernel.workload(dtypes=("float16",))
def heights(device: Any, _: Any) -> Iterator[Workload]:
    """Yield one launch for each height."""
    for height in (COMPILED, *TIMED):
        a, b, c = matmul.operands(height, WIDTH, WIDTH, str(device))
        sizes, strides = (height, WIDTH, WIDTH), (*a.stride(), *b.stride(), *c.stride())
        yield Workload(str(height), matmul.grid, (a, b, c, *sizes, *strides))
