"""What the command prints, and errors and warnings as one line each.

Nothing that is printed can control a terminal: a name or a value may come from a file or a database
that anybody wrote. Text goes through `visible`, in `echo` and in the console of `tables`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from safetune.errors import SafetuneError
from safetune.keys.encoding import visible

_PACKAGE = str(Path(__file__).resolve().parents[1])
_KERNELS = str(Path(_PACKAGE) / "kernels")


def echo(text: object, err: bool = False) -> None:
    """Print a text on standard output, or on standard error."""
    click.echo(visible(str(text)), err=err)


def describe(error: BaseException) -> str:
    """Return an error as one line; for an unexpected error, with the file and line."""
    if isinstance(error, SafetuneError):
        return _one_line(str(error))
    return f"{typed(error)}{location_of(error)}; --debug shows the traceback"


def typed(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return _one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def location_of(error: BaseException) -> str:
    """Return ` (file:line)`: the innermost line of the user's code, else of a library.

    Lines of the import machinery and of safetune, but for its kernels, do not count.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
        if frame.filename.startswith(_KERNELS) or not frame.filename.startswith(_PACKAGE)
    ]
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    for frame in (own or frames)[-1:]:
        return f" ({frame.filename}:{frame.lineno})"
    return ""


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print warnings, and what safetune logs as one, as one line each, without source.

    Characters that the terminal's encoding lacks are printed as escapes.
    """

    def show(message: Warning | str, *_: object, **__: object) -> None:
        echo(f"Warning: {_one_line(str(message))}", err=True)

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    logger, lines = logging.getLogger("safetune"), logging.Handler(logging.WARNING)
    lines.emit = lambda record: show(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(lines)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())
