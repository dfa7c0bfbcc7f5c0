"""Compiles kernels to Triton's IR, one request per line; run in a process of its own.

Where the test session interprets kernels, the library functions that they call are interpreted too,
and cannot be compiled there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.jit = JITFunction
    spec.loader.exec_module(module)
    return module


def compiled(kernel: Any, values: dict[str, Any], types: dict[str, str] | None = None) -> str:
    """Return the kernel's IR after Triton's own passes, without locations, or why there is none."""
    signature = {
        name: "constexpr" if name in values else (types or {}).get(name, "*i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=dict(values))
    options = BACKEND.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    try:
        module = source.make_ir(
            TARGET,
            options,
            BACKEND.get_codegen_implementation(options),
            BACKEND.get_module_map(),
            context,
        )
        module = BACKEND.make_ttir(module, {}, options, 90)
    except Exception as error:
        return f"error: {type(error).__name__}"
    return module.str_nodebug()


def answer(request: dict[str, Any]) -> list[str]:
    module = load(Path(request["path"]))
    return [compiled(module.kernel.fn, values) for values in request["values"]]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
