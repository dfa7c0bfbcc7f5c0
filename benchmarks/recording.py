"""What every benchmark records: where it ran, what it measured, and the figures computed from that.

A result is one JSON file, `<folder>/<device>/<bench>.json`:
`{"bench", "device", "versions", "date", "commit", "command", "rows", "figures"}`. Rows are what was
measured; `figures` is what the benchmark's own function makes of them, so that a reader, and a
test, can compute it again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
Figures = dict[str, float]
Part = TypeVar("Part")
FIELDS = ("bench", "device", "versions", "date", "commit", "command", "rows", "figures")


@dataclass
class Result:
    """What one benchmark has measured on one device so far; the fields are those of the file."""

    bench: str
    device: str
    versions: dict[str, str]
    commit: str
    command: str
    rows: list[Row] = field(default_factory=list)
    date: str = ""
    figures: Figures = field(default_factory=dict)

    def save(self, folder: Path, figures: Callable[[Sequence[Row]], Figures]) -> Path:
        """Compute the figures, write the file as a whole, and return where."""
        self.figures = figures(self.rows)
        self.date = now()
        path = folder / self.device / f"{self.bench}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = {name: asdict(self)[name] for name in FIELDS}
        partial = path.with_suffix(".tmp")
        partial.write_text(_as_text(ordered), encoding="utf-8")
        partial.replace(path)
        return path


def _as_text(fields: Mapping[str, Any]) -> str:
    """Return a file's JSON with one line per row, so that a diff shows which rows are new."""
    lines = []
    for name, value in fields.items():
        text = json.dumps(value, allow_nan=False, indent=1 if name == "figures" else None)
        if name == "rows" and value:
            rows = ",\n".join(json.dumps(row, allow_nan=False) for row in value)
            text = f"[\n{rows}\n]"
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def now() -> str:
    """Return the time as results have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def begin(bench: str) -> Result:
    """Return an empty result of this machine, this checkout and this command.

    Ends the program where there is neither a GPU nor the interpreter.
    """
    require_device()
    return Result(bench, device_slug(device_name()), versions(), commit(), command())


def resume(result: Result, folders: Iterable[Path]) -> None:
    """Take over the rows of the first file that the same code wrote on the same kind of machine."""
    for path, earlier in _earlier(result, folders):
        if all(earlier[name] == getattr(result, name) for name in ("commit", "versions")):
            print(f"continuing {path} with its {len(earlier['rows'])} rows")
            result.rows = list(earlier["rows"])
            return
        print(f"{path} is from other code or versions: not continued")


def take_over(result: Result, folders: Iterable[Path]) -> None:
    """Take over the rows of the first file of the same Triton and torch, also of other code.

    Each row has the commit and the date that it is from.
    """
    for path, earlier in _earlier(result, folders):
        if all(earlier["versions"][n] == result.versions[n] for n in ("triton", "torch")):
            print(f"keeping the {len(earlier['rows'])} rows of {path}")
            origin = {name: earlier[name] for name in ("commit", "date")}
            result.rows = [{**origin, **row} for row in earlier["rows"]]
            return
        print(f"{path} is from other versions: not kept")


def _earlier(result: Result, folders: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the files of this benchmark and device, and what is in them."""
    for folder in folders:
        path = folder / result.device / f"{result.bench}.json"
        if path.exists():
            yield path, json.loads(path.read_text(encoding="utf-8"))


def stored_figures(folder: Path, bench: str) -> Figures:
    """Return the figures of a result in a device's folder; none where there is no result."""
    path = folder / f"{bench}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["figures"]) if path.exists() else {}


def device_name() -> str:
    """Return the GPU's product name, or what stands in for one in Triton's interpreter.

    The driver's own tool is asked first: this process may not want a CUDA context.
    """
    if interpreted():
        return "interpreter"
    if name := _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]):
        return name
    import torch

    return str(torch.cuda.get_device_name())


