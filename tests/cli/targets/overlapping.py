"""A kernel whose second config has programs overlap by one element; its large shape is for GPUs."""

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def no_tall_blocks(configs, named, **kwargs):
    return [config for config in configs if config.kwargs["BLOCK"] < 1024]


@safetune(
    configs=[
        triton.Config({"BLOCK": 64, "STEP": 64}),
        triton.Config({"BLOCK": 64, "STEP": 63}),
        triton.Config({"BLOCK": 1024, "STEP": 1}),
    ],
    key=["N"],
    prune_configs_by={"early_config_prune": no_tall_blocks},
)
@triton.jit
def fill(x, N, BLOCK: tl.constexpr, STEP: tl.constexpr):
    offsets = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(x + offsets, 1.0, mask=offsets < N)


@fill.workload(dtypes=["float32", "float16"])
def vectors(device, dtype):
    for name, count in {"small": 100, "large": 10_000}.items():
        x = torch.zeros(count, device=device, dtype=dtype)
        yield Workload(name, lambda meta: (triton.cdiv(meta["N"], meta["STEP"]),), (x, count))


@safetune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 8})], key=["N"])
@triton.jit
def strict(x, N, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 16, "a block must be 16")
    tl.store(x + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) < N)


@strict.workload
def one_vector(device, dtype):
    yield Workload("only", (1,), (torch.zeros(12, device=device, dtype=dtype), 12))
