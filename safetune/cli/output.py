"""Output of a command beside its result: lines, and one line for each error and warning.

All text goes through `visible`, because it may come from a file that anybody wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from safetune.cli.command import DEBUG
from safetune.errors import PhantomKeyWarning, SafetuneError
from safetune.keys.encoding import visible
from safetune.messages import counted as counted
from safetune.messages import logger, one_line, prefix

_PACKAGE = str(Path(__file__).resolve().parents[1])
_KERNELS = str(Path(_PACKAGE) / "kernels")

_STDOUT = 1


def version_of(module: str) -> str:
    """Return the version of a module, whose package may have another name."""
    from importlib import import_module, metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(module)
    return str(import_module(module).__version__)


def echo(text: object, err: bool = False) -> None:
    """Print a text on standard output, or on standard error."""
    click.echo(visible(str(text)), err=err)


def describe(error: BaseException) -> str:
    """Return an error as one line; for an unexpected error, with the file and line."""
    if isinstance(error, SafetuneError):
        return one_line(str(error))
    return f"{typed(error)}{location_of(error)}; --debug shows the traceback"


def show_traceback() -> bool:
    """With --debug, print the traceback of the current error."""
    context = click.get_current_context(silent=True)
    if context is None or not context.meta.get(DEBUG):
        return False
    traceback.print_exc()
    return True


def typed(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def location_of(error: BaseException) -> str:
    """Return ` (file:line)`: the `innermost` line, or that of a mistake in the syntax."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    stack = traceback.extract_tb(error.__traceback__)
    return innermost((frame.filename, frame.lineno) for frame in stack)


def innermost(stack: Iterable[tuple[str, object]]) -> str:
    """Return ` (file:line)`: the innermost line of the user's code, else of a library.

    Lines of the import machinery and of safetune, except its kernels, do not count.
    """
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    frames = [
        (file, line)
        for file, line in stack
        if "importlib" not in file
        if file.startswith(_KERNELS) or not file.startswith(_PACKAGE)
    ]
    own = [frame for frame in frames if not frame[0].startswith(installed)]
    for file, line in (own or frames)[-1:]:
        return f" ({file}:{line})"
    return ""


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print warnings, and safetune's log records of that level, as one line each, without source.

    Characters that the terminal's encoding lacks are printed as escapes.
    """

    def show(
        message: Warning | str, category: object, filename: str, lineno: int, *_: Any, **__: Any
    ) -> None:
        place = f" ({filename}:{lineno})" if category is PhantomKeyWarning else ""
        tell(f"Warning: {str(message).removeprefix(prefix())}{place}")

    def log(record: logging.LogRecord) -> None:
        kind = "Warning: " if record.levelno >= logging.WARNING else ""
        tell(f"{kind}{record.getMessage()}")

    def tell(text: str) -> None:
        echo(one_line(text), err=True)

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    lines = logging.Handler()
    lines.emit = log  # type: ignore[method-assign]
    logger.addHandler(lines)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(lines)


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send a target's output to standard error, including C libraries and processes."""
    with contextlib.ExitStack() as at_the_end:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # one is closed, or no file
            if sys.stdout.fileno() == _STDOUT:
                sys.stdout.flush()
                own = os.dup(_STDOUT)
                at_the_end.callback(os.close, own)
                os.dup2(sys.stderr.fileno(), _STDOUT)
                at_the_end.callback(os.dup2, own, _STDOUT)
        at_the_end.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield
