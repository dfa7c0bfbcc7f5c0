"""Imports modules by name, also from the working directory, which the command does not search."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType


def import_named(name: str) -> ModuleType:
    """Import a module; raises the errors of its import.

    Puts the working directory first on the search path, permanently, but only if it contains the
    module's package: another folder there may have the name of a library.
    """
    with contextlib.suppress(OSError):  # it was deleted
        here = os.getcwd()
        if here not in sys.path and PathFinder.find_spec(name.partition(".")[0], [here]):
            sys.path.insert(0, here)
    return importlib.import_module(name)
