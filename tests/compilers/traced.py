"""A kernel to be traced for a GPU that is not there, and what its store is told beforehand."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from safetune import safetune
from safetune.config import config_digest, config_record
from safetune.keys import tuning_key
from safetune.miss import resolve
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord
from tests.backends import FakeBackend, launching_on

H100 = tuning_key.Device("NVIDIA H100 80GB HBM3", "90", 132, 232448)
TOOLCHAIN = tuning_key.Toolchain("3.9.0", "backend", "cuda:90:32")

SOURCE = """
import triton.language as tl


def scale_kernel(dst, src, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr = 2):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, FACTOR * tl.load(src + offset, mask=offset < n), mask=offset < n)
"""


def load(path: Path, text: str) -> Any:
    """Write a module, and import it: Triton reads a kernel's source from its file."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Driver:
    """A driver with one device, to which nothing is ever sent."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def a_gpu_to_trace_for(capability: int = 90) -> Iterator[None]:
    """Have torch and safetune believe in a GPU; good for tracing only."""
    from torch.utils import _triton

    detected = mock.patch.object(tuning_key, "detect", return_value=(H100, TOOLCHAIN))
    driver = launching_on(FakeBackend(), "cuda", _Driver(capability))
    believed = mock.patch.object(_triton, "has_triton", return_value=True)
    with detected, driver, believed:
        yield


def configs(*blocks: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, **options) for block in blocks or (64, 128, 256)]


def kernel(module: Any, **options: Any) -> Any:
    """Return a tuner of the module's `scale_kernel`, with a real `JITFunction` under it."""
    options.setdefault("configs", configs())
    options.setdefault("key", ["n"])
    return safetune(**options)(JITFunction(module.scale_kernel))


def choose(tuner: Any, config: triton.Config, *args: Any, **kwargs: Any) -> None:
    """Store `config` as the choice for a call, as a tuning of it would."""
    missed = resolve.Miss(tuner, args, {"grid": (1,), **kwargs})
    request = missed.request()
    lookup = open_lookup(Settings.current())
    lookup.forget(request.key.digest, request.declared)  # as a process that starts now
    store = lookup.store
    store.put_key(KeyRecord.of(request.key))
    store.put_choice(
        ChoiceRecord(
            request.key.digest,
            store.generation(request.key.digest) + 1,
            config_digest(config),
            config_record(config),
            request.declared,
            1.0,
            len(request.configs),
            time.time(),
        )
    )


def _meta(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


class Graphs:
    """A backend for torch.compile that keeps what it is given, and launches nothing."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.seen.append(module)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        ndims = [_meta(node).ndim for node in output.args[0]]
        return lambda *args: [torch.zeros([1] * ndim) for ndim in ndims]

    def kernels(self) -> list[Any]:
        """The kernels of all graphs, as Inductor would find them."""
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        return [
            kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            for module in self.seen
            for node in module.graph.nodes
            if "triton_kernel_wrapper" in str(node.target)
        ]

    def blocks(self) -> list[list[int]]:
        """The BLOCKs that each kernel has to choose from."""
        return [[config.kwargs["BLOCK"] for config in kernel.configs] for kernel in self.kernels()]
