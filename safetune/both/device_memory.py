"""Device memory: private to this process, shared with another, or mapped from another."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from safetune import forks
from safetune.both.cuda_driver import Driver, DriverError


class Bytes:
    """`size` bytes, in the form that torch imports from other libraries; freed with this object.

    Args:
        free: frees the address, in the context of the device.
        pinned: whether this is memory of the host, which the device copies at bus speed.
    """

    def __init__(
        self,
        context: Callable[[], AbstractContextManager[None]],
        address: int,
        size: int,
        free: Callable[[int], object],
        pinned: bool = False,
    ) -> None:
        self.address, self.size, self.pinned = address, size, pinned
        self._context, self._free = context, free

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.size,), "typestr": "|u1", "data": data, "version": 3}

    def __del__(self) -> None:
        try:  # contextlib may be gone at the interpreter's end
            with self._context():
                self._free(self.address)
        except Exception:  # after an error it frees nothing
            pass


def allocated(driver: Driver, index: int, size: int, pinned: bool = False) -> Bytes:
    """Return new memory of a device, or pinned memory of the host, with a single user."""
    allocate, free = driver.allocate, driver.free
    if pinned:
        allocate, free = driver.allocate_host, driver.free_host
    context = functools.partial(driver.on, index)
    with context():
        return Bytes(context, allocate(max(1, size)), size, free, pinned)


def mapped(driver: Driver, index: int, fd: int, size: int) -> Bytes:
    """Return the memory of another process behind a descriptor, mapped read-only."""
    context = functools.partial(driver.on, index)
    with context():
        handle = driver.import_(fd)
        try:
            address = driver.map(handle, size, index, writable=False)
        finally:
            driver.release(handle)
    return Bytes(context, address, size, functools.partial(driver.unmap, size=size))


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
