"""Kernels from text, each in a file of its own so that its source can be found.

`jit` in that text is the compiler's or the interpreter's decorator, whatever the environment says:
what is asked of a kernel here must not depend on which of the two it is for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

HEADER = "import triton\nimport triton.language as tl\n"


def load(directory: Path, text: str, interpret: bool = False, header: str = HEADER) -> ModuleType:
    """Return the module of `text`, imported from a new file in `directory`."""
    source = header + textwrap.dedent(text)
    name = f"k{hashlib.sha256(f'{directory}{source}{interpret}'.encode()).hexdigest()[:12]}"
    path = directory / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.jit = jit_decorator(interpret)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def jit_decorator(interpret: bool) -> Callable[..., Any]:
    """Return `@jit`, with or without arguments."""
    kind = InterpretedFunction if interpret else JITFunction

    def jit(function: Any = None, **options: Any) -> Any:
        return kind(function, **options) if function else lambda later: kind(later, **options)

    return jit
