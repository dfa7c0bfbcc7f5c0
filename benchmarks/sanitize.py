"""The norm kernels under NVIDIA's compute-sanitizer: memory out of bounds, races in shared memory.

Every launch has a config that is given, so nothing is tuned: layer norm of 450 tokens has all that
pruning leaves, the others have the first. The kernels are compiled before, in parallel. A store out
of bounds is planted first: a tool that does not report it proves nothing. Writes
OUT/<device>/sanitizer.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fresh_process
import recording

TOOLS = ("memcheck", "racecheck")
COLUMNS = (100, 256, 1024, 16384, 32768)
#: With the first, layer norm has all configs; with the others, the first one.
TOKENS = (450, 1, 7)
TINY_COLUMNS, TINY_TOKENS = (100,), (9, 1)
GROUPS = 4

Step = tuple[Any, Any, Any]  # kernel, launch, config


@dataclass(frozen=True)
class Problem:
    """One norm, forward and backward; layer norm with a residual in fp32, RMS norm without bias."""

    kind: str
    tokens: int
    columns: int
    all_configs: bool

    @property
    def name(self) -> str:
        """What is printed."""
        return f"{self.kind} {self.tokens}x{self.columns}"

    def steps(self, device: str) -> Iterator[Step]:
        """Yield every kernel, launch and config, on operands of that device."""
        import torch

        from safetune.kernels import launches, long_rows

        rms, residual = self.kind == "rms", self.kind == "layer"
        groups = GROUPS if self.kind == "group" else 1
        rows = self.tokens * groups

        def make(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            if device == "meta":
                return torch.empty(*shape, dtype=dtype, device=device)
            # Made on the CPU: kernels that are not ours take time under the tool, too.
            return torch.randn(*shape, dtype=dtype).to(device)

        x, dy = make(rows, self.columns), make(rows, self.columns)
        weight = make(groups * self.columns)
        bias = None if rms else make(groups * self.columns)
        added = make(rows, self.columns, dtype=torch.float32) if residual else None
        operands = (x, weight, bias, 1e-5, added, None, None, rms, groups)
        outputs, forward = launches.forward_launch(*operands)
        yield from self._with_configs(forward)
        normalized = x if outputs.residual is None else outputs.residual
        dres = make(rows, self.columns, dtype=torch.float32) if residual else None
        gradients = (dy, normalized, weight, bias, outputs.mean, outputs.rstd, dres)
        options = (residual, rms, x.dtype)
        if launches.are_few(x, groups):
            yield from self._with_configs(launches.few_rows_forward_launch(*operands)[1])
            few = launches.few_rows_backward_launch(*(*gradients, *options))
            yield from self._with_configs(few[1])
        plan = launches.backward_plan(x, weight, bias, groups, pinned=True)
        recompute = self.kind == "group"
        partials, backward = launches.backward_launch(plan, *(*gradients, *options, recompute))
        yield from self._with_configs(backward)
        if long_rows.is_long(dy, normalized, recompute, pinned=False):
            own = long_rows.long_rows_plan(normalized, groups, bias is not None, residual)
            _, backward = launches.backward_launch(own, *(*gradients, *options, recompute))
            yield from self._with_configs(long_rows.long_rows_launch(backward))
        sums = (partials.weight_partials, partials.bias_partials)
        _, finalize = launches.finalize_launch(plan, *sums, weight, bias)
        yield from self._with_configs(finalize)

    def _with_configs(self, launch: Any) -> Iterator[Step]:
        kernel = launch.kernel
        named = dict(zip(kernel.arg_names, launch.args, strict=False))
        configs = kernel.pruned_for(named, launch.kwargs)
        for config in configs if self.all_configs else configs[:1]:
            yield kernel, launch, config


def problems() -> list[Problem]:
    """Return all of them, the fewest columns first: those with the most configs."""
    tiny = recording.interpreted()
    tokens, columns = (TINY_TOKENS, TINY_COLUMNS) if tiny else (TOKENS, COLUMNS)
    return [
        Problem(kind, height, width, kind == "layer" and height == tokens[0])
        for height in tokens
        for width in columns
        for kind in ("layer", "rms", "group")
    ]


def compile_step(job: tuple[Problem, int]) -> str:
    """Compile into Triton's cache, in a process of its own; return what went wrong."""
    import torch

    problem, number = job
    kernel, launch, config = next(itertools.islice(problem.steps("meta"), number, None))
    args = [a.dtype if isinstance(a, torch.Tensor) else a for a in launch.args]
    try:
        kernel.fn.warmup(*args, grid=(1,), **launch.kwargs, **config.all_kwargs())
    except Exception as error:
        return f"{problem.name} {config}: {type(error).__name__}: {str(error)[-200:]}"
    return ""


