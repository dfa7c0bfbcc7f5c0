"""Errors and warnings as one line each, with the line of the user's code that raised it."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from safetune.errors import SafetuneError

_PACKAGE = str(Path(__file__).resolve().parents[1])
_KERNELS = str(Path(_PACKAGE) / "kernels")


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

    Lines of the import machinery and of safetune do not count.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not _is_ours(frame.filename)
    ]
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    for frame in (own or frames)[-1:]:
        return f" ({frame.filename}:{frame.lineno})"
    return ""


@contextlib.contextmanager
def only_our_output() -> Iterator[None]:
    """Send what a target prints to stderr, and print warnings as one line each, without source."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        click.echo(f"Warning: {_one_line(str(message))}", err=True)

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and not filename.startswith(_KERNELS)


def _is_installed(filename: str) -> bool:
    paths = sysconfig.get_paths()
    return filename.startswith(tuple(paths[name] for name in ("stdlib", "purelib", "platlib")))
