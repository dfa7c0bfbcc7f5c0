"""AOTInductor: exports a module, packages it, loads the package and runs it.

Arguments: a folder for the package and, for a module with a safetuned kernel, the folder of
`kernels.py`; without that, the module is of torch's own operations, and safetune is not imported.
Prints a line of JSON after each step, so that a process that dies has said how far it came.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

SIZE = 30_000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def add_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def tuned(folder: str, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """An addition with its stored choice, and what Inductor does with that from here on."""
    sys.path.insert(0, folder)
    import triton
    from torch._inductor.runtime import triton_heuristics

    import kernels
    import safetune

    configs = [triton.Config({"BLOCK": block}, num_warps=8) for block in (256, 512, 1024)]
    tuner = safetune.safetune(configs=configs, key=["n"])(kernels.add_kernel)

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
        return out

    safetune.prepare(add, x, y)
    seen: dict[str, Any] = {
        "chosen": tuner.best_config.kwargs["BLOCK"],
        "compiled": [],
        "timed": [],
    }
    compile_kernel = triton_heuristics.user_autotune
    time_configs = triton_heuristics.CachingAutotuner.benchmark_all_configs

    def watched_compile(configs: list[dict[str, Any]], *rest: Any, **options: Any) -> Any:
        seen["compiled"].append([config["BLOCK"] for config in configs])
        return compile_kernel(configs, *rest, **options)

    def watched_timing(kernel: Any, *rest: Any, **options: Any) -> Any:
        seen["timed"].append(kernel.fn.__name__)
        return time_configs(kernel, *rest, **options)

    triton_heuristics.user_autotune = watched_compile
    triton_heuristics.CachingAutotuner.benchmark_all_configs = watched_timing
    return add, seen


def tell(step: str, **facts: Any) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)


def main(folder: str, kernels: str = "") -> None:
    x, y = torch.randn(SIZE, device=DEVICE), torch.randn(SIZE, device=DEVICE)
    add, seen = tuned(kernels, x, y) if kernels else (add_of, {})

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return add(x, y) * 2

    program = torch.export.export(Module(), (x, y), strict=True)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(Path(folder) / "add.pt2")
    )
    tell("packaged", bytes=Path(package).stat().st_size, **seen)
    loaded = torch._inductor.aoti_load_package(package)
    tell("loaded")
    tell("run", off=(loaded(x, y) - 2 * (x + y)).abs().max().item())


if __name__ == "__main__":
    main(*sys.argv[1:])
