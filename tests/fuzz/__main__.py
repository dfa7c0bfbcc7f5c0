"""`make fuzz`: many random launches by stock Triton and by safetune, compared."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import warnings

from tests.fuzz.events import NOT_YET
from tests.fuzz.fuzzer import Case, Counts, Different, fuzz, shown


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--launches", type=int, default=100_000)
    parser.add_argument("--mode", choices=("stub", "interpreter", "gpu"), default=None)
    parser.add_argument("--off", default=",".join(sorted(NOT_YET)), help="features to leave out")
    parser.add_argument("--case", default="", help="one case, as a failure prints it")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the kernels
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SAFETUNE_CACHE_DIR"] = folder
        if given.case:
            case = Case.parse(given.case)
            different = case.run(Counts())
            print(shown(case))
            return 1 if different else 0
        seed = random.randrange(1 << 32) if given.seed is None else given.seed
        return _run(seed, given)


def _run(seed: int, given: argparse.Namespace) -> int:
    # One launch in fifty really runs, in the interpreter, which takes longer.
    shares = {"stub": 49, "interpreter": 1} if given.mode is None else {given.mode: 50}
    for mode, share in shares.items():
        launches = given.launches * share // 50
        print(f"seed {seed}, {mode}: {launches} launches", flush=True)
        start = time.perf_counter()
        try:
            counts = fuzz(seed, launches, mode, frozenset(filter(None, given.off.split(","))))
        except Different as different:
            print(different)
            return 1
        took_s = time.perf_counter() - start
        print(f"  {counts.launches} launches of {counts.cases} kernels in {took_s:.0f} s:")
        print(f"  {counts.known} by the fast path, {counts.errors} errors, 0 differences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
