"""Imports safetune when Python starts, and then the `sitecustomize` that this one hides."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys


def _chain() -> None:
    """Run the next `sitecustomize` on the path, under that name, as Python would have."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    with contextlib.suppress(ImportError):  # a Python of another environment
        import safetune  # noqa: F401  (SAFETUNE_INSTALL=1 acts)
finally:  # even if SAFETUNE_INSTALL is invalid, which raises
    _chain()
