"""Devices that are not there: a back end for an unknown kind, and a kernel compiled for a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from safetune.both import backend
from safetune.inputs import kernel_pickle
from safetune.inputs.compile_spec import pack_for_compiler
from safetune.isolation.compile_pool import Compiled, CompilePool
from safetune.outcome import Verdict

NAME = "fake"

TARGET = GPUTarget("cuda", 90, 32)


class FakeBackend:
    """Answers as a GPU that captures nothing, is shared freely and has plenty of memory.

    Tensors of the CPU stand for those of the device.
    """

    torch_type = "cpu"

    def __init__(self, **answers: Any) -> None:
        self.__dict__.update(answers)

    def launch_stream(self) -> int:
        return 7

    def capture_id(self, stream: int) -> int:
        return 0

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        yield

    def is_known_pointer(self, address: int) -> bool:
        return False

    def visible_environment(self) -> Mapping[str, str]:
        return {"FAKE_VISIBLE_DEVICES": "1,0"}

    def why_not_shared(self, index: int) -> str:
        return ""

    def device_name(self, index: int) -> str:
        return f"Fake {index}"

    def memory(self, index: int) -> backend.Memory:
        return backend.Memory(free=64 << 30, total=80 << 30, unused=0)

    def release_unused(self, index: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def use(self, index: int) -> str:
        return f"fake-{index}"

    def works(self) -> bool:
        return True


@contextlib.contextmanager
def launching_on(
    found: backend.Backend | None, name: str = NAME, active: Any = None
) -> Iterator[None]:
    """Have Triton launch on a device of the kind `name`, whose back end is `found`.

    Args:
        active: Triton's driver, if more than the name of its target is asked for.
    """
    target = GPUTarget(name, 90, 32)
    before = driver._active
    driver._active = active or SimpleNamespace(get_current_target=lambda: target)
    if found is not None:
        backend.register(name, found)
    try:
        yield
    finally:
        backend.unregister(name)
        driver._active = before


def small(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


def compiled_in_a_child(target: GPUTarget) -> Compiled:
    """A small kernel, compiled for a target by a compile server's child."""
    jit = JITFunction(small)
    source = ASTSource(jit, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(2,): 64}, {})
    options = make_backend(target).parse_options({}).__dict__
    parts = (source.signature, source.constants, source.attrs, dict(options), target)
    spec = kernel_pickle.pack(parts, "the constants of small")
    with CompilePool(lambda: pack_for_compiler(jit), 60.0, size=1) as pool:
        pool.add(0, spec)
        (compiled,) = pool.results()
    assert compiled.outcome.verdict is Verdict.OK, compiled.outcome
    return compiled


@pytest.fixture(autouse=True)
def h100() -> Iterator[None]:
    """Triton's launch path asks for the device, stream and target; there is no driver here."""
    made = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGET,
    )
    with launching_on(FakeBackend(), "cuda", active=made):
        yield
