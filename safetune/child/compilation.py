"""Compiles the configs of one kernel into Triton's disk cache, in a process that sees no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from safetune.child import failures
from safetune.inputs import kernel_pickle
from safetune.isolation.protocol import DONE, Answer


class Compiler:
    """Compiles one kernel, which is rebuilt when the first config needs it."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._jit: Any = None

    def compile(self, spec: bytes) -> Answer:
        """Compile a config from what `compile_spec.capture_spec` returned."""
        try:
            if self._jit is None:
                self._jit = kernel_pickle.unpack(self._packed)
            return replace(DONE, shared_bytes=_compile(self._jit, spec))
        except BaseException as error:
            return Answer(failures.of_compile(error))


def _compile(jit: Any, spec: bytes) -> int:
    """Return the bytes of shared memory that a launch needs; raises what the compiler raises."""
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile
    from triton.runtime import driver

    signature, constexprs, attrs, options, target = kernel_pickle.unpack(spec)
    driver.set_active(_TargetOnly(target))
    source_type = ASTSource
    if jit.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(jit, signature, constexprs, attrs)
    compiled = triton_compile(source, target=target, options=options)
    return int(compiled.metadata.shared)


@dataclass(frozen=True)
class _TargetOnly:
    """Stands for the driver where there is none: kernels may ask what they are compiled for."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target
