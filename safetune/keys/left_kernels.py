"""Kernels that are left to Triton: SAFETUNE_LEAVE, `install(leave=)` and `safetune run --leave`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from safetune import forks
from safetune.errors import SettingWarning
from safetune.keys.identity import base_function
from safetune.messages import warn
from safetune.settings import Settings, parse_kernels

#: The names that `install` was given.
installed: set[str] = set()
_matched: set[str] = set()


def leave(names: Iterable[str]) -> None:
    """Leave more kernels to Triton; raises `InvalidSetting` for an impossible kernel name."""
    installed.update(parse_kernels("leave", ",".join(names)))


def is_left(kernel: Any, settings: Settings) -> bool:
    """Whether a kernel is left to Triton; see `is_left_by_name`."""
    if not (installed or settings.leave):
        return False
    function = base_function(kernel)[1]
    return is_left_by_name(
        function.__name__, f"{function.__module__}.{function.__qualname__}", settings
    )


def is_left_by_name(name: str, path: str, settings: Settings) -> bool:
    """Whether a pattern matches a kernel's name or, if the pattern has a dot, its `module.kernel`.

    So `add_*` does not match a module's name.
    """
    if not (patterns := installed | settings.leave):
        return False
    _check_at_exit()
    fitting = {p for p in patterns if fnmatchcase(path if "." in p else name, p)}
    _matched.update(fitting)
    return bool(fitting)


@functools.cache
def _check_at_exit() -> None:
    forks.register("report", at_exit=_warn_of_the_others)


def _warn_of_the_others() -> None:
    missing = sorted((installed | Settings.current().leave) - _matched)
    if missing:
        warn(
            f"SAFETUNE_LEAVE or install(leave=) has {', '.join(map(repr, missing))}, which names "
            "no kernel that this process has tuned or launched; give a kernel's name, or "
            "module.kernel, with * for any text",
            SettingWarning,
        )
