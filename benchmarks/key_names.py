"""What becomes of the key names of installed libraries: `python benchmarks/key_names.py fla`.

Imports every module of each package, on any machine, and prints how many key names safetune keeps
and drops by each rule, as the table in docs/key_names.md. Packages that are not installed are
replaced by empty ones, and a machine without a GPU looks like one with an H100. `--names` prints
each name that nothing reads.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import json
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import click

KINDS = ("read", "bucket", "stand-in", "size", "unseen", "kept", "phantom", "unknown")
READERS = ("prune_configs_by", "pre_hook", "post_hook")


class Empty(types.ModuleType):
    """Stands for a package that is not installed."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name, __mro_entries__=lambda bases: ())
        setattr(self, name, value)
        return value


class EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that nothing else finds."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of an empty module."""
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module."""
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def look_like_an_h100() -> None:
    """Have Triton and torch tell of a GPU that is not there."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32}
    driver.set_active(
        MagicMock(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            utils=MagicMock(get_device_properties=lambda index: properties),
        )
    )
    shown = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
    )
    torch.version.cuda = "12.8"
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
    torch.cuda.get_device_properties = lambda device=None: shown
    assert triton.runtime.driver.active is driver.active


def scan(package: str) -> dict[str, Any]:
    """Import a package, and return the classes of the key names of every tuner that this makes."""
    from triton.runtime.autotuner import Autotuner

    from safetune.keys.key_names import classes_of
    from safetune.keys.written_key import written_key
    from safetune.settings import PhantomPolicy

    notes: list[dict[str, Any]] = []
    construct = Autotuner.__init__

    def noting(self: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        named = inspect.signature(construct).bind(self, fn, *args, **kwargs).arguments
        options = {name: named.get(name) for name in READERS}
        started = time.process_time()
        key = written_key(fn, named["key"], prune=options["prune_configs_by"])
        report = classes_of(fn, key, named["configs"] or [], PhantomPolicy.DROP, **options)
        notes.append(
            {
                "kernel": report.kernel,
                "location": report.location,
                "names": [[name.name, name.kind.value, name.reason] for name in report.names],
                "seconds": time.process_time() - started,
            }
        )
        construct(self, fn, *args, **kwargs)

    Autotuner.__init__ = noting
    failed = [f"{name}: {error!r}" for name, error in import_all(package)]
    return {"package": package, "notes": notes, "failed": failed}


def import_all(package: str) -> Iterator[tuple[str, BaseException]]:
    """Import every module of a package, and yield those that cannot be, with the reason."""
    try:
        root = importlib.import_module(package)
    except Exception as error:
        yield package, error
        return
    for file in sorted(Path(root.__path__[0]).rglob("*.py")):
        parts = file.relative_to(root.__path__[0]).with_suffix("").parts
        name = ".".join([package, *parts]).removesuffix(".__init__")
        if all(part.isidentifier() for part in parts) and parts[-1] != "__main__":
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                yield name, error


def row(found: dict[str, Any]) -> str:
    """Return one row of the table."""
    kinds = Counter(kind for note in found["notes"] for _, kind, _ in note["names"])
    counts = [len(found["notes"]), kinds.total(), *(kinds[kind] for kind in KINDS)]
    return f"| {' | '.join([found['package'], *map(str, counts)])} |"


@click.command()
@click.argument("packages", nargs=-1, required=True)
@click.option("--empty", multiple=True, help="A package to replace by an empty one.")
@click.option("--names", is_flag=True, help="Print each name that nothing reads.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def main(packages: tuple[str, ...], empty: tuple[str, ...], names: bool, as_json: bool) -> None:
    """Count the key names of installed libraries by what becomes of them."""
    if as_json:
        sys.meta_path.append(EmptyPackages(empty))
        look_like_an_h100()
        print(json.dumps(scan(packages[0])))
        return
    print(f"| library | kernels | names | {' | '.join(KINDS)} |")
    print("|" + " --- |" * (len(KINDS) + 3))
    options = [f"--empty={name}" for name in empty]
    for package in packages:
        command = [sys.executable, __file__, package, "--json", *options]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(result.stdout.splitlines()[-1])
        print(row(found))
        milliseconds = 1000 * sum(note["seconds"] for note in found["notes"])
        each = milliseconds / max(len(found["notes"]), 1)
        print(f"{package}: {each:.1f} ms of CPU time per kernel", file=sys.stderr)
        for note in found["notes"] if names else ():
            for name, kind, reason in note["names"]:
                if kind != "read":
                    print(f"    {note['kernel']}: {name}, {kind}: {reason}")
        for failure in found["failed"]:
            print(f"{package}: not imported: {failure}", file=sys.stderr)


if __name__ == "__main__":
    main()
