"""Device memory: private to this process, shared with another, or mapped from another."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

from safetune import forks
from safetune.both.cuda_driver import Driver, DriverError


class Bytes:
    """`size` bytes of a device, in the form that torch imports from other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.size,), "typestr": "|u1", "data": data, "version": 3}


class DeviceMemory(Bytes):
    """Memory of one device with a single user; it is freed with this object.

    Args:
        pinned: allocate pinned host memory instead, which the device copies at bus speed.
    """

    def __init__(self, driver: Driver, index: int, size: int, pinned: bool = False) -> None:
        super().__init__(0, size)
        self._driver, self._index = driver, index
        self.pinned = pinned
        with driver.on(index):
            allocate = driver.allocate_host if pinned else driver.allocate
            self.address = allocate(max(1, size))

    def __del__(self) -> None:
        if self.address:
            free = self._driver.free_host if self.pinned else self._driver.free
            try:
                with self._driver.on(self._index):
                    free(self.address)
            except Exception:  # a context with an error frees nothing
                pass


_open: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


class SharedMemory:
    """Memory of one device that other processes can map by a descriptor, until it is closed.

    It has an address in this process while it is `open`. Other processes can reach none of this
    process's other memory through it.
    """

    def __init__(self, driver: Driver, index: int, size: int) -> None:
        self._driver, self._index = driver, index
        with driver.on(index):
            step = driver.granularity(index)
            self.size = -(-size // step) * step
            self._handle = driver.create(self.size, index)
            try:
                self.fd = driver.export(self._handle)
            except BaseException:
                driver.release(self._handle)
                raise
        _open.add(self)

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """Yield its address, which is valid in the body."""
        with self._driver.on(self._index):
            address = self._driver.map(self._handle, self.size, self._index)
            try:
                yield address
            finally:
                self._driver.unmap(address, self.size)

    def close(self) -> None:
        """Free the memory, except blocks that a child still maps."""
        _open.discard(self)
        os.close(self.fd)
        driver = self._driver
        with contextlib.suppress(DriverError), driver.on(self._index), driver.relaxed():
            driver.release(self._handle)


def _forget() -> None:
    """In a forked copy of this process, which would keep the memory as long as it lives."""
    for memory in list(_open):
        os.close(memory.fd)
    _open.clear()


forks.register("tuning", after_in_child=_forget)


class MappedMemory(Bytes):
    """Memory of another process, mapped read-only."""

    pinned = False

    def __init__(self, driver: Driver, index: int, fd: int, size: int) -> None:
        super().__init__(0, size)
        self._driver, self._index = driver, index
        with driver.on(index):
            handle = driver.import_(fd)
            try:
                self.address = driver.map(handle, size, index, writable=False)
            finally:
                driver.release(handle)

    def __del__(self) -> None:
        if self.address:
            try:
                with self._driver.on(self._index):
                    self._driver.unmap(self.address, self.size)
            except Exception:
                pass
