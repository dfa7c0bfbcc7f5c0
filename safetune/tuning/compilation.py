"""Compiling a config where there is no GPU: the measuring child resolves, a compile child compiles.

Everything that a launch feeds to the compiler (signature, constexprs, attributes, options) is taken
from the launch itself: heuristics and pre-hooks may change any of it. What a compile child writes
is an entry of Triton's own disk cache, under the key that the launch will look up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime.jit import JITFunction

from safetune.tuning import kernel_ref


def capture_spec(jit: JITFunction, launch: Callable[[], object], device: int) -> bytes:
    """Run `launch` up to the point where Triton would compile, and return what it would compile.

    Nothing is compiled, loaded or launched.
    """
    captured: list[bytes] = []

    def stop(
        key: Any,
        signature: Any,
        index: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> None:
        spec = (signature, constexprs, attrs, dict(options.__dict__), target)
        captured.append(kernel_ref.pack(spec, f"the constants of {jit.__name__}"))

    caches = jit.device_caches
    _, _, target, backend, binder = caches[device]
    # Empty caches, so that Triton gets as far as its compile step; it launches nothing when that
    # returns None, as it may under a hook's veto.
    jit.device_caches = {device: ({}, {}, target, backend, binder)}
    jit._do_compile = stop
    try:
        launch()
    finally:
        del jit._do_compile
        jit.device_caches = caches
    return captured[0]


def compile_spec(kernel: bytes, spec: bytes) -> dict[str, Any]:
    """Compile a captured spec into Triton's disk cache; return what its metadata says.

    Raises whatever the compiler raises.
    """
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    jit = kernel_ref.unpack(kernel)
    signature, constexprs, attrs, options, target = kernel_ref.unpack(spec)
    source_type = ASTSource
    if jit.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(jit, signature, constexprs, attrs)
    compiled = triton_compile(source, target=target, options=options)
    return {
        "hash": compiled.hash,
        "shared": int(compiled.metadata.shared),
        "global_scratch": int(getattr(compiled.metadata, "global_scratch_size", 0)),
    }
