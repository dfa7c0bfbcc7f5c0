"""A stand-in for Triton's driver, below which nothing of a launch is in Python.

Triton's own path runs in full but for the compilation, which notes what would be compiled: what
the tests compare is the hash of that, as Triton makes it.
"""

from __future__ import annotations

import importlib.util
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from safetune import safetune
from safetune.launch import fast_path_codegen
from tests.backends import FakeBackend, launching_on
from tests.binding import tell_binding

TARGET = GPUTarget("cuda", 90, 32)


@dataclass
class Machine:
    """What has been launched and compiled on it.

    Attributes:
        launches: the binary's hash, the grid, the stream, and the arguments; tensors by address.
        compiled: the hash of each binary.
        device, stream: the current ones.
    """

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    _binaries: list[weakref.ref[CompiledKernel]] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    device: int = 0
    stream: int = 100
    #: Triton 3.8 unloads a binary that is collected, whether it has loaded it or not.
    utils: ClassVar[Any] = SimpleNamespace(
        unload_module=lambda module: None,
        get_device_properties=lambda index: {
            "multiprocessor_count": 132,
            "max_shared_mem": 232448,
        },
    )

    def unload(self) -> None:
        """Leave nothing that Triton would unload when there is no machine any more."""
        for binary in filter(None, [reference() for reference in self._binaries]):
            binary.module = None

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def kernel_of(
        self, function: Any, kind: type[JITFunction] = JITFunction, **options: Any
    ) -> JITFunction:
        """A Triton kernel of a function, that is launched here."""
        jit = kind(function, **options)

        def compile_stub(src: ASTSource, target: Any, options: dict[str, Any]) -> CompiledKernel:
            return self._binary(src, options)

        create_binder = jit.create_binder

        def with_our_compiler() -> Any:
            found = create_binder()
            jit.compile = compile_stub
            return found

        jit.device_caches.default_factory = with_our_compiler
        return jit

    def _binary(self, src: ASTSource, options: dict[str, Any]) -> CompiledKernel:
        options = {name: str(value) for name, value in sorted(options.items())}
        made = f"{src.hash()} {options}"
        self.compiled.append(made)
        kernel = CompiledKernel.__new__(CompiledKernel)
        self._binaries.append(weakref.ref(kernel))
        kernel.src, kernel.name, kernel.hash, kernel.metadata_group = src, "kernel", made, {}
        kernel.metadata = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
        kernel.packed_metadata = (4, 1, 0)
        kernel.module, kernel._module_pid, kernel.function = 1, None, 7

        def launcher(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            _, metadata, enter, leave, *arguments = rest
            for hook in (enter, leave):
                if hook is not None:
                    hook(metadata)
            self.launches.append((made, (x, y, z), stream, *map(_plain, arguments)))

        kernel._run = launcher
        return kernel


def _plain(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def machine_type() -> type[Machine]:
    return Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, machine_type: type[Machine]) -> Iterator[Machine]:
    made = machine_type()
    monkeypatch.setattr(driver, "_active", made)
    # Tensors of the CPU stand for a device's.
    monkeypatch.setattr(fast_path_codegen, "ON_DEVICE", "is_cpu")
    yield made
    made.unload()


@pytest.fixture
def back_end(machine: Machine) -> Iterator[FakeBackend]:
    """The back end of the machine; a test may replace its answers."""
    made = FakeBackend()
    with launching_on(made, TARGET.backend, active=machine):
        yield made


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The module `launch_kernels.py` beside this file."""
    path = Path(__file__).with_name("launch_kernels.py")
    spec = importlib.util.spec_from_file_location("launch_test_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jit_function(kernel: Any) -> JITFunction:
    """The jit function below heuristics and tuners."""
    return kernel if isinstance(kernel, JITFunction) else jit_function(kernel.fn)


class Tuned:
    """A tuner whose misses choose one of its configs by turns, and measure nothing.

    Attributes:
        tuner: the tuner.
        by_triton: how many launches went through Triton's own path.
    """

    def __init__(self, jit: Any, configs: list[triton.Config], **options: Any) -> None:
        self.tuner = safetune(configs=[*configs], **options)(jit)
        self.tuner.key_report
        self.jit = jit_function(jit)
        self._turn = itertools.cycle(configs)
        self.tuner._miss = self._choose
        self.by_triton = 0
        self.watch()

    def _choose(self, key: Any, args: Any, kwargs: Any) -> triton.Config:
        return self.tuner.states.of(key).set_choice(next(self._turn))

    def watch(self) -> None:
        tell_binding(self.jit, self._bound)

    def _bound(self) -> None:
        self.by_triton += 1


@pytest.fixture
def tuned() -> type[Tuned]:
    return Tuned
