"""Whether code is the user's, or belongs to Python or to the toolchain.

Kernels and hooks refer to both. The user's code is part of a kernel's identity by its text; that of
Python and of the toolchain by its name, as its text differs between versions.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
import sysconfig
from types import FunctionType, ModuleType

#: The packages of the toolchain.
_TOOLCHAIN = frozenset({"triton", "torch", "numpy", "jax"})

#: The flag of classes that are not built into the interpreter.
_HEAP_TYPE = 1 << 9


def is_foreign(defined: ModuleType | FunctionType) -> bool:
    """Whether a module, or what defines a function, is Python's or the toolchain's own.

    Its file tells, not its name: a user's module may be named `profile.py`, too.
    """
    if isinstance(defined, ModuleType):
        name, file = defined.__name__, getattr(defined, "__file__", None)
        if getattr(defined.__spec__, "origin", None) in ("built-in", "frozen"):
            file = file or "built-in"
    else:
        name, file = defined.__module__ or "", defined.__code__.co_filename
        if file.startswith("<frozen "):
            file = defined.__globals__.get("__file__") or "built-in"
    return bool(file) and _is_installed(name.partition(".")[0], str(file))


def is_foreign_class(cls: type) -> bool:
    """Whether a class is one of Python or of the toolchain."""
    module = sys.modules.get(cls.__module__)
    if module is builtins:  # also the module of a class that `exec` made without `__name__`
        return not cls.__flags__ & _HEAP_TYPE
    return module is not None and is_foreign(module)


def _is_installed(package: str, file: str) -> bool:
    """Whether a file is of the standard library, or of the toolchain's package of this name."""
    path = os.path.normpath(file)  # not by the working directory, which may be gone
    if package in sys.stdlib_module_names:
        installed = bool({"site-packages", "dist-packages"}.intersection(path.split(os.sep)))
        return file == "built-in" or (not installed and path.startswith(_standard_library()))
    if package not in _TOOLCHAIN:
        return False
    folder = next(iter(getattr(sys.modules.get(package), "__path__", ())), "")
    # safetune itself imports triton, so that name is never taken by another package.
    real = package == "triton" or os.path.basename(os.path.dirname(folder)).endswith("-packages")
    return real and path.startswith(os.path.join(os.path.abspath(folder), ""))


@functools.cache
def _standard_library() -> tuple[str, ...]:
    folders = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib")}
    folders.add(sysconfig.get_path("platstdlib"))
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)
