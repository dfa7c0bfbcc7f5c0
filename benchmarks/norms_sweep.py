"""Device time of every config of the layer-norm kernels, backward and finalize apart: to explore.

Nothing is tuned: each config, of the lists and around them, runs as it is, on every shape, with
several numbers of programs. Prints a line per measurement and writes it to OUT/norms_sweep.jsonl.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import norm_timing
import recording

#: Matrices of 256 MiB in bf16, so that the start of a kernel does not count.
SHAPES = tuple((2**27 // columns, columns) for columns in (2**power for power in range(8, 16)))
TINY_SHAPES = ((48, 64), (9, 300))


@dataclass(frozen=True)
class Candidate:
    """One config of one kernel for one shape; a backward one has several numbers of programs."""

    kind: str
    shape: tuple[int, int]
    is_rms_norm: bool
    options: tuple[tuple[str, int], ...]
    programs_per_sm: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The config as text."""
        return " ".join(f"{name}={value}" for name, value in self.options)


@dataclass(frozen=True)
class Backward:
    """Options of the backward kernel; each number of stages and order of rows is a config."""

    warps: int
    elements: int
    stages: tuple[int, ...]
    programs_per_sm: tuple[float, ...]
    registers: int = 0
    load_again: bool = False
    orders: str = "runs turns"
    joined: tuple[bool, ...] = (True,)

    def configs(self) -> Iterator[tuple[tuple[str, int], ...]]:
        """Yield the options of each as a launch takes them."""
        cases = itertools.product(self.orders.split(), self.stages, self.joined)
        for order, stages, joined in cases:
            yield _config(
                self.warps,
                self.elements,
                PIPELINE_STAGES=stages,
                LOAD_AGAIN=self.load_again,
                IN_TURNS=order == "turns",
                JOINED_SUMS=joined,
                maxnreg=self.registers,
            )


#: What the lists have, for the number of columns, and what lies around it. None is best for all.
BACKWARD: dict[int, list[Backward]] = {
    256: [
        Backward(4, 16, (3,), (2,), 128, orders="turns"),
        Backward(4, 8, (3,), (4,), 64, orders="turns"),
        Backward(4, 16, (1, 2, 3), (4, 6)),
        Backward(4, 16, (4,), (2, 4), orders="turns"),
        Backward(8, 8, (2, 3, 4), (2, 4), 64, orders="turns"),
        Backward(4, 8, (2, 3), (8,), 64),
        Backward(8, 16, (1, 3), (2,), 128, orders="turns"),
    ],
    512: [
        Backward(4, 8, (3,), (4,), 64, orders="turns"),
        Backward(4, 16, (3,), (2,), 128, orders="turns"),
        Backward(4, 16, (1, 2, 3), (4, 5)),
        Backward(4, 16, (4,), (4, 5), orders="turns"),
        Backward(8, 8, (2, 3, 4), (2, 4), 64, orders="turns"),
        Backward(4, 8, (2, 3), (8,), 64),
        Backward(8, 16, (1, 3), (2,), 128, orders="turns"),
    ],
    1024: [
        Backward(4, 8, (3,), (4,), 64, orders="turns"),
        Backward(4, 16, (3,), (2,), 128, orders="turns"),
        Backward(4, 16, (1, 2, 3, 4), (2, 4)),
        Backward(8, 16, (3, 4), (1, 2), 128),
        Backward(8, 8, (3, 4), (2, 4), 64, orders="turns"),
    ],
    2048: [
        Backward(8, 16, (4,), (1,), orders="turns", joined=(True, False)),
        Backward(4, 16, (3,), (2,), 128, orders="turns"),
        Backward(4, 16, (2, 3, 4), (2,)),
        Backward(8, 8, (3, 4), (2,), 64),
        Backward(8, 16, (3, 4), (1, 2), 128),
    ],
    4096: [
        Backward(16, 8, (4,), (1,), 64, orders="turns", joined=(True, False)),
        Backward(8, 16, (3, 4), (1, 2), 128),
        Backward(16, 8, (3,), (1, 2), 64),
    ],
    8192: [
        Backward(8, 16, (3,), (1,), 128, orders="turns", joined=(True, False)),
        Backward(8, 16, (4,), (0.5,), orders="turns"),
        Backward(16, 16, (3, 4), (1,)),
        Backward(8, 32, (1,), (1, 2), 128, True),
    ],
    16384: [
        Backward(16, 16, (3,), (0.5,)),
        Backward(16, 32, (1, 2), (0.5, 1), 0, True),
        Backward(8, 32, (1,), (0.5, 1), 128, True),
    ],
    32768: [
        Backward(16, 32, (1,), (0.5,), 0, True),
        Backward(8, 32, (1,), (0.5,), 128, True),
    ],
}

