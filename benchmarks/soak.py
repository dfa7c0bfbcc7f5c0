"""Many tunings in one process, a third of the configs faulty: are answers right, what is left?

    python benchmarks/soak.py [--tunings 300] [--out DIR]

Every tuning has a key of its own, four good configs and two that crash, hang, compute something
else, write out of bounds or do not compile. At the end no process, descriptor, thread, device
memory or row may be over, and this process may not have grown. The exit code is 1 otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import recording
import triton
import triton.language as tl

from safetune import safetune
from safetune.isolation import child_handle

#: Verdicts that a fault may end with.
EXPECTED = {
    "no": "ok",
    "segfault": "died",
    "exit": "died",
    "exception": "launch_error",
    "hang": "timeout",
    "wrong": "wrong_result",
    "after": "out_of_bounds",
    "static": "compile_error",
    "llvm": "compile_crash",
    "far": "illegal_access",
}
_QUICK = ("segfault", "exit", "exception", "wrong", "after")
_ON_GPU = ("static", "far", "llvm")
#: Of this many tunings one has a config that hangs until its deadline.
HANG_EVERY = 30
DEADLINE_S = 3.0
#: Children leave by themselves after they have been idle for some seconds.
LEAVING_S = 20.0
#: How much this process may grow after a tenth of the tunings, and the device's used memory.
GROWTH_MIB = 150.0
DEVICE_MIB = 64.0

FAR: tl.constexpr = tl.constexpr(1 << 40)
BLOCKS = (128, 256, 512, 1024, 2048, 4096)


@triton.jit
def kernel(x, out, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """out = x + 1, and what FAULT says."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask, other=0.0) + 1
    if FAULT == "static":
        tl.static_assert(BLOCK < 8, "a block of 8")
    if FAULT == "wrong":
        value = value + 1
    if FAULT == "llvm":
        value = tl.inline_asm_elementwise(
            "mov.b32 $9, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    if FAULT == "far":
        tl.store(out + FAR + offset, value, mask=mask)
    if FAULT == "after":
        tl.store(out + n, 7.0)
    tl.store(out + offset, value, mask=mask)


def hook_of(fault: str) -> Any:
    """Return a config's pre_hook that does in a child what its fault says; None without one."""
    parent = os.getpid()

    def segfault(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            ctypes.string_at(0)

    def leave(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            os._exit(0)

    def throw(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            raise ValueError("a tile of 7 rows")

    def hang(arguments: dict[str, Any]) -> None:
        while os.getpid() != parent:
            pass

    return {"segfault": segfault, "exit": leave, "exception": throw, "hang": hang}.get(fault)


def faults_of(number: int) -> tuple[str, str]:
    """Return the faults of the two faulty configs of a tuning."""
    kinds = _QUICK if recording.interpreted() else _QUICK + _ON_GPU
    first, second = kinds[number % len(kinds)], kinds[(number // len(kinds) + number) % len(kinds)]
    return ("hang" if number % HANG_EVERY == HANG_EVERY - 1 else first), second


def tune_once(number: int, device: str) -> recording.Row:
    """Tune one new key; return what was wrong with it, if anything."""
    faults = faults_of(number)
    kinds = ["no"] * 4
    for turn, fault in enumerate(faults):  # declared first, last, and in between
        kinds.insert((number * (turn + 1)) % (len(kinds) + 1), fault)
    configs = [
        triton.Config({"BLOCK": block, "FAULT": kind}, pre_hook=hook_of(kind))
        for block, kind in zip(BLOCKS, kinds, strict=True)
    ]
    tuned = safetune(configs=configs, key=["n"], run_timeout_s=DEADLINE_S)(kernel)
    n = 300 + number
    x, out = torch.randn(n, device=device), torch.zeros(n, device=device)
    before = x.clone()
    start = time.perf_counter()
    tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    seconds = time.perf_counter() - start
    right = torch.equal(out, before + 1) and torch.equal(x, before)
    chosen = tuned.best_config.kwargs["FAULT"]
    wanted = Counter(EXPECTED[kind] for kind in kinds)
    return {
        "tuning": number,
        "faults": list(faults),
        "seconds": round(seconds, 3),
        "right": right and chosen == "no",
        "verdicts": dict(sorted(wanted.items())),
    }


def footprint(device: str) -> dict[str, float]:
    """Return what this process holds once no idle child waits for its next tuning."""
    child_handle.idle.drop()
    wait_for_children()
    gc.collect()
    used = 0.0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / 2**20
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident_mib": round(resident, 1),
        "device_mib": round(used, 1),
        "device_processes": device_processes() if device == "cuda" else 0,
    }


def device_processes() -> int:
    """Return how many processes have a context on a device, as far as nvidia-smi sees them."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return len(done.stdout.split())


def children() -> list[int]:
    """Return the processes that the fork servers below this process have forked."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(folder.name)] = int(parent)
    servers = {pid for pid, parent in parents.items() if parent == os.getpid()}
    return [pid for pid, parent in parents.items() if parent in servers]


def wait_for_children() -> int:
    """Wait until the children have left by themselves; return how many have not."""
    deadline = time.monotonic() + LEAVING_S
    while (left := len(children())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def rows_in_store(folder: Path) -> dict[str, Any]:
    """Return how many trials and choices there are, and the trials by verdict."""
    with closing(sqlite3.connect(f"file:{folder / 'safetune.db'}?mode=ro", uri=True)) as database:
        verdicts = dict(database.execute("SELECT verdict, count(*) FROM trial GROUP BY verdict"))
        (choices,) = database.execute("SELECT count(*) FROM choice").fetchone()
    return {"trials": sum(verdicts.values()), "choices": choices, "verdicts": verdicts}


def figures(rows: Sequence[recording.Row]) -> recording.Figures:
    """Return what came out; everything but the first two and the time should be 0 or small."""
    tunings = [row for row in rows if "tuning" in row]
    wanted: Counter[str] = Counter()
    for row in tunings:
        wanted.update(row["verdicts"])
    found: recording.Figures = {
        "tunings": float(len(tunings)),
        "faulty_configs": float(sum(n for v, n in wanted.items() if v != "ok")),
        "seconds": round(sum(row["seconds"] for row in tunings), 1),
        "wrong_answers": float(sum(not row["right"] for row in tunings)),
    }
    for end in (row for row in rows if "store" in row):
        verdicts = Counter(end["store"]["verdicts"])
        found["unexpected_verdicts"] = float(((wanted - verdicts) + (verdicts - wanted)).total())
        found["missing_rows"] = float(
            abs(end["store"]["trials"] - len(BLOCKS) * len(tunings))
            + abs(end["store"]["choices"] - len(tunings))
        )
        found["leaked_processes"] = float(end["children"])
        for name, before in end["before"].items():
            found[f"more_{name}"] = round(end["after"][name] - before, 1)
    return found


def failures(found: recording.Figures) -> list[str]:
    """Return what is not as it should be."""
    limits = {"more_resident_mib": GROWTH_MIB, "more_device_mib": DEVICE_MIB}
    free = ("tunings", "faulty_configs", "seconds")
    return [
        f"{name} is {value:g}, at most {limits.get(name, 0):g} is allowed"
        for name, value in found.items()
        if name not in free and value > limits.get(name, 0)
    ]


def main() -> int:
    """Run, print, save; return the exit code."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--tunings", type=int, default=300)
    parsed = parser.parse_args()
    device = recording.torch_device()
    result = recording.begin("soak")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SAFETUNE_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        settled, before = max(2, parsed.tunings // 10), {}
        for number in range(parsed.tunings):
            result.rows.append(tune_once(number, device))
            if number + 1 == settled:
                before = footprint(device)
        left = wait_for_children()  # by themselves
        after = footprint(device)
        store = rows_in_store(Path(folder))
        result.rows.append({"store": store, "children": left, "before": before, "after": after})
    found = figures(result.rows)
    if parsed.out != recording.RESULTS or not recording.interpreted():
        recording.report(result, result.save(parsed.out, figures))
    else:
        print("\n".join(f"{name}: {value:g}" for name, value in found.items()))
    wrong = failures(found)
    print("\n".join(["", *wrong] if wrong else ["", "nothing is left, every answer is right"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
