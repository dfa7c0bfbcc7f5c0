"""`safetune demo`: the examples that are installed with safetune, run or copied."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from safetune.cli.command import FILE, command
from safetune.cli.output import echo
from safetune.errors import TargetError

_PACKAGE = Path(__file__).resolve().parents[1]


@command("demo", "safetune demo", "safetune demo --copy examples", json=False)
@click.option(
    "--copy",
    metavar="DIR",
    type=FILE,
    help="Copy the examples to DIR, a new directory, and run nothing.",
)
def demo(copy: Path | None) -> None:
    """Tune kernels with configs that crash or hang, in a store that is deleted at the end.

    Tunes the shipped layer norm kernels for two shapes and a vector addition, then runs both again:
    nothing is measured twice. Takes about a minute, on a GPU or in Triton's interpreter. Exits with
    1 if any of this fails.
    """
    folder = _folder()
    if copy is None:
        os.execv(sys.executable, [sys.executable, str(folder / "demo.py")])
    try:
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise TargetError(f"{copy} exists; give a new directory") from None
    for file in sorted(copy.iterdir()):
        echo(file)


def _folder() -> Path:
    """Return the folder of the examples: in the installed package, or in a checkout's docs."""
    installed = _PACKAGE / "examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "docs" / "examples"
