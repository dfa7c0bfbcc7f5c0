"""`make fuzz`: many random launches by stock Triton and by safetune, compared."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings

from tests.fuzz.events import NOT_YET
from tests.fuzz.fuzzer import Case, Counts, Different, fuzz, shown

#: Of 1,000 launches, how many of each mode: those that really run or tune take longer.
SHARES = {"stub": 940, "interpreter": 10, "tuned": 50}


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--launches", type=int, default=100_000)
    parser.add_argument("--mode", choices=(*SHARES, "gpu"), default=None)
    parser.add_argument("--off", default=",".join(sorted(NOT_YET)), help="features to leave out")
    parser.add_argument("--case", default="", help="one case, as a failure prints it")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the launches")
    given = parser.parse_args()
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    if given.jobs > 1 and not given.case:
        return _shared(seed, given)
    warnings.simplefilter("ignore")  # of the kernels
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SAFETUNE_CACHE_DIR"] = folder
        if given.case:
            case = Case.parse(given.case)
            different = case.run(Counts())
            print(shown(case))
            return 1 if different else 0
        return _run(seed, given)


def _shared(seed: int, given: argparse.Namespace) -> int:
    """Run the launches in several processes, each with a seed of its own."""
    rest = ["--launches", str(-(-given.launches // given.jobs)), "--off", given.off]
    rest += ["--mode", given.mode] if given.mode else []
    command = [sys.executable, "-m", "tests.fuzz", *rest, "--seed"]
    jobs = [subprocess.Popen([*command, str(seed + number)]) for number in range(given.jobs)]
    return max([job.wait() for job in jobs])


def _run(seed: int, given: argparse.Namespace) -> int:
    for mode, share in ({given.mode: 1000} if given.mode else SHARES).items():
        launches = given.launches * share // 1000
        start = time.perf_counter()
        try:
            counts = fuzz(seed, launches, mode, frozenset(filter(None, given.off.split(","))))
        except Different as different:
            print(f"seed {seed}, {mode}: differs\n{different}", flush=True)
            return 1
        took_s = time.perf_counter() - start
        print(
            f"seed {seed}, {mode}: {counts.launches} launches of {counts.cases} kernels in "
            f"{took_s:.0f} s: {counts.known} by the fast path, {counts.errors} errors, "
            "0 differences",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
