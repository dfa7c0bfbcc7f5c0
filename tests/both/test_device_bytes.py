"""Kernels over bytes: what they find and change, on a driver without a device.

The stub computes in C what the kernels' source says, which Triton's interpreter runs here, too.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safetune.both import byte_kernels, device_bytes
from safetune.both.cuda_driver import Driver, DriverError
from safetune.both.device_bytes import DeviceBytes, Run, View
from safetune.child import compare, tolerance
from safetune.child.memory import HostBytes
from tests.libcuda.stub import driver as driver  # a fixture
from tests.libcuda.stub import used


class Memory:
    """Device memory that holds an array."""

    def __init__(self, driver: Driver, data: np.ndarray, before: int = 0) -> None:
        self._driver, self._size, self._dtype = driver, data.nbytes, data.dtype
        self.address = driver.allocate(before + data.nbytes + 64) + before
        driver.write(self.address, data.tobytes())

    def read(self) -> np.ndarray:
        return np.frombuffer(self._driver.read(self.address, self._size), self._dtype)

    @property
    def run(self) -> Run:
        return Run(self.address, self._size)


@pytest.fixture(params=["device", "host"])
def device(driver: Driver, request: pytest.FixtureRequest) -> DeviceBytes | HostBytes:
    """What works on memory of the stub's device, which is the host's: both find the same."""
    return HostBytes() if request.param == "host" else DeviceBytes(driver, 0, "cuda:0")


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class TestChecksum:
    @pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 100, 4096, 10_001])
    @pytest.mark.parametrize("before", [0, 3, 8, 13])
    def test_it_is_that_of_the_bytes_alone(
        self, driver: Driver, device: DeviceBytes | HostBytes, size: int, before: int
    ) -> None:
        """Every bit of the run counts, and none beside it."""
        data = random_bytes(size)
        memory = Memory(driver, data, before)
        (found,) = device.checksums([memory.run])
        driver.fill(memory.address - before, 7, before)
        driver.fill(memory.address + size, 7, 33)
        assert device.checksums([memory.run]) == [found]
        for place in {0, size // 2, size - 1}:
            changed = data.copy()
            changed[place] ^= 1 << (place % 8)
            driver.write(memory.address, changed.tobytes())
            assert device.checksums([memory.run]) != [found]

    def test_signs_that_change_in_pairs_show(
        self, driver: Driver, device: DeviceBytes | HostBytes
    ) -> None:
        """A sum of weighted words lost the highest bits of any even number of them."""
        values = np.random.default_rng(0).normal(size=64)
        sums = device.checksums([Memory(driver, v).run for v in (values, -values)])
        assert sums[0] != sums[1]

    def test_exchanged_words_show(self, driver: Driver, device: DeviceBytes | HostBytes) -> None:
        values = np.arange(1000)
        sums = device.checksums([Memory(driver, v).run for v in (values, values[::-1].copy())])
        assert sums[0] != sums[1]

    def test_many_runs_at_once(self, driver: Driver, device: DeviceBytes | HostBytes) -> None:
        runs = [Memory(driver, random_bytes(64, seed)).run for seed in range(1100)]
        assert len(set(device.checksums(runs))) == 1100

    def test_an_empty_run(self, device: DeviceBytes | HostBytes) -> None:
        assert len(set(device.checksums([Run(0, 0), Run(0, 0)]))) == 1

    @pytest.mark.parametrize(("size", "before"), [(10_001, 13), (5, 3), (8192, 0)])
    def test_the_source_computes_the_same(self, driver: Driver, size: int, before: int) -> None:
        padded = np.zeros((before + size + 15) // 16 * 16, np.uint8)
        padded[before : before + size] = random_bytes(size)
        words = torch.from_numpy(padded.view(np.uint64).copy())
        found = torch.zeros(1, dtype=torch.int64).view(torch.uint64)
        whole = Memory(driver, padded)
        run = Run(whole.address + before, size)
        count, (_, _, *bits) = device_bytes._words(Run(before, size))
        byte_kernels.checksum[(3,)](words, count, *bits, found, BLOCK=1024)
        assert DeviceBytes(driver, 0, "cuda:0").checksums([run]) == [int(found.numpy()[0])]


VIEWS = {
    "dense": ((6, 5), (5, 1)),
    "transposed": ((5, 6), (1, 5)),
    "every other": ((3, 5), (10, 1)),
    "three": ((2, 3, 4), (15, 5, 1)),
    "expanded": ((4, 5), (0, 1)),
    "scalar": ((), ()),
    "empty": ((0, 7), (7, 1)),
}
DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("name", VIEWS)
class TestViews:
    def test_elements_are_counted_and_set(
        self, driver: Driver, device: DeviceBytes | HostBytes, width: int, name: str
    ) -> None:
        shape, stride = VIEWS[name]
        data = random_bytes(30 * width).view(DTYPES[width])
        memory, expected = Memory(driver, data), torch.from_numpy(data.copy())
        view = View.of(memory.address, width, shape, stride)
        value = int(data[1])
        (found,) = device.unlike([(view, value)])
        elements = expected.as_strided(shape, stride)
        assert found == int((elements.numpy() != value).sum())
        device.fill(view, 7)
        mask = torch.zeros(30, dtype=torch.bool)
        mask.as_strided(shape, stride).fill_(True)
        wanted = np.where(mask.numpy(), DTYPES[width](7), data)
        assert np.array_equal(memory.read(), wanted)


def test_the_source_walks_a_view_as_the_stub_does(
    driver: Driver, device: DeviceBytes | HostBytes
) -> None:
    shape, stride = VIEWS["three"]
    data = random_bytes(120).view(np.uint32)
    memory, tensor = Memory(driver, data), torch.from_numpy(data.copy())
    view = View.of(memory.address, 4, shape, stride)
    dims = torch.tensor(view.inner, dtype=torch.int64)
    walked = (tensor, dims, len(view.inner), view.step)
    found, value = torch.zeros(1, dtype=torch.int64), int(tensor[0])
    byte_kernels.unlike[(2,)](*walked, view.count, value, found, BLOCK=16)
    assert device.unlike([(view, value)]) == found.tolist()
    numbers = torch.tensor([0, 5, 23, 7])
    values = torch.zeros(4, dtype=torch.int64)
    byte_kernels.gather[(1,)](*walked, 4, numbers, values.view(torch.uint64), BLOCK=256)
    picked = DeviceBytes(driver, 0, "cuda:0").gather(view, numbers.tolist())
    assert picked == values.tolist() == tensor.as_strided(shape, stride).flatten()[numbers].tolist()
    byte_kernels.fill[(2,)](*walked, view.count, 9, BLOCK=16)
    device.fill(view, 9)
    assert np.array_equal(memory.read(), tensor.numpy())


@pytest.mark.parametrize("dtype", byte_kernels.FLOATS)
def test_what_is_further_apart_than_allowed(driver: Driver, dtype: str) -> None:
    kind, device = getattr(torch, dtype), DeviceBytes(driver, 0, "cuda:0")
    mine = torch.tensor([1.0, 2.0, 4.0, torch.nan, torch.inf, torch.inf, 0.0, 1.0], dtype=kind)
    theirs = torch.tensor([1.0, 2.5, 4.25, torch.nan, torch.inf, 1.0, torch.nan, 1.25]).to(kind)
    pair = [Memory(driver, t.view(torch.uint8).numpy()) for t in (mine, theirs)]
    view = View.of(pair[0].address, kind.itemsize, (8,), (1,))
    for share, floor, count in ((0.0, 0.0, 5), (0.1, 0.0, 4), (0.1, 0.25, 3), (9.0, 9.0, 2)):
        assert device.beyond(dtype, view, pair[1].address, share, floor) == count
        found = torch.zeros(1, dtype=torch.int64)
        byte_kernels.beyond[(1,)](
            mine, theirs, found, 0, 1, 8, float(share), float(floor), found, BLOCK=256
        )
        assert int(found) == count


@pytest.mark.parametrize("dtype", byte_kernels.FLOATS)
def test_what_is_near_without_torch_is_the_same_with_it(driver: Driver, dtype: str) -> None:
    """And its typical size is that which torch finds."""
    kind, device = getattr(torch, dtype), DeviceBytes(driver, 0, "cuda:0")
    mine = (torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 9).to(kind)
    eps, memory = torch.finfo(kind).eps, Memory(driver, mine.view(torch.uint8).flatten().numpy())
    view = View.of(memory.address, kind.itemsize, mine.shape, mine.stride())
    assert tolerance.typical_size(device, view, dtype) == compare.typical_size(mine)
    for off, near in ((eps, True), (16 * eps if kind.itemsize < 4 else 1e-3, False)):
        theirs = (mine.double() * (1 + off)).to(kind)
        other = Memory(driver, theirs.view(torch.uint8).flatten().numpy())
        copy = View.of(other.address, kind.itemsize, mine.shape, mine.stride())
        assert tolerance.are_near(device, view, copy, dtype, 0.0) is near
        assert (compare.difference(mine, theirs).fine == 0) is near


@pytest.mark.parametrize("dtype", byte_kernels.FLOATS)
def test_drawn_values_are_within_limits_and_the_same_again(driver: Driver, dtype: str) -> None:
    kind, device = getattr(torch, dtype), DeviceBytes(driver, 0, "cuda:0")
    held = []
    for _ in range(2):
        memory = Memory(driver, np.zeros(1000 * kind.itemsize, np.uint8))
        device.draw(dtype, memory.run, kind.itemsize, 3, (1.0, 2.0, -1.0, 4.0))
        held.append(torch.from_numpy(memory.read().copy()).view(kind).double())
    assert torch.equal(*held)
    assert held[0].min() == -1
    assert held[0].max() == 4
    assert abs(held[0].mean() - 1.2) < 0.3


class TestSharing:
    def test_another_mapping_sees_the_bytes_and_all_of_it_is_freed(self, driver: Driver) -> None:
        before = used(driver._library)
        size = driver.granularity(0)
        handle = driver.create(size, 0)
        ours = driver.map(handle, size, 0)
        fd = driver.export(handle)
        driver.release(handle)
        driver.write(ours, b"shared")
        imported = driver.import_(fd)
        theirs = driver.map(imported, size, 0, writable=False)
        driver.release(imported)
        assert driver.read(theirs, 6) == b"shared"
        driver.unmap(ours, size)
        assert driver.read(theirs, 6) == b"shared"
        driver.unmap(theirs, size)
        os.close(fd)
        assert used(driver._library) == before

    def test_an_error_has_the_drivers_name_for_it(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DriverError, match="cuMemAlloc_v2 returned CUDA_ERROR_OUT_OF") as caught:
            driver.allocate(1 << 60)
        assert isinstance(caught.value, MemoryError)

    @pytest.mark.parametrize(("attribute", "shared"), [("102", False), ("103", False), ("1", True)])
    def test_support_is_asked_for(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch, attribute: str, shared: bool
    ) -> None:
        monkeypatch.setenv("LIBCUDA_WITHOUT", attribute)
        assert driver.can_share(0) == shared


def test_the_shipped_kernels_were_made_from_this_source() -> None:
    digest = hashlib.sha256(Path(byte_kernels.__file__).read_bytes()).hexdigest()
    assert digest in byte_kernels.PTX.read_text()[:200], "run python -m safetune.both.byte_kernels"


@pytest.mark.full
def test_the_shipped_kernels_can_be_made_again(tmp_path: Path) -> None:
    made = byte_kernels.PTX.read_text()
    import triton

    if f"triton {triton.__version__} " not in made:
        pytest.skip("they were made by another version of Triton")
    environment: dict[str, Any] = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "safetune.both.byte_kernels", str(tmp_path / "ptx")]
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "ptx").read_text() == made
