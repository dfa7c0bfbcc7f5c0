"""Names to keep in the keys of kernels that one cannot edit: SAFETUNE_KEEP and `install(keep=)`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from types import FunctionType

from safetune import forks
from safetune.errors import with_nearest
from safetune.settings import Settings

_installed: set[tuple[str, str]] = set()
_asked: set[tuple[str, str]] = set()
_found: set[tuple[str, str]] = set()
_seen: set[str] = set()


def keep(pairs: Iterable[tuple[str, str]]) -> None:
    """Keep these (kernel, name) pairs, of all kernels that are decorated from now on."""
    _installed.update(pairs)


def kept_for(function: FunctionType, names: Sequence[str], settings: Settings) -> list[str]:
    """Return those of a kernel's key names that are kept, and note that they were found."""
    asked = _installed | settings.keep
    if not asked:
        return []
    _check_at_exit()
    kernels = (function.__name__, f"{function.__module__}.{function.__qualname__}")
    found = {(kernel, name) for kernel, name in asked if kernel in kernels and name in names}
    _asked.update(asked)
    _found.update(found)
    _seen.update(f"{function.__name__}:{name}" for name in names)
    return [name for _, name in sorted(found)]


@functools.cache
def _check_at_exit() -> None:
    forks.register("report", at_exit=_warn_of_the_others)


def _warn_of_the_others() -> None:
    missing = sorted(f"{kernel}:{name}" for kernel, name in _asked - _found)
    if missing:
        warnings.warn(
            f"safetune: SAFETUNE_KEEP or install(keep=) has {with_nearest(missing, _seen)}, which "
            "is not in the key of any kernel of this process",
            stacklevel=2,
        )
