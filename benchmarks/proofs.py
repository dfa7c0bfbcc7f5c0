"""Libraries' own tests under stock Triton, under `safetune run`, and with the vendored shim.

    python benchmarks/proofs.py --sources DIR

A result keeps the rows that a run does not measure again, such as those that `--only` and `--ways`
leave out; each row has its date and commit. The row of a process that ran out of time has the tests
that had ended (`ended` is false); no figure is made of it.

DIR has the tests and kernels of `PROOFS`, which are not in this repository: `fla/tests`,
`liger/test`, `tutorials/*.py`, `finegrained-fp8/`; `proof_sources.sh DIR` brings them. The packages
themselves are the installed ones, but for the last two. With the shim,
`docs/examples/autotune_shim.py` is put into a copy of the package, and every `triton.autotune`
there becomes the shim's `autotune`.

The time to the first step is that of the first test of a proof, in a process of its own, while no
other one runs tests: its reference included, imports not. `cold` has empty caches, `stored` those
of the cold process. All other runs are side by side, and take over compiled kernels and choices
from the first steps: their times say nothing. Stock Triton times each config for 5 ms there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import fresh_process
import recording
from proof_list import PROOFS, VERSIONS, Proof
from recording import Figures, Row

HERE = Path(__file__).resolve().parent
SHIM = HERE.parent / "docs" / "examples" / "autotune_shim.py"
WAYS = ("run", "stock", "shim")  # the first fills the cache of compiled kernels
PASSED = ("passed", "skipped", "expected")


def figures(rows: Sequence[Row]) -> Figures:
    """Return the tests that passed in each way, what differs from stock, and the first steps."""
    found: Figures = {"differences": float(sum(len(each) for each in differences(rows).values()))}
    for row in rows:
        name = f"{row['proof']}, {row['way']}"
        if not row.get("ended", True):
            continue
        if row["state"] == "all":
            passed = sum(outcome in PASSED for outcome in row["outcomes"].values())
            found |= {f"passed {name}": float(passed), f"tests {name}": len(row["outcomes"])}
            if row["way"] != "stock":
                found[f"tunings {name}"] = float(row["tunings"])
        elif row["first_s"] is not None:
            found[f"first_step_s {name} {row['state']}"] = row["first_s"]
    return found


def differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return for each proof and way the tests whose outcome is not stock's, by name."""
    every = {
        (row["proof"], row["way"]): row["outcomes"]
        for row in rows
        if row["state"] == "all" and row.get("ended", True)
    }
    return {
        f"{proof}, {way}": [
            f"{test}: {outcomes.get(test)}, stock {stock.get(test)}"
            for test in sorted({*outcomes, *stock})
            if outcomes.get(test) != stock.get(test)
        ]
        for (proof, way), outcomes in every.items()
        if way != "stock" and (stock := every.get((proof, "stock")))
    }


# --------------------------------------------------------------------------- the shim


def with_shim(text: str, module: str) -> str:
    """Return a module's text with `autotune` of the vendored file for Triton's."""
    changed = re.sub(r"@(?:triton\.autotune|fla_cache_autotune)\(", "@autotune(", text)
    if changed == text:
        return text
    # On the same line: Triton's cache knows a kernel by its line, too.
    line = f"import triton; from {module} import autotune\n"
    return re.sub(r"^import triton\n", line, changed, count=1, flags=re.MULTILINE)


def vendor(folder: Path, module: str) -> None:
    """Make the shim's `autotune` that of a package, or of scripts."""
    for path in folder.rglob("*.py"):
        path.write_text(with_shim(path.read_text(encoding="utf-8"), module), encoding="utf-8")
    shutil.copy(SHIM, folder / "autotune_shim.py")


def built(repository: Path, target: Path) -> Path:
    """Lay a repository of Hugging Face kernels out as its builder does; return the package."""
    name = repository.name.replace("-", "_")
    variant = target / "build" / "torch-cuda"
    shutil.copytree(repository / "torch-ext" / name, variant)
    space = f"_{name}_cuda_proof"
    (variant / "_ops.py").write_text(
        f"import torch\n\nops = torch.ops.{space}\n\n\n"
        f'def add_op_namespace_prefix(op_name):\n    return f"{space}::{{op_name}}"\n'
    )
    metadata = {"name": repository.name, "id": space, "version": 4, "license": "Apache-2.0"}
    metadata |= {"python-depends": [], "backend": {"type": "cuda"}}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return variant


