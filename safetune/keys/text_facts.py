"""What the text of a function says of its names, without reading it a second time.

A text is read as a tree (`run_order`) where no earlier process has read the same one. What it says
is noted beside the kernels that Triton has compiled.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any

from safetune.errors import from_signal_handler
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.source_text import (
    Use,
    code_record,
    compiles_to,
    dotted,
    file_text,
    files_in,
    nodes_of,
    package_of,
    segment,
    source_of,
    tree_of,
)
from safetune.settings import Mode, Settings

#: Whether what a text says is looked for in notes and noted.
_noting: ContextVar[bool] = ContextVar("safetune_texts_are_noted", default=True)

#: Seconds after which another change of a file has another time, on every file system.
_SETTLED_S = 3.0


@dataclass(frozen=True)
class Facts:
    """What a function's text says."""

    names: tuple[str, ...]  # the dotted names that it reads and does not bind, sorted
    #: How it uses its parameters, in the order in which it runs; None where it is not the text of a
    #: `def`.
    uses: tuple[Use, ...] | None


@functools.lru_cache(maxsize=4096)
def facts_of(text: str) -> Facts:
    """Return what the text of one function, or of a lambda, says; raises `SyntaxError`."""
    names, uses = noted("function", text, lambda: _read(text))
    return Facts(tuple(names), None if uses is None else tuple(Use(*use) for use in uses))


def _read(text: str) -> list[Any]:
    from safetune.keys import run_order

    tree = tree_of(f"({text})" if text.startswith("lambda") else text)
    names = sorted({dotted(node) for node in run_order.free_names(tree)})
    match tree.body:
        case [ast.FunctionDef() as function]:
            return [names, run_order.uses_of(function)]
    return [names, None]


def text_of(jit: Any, function: FunctionType) -> str | None:
    """Return a function's text; None where it is missing, or is of other code by now."""
    if jit is not function and not hasattr(function, "__wrapped__"):
        return source_of(jit)
    code = function.__code__
    place = [code.co_name, code.co_firstlineno, code.co_flags, *inspect.getargs(code)]
    file = _file_digest(file_text(function))
    text: str | None = noted(
        "text", [file, place, code_record(code)], lambda: _found_text(function)
    )
    return text


@functools.lru_cache(maxsize=64)
def _file_digest(text: str) -> str:
    return encoding.digest(text)


def _found_text(function: FunctionType) -> str | None:
    text = file_text(function)
    found = [node for node in nodes_of(function) if compiles_to(node, function.__code__)]
    return "\n".join(segment(text, node) for node in found) if found else None


def noted(kind: str, rests_on: Any, find: Callable[[], Any]) -> Any:
    """Return the plain data that `find` makes of `rests_on` alone, or made in an earlier process.

    A note has a checksum, and the files of this folder are part of its name, as is the version of
    Python and Triton. Where nothing can be written, everything is found again.
    """
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    reader = _reader() if _noting.get() else None
    if reader is None or not os.path.isabs(knobs.cache.dir or ""):  # there is no home directory
        return find()
    key = encoding.digest([reader, kind, rests_on])
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if file := get_cache_manager(key).get_file(kind):
            checksum, _, text = Path(file).read_text(encoding="utf-8").partition("\n")
            if checksum == encoding.digest(text):
                return json.loads(text)
    found = find()
    if Settings.current().mode is not Mode.FROZEN:
        text = encoding.dumps(found)
        try:
            note = f"{encoding.digest(text)}\n{text}"
            get_cache_manager(key).put(note, kind, binary=False)
        except (OSError, RuntimeError) as error:
            if from_signal_handler(error):
                raise
    return found


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Read each text anew in the body, and leave nothing behind."""
    token = _noting.set(False)
    try:
        yield
    finally:
        _noting.reset(token)


@functools.cache
def _reader() -> list[Any] | None:
    """What a note depends on beside what it rests on: the code that makes it."""
    import triton

    files = files_state(sorted(Path(__file__).parent.glob("*.py")))
    return None if files is None else [triton.__version__, *sys.version_info[:3], files]


def files_state(files: Iterable[Path]) -> list[Any] | None:
    """Return what changes with the content of any of these files; None where that is not sure.

    The time of a file's last change can be set to any value, but not that of its inode. A file that
    was changed a moment ago may change again within the resolution of its file system's clock.
    """
    found = []
    for file in files:
        try:
            state = file.stat()
        except OSError:
            return None
        if max(state.st_mtime, state.st_ctime) > time.time() - _SETTLED_S:
            return None
        found.append([str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino])
    return found


def package_state(file: str) -> list[Any] | None:
    """Return what changes with a file, and with any file of its package; None where not sure."""
    path = Path(os.path.abspath(file))
    own, package = files_state([path]), package_of(path.parent)
    if own is None or package is None:
        return own
    others = _state_of_all(package)
    return None if others is None else [own, others]


@functools.lru_cache(maxsize=8)
def _state_of_all(package: Path) -> str | None:
    state = files_state(files_in(package))
    return None if state is None else encoding.digest(state)


def triton_hash(compute: Callable[[], str]) -> str:
    """Return `compute()`, Triton's hash of its own files, or what it was for the same files.

    Triton reads 400 MB for it in each process, before it finds a compiled kernel.
    """
    import triton

    folder = Path(triton.__file__).parent
    files = files_state([*files_in(folder), *sorted(folder.glob("_C/libtriton*"))])
    return compute() if files is None else str(noted("triton", files, compute))
