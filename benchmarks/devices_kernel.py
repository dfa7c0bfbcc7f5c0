"""The list that `benchmarks/devices.py` has tuned: a matrix product of 72 configs at some heights.

Triton compiles a config once for all of them. DEVICES_KEYS sets their number; DEVICES_CONFIGS=288
gives each four times as many configs, so that the cards can share those of one height.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import matmul
import triton

from safetune import Workload, safetune

COUNT = int(os.environ.get("DEVICES_KEYS", "12"))
WIDTH = int(os.environ.get("DEVICES_WIDTH", "4096"))
STEP = WIDTH // 8

#: The heights that are timed, after one that has all configs compiled.
COMPILED, TIMED = STEP, [STEP * (2 + number) for number in range(COUNT)]

CONFIGS = matmul.configs()
if os.environ.get("DEVICES_CONFIGS") == "288":
    CONFIGS = [
        triton.Config(config.kwargs, num_warps=config.num_warps, num_stages=stages, maxnreg=most)
        for config in CONFIGS
        for stages, most in itertools.product(
            (config.num_stages, config.num_stages + 2), (None, 128)
        )
    ]

kernel = safetune(configs=CONFIGS, key=matmul.KEY)(matmul.matmul_kernel)


@kernel.workload(dtypes=("float16",))
def heights(device: Any, _: Any) -> Iterator[Workload]:
    """Yield one launch for each height."""
    for height in (COMPILED, *TIMED):
        a, b, c = matmul.operands(height, WIDTH, WIDTH, str(device))
        sizes, strides = (height, WIDTH, WIDTH), (*a.stride(), *b.stride(), *c.stride())
        yield Workload(str(height), matmul.grid, (a, b, c, *sizes, *strides))
