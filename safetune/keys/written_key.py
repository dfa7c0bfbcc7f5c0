"""A key as written, after the checks that need no source text.

`install(keep=)` and `safetune run --keep` name what stays in the keys of kernels that users cannot
edit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import field
from types import FunctionType
from typing import Any, TypeAlias

from safetune import forks
from safetune.errors import InvalidSetting, PhantomKeyWarning, SettingWarning, with_nearest
from safetune.frozen import dataclass
from safetune.keys.identity import base_function
from safetune.keys.source_text import definition_line, file_of
from safetune.keys.tuning_key import Bucket
from safetune.messages import warn

#: The names in `prune_configs_by`.
_PRUNING = ("early_config_prune", "perf_model", "top_k")

#: What `key=` may be.
Key: TypeAlias = Iterable[str] | Mapping[str, Callable[[Any], Any] | None] | str | None


_installed: set[tuple[str, str]] = set()
_found: set[tuple[str, str]] = set()
_seen: set[str] = set()


@dataclass(frozen=True)
class WrittenKey:
    """A key as written."""

    names: tuple[str, ...]
    keep: tuple[str, ...] = ()  # of the decorator
    kept: tuple[str, ...] = ()  # for another reason: a bucket, or `install(keep=)`
    buckets: Mapping[str, Bucket] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"key={[*self.names]!r}"


def written_key(
    kernel: Any,
    key: Key,
    keep: Iterable[str] = (),
    prune: Any = None,
) -> WrittenKey:
    """Return a key after the checks that need no text; `prune` is `prune_configs_by`.

    Raises:
        InvalidSetting: `key` is a single name or has a name that is not a parameter, `keep` has a
            name that is not in `key`, `prune` has an unknown name, or `kernel` is not a Triton
            kernel.
    """
    _, function = base_function(kernel)
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    keep = tuple(_names("keep", keep))
    if prune and not isinstance(prune, Mapping):
        raise InvalidSetting(
            f"prune_configs_by={prune!r} of {function.__name__} is not a dict; write "
            'prune_configs_by={"early_config_prune": ...}'
        )
    _check_known(kernel, "prune_configs_by", prune or (), _PRUNING)
    names = tuple(_names("key", key))
    _check_known(kernel, "key", names, parameters)
    check_kept(kernel, keep, names)
    buckets = buckets_of(function.__name__, key)
    kept = kept_for(function, names)
    return WrittenKey(names, keep, (*buckets, *kept), buckets)


def buckets_of(kernel: str, key: Any) -> dict[str, Bucket]:
    """Return the buckets in the `key=` of a decorator; raises `InvalidSetting`."""
    if not isinstance(key, Mapping):
        return {}
    for name, function in key.items():
        if function is not None and not callable(function):
            raise InvalidSetting(
                f"key of {kernel} maps {name!r} to {function!r}, which is not a function; give a "
                "function from a value to its bucket, or None for the value itself"
            )
    return {name: Bucket(kernel, name, f) for name, f in key.items() if f is not None}


def _names(what: str, names: Key) -> list[str]:
    if isinstance(names, str):
        raise InvalidSetting(f'{what}={names!r} is one string; write {what}=["{names}"]')
    if not (names is None or isinstance(names, Iterable)):
        raise InvalidSetting(
            f"{what}={names!r} is not a list of argument names; write {what}=[...]"
        )
    unique_names = list(dict.fromkeys(names or ()))
    if wrong := [name for name in unique_names if not isinstance(name, str)]:
        raise InvalidSetting(
            f"{what} contains {wrong[0]!r}, of type {type(wrong[0]).__name__}; give argument names"
        )
    return unique_names


def _check_known(kernel: Any, what: str, names: Iterable[str], parameters: Sequence[str]) -> None:
    """Raise for unknown names; of a tuner whose text the user may not be able to change, warn."""
    unknown = [name for name in names if name not in parameters]
    if not unknown:
        return
    name = base_function(kernel)[1].__name__
    text = (
        f"{what} of {name} has {with_nearest(unknown, parameters)}, which is not one of "
        f"{', '.join(parameters)}"
    )
    if not _lenient.get():
        raise InvalidSetting(text)
    warn_at(kernel, f"{text}; ignored")


def check_kept(kernel: Any, keep: Sequence[str], names: Sequence[str]) -> None:
    """Raise `InvalidSetting` for a name in `keep` that is not in the key."""
    if stray := [name for name in keep if name not in names]:
        raise InvalidSetting(
            f"keep={[*keep]} of {base_function(kernel)[1].__name__} has "
            f"{with_nearest(stray, names)}, which is not in key={[*names]}"
        )


def keep(pairs: Iterable[tuple[str, str]]) -> None:
    """Keep these (kernel, name) pairs for all kernels decorated from now on."""
    _installed.update(pairs)


def keep_as_recorded(kernel: str, names: Iterable[str]) -> None:
    """Keep the names that the process which recorded a call of a kernel kept."""
    pairs = {(kernel, name) for name in names}
    _found.update(pairs)  # the call shows that they fit
    keep(pairs)


def kept_names(function: FunctionType) -> list[str]:
    """Return the names that `install(keep=)` or `safetune run --keep` keeps for a kernel."""
    return sorted({name for kernel, name in _installed if kernel in _names_of(function)})


def _names_of(function: FunctionType) -> tuple[str, str]:
    return function.__name__, f"{function.__module__}.{function.__qualname__}"


def kept_for(function: FunctionType, names: Sequence[str]) -> list[str]:
    """Return the kernel's key names that are kept, and note that they were found."""
    if not _installed:
        return []
    _check_at_exit()
    kernels = _names_of(function)
    found = {(kernel, name) for kernel, name in _installed if kernel in kernels and name in names}
    _found.update(found)
    _seen.update(f"{function.__name__}:{name}" for name in names)
    return [name for _, name in sorted(found)]


@functools.cache
def _check_at_exit() -> None:
    forks.register("report", at_exit=_warn_of_the_others)


def _warn_of_the_others() -> None:
    missing = sorted(f"{kernel}:{name}" for kernel, name in _installed - _found)
    if missing:
        warn(
            f"run --keep or install(keep=) has {with_nearest(missing, _seen)}, which "
            "is not in the key of any kernel of this process",
            SettingWarning,
        )


@contextlib.contextmanager
def during(switch: ContextVar[bool]) -> Iterator[None]:
    """Turn a switch on in the body; also a decorator."""
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


#: Warns of unknown names, which Triton 3.6 ignores, instead of raising.
_lenient: ContextVar[bool] = ContextVar("safetune_unknown_names_are_ignored", default=False)
lenient = functools.partial(during, _lenient)


#: On where the user of a library has not written the decorator: its faults are logged.
of_a_library: ContextVar[bool] = ContextVar("safetune_decorator_of_a_library", default=False)


def warn_at(kernel: Any, message: str) -> None:
    """Warn at the kernel's own line, because its decorator may be any number of frames away."""
    jit, function = base_function(kernel)
    line = definition_line(jit) or function.__code__.co_firstlineno
    warn(message, PhantomKeyWarning, at=(file_of(function), line))
