"""Launch a tuned kernel once and report, in JSON, what that started, stored and compiled."""

import glob
import json
import os
import sqlite3
import sys

started = []
forks = []


def audit(event, arguments):
    if event == "subprocess.Popen":
        started.append(" ".join(map(str, arguments[1])))
    elif event in ("os.fork", "os.forkpty"):
        forks.append(event)


sys.addaudithook(audit)

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from safetune import safetune  # noqa: E402

N = 1 << 12


@safetune(
    configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512, 1024)],
    key=["n"],
)
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


def binaries():
    return set(glob.glob(os.path.join(os.environ["TRITON_CACHE_DIR"], "*", "*.cubin")))


device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = (torch.randn(N, device=device) for _ in range(2))
out = torch.zeros_like(x)
before = binaries()
add_kernel[lambda m: (triton.cdiv(N, m["BLOCK"]),)](x, y, out, N)
right = torch.equal(out, x + y)

store = sqlite3.connect(os.path.join(os.environ["SAFETUNE_CACHE_DIR"], "safetune.db"))
trials, newest = store.execute("SELECT count(*), max(created) FROM trial").fetchone()
print(
    json.dumps(
        {
            "right": right,
            "best": str(add_kernel.best_config),
            "trials": trials,
            "newest_trial": newest,
            "tuning_processes": sum("safetune.child.server_main" in line for line in started),
            "forks": forks,
            "worker_imported": "safetune.isolation.measuring_child" in sys.modules,
            "new_binaries": len(binaries() - before),
        }
    )
)
