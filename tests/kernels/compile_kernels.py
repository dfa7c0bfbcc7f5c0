"""Compile the shipped kernels without a GPU and print what each config takes, as JSON lines.

Run by `test_compile.py` in a process of its own: where the test session interprets kernels, the
helpers that these kernels call are interpreted too, and cannot be compiled.

    python compile_kernels.py CAPABILITY COLUMNS [--dtype bf16] [--kernel NAME] [--first | --pinned]

CAPABILITY is 90, for example.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from safetune.kernels.configs import (
    backward_configs,
    forward_configs,
    is_light,
    prune_few_configs,
)
from safetune.kernels.few_rows import few_rows_backward_kernel, few_rows_forward_kernel
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)
from safetune.kernels.long_rows import long_rows_backward_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

#: Pointers to fp32 whatever the dtype of the inputs, unless that is fp64.
STATISTICS = ("mean_pointer", "rstd_pointer", "weight_partials_pointer", "bias_partials_pointer")

#: The dtype of other pointers that does not depend on that of the inputs.
OTHERS = {"words_pointer": "*i64"}

#: Not passed in these launches.
ABSENT = {
    "forward": ("residual_pointer", "residual_output_pointer"),
    "backward": (
        "residual_output_gradient_pointer",
        "residual_gradient_pointer",
        "output_pointer",
    ),
    "finalize": (),
}
ABSENT |= {f"few_{name}": ABSENT[name] for name in ("forward", "backward")}
ABSENT["long_backward"] = ABSENT["backward"]

#: Those of them that a launch with a residual passes, and its flags.
RESIDUAL = {
    "residual_pointer",
    "residual_output_pointer",
    "residual_output_gradient_pointer",
    "HAS_RESIDUAL",
    "STORE_RESIDUAL",
    "HAS_RESIDUAL_GRADIENT",
}
KERNELS = {
    "forward": layer_norm_forward_kernel,
    "backward": layer_norm_backward_kernel,
    "finalize": layer_norm_finalize_kernel,
    "few_forward": few_rows_forward_kernel,
    "few_backward": few_rows_backward_kernel,
    "long_backward": long_rows_backward_kernel,
}
FLAGS = {"GROUPS": 1, "HAS_WEIGHT": True, "HAS_BIAS": True, "HAS_RESIDUAL_GRADIENT": False}


def compile_config(
    name: str,
    config: triton.Config,
    capability: int,
    columns: int,
    dtype: str,
    is_rms_norm: bool,
    has_residual: bool = False,
) -> dict[str, Any]:
    """Return what one config of one kernel takes: shared memory; of NVIDIA's also registers and
    spilled bytes."""
    kernel = JITFunction(KERNELS[name].base_fn)
    absent = {*ABSENT[name], *(("mean_pointer",) if is_rms_norm else ())}
    has_bias = not (name == "long_backward" and is_rms_norm)
    absent |= set() if has_bias else {"bias_pointer", "bias_partials_pointer"}
    absent -= RESIDUAL if has_residual else set()
    statistics = "*fp64" if dtype == "fp64" else "*fp32"
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for argument in kernel.arg_names:
        if argument.endswith("_pointer") and argument not in absent:
            signature[argument] = (
                statistics if argument in STATISTICS else OTHERS.get(argument, f"*{dtype}")
            )
        elif argument in ("rows", "programs_per_group"):
            signature[argument] = "i32"
        elif argument == "eps":
            signature[argument] = "fp64"
        else:
            signature[argument] = "constexpr"
            flag = has_residual and argument in RESIDUAL
            constants[argument] = None if argument in absent else flag
    flags = {**FLAGS, "IS_RMS_NORM": is_rms_norm, "HAS_BIAS": has_bias}
    known = {"COLUMNS": columns, **flags, **config.kwargs}
    constants.update({name: value for name, value in known.items() if name in constants})
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*")
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={**options, "maxnreg": config.maxnreg},
    )
    found = {
        "kernel": name,
        "config": {**config.kwargs, "num_warps": config.num_warps},
        "columns": columns,
        "dtype": dtype,
        "is_rms_norm": is_rms_norm,
        "has_residual": has_residual,
        "capability": capability,
        "shared_bytes": compiled.metadata.shared,
        "code_bytes": len(compiled.asm["cubin"]),
    }
    registers, local_bytes = resources(compiled.asm["cubin"])
    before_copies, copy, _ = compiled.asm["ptx"].partition("cp.async")
    return {
        **found,
        "registers": registers,
        "local_bytes": local_bytes,
        "asynchronous_copies": compiled.asm["ptx"].count("cp.async.cg"),
        "waits_before_copies": before_copies.count("bar.sync") if copy else 0,
        "vector_stores": len(
            re.findall(
                r"st\.global(\.cs|\.L1::evict_first)?(\.L2::cache_hint)?\.v4", compiled.asm["ptx"]
            )
        ),
        "fp32": "f32" in compiled.asm["ttir"],
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers per thread, bytes of stack and local memory per thread)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    functions = [tuple(map(int, numbers)) for numbers in found]
    return max(f[0] for f in functions), max(stack + local for _, stack, local in functions)


def main() -> None:
    """Print one JSON object per config and kind of norm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("columns", type=int, nargs="+")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--kernel", choices=KERNELS, action="append")
    parser.add_argument("--first", action="store_true", help="only the first config of each")
    parser.add_argument(
        "--pinned", action="store_true", help="only what a pinned call launches, residual or not"
    )
    options = parser.parse_args()
    for columns, dtype in itertools.product(options.columns, options.dtype or ["bf16"]):
        for name in options.kernel or ("forward", "backward", "finalize"):
            configs = left_by_pruning(name, columns)
            if options.first or options.pinned:
                del configs[1:]
            norms = [(False, False), (True, False)]
            if options.pinned:
                norms = [(True, False), (False, True)]
            pairs = itertools.product(configs, norms[: 1 + (name != "finalize")])
            if name == "long_backward":  # RMS norm without a bias
                rms = configs[is_light(columns, 4 if dtype == "fp32" else 2, False, False)]
                pairs = [(configs[0], norms[0]), (rms, norms[1])]
            for config, norm in pairs:
                result = compile_config(name, config, options.capability, columns, dtype, *norm)
                print(json.dumps(result), flush=True)


def left_by_pruning(name: str, columns: int) -> list[triton.Config]:
    """Return the configs of a kernel that may be launched on rows of this number of columns."""
    configs = KERNELS[name].configs
    if name.startswith("few"):
        return prune_few_configs(configs, {}, COLUMNS=columns)
    if name == "forward":
        return forward_configs(configs, columns, fast_memory=True)
    if name == "backward":
        return backward_configs(
            configs,
            fast_memory=True,
            COLUMNS=columns,
            IN_PLACE=False,
            HAS_WEIGHT=True,
            HAS_BIAS=True,
            HAS_RESIDUAL_GRADIENT=False,
        )
    return list(configs)


if __name__ == "__main__":
    main()
