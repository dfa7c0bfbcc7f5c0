"""What `safetune.install()` adds to the import of a library with many tuners: FLA's 193.

A fresh process that has imported torch and Triton imports every module of FLA's `ops` and
`modules`, with `safetune.install()` before it or without. They alternate, and change who goes
first; two processes that are not counted write Python's bytecode. The figure is the difference of
the medians. Times are of the CPU: an import waits for nothing, and other processes are not in them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
from recording import Figures, Row

KINDS = ("safetune", "stock")
PROCESS_TIMEOUT_S = 120.0
PART_S = 30.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the medians, and what `install` adds."""
    times = recording.medians(rows, "seconds", "kind")
    found = {f"import_fla_s_{kind}": seconds for (kind,), seconds in sorted(times.items())}
    if len(times) == len(KINDS):
        found["added_s_fla"] = times["safetune",] - times["stock",]
    found["tuners"] = float(max((row["tuners"] for row in rows), default=0))
    found["alternations"] = float(len({row["part"] for row in rows}))
    return found


def import_all(kind: str) -> dict[str, Any]:
    """In a fresh process: import FLA, and say how long that took."""
    import torch  # noqa: F401
    import triton.runtime.autotuner as triton_autotuner

    made = []
    initialise = triton_autotuner.Autotuner.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(type(self))
        initialise(self, *args, **kwargs)

    triton_autotuner.Autotuner.__init__ = counted
    begin = time.process_time()
    if kind == "safetune":
        import safetune

        safetune.install()
    for name in ("fla.ops", "fla.modules"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            with contextlib.suppress(Exception):  # it needs another library, or a GPU
                importlib.import_module(module.name)
    seconds = time.process_time() - begin
    assert any(each.__module__.startswith("safetune") for each in made) == (kind == "safetune")
    return {"seconds": seconds, "tuners": len(made)}


def run_part(part: int, folder: Path) -> Iterator[Row]:
    """Import FLA once under each kind."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for order, kind in enumerate(KINDS if part % 2 == 0 else KINDS[::-1]):
        if part == 0:
            fresh_process.run(__file__, ["--task", kind], {}, folder, PROCESS_TIMEOUT_S)
        report = fresh_process.run(__file__, ["--task", kind], {}, folder, PROCESS_TIMEOUT_S)
        yield {"part": part, "order": order, "kind": kind, **report}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--alternations", type=int, default=5, help="in all, earlier runs included")
    parser.add_argument("--task", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Run the task of a measuring process, or the parts that are still missing."""
    options = parse()
    if options.task:
        options.report.write_text(json.dumps(import_all(options.task)))
        return
    result = recording.begin("install_time")
    if not options.fresh:
        recording.resume(result, [options.out, recording.RESULTS])
    with tempfile.TemporaryDirectory(prefix="install-") as name:
        every = range(options.alternations)
        for part in recording.parts_to_run(every, result.rows, options, PART_S):
            result.rows += run_part(part, Path(name))
            result.save(options.out, figures)
    path = result.save(options.out, figures)
    print(recording.table(result.rows, ["part", "kind", "seconds", "process_s", "tuners"]))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
