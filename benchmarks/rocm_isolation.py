"""A tuning with a config that faults and one that is wrong, on an AMD GPU: what came of it.

`rocm.py` runs it, and a test does, on a library of C that stands for HIP's. It prints a JSON list
of rows: what was looked at, whether that is as it should be, and what was seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

import safetune
from safetune import triton_launch
from safetune.isolation import backend
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

#: By warps: the first stores beyond all memory, the second computes something else.
FAULTY, WRONG, WORKING = 16, 8, (4, 2, 1)
COUNT = 1000


@triton.jit
def doubled(x, y, n, FAULTY: tl.constexpr, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    """Double n elements, unless told otherwise."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = offset.to(tl.int64) + ((1 << 42) if FAULTY else 0)
    factor = 3 if WRONG else 2
    tl.store(y + place, factor * tl.load(x + offset, mask=offset < n), mask=offset < n)


def config(warps: int) -> triton.Config:
    """Return the config that is known by its warps."""
    options = {"FAULTY": warps == FAULTY, "WRONG": warps == WRONG, "BLOCK": 256}
    if not torch.version.cuda:
        options["waves_per_eu"] = warps % 2
    return triton.Config(options, num_warps=warps)


def tuner(*warps: int, **options: Any) -> Any:
    """Return the tuned kernel with the configs of these warps."""
    return safetune.autotune(configs=[config(each) for each in warps], key=["n"], **options)(
        doubled
    )


def use_device() -> str:
    """Return torch's name of the device; without torch for a GPU, Triton alone launches there."""
    if torch.cuda.is_available():
        return "cuda"
    triton_launch.use_amd_device_without_torch(0)
    return "cpu"


def is_right(kernel: Any, device: str) -> bool:
    """Launch the kernel, and return whether it computes the right values and changes nothing."""
    x, y = torch.arange(float(COUNT), device=device), torch.zeros(COUNT, device=device)
    kernel[lambda meta: (triton.cdiv(COUNT, meta["BLOCK"]),)](x, y, COUNT)
    expected = torch.arange(float(COUNT))
    return bool((x.cpu() == expected).all() and (y.cpu() == 2 * expected).all())


def row(check: str, ok: bool, seen: object) -> dict[str, Any]:
    """Return what was looked at."""
    return {"kind": "isolation", "check": check, "ok": ok, "seen": str(seen)}


def rows() -> Iterator[dict[str, Any]]:
    """Tune, and yield what came of it."""
    device = use_device()
    kernel = tuner(FAULTY, WRONG, *WORKING)
    right = is_right(kernel, device)
    chosen = kernel.best_config.num_warps
    yield row("the tuned kernel is right", right and chosen in WORKING, f"{chosen} warps")
    store = open_lookup(Settings.current()).store
    trials = [trial for _, trials in store.trials_of() for trial in trials]
    outcomes = {trial.config["num_warps"]: trial.outcome for trial in trials}
    labels = {warps: outcome.label for warps, outcome in outcomes.items()}
    for warps in WORKING:
        found = outcomes.get(warps)
        timed = found is not None and found.timing is not None and found.timing.median_ms > 0
        yield row(f"{warps} warps are measured", timed, labels.get(warps))
    wrong, faulty = labels.get(WRONG, "no trial"), labels.get(FAULTY, "no trial")
    yield row("a wrong result is found", wrong == "wrong_result", wrong)
    contained = faulty.startswith(("died", "illegal_access"))
    yield row("a fault of the device ends a child only", contained, faulty)
    used: Any = backend.required()
    own = used.device_uuids()[torch.cuda.current_device() if device == "cuda" else 0]
    theirs = {outcome.gpu_uuid for outcome in outcomes.values() if outcome.ok}
    yield row("children have measured on this device", theirs == {own}, f"{own}, {theirs}")
    yield row("the next call is right", is_right(kernel, device), "")


def again() -> dict[str, Any]:
    """Launch in a second process, which must not tune; without a choice it launches the fault."""
    environment = {**os.environ, "SAFETUNE_MODE": "frozen"}
    command = [sys.executable, __file__, "again"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seen = (done.stdout or done.stderr).strip().splitlines()[-1:]
    return row("a second process launches the stored choice", seen == ["right"], seen)


if __name__ == "__main__":
    if sys.argv[1:] == ["again"]:
        print("right" if is_right(tuner(FAULTY, WRONG, *WORKING), use_device()) else "wrong")
    else:
        alone = sys.argv[1:] == ["alone"]
        print(json.dumps([*rows(), *([] if alone else [again()])]))
