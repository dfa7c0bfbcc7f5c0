"""What `safetune.install()` adds to the import of a library with many tuners: FLA's 193.

A fresh process that has imported torch and Triton imports every module of FLA's `ops` and
`modules`, with `safetune.install()` before it or without. They alternate, and change who goes
first; two processes that are not counted write Python's bytecode. The figure is the difference of
the medians. Times are of the CPU: an import waits for nothing, and other processes are not in them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import time
from collections.abc import Iterator, Sequence
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


def run_part(part: int) -> Iterator[Row]:
    """Import FLA once under each kind."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    call = functools.partial(fresh_process.run, import_all, variables={}, limit_s=PROCESS_TIMEOUT_S)
    for order, kind in enumerate(recording.in_turn(KINDS, part)):
        if part == 0:
            call(kind)
        yield {"part": part, "order": order, "kind": kind, **call(kind)}


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--alternations", type=int, default=5, help="in all, earlier runs included")
    options = parser.parse_args()
    recording.run_parts(
        recording.begin("install_time"),
        range(options.alternations),
        run_part,
        figures,
        options,
        PART_S,
        ["part", "kind", "seconds", "process_s", "tuners"],
    )


if __name__ == "__main__":
    main()
