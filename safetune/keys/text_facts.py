"""The facts of a function's text about its names, for kernels read once and kept in a note.

A kernel is parsed (`run_order`) only if no earlier process has parsed it. The notes are beside the
kernels that Triton has compiled.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import sys
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
    compiles_to,
    dotted,
    file_text,
    files_in,
    nodes_of,
    source_of,
    tree_of,
    undecorated,
)
from safetune.settings import Mode, Settings

#: Whether facts of texts are read from notes and noted.
_noting: ContextVar[bool] = ContextVar("safetune_texts_are_noted", default=True)


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
    if jit is not function and not hasattr(function, "__wrapped__") and (text := source_of(jit)):
        with contextlib.suppress(*UNREADABLE):
            return facts_of(text)
    with contextlib.suppress(*UNREADABLE):
        return _in_its_file(function)
    return None


def _in_its_file(function: FunctionType) -> Facts | None:
    """Read a function where it stands in its file, whatever its lines begin with.

    Lambdas on one line that cannot be told apart have one text, where it is the same.
    """
    from safetune.keys import run_order
    from safetune.keys.canonical_text import canonical

    text = file_text(function)
    found = [node for node in nodes_of(function) if compiles_to(node, function)]
    names = {dotted(name) for node in found for name in run_order.free_names(undecorated(node))}
    texts = sorted({canonical(ast.get_source_segment(text, node) or "") for node in found})
    return Facts("\n".join(texts), tuple(sorted(names)), None) if found else None


def noted(kind: str, rests_on: Any, find: Callable[[], Any]) -> Any:
    """Return the plain data that `find` computes from `rests_on` alone, now or in an earlier
    process.

    The name of a note includes the files of this folder and the versions of Python and Triton. If
    no note can be written, every process recomputes the data.
    """
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    # Without a home directory, the folder is in the working directory.
    if not (_noting.get() and os.path.isabs(knobs.cache.dir or "")):
        return find()
    key = encoding.digest([_reader(), kind, rests_on])
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if file := get_cache_manager(key).get_file(kind):
            return json.loads(Path(file).read_text(encoding="utf-8"))
    facts = find()
    if Settings.current().mode is not Mode.FROZEN:
        with contextlib.suppress(OSError, RuntimeError):
            get_cache_manager(key).put(encoding.dumps(facts), kind, binary=False)
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
def _reader() -> list[Any]:
    """The code that makes a note: notes depend on it as well."""
    import triton

    files = files_state(sorted(Path(__file__).parent.glob("*.py")))
    return [triton.__version__, *sys.version_info[:3], files]


def files_state(files: Iterable[Path]) -> list[Any]:
    """Return a state that changes with the content of any of these files.

    A file's modification time can be set to any value, but its inode's change time cannot.
    """
    states = [(str(file), file.stat()) for file in files if file.is_file()]
    return [
        [file, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        for file, state in states
    ]


def triton_hash(compute: Callable[[], str]) -> str:
    """Return `compute()`, Triton's hash of its own files, or the noted result for the same files.

    Otherwise Triton reads 400 MB for it in each process before it finds a compiled kernel.
    """
    import triton

    folder = Path(triton.__file__).parent
    files = files_state([*files_in(folder), *sorted(folder.glob("_C/libtriton*"))])
    return str(noted("triton", files, compute))