def prepare(proof: Proof, way: str, sources: Path, place: Path) -> None:
    """Make what a way needs besides what is installed and the sources."""
    ignored = shutil.ignore_patterns("__pycache__")
    if proof.folder == "finegrained-fp8":
        package, module = built(sources / proof.folder, place), ".autotune_shim"
    elif proof.folder == "tutorials":
        package, module = place, "autotune_shim"
        shutil.copytree(sources / proof.folder, package, ignore=ignored)
    elif way == "shim":
        spec = importlib.util.find_spec(proof.package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        package, module = place / proof.package, f"{proof.package}.autotune_shim"
        shutil.copytree(spec.submodule_search_locations[0], package, ignore=ignored)
    if way == "shim":
        vendor(package, module)


def environment(place: Path) -> dict[str, str]:
    """Return how a process finds the plugins and what was prepared for it."""
    paths = [str(place), str(HERE), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | {"PROOF_KERNEL": str(place), "PROOF_TUTORIALS": str(place)}


# --------------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Bench:
    """What all processes share: the sources, where caches go, and when the last has to end."""

    sources: Path
    folder: Path
    deadline: float
    preparing: threading.Lock = field(default_factory=threading.Lock)

    def run(self, proof: Proof, way: str, state: str) -> Row:
        """Run tests in a fresh process; return their outcomes and what safetune has to say."""
        own = self.folder / re.sub(r"\W+", "_", proof.name)
        store = own / f"store-{way}"
        own.mkdir(parents=True, exist_ok=True)
        report = own / f"{way}-{state}.jsonl"
        report.unlink(missing_ok=True)
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("SAFETUNE_", "FLA_"))}
        place = self.folder / "packages" / proof.folder / way
        with self.preparing:
            if not place.exists():
                prepare(proof, way, self.sources, place)
        env = inherited | environment(place)
        env |= {"TRITON_CACHE_DIR": str(own / "triton"), "SAFETUNE_CACHE_DIR": str(store)}
        env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HF_HUB_OFFLINE": "1"}
        env["PROOF_REPORT"] = str(report)
        if way == "stock":
            env["PROOF_QUICK"] = "1"
        command = [sys.executable, *(["-m", "safetune", "run"] if way == "run" else [])]
        command += ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", "."]
        command += ["-p", "no:cacheprovider", "-p", "proof_report", "--tb=short"]
        command += proof.arguments(state)
        before, start = tunings(store), time.monotonic()
        cwd, left_s = self.sources / proof.folder, self.deadline - start
        status, output = fresh_process.output_of(command, env, left_s, cwd)
        report.with_suffix(".txt").write_text(" ".join(command) + "\n" + output)
        outcomes, first_s = read(report)
        row: Row = {"part": f"{proof.name} {way} {state}", "proof": proof.name, "way": way}
        row |= {
            "state": state,
            "ended": status is not None,
            "process_s": time.monotonic() - start,
            "first_s": first_s,
        }
        row |= {"tunings": tunings(store) - before, "outcomes": outcomes}
        said = [line for line in output.splitlines() if line.startswith("safetune: ")]
        return row | {"report": said, "of": VERSIONS[proof.folder]}


def read(report: Path) -> tuple[dict[str, str], float | None]:
    """Return each test's outcome, by name, and the seconds of the first; none without a report."""
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    tests = [json.loads(line) for line in lines]
    return {name: outcome for name, outcome, _ in tests}, tests[0][2] if tests else None


def tunings(store: Path) -> int:
    """Return how many keys have been tuned into a store."""
    if not list(store.glob("*.db")):
        return 0
    from safetune.store.local.store import Store

    opened = Store.open(store)
    try:
        return sum(1 for _, trials in opened.trials_of() if trials)
    finally:
        opened.close()


# --------------------------------------------------------------------------- all of them


def main(argv: Sequence[str] | None = None) -> None:
    """Run all tests side by side, or with `--first-steps` those, one process after the other."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--sources", type=Path, required=True, help="tests and tutorials")
    parser.add_argument("--only", default="", help="proofs whose name has this regular expression")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--first-steps", action="store_true", help="time these, and nothing else")
    parser.add_argument("--workers", type=int, default=12, help="processes side by side")
    parser.add_argument("--caches", type=Path, help="keep the caches and the outputs here")
    options: argparse.Namespace = parser.parse_args(argv)
    result = recording.begin("proof_steps" if options.first_steps else "proofs")
    recording.take_over(result, [options.out, recording.RESULTS])
    ended = [row for row in result.rows if row.get("ended", True)]
    done = {row["part"] for row in ended if row["commit"] == result.commit}
    with tempfile.TemporaryDirectory(prefix="proofs-") as name:
        deadline = time.monotonic() + min(options.budget, 1e6)
        folder = (options.caches or Path(name)).resolve()
        bench = Bench(options.sources.resolve(), folder, deadline)
        for row in run(bench, options, set() if options.fresh else done):
            if not row["ended"] and any(row["part"] == earlier["part"] for earlier in ended):
                continue
            kept = [earlier for earlier in result.rows if earlier["part"] != row["part"]]
            result.rows = [*kept, {**row, "commit": result.commit, "date": recording.now()}]
            result.save(options.out, figures)
            failed = [test for test, how in row["outcomes"].items() if how not in PASSED]
            counted = dict(Counter(row["outcomes"].values()))
            print(row["part"], f"{row['process_s']:.1f} s", row["first_s"], counted, end=" ")
            print(f"{row['tunings']} tunings", *failed, *row["report"], sep="\n    ", flush=True)
    path = result.save(options.out, figures)
    print(json.dumps(differences(result.rows), indent=1))
    recording.report(result, path)


def run(bench: Bench, options: argparse.Namespace, done: set[str]) -> Iterator[Row]:
    """Yield the rows that are not there yet, of processes that have ended in time."""
    states = ("cold", "stored") if options.first_steps else ("all",)
    with ThreadPoolExecutor(1 if options.first_steps else options.workers) as pool:
        every = [
            pool.submit(bench.run, proof, way, state)
            for way in options.ways
            for proof in PROOFS
            if re.search(options.only, proof.name)
            and not {f"{proof.name} {way} {state}" for state in states} <= done
            for state in states
        ]
        for future in as_completed(every):
            row = future.result()
            if not (row["ended"] and row["outcomes"]):
                how = "reported no test" if row["ended"] else "did not end"
                print(row["part"], f"{how}; see its output in --caches")
            if row["outcomes"]:
                yield row


if __name__ == "__main__":
    main()
