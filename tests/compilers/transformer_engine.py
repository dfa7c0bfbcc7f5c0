"""What TransformerEngine's helper compiles of a kernel; a program of its own, which prints JSON.

argv: `resolved`, the one-config tuner of a resolved kernel, or `tuner`, the kernel as it is. Not in
the process of a test: Triton's interpreter leaves its language changed there.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner as TritonAutotuner

from tests.compilers import traced

#: What a caller of its helper passes as constants: all that is neither an array nor chosen.
GIVEN = {"n": 100, "FACTOR": 3}


def compiled_by_transformer_engine(
    kernel: Any, arrays: list[str], constants: dict[str, Any]
) -> list[Any]:
    """What `triton_call_lowering` compiles: written after its logic, with none of its code.

    (TransformerEngine 2.x, transformer_engine/jax/triton_extensions/utils.py.) A tuner, by
    `isinstance`, is its `fn`, compiled for each of `configs`: with the config's warps, stages and
    CTAs, and the config's constants unless the caller has others. Anything else is a plain kernel,
    compiled once with options of the helper's. The arrays are the first of `arg_names`.
    """
    is_tuner = isinstance(kernel, TritonAutotuner)
    function = kernel.fn if is_tuner else kernel
    signature = dict(zip(function.arg_names, arrays, strict=False))
    made = []
    for config in kernel.configs if is_tuner else [triton.Config({})]:
        values = {**config.kwargs, **constants}
        source = ASTSource(
            fn=function,
            signature={n: "constexpr" if n in values else t for n, t in signature.items()},
            constexprs=values,
        )
        options = {n: getattr(config, n) for n in ("num_warps", "num_stages", "num_ctas")}
        made.append(triton.compile(source, GPUTarget("cuda", 90, 32), options))
    return made


def resolved(module: Any) -> Any:
    """The one-config tuner of the kernel, whose choice is stored."""
    tuner = traced.kernel(module, configs=traced.configs(64, 128, num_warps=8, num_stages=2))
    x = torch.zeros(100)
    with traced.a_gpu_to_trace_for():
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)  # noqa: E731
        return tuner.resolve(x, x, 100, grid=grid).as_single_config_autotuner()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        module = traced.load(Path(folder) / "scale_resolved.py", traced.SOURCE)
        if sys.argv[1] == "resolved":
            kernel = resolved(module)
        else:
            kernel = traced.kernel(module, configs=traced.configs(64, 128))
        found = [
            {
                "type": f"{type(kernel).__module__}.{type(kernel).__name__}",
                "name": each.name,
                "constants": {
                    each.src.fn.arg_names[place]: value
                    for (place,), value in each.src.constants.items()
                },
                "num_warps": each.metadata.num_warps,
                "num_stages": each.metadata.num_stages,
                "threads": int(re.findall(r"\.reqntid (\d+)", each.asm["ptx"])[0]),
            }
            for each in compiled_by_transformer_engine(kernel, ["*fp32", "*fp32"], GIVEN)
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
