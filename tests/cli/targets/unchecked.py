"""A kernel whose launches cannot be checked for all sorts of reasons, and its outputs."""

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def broken_hook(named):
    raise RuntimeError("broken hook")


def broken_prune(configs, named, **kwargs):
    if named["n"] > 1000:
        raise OSError("broken prune")
    return configs


@safetune(
    configs=[triton.Config({"BLOCK": 32}, pre_hook=broken_hook), triton.Config({"BLOCK": 64})],
    key=["n"],
    prune_configs_by={"early_config_prune": broken_prune},
)
@triton.jit
def fill(y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 1.0, mask=offsets < n)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@fill.workload
def launches(device, dtype):
    y = torch.zeros(128, device=device, dtype=dtype)
    yield Workload("hook", grid, (y, 128))
    yield Workload("grid", lambda meta: (meta["COUNT"],), (y, 128))
    yield Workload("prune", grid, (y, 1024))
    yield Workload("sparse", grid, (y.to_sparse(), 128))
    yield Workload("exit", lambda meta: leave(), (y, 128))
    yield Workload("misspelt", grid, (y, 128), {"m": 1})


@fill.workload
def outputs(device, dtype):
    y = torch.zeros(128, device=device, dtype=dtype)
    yield Workload("whole", grid, (y, 128), outputs=["y"])
    yield Workload("part", grid, (y, 127), outputs=["y"])
    yield Workload("nothing", grid, (y, 0), outputs=("y",))
    yield Workload("undeclared", grid, (y, 0))
    yield Workload("unknown", grid, (y, 128), outputs=["z"])
    yield Workload("allowed", grid, (y, 128), allow=["z"])


def leave():
    raise SystemExit(0)
