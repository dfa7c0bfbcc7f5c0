"""What safetune costs as a dependency of a library that has torch and Triton already.

`--wheel FILE` is the wheel (`python -m build --wheel`). A row for each distribution that comes
with it has its size when unpacked, and its licence; torch, Triton, what they need, and pip are
not counted. Further rows have the CPU seconds, in fresh processes that have imported torch and
Triton, of `import safetune` and of the first kernel that is decorated. Needs no GPU.
"""

from __future__ import annotations

import re
import statistics
import time
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import fresh_process
import recording
from packaging.requirements import Requirement
from recording import Figures, Row

PROCESSES = 7
THERE = ("torch", "triton", "pip")


def figures(rows: Sequence[Row]) -> Figures:
    """Return how much is installed, and how long imports take."""
    packages = [row for row in rows if row["what"] == "package"]
    found: Figures = {
        "megabytes": sum(row["bytes"] for row in packages) / 1e6,
        "megabytes_safetune": sum(r["bytes"] for r in packages if r["name"] == "safetune") / 1e6,
        "packages": float(len(packages) - 1),
    }
    for name in ("import_ms", "decorate_ms", "modules"):
        if values := [row[name] for row in rows if row["what"] == "process"]:
            found[name] = float(statistics.median(values))
    return found


def needed(name: str) -> set[str]:
    """Return all that a distribution needs in this environment, by name, without extras."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in metadata.requires(waiting.pop()) or ():
            required = Requirement(text)
            plain = required.name.lower().replace("_", "-")
            if plain in found or (required.marker and not required.marker.evaluate({"extra": ""})):
                continue
            found.add(plain)
            if plain not in THERE:
                waiting.append(plain)
    return found


def package_rows(wheel: Path) -> Iterator[Row]:
    """Yield the size and the licence of all that comes along."""
    there = {*THERE, *(each for name in THERE for each in needed(name))}
    for name in sorted(needed("safetune") - there):
        found = metadata.distribution(name)
        size = sum(path.stat().st_size for path in _files(found))
        yield {"what": "package", "name": name, "version": found.version, "bytes": size} | {
            "licence": licence(found.metadata)
        }
    with zipfile.ZipFile(wheel) as archive:
        size = sum(each.file_size for each in archive.infolist())
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        told = re.search(r"^License-Expression: (.*)", archive.read(name).decode(), re.MULTILINE)
    row = {"what": "package", "name": "safetune", "version": metadata.version("safetune")}
    yield {**row, "bytes": size, "licence": told[1] if told else ""}


def _files(found: metadata.Distribution) -> Iterator[Path]:
    for each in found.files or ():
        path = Path(str(each.locate()))
        if path.suffix != ".pyc" and path.is_file():
            yield path


def licence(told: metadata.PackageMetadata) -> str:
    """Return what a distribution says of its licence, in a word or two."""
    classifiers = [each for each in told.get_all("Classifier") or () if "License ::" in each]
    classified = classifiers[0].rpartition(" :: ")[2] if classifiers else ""
    plain = (told.get("License") or "").strip()
    found = told.get("License-Expression") or (plain if 0 < len(plain) < 40 else classified)
    same = {"MIT License": "MIT", "Apache License, Version 2.0": "Apache-2.0"}
    return same.get(found, found)


def measured() -> dict[str, Any]:
    """In a fresh process: import safetune, and decorate a kernel."""
    import sys

    import torch  # noqa: F401
    import triton

    def kernel(x, n):  # type: ignore[no-untyped-def]
        pass

    function, configs = triton.jit(kernel), [triton.Config({}), triton.Config({}, num_warps=8)]
    before, began = len(sys.modules), time.process_time()
    import safetune

    imported = time.process_time()
    safetune.autotune(configs, key=["n"])(function)
    decorated = time.process_time()
    return {
        "import_ms": 1e3 * (imported - began),
        "decorate_ms": 1e3 * (decorated - imported),
        "modules": len(sys.modules) - before,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the result."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--wheel", type=Path, required=True)
    options = parser.parse_args(argv)
    result = recording.begin("dependency")
    result.rows += package_rows(options.wheel)
    for number in range(PROCESSES + 1):
        report = fresh_process.run(measured, variables={}, limit_s=120.0)
        if number:  # the first one writes Python's bytecode
            result.rows.append({"what": "process", "number": number, **report})
    recording.report(result, result.save(options.out, figures))


if __name__ == "__main__":
    main()