def device_slug(name: str) -> str:
    """Return a device's name as a folder is called: `NVIDIA_H100_80GB_HBM3`."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: good for trying a script, not for figures."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def torch_device() -> str:
    """Return the torch device of this run."""
    return "cpu" if interpreted() else "cuda"


def require_device() -> None:
    """End the program where there is neither a GPU nor the interpreter."""
    import torch

    if not interpreted() and not torch.cuda.is_available():
        sys.exit("no GPU here; TRITON_INTERPRET=1 and --out DIR try the script without one")


def versions() -> dict[str, str]:
    """Return the versions that a time depends on, and how many CPUs compile.

    `sources` is a digest over what is measured: it tells changes that are not committed yet.
    """
    import torch
    import triton

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "safetune": _version("safetune"),
        "cuda": str(torch.version.cuda),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cpus": str(len(os.sched_getaffinity(0))),
        "sources": _sources_digest(),
    }
    return {name: value for name, value in found.items() if value}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # on PYTHONPATH, not installed
        return ""


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for pattern in ("safetune/**/*.py", "kernels/**/*.py", "benchmarks/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the commit that is measured: BENCH_COMMIT, else what git says; `-dirty` if changed."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    head = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if not head:
        return "unknown"
    measured = ["safetune", "kernels", "benchmarks/*.py"]
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--", *measured])
    return f"{head}-dirty" if changed else head


def _output(command: list[str]) -> str:
    """Return the first line that a program prints; nothing where it cannot run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return (done.stdout.strip().splitlines() or [""])[0]
    return ""


def command() -> str:
    """Return the command line of this run: no path of this machine is in it."""
    script = os.path.relpath(sys.argv[0], ROOT)
    arguments = list(sys.argv[1:])
    for option in ("--out", "--caches"):
        if option in arguments:
            place = arguments.index(option)
            del arguments[place : place + 2]
    named = ["DIR" if os.path.isabs(argument) else argument for argument in arguments]
    return shlex.join(["python", script, *named])


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes, under the first line of a description."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results"
    )
    return parser


def part_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser for a benchmark that runs in parts and goes on where it ended."""
    parser = arguments(description)
    parser.add_argument("--parts", type=int, default=None, help="parts to run now, at most")
    parser.add_argument(
        "--budget", type=float, default=1e9, metavar="SECONDS", help="begin no part past it"
    )
    parser.add_argument("--fresh", action="store_true", help="do not go on with earlier rows")
    return parser


def parts_to_run(
    every: Iterable[Part], rows: Sequence[Row], parsed: argparse.Namespace, expected_s: float
) -> Iterator[Part]:
    """Yield the parts that have no rows yet, at most `--parts`, while one more fits the budget.

    Args:
        expected_s: how long the first one will take; after that the longest so far is expected.
    """
    start, done = time.monotonic(), {row["part"] for row in rows}
    longest = expected_s
    for number, part in enumerate([part for part in every if part not in done][: parsed.parts]):
        began = time.monotonic()
        if began - start + longest > parsed.budget:
            print(f"no part more fits in {parsed.budget:g} s: run again for the rest")
            return
        yield part
        took = time.monotonic() - began
        longest = took if number == 0 else max(longest, took)


def run_parts(
    result: Result,
    every: Iterable[Part],
    run_part: Callable[[Part], Iterable[Row]],
    figures: Callable[[Sequence[Row]], Figures],
    parsed: argparse.Namespace,
    expected_s: float,
    columns: Sequence[str] = (),
) -> None:
    """Run the parts that earlier runs have left, save each, and print these columns and figures."""
    folder = output_folder(parsed)
    if not parsed.fresh:
        resume(result, [folder, RESULTS])
    for part in parts_to_run(every, result.rows, parsed, expected_s):
        result.rows += run_part(part)
        result.save(folder, figures)
    report(result, result.save(folder, figures), columns)


def report(result: Result, path: Path, columns: Sequence[str] = ()) -> None:
    """Print columns of the rows, the figures, where they were measured, and where they are."""
    if columns:
        print(table(result.rows, columns), end="\n\n")
    figures = [{"figure": name, "value": value} for name, value in result.figures.items()]
    print(table(figures, ["figure", "value"]))
    print(f"\n{result.device}, {result.versions}, commit {result.commit}\n{path}")


def in_turn(names: Sequence[Part], turn: int) -> list[Part]:
    """Return the names with another one first in each turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def output_folder(parsed: argparse.Namespace) -> Path:
    """Return `--out`; the interpreter's times are kept out of the repository's results."""
    if interpreted() and parsed.out == RESULTS:
        sys.exit("times of the interpreter are not results: give another --out DIR")
    return Path(parsed.out)


def medians(rows: Iterable[Row], value: str, *by: str) -> dict[tuple[Any, ...], float]:
    """Return the median of a column for each combination of the columns `by`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row[value])
    return {group: statistics.median(values) for group, values in groups.items()}


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as aligned text, numbers to the right."""
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [all(isinstance(row.get(name, 0), (int, float)) for row in rows) for name in columns]

    def line(values: Sequence[str]) -> str:
        placed = zip(values, widths, numeric, strict=True)
        return "  ".join(v.rjust(w) if right else v.ljust(w) for v, w, right in placed).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
