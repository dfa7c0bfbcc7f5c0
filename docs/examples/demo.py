"""The main job of safetune from end to end, with a store of its own: `make demo`.

1. Tune the shipped layer norm kernels for a few shapes.
2. Tune a kernel one of whose configs dies of a SIGSEGV and another of which hangs.
3. Run both again, in new processes: nothing is measured, the stored choices are used.

On a GPU if there is one, else in Triton's interpreter. Exits with 1 if any of this fails.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FAULTY = os.path.relpath(Path(__file__).with_name("faulty.py"))

USE = """
import importlib.util, os, sys, torch
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
spec = importlib.util.spec_from_file_location("faulty", sys.argv[1])
faulty = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faulty)
device, dtype, count = (
    ("cuda", torch.bfloat16, 1 << 24) if torch.cuda.is_available() else ("cpu", torch.float32, 1000)
)
left, right = torch.randn(2, count, device=device, dtype=dtype)
right_answer = torch.equal(faulty.add(left, right), left + right)
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(f"the kernel ran with {faulty.add_kernel.best_config.kwargs}")
print(f"right answer: {right_answer}; processes started: {len(children)}")
sys.exit(not right_answer or bool(children))
"""


def safetune(*arguments: str) -> str:
    """Run a safetune command, show it and what it prints, and return its standard output."""
    print(f"\n$ safetune {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "safetune", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    if "--json" not in arguments:
        print(done.stdout, end="", flush=True)
    return done.stdout


def shapes() -> list[str]:
    """The options that leave a few of the workloads; those that are meant for a GPU are 48."""
    import torch

    on_gpu = torch.cuda.is_available()
    names = ("layer-32768x1024", "rms-32768x4096") if on_gpu else ("layer-33x50", "rms-5x3x20")
    return [f"--shape={name}" for name in names]


def measured(*targets: str) -> int:
    """Tune again and return how many configs had to be measured."""
    count = json.loads(safetune("tune", *targets, "--json"))["measured"]
    print(f"measured: {count}")
    return count


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="safetune-demo-") as directory:
        os.environ["SAFETUNE_CACHE_DIR"] = directory
        os.environ.setdefault("COLUMNS", "120")
        # The working directory's folder `safetune` is not the package as it is installed.
        os.environ["PYTHONSAFEPATH"] = "1"
        layer_norm = ("safetune.kernels.layer_norm", *shapes())
        safetune("tune", *layer_norm)
        table = safetune("tune", FAULTY)
        again = measured(*layer_norm) + measured(FAULTY)
        print("\n$ python   # another process launches the kernel", flush=True)
        used = subprocess.run([sys.executable, "-c", USE, FAULTY], check=False).returncode == 0
        good = "died(SIGSEGV)" in table and "timeout" in table and again == 0 and used
        print(
            "\nThe crash and the hang cost one config each; nothing was measured twice."
            if good
            else "\nThis is not what the demo is meant to show."
        )
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
