"""What the command prints: lines, errors and warnings as one line each, tables, data for programs.

Nothing that is printed can control a terminal: a name or a value may come from a file or a database
that anybody wrote. Text goes through `visible`, in `echo` and in the console of tables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from safetune.config import OPTION_DEFAULTS, shown_options
from safetune.errors import PhantomKeyWarning, SafetuneError
from safetune.keys.encoding import visible
from safetune.keys.tuning_key import readable
from safetune.messages import counted as counted
from safetune.messages import logger, one_line, prefix
from safetune.outcome import Outcome
from safetune.store.local.store import AGREED, IMPORTED

_PACKAGE = str(Path(__file__).resolve().parents[1])
_KERNELS = str(Path(_PACKAGE) / "kernels")

#: Triton's compile errors begin with a location in the kernel's source and end with the reason.
_TRITON_LOCATION = re.compile(r"at \d+:\d+:")

_WIDE = 10_000
_STDOUT = 1

#: In place of `Store.origin`, for a choice in a directory of SAFETUNE_PACKS.
PACK = "pack "

#: In the context of a command that has printed its JSON.
PRINTED = "safetune.printed"

#: The end of a shared store's identity, which tells databases of one location apart.
_DIGEST = re.compile(" [0-9a-f]{32}$")


def version_of(module: str) -> str:
    """Return the version of a module; torch for ROCm brings Triton in a package of another name."""
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


def typed(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


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
    """Have what a target prints go to standard error: also libraries in C, and processes."""
    with contextlib.ExitStack() as at_the_end:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or not a file
            if sys.stdout.fileno() == _STDOUT:
                sys.stdout.flush()
                own = os.dup(_STDOUT)
                at_the_end.callback(os.close, own)
                os.dup2(sys.stderr.fileno(), _STDOUT)
                at_the_end.callback(os.dup2, own, _STDOUT)
        at_the_end.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def print_json(data: Any) -> None:
    """Print JSON for programs: the one document of a command."""
    click.echo(json.dumps(data, indent=2))
    if context := click.get_current_context(silent=True):
        context.meta[PRINTED] = True


def source_words(origin: str) -> str:
    """Return where a choice is from, for people; `origin` is as `Store.origin` returns it."""
    known = {"": "measured here", IMPORTED: "imported", AGREED: "agreed on in sync()"}
    if origin.startswith(PACK):
        return f"in the {origin}"
    return known.get(origin) or f"from {_DIGEST.sub('', origin)}"


def open_closed_streams() -> None:
    """Have the standard streams that the caller has closed lead nowhere.

    Else a file or a pipe gets their numbers, and what is printed goes there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            if getattr(sys, name) is None:
                mode = "w" if number else "r"
                setattr(sys, name, open(opened, mode, closefd=False))  # noqa: SIM115 - it stays


def forget_bad_width() -> None:
    """Unset $COLUMNS where it is not a width: at 0, as without a terminal, tables have no text."""
    text = os.environ.get("COLUMNS", "")
    if not (text.isdecimal() and int(text)):
        os.environ.pop("COLUMNS", None)


def stdout_console() -> Console:
    """Return the console for tables: as wide as the terminal; in a file or pipe lines never wrap.

    $COLUMNS overrides both. Text is printed literally: a config's `[64, 64]` is not rich markup.
    """
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    console = _Console(**plain)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _Console(**plain, width=_WIDE)


class _Console(Console):
    """A console whose texts cannot control the terminal; its styles can."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON data."""
    return {**asdict(outcome), "verdict": outcome.verdict.value, "label": outcome.label}


def left_out_data(left_out: Iterable[Any]) -> list[dict[str, str]]:
    """Return recorded calls that are left out, and why, as plain JSON data."""
    return [{"call": left.words, "reason": left.reason} for left in left_out]


def config_parts(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a stored config's kwargs by name, and its options that are not defaults."""
    options = {name: record[name] for name in (*OPTION_DEFAULTS, "pre_hook") if name in record}
    kwargs = {name: record[name] for name in sorted(record) if name not in options}
    hook = {"pre_hook": options["pre_hook"]} if options.get("pre_hook") else {}
    return kwargs, shown_options(options) | hook


def readable_config(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a stored config's kwargs by name, then its options, as people read them."""
    kwargs, options = config_parts(record)
    found = {name: str(readable(value)) for name, value in (kwargs | options).items()}
    return found | ({"pre_hook": "yes"} if "pre_hook" in found else {})


def config_words(record: Mapping[str, Any]) -> str:
    """Return a stored config as text."""
    return " ".join(f"{name}={value}" for name, value in readable_config(record).items())


def readable_call(call: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a stored key by name, and the dtypes, as people read them."""
    values = {name: str(readable(value)) for name, value in call["values"]}
    dtypes = "/".join(dict.fromkeys(dtype for _, dtype in call["dtypes"]))
    return values | ({"dtype": dtypes} if dtypes else {})


def call_words(call: Mapping[str, Any]) -> str:
    """Return the values and dtypes of a stored key as text."""
    values = [f"{name}={readable(value)}" for name, value in call["values"]]
    dtypes = "/".join(dict.fromkeys(dtype for _, dtype in call["dtypes"]))
    return " ".join([*values, *([dtypes] if dtypes else [])])


def date(seconds: float) -> str:
    """Return the day of a time since the epoch, in the time zone of this machine."""
    return time.strftime("%Y-%m-%d", _local(seconds))


def moment(seconds: float) -> str:
    """Return the day and the minute of a time since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M", _local(seconds))


def _local(seconds: float) -> time.struct_time:
    from safetune.store.schema import LAST_SECOND

    # A row that another program wrote may say 1e300.
    return time.localtime(max(0, min(seconds, LAST_SECOND)))


def one_reason(message: str) -> str:
    """Return the line of a failure's message that says why."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if _TRITON_LOCATION.match(lines[0]) else lines[0]