def compile_all(workers: int) -> None:
    """Compile in parallel what is launched under the tools, the longest rows first."""
    every = sorted(problems(), key=lambda problem: -problem.columns)
    every = [problem for problem in every if problem.tokens == every[0].tokens]
    jobs = [
        (problem, number) for problem in every for number, _ in enumerate(problem.steps("meta"))
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failed in filter(None, pool.map(compile_step, jobs)):
            print(failed, flush=True)
    print(f"{len(jobs)} compiled", flush=True)


def launch_all(budget_s: float) -> None:
    """Launch everything once, while the budget lasts; the last line counts the launches.

    Long rows in four stages need more shared memory than there is: those configs are counted apart.
    """
    import torch
    from triton.runtime.errors import OutOfResources

    began, launched, unfit, done = time.monotonic(), 0, 0, 0
    every, device = problems(), recording.torch_device()
    for problem in every:
        if time.monotonic() - began > budget_s:
            break
        for kernel, launch, config in problem.steps(device):
            try:
                kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
                launched += 1
            except OutOfResources:
                unfit += 1
        if not recording.interpreted():
            torch.cuda.synchronize()
        done += 1
    print(
        f"{launched} launches of {done} of {len(every)} problems, {unfit} out of resources",
        flush=True,
    )


def launch_fault() -> None:
    """Store one element past the end of a tensor, by a kernel of the same kind."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def store_past_the_end(output_pointer, elements):
        tl.store(output_pointer + elements + tl.arange(0, 128), 1.0)

    if recording.interpreted():
        return
    output = torch.empty(1024, device="cuda")
    store_past_the_end[(1,)](output, output.numel())
    torch.cuda.synchronize()


def find_sanitizer() -> str | None:
    """Return compute-sanitizer: on PATH, in CUDA's folder, or in NVIDIA's Python packages."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) for home in homes if home]
    nvidia = Path(sysconfig.get_path("purelib")) / "nvidia"
    places = [place for home in folders for place in (home / "bin", home / "compute-sanitizer")]
    places += sorted({path.parent for path in nvidia.rglob("compute-sanitizer") if path.is_file()})
    return shutil.which("compute-sanitizer") or next(
        (str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").is_file()), None
    )


def run_tool(sanitizer: str, tool: str, mode: list[str], limit_s: float) -> tuple[str, str]:
    """Return (the command as text, its output); the output says so where it took too long."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(Path(__file__).resolve()), *mode]
    # Each tensor apart: PyTorch's allocator puts them next to each other.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    shown = shlex.join(["compute-sanitizer", *command[1:5], "python", "benchmarks/sanitize.py"])
    shown = f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 {shown} {shlex.join(mode)}"
    status, output = fresh_process.output_of(command, environment, limit_s)
    ended = f"ended after {limit_s:.0f} s" if status is None else f"exit code {status}"
    return shown, f"{output}\n{ended}"


def summary_of(output: str) -> list[str]:
    """Return the lines of a tool's output that say what was launched and what was found."""
    wanted = re.compile(r"SUMMARY|launches of|exit code|ended after|Error|error:|not supported")
    return [line for line in output.splitlines() if wanted.search(line)][-8:]


def main() -> None:
    """Compile, run each tool, print and write the summary; exits 1 where one is not clean."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--launch", type=float, metavar="SECONDS", help="only launch, for SECONDS")
    parser.add_argument("--launch-fault", action="store_true", help="only store out of bounds")
    parser.add_argument("--budget", type=float, default=120, metavar="SECONDS", help="for it all")
    parser.add_argument("--workers", type=int, default=14, help="compiling processes")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS))
    options = parser.parse_args()
    if options.launch is not None:
        launch_all(options.launch)
    elif options.launch_fault:
        launch_fault()
    else:
        sys.exit(check(options))


def check(options: argparse.Namespace) -> int:
    """Return 0 where the planted fault is found and nothing else is."""
    recording.require_device()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        sys.exit("no compute-sanitizer on PATH, in CUDA_HOME, /usr/local/cuda or site-packages")
    began = time.monotonic()
    if not recording.interpreted():
        compile_all(options.workers)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    run = functools.partial(run_tool, sanitizer)
    runs = [(*run("memcheck", ["--launch-fault"], 90), False)]
    for number, tool in enumerate(options.tools):
        left = began + options.budget - time.monotonic()
        share = max(15.0, left / (len(options.tools) - number))
        # A process under the tool takes a while to start, and a problem more than was left.
        mode = ["--launch", f"{share * 0.6:.0f}"]
        runs.append((*run(tool, mode, share + 30), True))
    lines, wrong = [f"# compute-sanitizer on {recording.device_name()}", ""], 0
    for command, output, should_be_clean in runs:
        clean = "exit code 0" in output
        wrong += clean != should_be_clean
        verdict = "as it should" if clean == should_be_clean else "NOT AS IT SHOULD"
        found = summary_of(output)
        print(command, *found, verdict, sep="\n", flush=True)
        if clean != should_be_clean:
            print(output[-6000:], flush=True)
        lines += [f"`{command}`:", "", *(f"    {line}" for line in found), ""]
    lines += [f"{recording.versions()}, commit {recording.commit()}", ""]
    path = Path(options.out) / recording.device_slug(recording.device_name()) / "sanitizer.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    print(path, f"{time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    main()
