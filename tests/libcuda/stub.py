"""`libcuda.c`, compiled: a CUDA driver whose devices are memory of the host."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from safetune.both import cuda
from safetune.both.cuda_driver import Driver
from safetune.both.device_bytes import DeviceBytes, Run
from safetune.both.device_memory import Bytes
from safetune.inputs import spans
from safetune.inputs.spans import Span
from tests.backends import launching_on

SOURCE = Path(__file__).with_name("libcuda.c")


@functools.cache
def folder() -> Path:
    """Return a folder with the library under the name that programs load it by."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made = Path(tempfile.mkdtemp(prefix="safetune-libcuda-"))
    options = ["-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    library = str(made / "libcuda.so.1")
    atexit.register(_remove, made, os.getpid())
    subprocess.run([compiler, *options, "-o", library, str(SOURCE), "-lm"], check=True)
    return made


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def library() -> ctypes.CDLL:
    """Return the library in this process; its devices are the same for all that load it."""
    return ctypes.CDLL(str(folder() / "libcuda.so.1"))


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A driver that has made the context of its first device current in this thread."""
    made = Driver(library())
    with made.on(0):
        yield made


def used(library: ctypes.CDLL, device: int = 0) -> int:
    """Return the bytes that this process has allocated on a device."""
    count = library.stub_used
    count.restype = ctypes.c_int64
    return int(count(device))


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Have the library know the memory of a tensor as pinned, in this process."""
    start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    made = Driver(library())
    with made.on(0):
        made.call("cuMemHostRegister_v2", start, size, 0)
    return tensor


class Cuda(cuda.Cuda):
    """The back end on the library, in a process whose torch has no devices."""

    def __init__(self) -> None:
        super().__init__(Driver(library()))

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        yield


def tensor(where: DeviceBytes, memory: Bytes, run: Run) -> torch.Tensor:
    """Return device memory as a tensor of the CPU, in place of `DeviceBytes.tensor`."""
    held = (ctypes.c_ubyte * max(1, run.size)).from_address(run.address)
    held.owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(held, dtype=torch.uint8)[: run.size]


def span_on_a_device(tensor: torch.Tensor) -> Span:
    """Return where a tensor of the CPU is, as if the device held it; in place of `span_of`."""
    storage = tensor.untyped_storage()
    return Span("cuda:0", storage.data_ptr(), storage.data_ptr() + storage.nbytes())


@contextlib.contextmanager
def holding_tensors(
    span_of: Callable[[torch.Tensor], Span] = span_on_a_device,
) -> Iterator[None]:
    """Have tensors of the CPU be on the device in here, for what copies arguments."""
    with pytest.MonkeyPatch.context() as patch, launching_on(Cuda(), "cuda"):
        patch.setattr(spans, "span_of", span_of)
        yield
