"""A key as it was written, after the checks that need no source text."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from safetune.errors import InvalidSetting, with_nearest
from safetune.keys.buckets import Bucket, buckets_of
from safetune.keys.kept_names import kept_for
from safetune.keys.kernel_digest import base_function, definition_line
from safetune.settings import Settings

#: The names in `prune_configs_by`.
_PRUNING = ("early_config_prune", "perf_model", "top_k")

#: What `key=` may be.
Key: TypeAlias = Iterable[str] | Mapping[str, Callable[[Any], Any] | None] | str | None


class PhantomKeyWarning(UserWarning):
    """A key has a name that nothing reads; or, of a library's tuner, an unknown name."""


@dataclass(frozen=True)
class WrittenKey:
    """A key as it was written.

    Attributes:
        names: None for "auto".
        keep: of the decorator.
        kept: names that stay for another reason: a bucket, or SAFETUNE_KEEP.
    """

    names: tuple[str, ...] | None
    keep: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    buckets: Mapping[str, Bucket] = field(default_factory=dict)


def written_key(
    kernel: Any,
    key: Key,
    keep: Iterable[str] = (),
    prune: Any = None,
    settings: Settings | None = None,
) -> WrittenKey:
    """Return a key after the checks that need no text; `prune` is `prune_configs_by`.

    Raises:
        InvalidSetting: `key` is a single name or has one that is not a parameter, `keep` has a
            name that `key` lacks, `prune` an unknown one, or `kernel` is not a Triton kernel.
    """
    _, function = base_function(kernel)
    keep = tuple(_names("keep", keep))
    _check_known(kernel, "prune_configs_by", prune or (), _PRUNING)
    if key == "auto":
        return WrittenKey(None, keep)
    names = tuple(_names("key", key))
    _check_known(kernel, "key", names, list(inspect.signature(function).parameters))
    check_kept(kernel, keep, names)
    buckets = buckets_of(function.__name__, key)
    kept = kept_for(function, names, settings or Settings.current())
    return WrittenKey(names, keep, (*buckets, *kept), buckets)


def _names(what: str, names: Key) -> list[str]:
    if isinstance(names, str):
        raise InvalidSetting(f'{what}={names!r} is one string; write {what}=["{names}"]')
    found = list(dict.fromkeys(names or ()))
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise InvalidSetting(
            f"{what} has {wrong[0]!r}, of type {type(wrong[0]).__name__}; give names of arguments"
        )
    return found


def _check_known(kernel: Any, what: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise for unknown names; of a tuner whose text the user may not be able to change, warn."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    name = base_function(kernel)[1].__name__
    text = (
        f"{what} of {name} has {with_nearest(unknown, known)}, which is not one of "
        f"{', '.join(known)}"
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


_lenient: ContextVar[bool] = ContextVar("safetune_unknown_names_are_ignored", default=False)


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Warn of unknown names, which Triton 3.6 ignores, instead of raising."""
    token = _lenient.set(True)
    try:
        yield
    finally:
        _lenient.reset(token)


def warn_at(kernel: Any, message: str) -> None:
    """Warn at the kernel's own line: its decorator may be any number of frames away."""
    jit, function = base_function(kernel)
    line = definition_line(jit) or function.__code__.co_firstlineno
    warnings.warn_explicit(message, PhantomKeyWarning, function.__code__.co_filename, line)
