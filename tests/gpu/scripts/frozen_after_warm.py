"""Launches kernels frozen, and prints what Triton's compile hooks were told.

    python frozen_after_warm.py FOLDER [--preload]

FOLDER has `warm_kernels.py`. With --preload, what is launched is loaded first, and any compilation
after that raises, as vLLM has it with `--jit-monitor-mode error`.
"""

import json
import sys

sys.path.insert(0, sys.argv[1])

import torch
import warm_kernels
from triton import knobs

import safetune
from safetune.miss import reporting

compilations, hooks = [], []
knobs.compilation.listener = lambda *, cache_hit, **_: compilations.append(cache_hit)


def refuse(**event):
    hooks.append(event["fn"].name)
    if "--preload" in sys.argv:
        raise RuntimeError(f"{event['fn'].name} is compiled while it serves")


if "--preload" in sys.argv:
    safetune.preload(warm_kernels.add_one, warm_kernels.fill, dtypes=["float16"])
knobs.runtime.jit_post_compile_hook = refuse
right = []
for count in (256, 301):
    arguments = warm_kernels.arguments(count, torch.float16, "cuda")
    warm_kernels.add_one[warm_kernels.grid](*arguments)
    right.append(bool((arguments[1][:count] == 1).all()))
warm_kernels.record_fill("cuda")
torch.cuda.synchronize()
found = {"compilations": compilations, "hooks": hooks, "right": right}
print(json.dumps({**found, "tunings": reporting.tunings.begun}))
