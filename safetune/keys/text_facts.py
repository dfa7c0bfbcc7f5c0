"""The facts of a function's text about its names, read once and kept in a note.

A text is parsed (`run_order`) only if no earlier process has parsed it. The notes are beside the
kernels that Triton has compiled.
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

from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.source_text import (
    UNREADABLE,
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
    undecorated,
)
from safetune.settings import Mode, Settings

#: Whether facts of texts are read from notes and noted.
_noting: ContextVar[bool] = ContextVar("safetune_texts_are_noted", default=True)

#: Seconds after which another change of a file has another time, on every file system.
_SETTLED_S = 3.0


@dataclass(frozen=True)
class Facts:
    """The facts of a function's text."""

    text: str  # without comments and the like, see `canonical_text`
    names: tuple[str, ...]  # the dotted names that it reads and does not bind, sorted
    #: The uses of its parameters, in run order; None if it is not the text of a `def`.
    uses: tuple[Use, ...] | None


@functools.lru_cache(maxsize=4096)
def facts_of(text: str) -> Facts:
    """Return the facts of one function's text, from `def` on; raises `UNREADABLE`."""
    canonical, names, uses = noted("function", text, lambda: _read(text))
    return Facts(canonical, tuple(names), None if uses is None else tuple(Use(*u) for u in uses))


def _read(text: str) -> list[Any]:
    from safetune.keys import run_order
    from safetune.keys.canonical_text import canonical

    tree = tree_of(text)
    names = sorted({dotted(node) for node in run_order.free_names(tree)})
    match tree.body:
        case [ast.FunctionDef() as function]:
            return [canonical(text), names, run_order.uses_of(function)]
    return [canonical(text), names, None]


def facts_of_function(jit: Any, function: FunctionType) -> Facts | None:
    """Return the facts of a function's text; None if it is missing, unreadable or out of date."""
    code = function.__code__
    if jit is not function and not hasattr(function, "__wrapped__") and (text := source_of(jit)):
        with contextlib.suppress(*UNREADABLE):
            return facts_of(text)
    place = [code.co_name, code.co_firstlineno, code.co_flags, *inspect.getargs(code)]
    file = _file_digest(file_text(function))
    try:
        found = noted("text", [file, place, code_record(code)], lambda: _in_its_file(function))
    except UNREADABLE:
        return None
    return None if found is None else Facts(found[0], tuple(found[1]), None)


def _in_its_file(function: FunctionType) -> list[Any] | None:
    """Read a function where it stands in its file, whatever its lines begin with.

    Lambdas on one line that cannot be told apart have one text, where it is the same.
    """
    from safetune.keys import run_order
    from safetune.keys.canonical_text import canonical

    text = file_text(function)
    found = [node for node in nodes_of(function) if compiles_to(node, function)]
    names = {dotted(name) for node in found for name in run_order.free_names(undecorated(node))}
    texts = sorted({canonical(segment(text, node)) for node in found})
    return ["\n".join(texts), sorted(names)] if found else None


@functools.lru_cache(maxsize=64)
def _file_digest(text: str) -> str:
    return encoding.digest(text)


def noted(kind: str, rests_on: Any, find: Callable[[], Any]) -> Any:
    """Return the plain data that `find` computes from `rests_on` alone, now or in an earlier
    process.

    A note has a checksum. Its name includes the files of this folder and the versions of Python and
    Triton. If no note can be written, every process recomputes the data.
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
    facts = find()
    if Settings.current().mode is not Mode.FROZEN:
        text = encoding.dumps(facts)
        with contextlib.suppress(OSError, RuntimeError):
            note = f"{encoding.digest(text)}\n{text}"
            get_cache_manager(key).put(note, kind, binary=False)
    return facts


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Read all texts anew in the body, and write no notes."""
    token = _noting.set(False)
    try:
        yield
    finally:
        _noting.reset(token)


@functools.cache
def _reader() -> list[Any] | None:
    """The code that makes a note: notes depend on it as well."""
    import triton

    files = files_state(sorted(Path(__file__).parent.glob("*.py")))
    return None if files is None else [triton.__version__, *sys.version_info[:3], files]


def files_state(files: Iterable[Path]) -> list[Any] | None:
    """Return a state that changes with the content of any of these files; None if it is uncertain.

    A file's modification time can be set to any value, but its inode's change time cannot. A file
    changed a moment ago may change again within the resolution of its file system's clock.
    """
    states = []
    for file in files:
        try:
            state = file.stat()
        except OSError:
            return None
        if max(state.st_mtime, state.st_ctime) > time.time() - _SETTLED_S:
            return None
        states.append(
            [str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        )
    return states


def package_state(file: str) -> list[Any] | None:
    """Return a state that changes with any file in a file's package; None if it is uncertain."""
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
    """Return `compute()`, Triton's hash of its own files, or the noted result for the same files.

    Otherwise Triton reads 400 MB for it in each process before it finds a compiled kernel.
    """
    import triton

    folder = Path(triton.__file__).parent
    files = files_state([*files_in(folder), *sorted(folder.glob("_C/libtriton*"))])
    return compute() if files is None else str(noted("triton", files, compute))
