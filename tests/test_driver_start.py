"""Nothing starts the CUDA driver but the program: after cuInit no fork of a process can use a GPU.

Triton 3.8 and newer start it where a driver is looked for before torch is imported, older ones ask
torch, which starts it too. A library of C stands for the driver, and notes who calls cuInit.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget

from safetune.both import cuda_driver
from safetune.errors import BackendError
from tests.backends import compiled_in_a_child
from tests.conftest import ROOT, stop_servers

pytestmark = pytest.mark.internals

#: Says after each step what it has come to.
PROGRAM = """
import ctypes
import os

import torch
import triton
import triton.language as tl

import safetune
from safetune.both import cuda_driver

for name in safetune.__all__:
    getattr(safetune, name)


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


configs = [triton.Config({"BLOCK": block}) for block in (32, 64)]
kernel = safetune.autotune(configs=configs, key=["n"])(double)
safetune.install()
installed = triton.autotune(configs=configs, key=["n"])(double)
interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def step(kernel, n):
    if not interpreted:
        try:
            return kernel.resolve(torch.empty(n, device="meta"), n, grid=(1,)).provenance
        except safetune.MissingChoice:
            return "missing"
    x = torch.ones(n)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    return bool((x == 2).all())


for n, mode in enumerate(["off", "record", "frozen", "tune"], start=100):
    os.environ["SAFETUNE_MODE"] = mode
    print(mode, step(kernel, n), step(installed, n))
print(os.getpid(), cuda_driver.may_start())
ctypes.CDLL("libcuda.so.1").cuInit(0)
print(os.getpid(), cuda_driver.may_start())
"""


@dataclass(frozen=True)
class Stub:
    """A folder with a libcuda.so.1, and the environment in which a process finds it."""

    folder: Path
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.folder), "STUB_CUDA_LOG": str(self.log)}

    def starts(self) -> list[str]:
        """The pid of each process that has called cuInit, in the order of the first calls."""
        return [*dict.fromkeys(self.log.read_text().split())] if self.log.exists() else []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    source = ROOT / "tests/stub_libcuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    return made.parent


@pytest.fixture
def stub(library: Path, tmp_path: Path) -> Stub:
    return Stub(library, tmp_path / "started")


@pytest.mark.parametrize(
    "interpret",
    [
        pytest.param(None, id="compiled"),
        pytest.param("1", id="interpreted", marks=pytest.mark.full),
    ],
)
def test_import_decoration_install_resolve_and_all_modes_leave_it_to_the_program(
    fresh_process: Any, tmp_path: Path, stub: Stub, interpret: str | None
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    done = fresh_process(program, env={**stub.environment, "TRITON_INTERPRET": interpret})

    *steps, before, after = (line.split() for line in done.stdout.splitlines())
    pid = before[0]
    assert (before[1], after[1]) == ("True", "False")
    *others, own = stub.starts()
    assert own == pid
    assert pid not in others
    if interpret:
        assert [result for _, *results in steps for result in results] == ["True"] * 8
        assert others == [], "no server and no child has, either"
    else:
        results = ["off", "fallback", "fallback", "missing"]
        assert [found for _, *found in steps] == [[result] * 2 for result in results]
        assert len(others) == 1, "one process has told what the device is"


@pytest.fixture
def servers_with_it(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children of servers that were started in an environment with the stub."""
    stop_servers()
    for name, value in stub.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    yield
    stop_servers()


@pytest.mark.usefixtures("servers_with_it")
def test_no_compile_server_or_child_starts_it(stub: Stub) -> None:
    compiled_in_a_child(GPUTarget("cuda", 90, 32))

    assert stub.starts() == []
    assert cuda_driver.described_elsewhere(0) == ("cuda", "Stub", 90, 132, 232448)
    assert len(stub.starts()) == 1, "the stub is what they would have found"


def test_a_device_that_another_process_does_not_find(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stub.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match="INVALID_DEVICE"):
        cuda_driver.described_elsewhere(1)
