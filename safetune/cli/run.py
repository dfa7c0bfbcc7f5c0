"""`safetune run`: an unmodified program, with safetune in place of `triton.autotune`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from safetune.cli.command import command
from safetune.settings import Settings


@command(
    "run",
    "safetune run train.py --epochs 3",
    "safetune run -m my_package.train",
    json=False,
    context_settings={"allow_interspersed_args": False},
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def run_command(module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with every triton.autotune replaced by safetune's.

    This includes the Python processes that SCRIPT starts, such as torchrun's workers. At exit, each
    process that met a kernel reports on stderr what it tuned.
    """
    Settings.current()  # a bad variable is an error before the program starts
    spec = find_spec("safetune.integrations.site")
    assert spec is not None
    assert spec.origin is not None
    folder = str(Path(spec.origin).parent)
    path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(SAFETUNE_INSTALL="1", PYTHONPATH=os.pathsep.join(path))
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *(["-m"] if module else []), script, *arguments])
