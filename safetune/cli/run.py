"""`safetune run`: a program as it is, with safetune in place of `triton.autotune`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from safetune.settings import Settings


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with every triton.autotune replaced by safetune's.

    Python processes that it starts, such as torchrun's workers, are reached as well. At exit each
    process with kernels says on stderr what was tuned.
    """
    Settings.current()  # raises, before the program has begun
    spec = find_spec("safetune.integrations.site")
    assert spec is not None
    assert spec.origin is not None
    folder = str(Path(spec.origin).parent)
    path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(SAFETUNE_INSTALL="1", PYTHONPATH=os.pathsep.join(path))
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *(["-m"] if module else []), script, *arguments])
