"""`libcuda.c`, compiled: a CUDA driver whose devices are memory of the host."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from safetune.isolation.cuda_driver import Driver

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
    subprocess.run([compiler, *options, "-o", library, str(SOURCE), "-lm"], check=True)
    return made


def library() -> ctypes.CDLL:
    """Return the library in this process; its devices are the same for all that load it."""
    return ctypes.CDLL(str(folder() / "libcuda.so.1"))


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A driver that has made the context of its first device current in this thread."""
    made = Driver(library())
    with made.on(0):
        yield made


def used(driver: Driver, device: int = 0) -> int:
    """Return the bytes that this process has allocated on a device."""
    count = driver._library.stub_used
    count.restype = ctypes.c_int64
    return int(count(device))