#: (warps, elements per thread)
FORWARD = (
    (4, 8),
    (8, 8),
    (2, 16),
    (4, 16),
    (8, 16),
    (16, 16),
    (4, 32),
    (8, 32),
    (16, 32),
    (32, 32),
)

#: (programs in a tile, columns in a tile, warps)
FINALIZE = (
    (128, 16, 4),
    (256, 8, 4),
    (64, 32, 4),
    (64, 64, 8),
    (64, 16, 2),
    (32, 32, 2),
    (32, 32, 4),
    (32, 64, 4),
)


def _config(warps: int, elements: int, **options: int) -> tuple[tuple[str, int], ...]:
    found = {"TILE_ELEMENTS": 32 * warps * elements, **options, "num_warps": warps}
    return tuple((name, value) for name, value in found.items() if name != "maxnreg" or value)


def candidates(shapes: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Yield every config that is measured."""
    from safetune.kernels.configs import programs_per_sm

    for shape in shapes:
        for is_rms_norm in (False, True):
            for options in BACKWARD.get(shape[1], [Backward(4, 8, (2,), (1, 2))]):
                for config in options.configs():
                    programs = options.programs_per_sm
                    yield Candidate("backward", shape, is_rms_norm, config, programs)
            for warps, elements in FORWARD:
                tile = 32 * warps * elements
                if min(shape[1], 16384) <= tile <= 32 * shape[1]:
                    yield Candidate("forward", shape, is_rms_norm, _config(warps, elements))
            for rows, columns, warps in FINALIZE:
                config = (
                    ("TILE_PROGRAMS", rows),
                    ("TILE_COLUMNS", columns),
                    ("num_warps", warps),
                )
                usual = programs_per_sm(shape[1], 1 if is_rms_norm else 2)
                yield Candidate("finalize", shape, is_rms_norm, config, (usual, 2 * usual))


def _operands(candidate: Candidate, device: str) -> dict[str, Any]:
    import torch

    rows, columns = candidate.shape
    random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    return {
        "x": random(rows, columns),
        "dy": random(rows, columns),
        "weight": random(columns),
        "bias": None if candidate.is_rms_norm else random(columns),
        "mean": None if candidate.is_rms_norm else torch.zeros(rows, device=device),
        "rstd": torch.ones(rows, device=device),
    }


def launch_of(
    candidate: Candidate, operands: dict[str, Any], sm_count: int, programs: float
) -> Any:
    """Return (kernel, launch) on these operands."""
    import torch

    from safetune.kernels import launches
    from safetune.kernels.grid_policy import plan_grid
    from safetune.kernels.layer_norm import (
        layer_norm_backward_kernel,
        layer_norm_finalize_kernel,
        layer_norm_forward_kernel,
    )

    x, weight, bias = operands["x"], operands["weight"], operands["bias"]
    plan = plan_grid(candidate.shape[0], 1, sm_count, programs or 1)
    if candidate.kind == "forward":
        _, launch = launches.forward_launch(
            x, weight, bias, 1e-5, None, None, None, candidate.is_rms_norm, 1
        )
        return layer_norm_forward_kernel.fn, launch
    if candidate.kind == "backward":
        _, launch = launches.backward_launch(
            plan,
            operands["dy"],
            x,
            weight,
            bias,
            operands["mean"],
            operands["rstd"],
            None,
            has_residual=False,
            is_rms_norm=candidate.is_rms_norm,
            x_dtype=None,
            recompute_output=False,
        )
        return layer_norm_backward_kernel.fn, launch
    partials = [
        None if p is None else p.new_zeros(plan.programs, p.shape[0], dtype=torch.float32)
        for p in (weight, bias)
    ]
    _, launch = launches.finalize_launch(plan, *partials, weight, bias)
    return layer_norm_finalize_kernel.fn, launch


def compile_only(candidate: Candidate) -> str:
    """Compile into Triton's cache, in a process of its own; return what went wrong."""
    import torch

    try:
        kernel, launch = launch_of(candidate, _operands(candidate, "meta"), 132, 1)
        args = [a.dtype if isinstance(a, torch.Tensor) else a for a in launch.args]
        kernel.warmup(*args, grid=(1,), **launch.kwargs, **dict(candidate.options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(every: Sequence[Candidate], workers: int) -> None:
    """Compile in parallel what the measurement then finds in Triton's cache."""
    began, unique = time.monotonic(), {}
    for candidate in every:
        unique[candidate.kind, candidate.shape[1], candidate.is_rms_norm, candidate.name] = (
            candidate
        )
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for candidate, error in zip(
            unique.values(), pool.map(compile_only, unique.values()), strict=True
        ):
            if error:
                print(f"not compiled: {candidate}: {error[-300:]}", flush=True)
    print(f"{len(unique)} compiled in {time.monotonic() - began:.0f} s", flush=True)


def measure(
    candidate: Candidate, sets: Sequence[dict[str, Any]], programs: float
) -> dict[str, Any]:
    """Return one line of results."""
    import torch

    from safetune.kernels.launches import sm_count

    options = dict(candidate.options)
    device = torch.device(recording.torch_device())
    calls, compiled = [], []
    for operands in sets:
        kernel, launch = launch_of(candidate, operands, sm_count(device), programs)
        run = functools.partial(kernel[launch.grid], *launch.args, **launch.kwargs, **options)
        calls.append(run)
    compiled.append(calls[0]())
    rows, columns = candidate.shape
    microseconds = norm_timing.time_calls(calls, replay_s=2e-3)
    moved = {"forward": 2, "backward": 3, "finalize": 0}[candidate.kind] * rows * columns * 2
    return {
        "kind": candidate.kind,
        "shape": f"{rows}x{columns}",
        "norm": "rms" if candidate.is_rms_norm else "ln",
        "config": candidate.name,
        "programs_per_sm": programs,
        "us": round(microseconds, 2),
        "tb_per_s": round(moved / microseconds / 1e6, 3),
        "regs": getattr(compiled[0], "n_regs", None),
        "spills": getattr(compiled[0], "n_spills", None),
        "shared": getattr(getattr(compiled[0], "metadata", None), "shared", None),
    }


def print_fastest(lines: Sequence[dict[str, Any]], count: int = 6) -> None:
    """Print the fastest configs of each kernel, shape and norm."""
    by_case: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        by_case.setdefault((line["kind"], line["shape"], line["norm"]), []).append(line)
    columns = ["us", "tb_per_s", "config", "programs_per_sm", "regs", "spills", "shared"]
    for case, found in by_case.items():
        fastest = sorted(found, key=lambda line: line["us"])[:count]
        print("\n" + " ".join(case), recording.table(fastest, columns), sep="\n", flush=True)


def sweep(parsed: argparse.Namespace) -> None:
    """Measure everything, print each line, and append it to the file."""
    began = time.monotonic()
    shapes = TINY_SHAPES if recording.interpreted() else SHAPES
    wanted = [shape for shape in shapes if not parsed.columns or shape[1] in parsed.columns]
    kinds = parsed.kinds or ["backward", "finalize"]
    every = [c for c in candidates(wanted) if c.kind in kinds]
    every.sort(key=lambda c: (kinds.index(c.kind), c.shape[1], c.is_rms_norm))
    if not recording.interpreted():
        try:
            compile_all(every, parsed.workers)
        except Exception as error:
            print(f"compiled one by one: {type(error).__name__}: {error}", flush=True)
    folder = parsed.out
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "norms_sweep.jsonl").open("a", encoding="utf-8") as file:

        def tell(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(" ".join(str(value) for value in line.values()), flush=True)

        for size in (1, 2, 4):
            tell({"kind": "copy", "gib": size, "tb_per_s": norm_timing.copy_bandwidth(size)})
        operands_of: tuple[Any, list[dict[str, Any]]] = (None, [])
        told: list[dict[str, Any]] = []
        for candidate in every:
            if time.monotonic() - began > parsed.budget:
                tell({"kind": "stopped", "why": "no budget left"})
                break
            group = (candidate.shape, candidate.is_rms_norm)
            if operands_of[0] != group:
                operands_of = (None, [])
                count = 2 if not recording.interpreted() else 1
                device = recording.torch_device()
                operands_of = (group, [_operands(candidate, device) for _ in range(count)])
            for programs in candidate.programs_per_sm or (0,):
                try:
                    told.append(measure(candidate, operands_of[1], programs))
                    tell(told[-1])
                except Exception as error:
                    text = f"{type(error).__name__}: {str(error)[:200]}"
                    tell({"kind": "error", "of": repr(candidate), "error": text})
    print_fastest(told)
