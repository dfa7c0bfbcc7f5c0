"""`safetune run`: an unmodified program, with safetune in place of `triton.autotune`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from safetune.cli.command import command
from safetune.settings import RUN_KEEP, Settings, parse_keep, parse_kernels


@command(
    "run",
    "safetune run train.py --epochs 3",
    "safetune run -m my_package.train",
    json=False,
    context_settings={"allow_interspersed_args": False},
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option(
    "--keep",
    metavar="KERNEL:NAME",
    multiple=True,
    help="Keep this name in the key of a kernel even if nothing reads it; can be repeated.",
)
@click.option(
    "--leave",
    metavar="KERNEL",
    multiple=True,
    help="Leave a kernel to Triton: its name or module.kernel, with * for any text.",
)
@click.argument("script")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def run_command(
    module: bool,
    keep: tuple[str, ...],
    leave: tuple[str, ...],
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with every triton.autotune replaced by safetune's.

    This includes the Python processes that SCRIPT starts, such as torchrun's workers. At exit, each
    process with a kernel reports its tunings on stderr.
    """
    settings = Settings.current()  # a bad variable is an error before the program starts
    left = settings.leave | parse_kernels("--leave", ",".join(leave))
    os.environ["SAFETUNE_LEAVE"] = ",".join(sorted(left))
    parse_keep("--keep", ",".join(keep))
    os.environ[RUN_KEEP] = ",".join(keep)
    spec = find_spec("safetune.integrations.site")
    assert spec is not None
    assert spec.origin is not None
    folder = str(Path(spec.origin).parent)
    path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(SAFETUNE_INSTALL="1", PYTHONPATH=os.pathsep.join(path))
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *(["-m"] if module else []), script, *arguments])
