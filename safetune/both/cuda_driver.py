"""The CUDA driver without torch: contexts, memory, shareable memory, streams, kernels.

Every handle and address is a Python integer. A call that fails raises `DriverError`. All calls act
on this thread's current context, which `use` and `on` set. It is the primary context, so torch in
the same process sees the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from safetune.errors import BackendError

# Values of cuda.h: CUdevice_attribute, CUstream_flags, CUmemAllocationGranularity_flags and others.
_VIRTUAL_MEMORY = 102
_FILE_DESCRIPTORS = 103
_NON_BLOCKING = 1
_PORTABLE, _MAPPED = 1, 2
_PINNED, _POSIX_DESCRIPTOR, _ON_DEVICE = 1, 1, 1
_READ, _READ_WRITE = 1, 3
_OUT_OF_MEMORY, _NOT_READY = 2, 600
_CAPTURE_THREAD_LOCAL, _CAPTURE_RELAXED = 1, 2
_NOT_INITIALIZED, _DEINITIALIZED, INVALID_CONTEXT = 3, 4, 201
NO_CONTEXT = frozenset({_NOT_INITIALIZED, _DEINITIALIZED, INVALID_CONTEXT})
_SM_COUNT, _L2_BYTES, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 38, 75, 76
_SHARED_MEMORY, _OVERSIZED_SHARED_MEMORY = 97, 150

_DESCRIBE = """
import json
from safetune.both import cuda_driver
print(json.dumps(cuda_driver.load().describe(int(sys.argv[1]))))
"""
_DESCRIBE_S = 60.0


class Description(NamedTuple):
    """A device as Triton describes it: `capability` is 90 for 9.0."""

    target: str
    name: str
    capability: int
    sm_count: int
    shared_memory_bytes: int


class DriverError(BackendError):
    """A call of the driver failed, or the driver or the device does not support it."""


class LacksMemory(DriverError, MemoryError):
    """A call of the CUDA driver ran out of memory, which may be temporary."""

    def __str__(self) -> str:
        return f"a device has too little free memory: {super().__str__()}"


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def load() -> Driver:
    """Return the driver; raises `BackendError` if its library cannot be loaded."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise BackendError(f"cannot load the CUDA driver library ({error})") from error


def may_start() -> bool:
    """Whether this process could initialise the driver but has not done so."""
    try:
        return not load().has_started()
    except BackendError:
        return False


def described_elsewhere(index: int) -> Description:
    """Return the description of a device from another process; cuInit here would break CUDA in
    forks.

    Raises `BackendError` if that process finds no such device.
    """
    from safetune.both import elsewhere

    try:
        done = elsewhere.ask(elsewhere.python(_DESCRIBE, str(index)), _DESCRIBE_S)
    except OSError as error:
        raise BackendError(
            f"could not start a process to describe device {index}: {error}"
        ) from error
    if done.returncode:
        raise BackendError((done.stderr.strip() or str(done.returncode)).splitlines()[-1])
    return Description(*json.loads(done.stdout))


class Driver:
    """The functions of libcuda that safetune uses, or their stand-ins."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}

    def call(self, function: str, *arguments: Any, known: Collection[int] = ()) -> int:
        """Call the driver and return its error code: 0 or one of `known`. Any other error is
        raised.
        """
        if (asked := getattr(self._library, function, None)) is None:
            raise DriverError(f"the CUDA driver is too old: it has no {function}; update it")
        error = int(asked(*map(_wide, arguments)))
        if error and error not in known:
            kind = LacksMemory if error == _OUT_OF_MEMORY else DriverError
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(error, ctypes.byref(text))
            name = text.value.decode() if text.value else f"error {error}"
            raise kind(f"the CUDA driver failed: {function} returned {name}")
        return error

    # Devices and contexts

    def has_started(self) -> bool:
        """Whether this process has initialised the driver."""
        count = ctypes.byref(ctypes.c_int())
        return not self.call("cuDeviceGetCount", count, known={_NOT_INITIALIZED, _DEINITIALIZED})

    def describe(self, index: int) -> Description:
        """Return Triton's description of a device, without a context on it."""
        major, minor = (self.attribute(a, index) for a in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
        shared = _OVERSIZED_SHARED_MEMORY if (major, minor) == (10, 7) else _SHARED_MEMORY
        name, count = self.device_name(index), self.attribute(_SM_COUNT, index)
        return Description("cuda", name, 10 * major + minor, count, self.attribute(shared, index))

    def device_count(self) -> int:
        """Return the number of devices visible to this process; initialises the driver."""
        self.call("cuInit", 0)
        return self._made("cuDeviceGetCount", ctypes.c_int)

    def device(self, index: int) -> int:
        """Return the handle of a device by its index in this process; initialises the driver."""
        self.call("cuInit", 0)
        return self._made("cuDeviceGet", ctypes.c_int, index)

    def attribute(self, attribute: int, index: int, known: Collection[int] = ()) -> int:
        """Return an attribute of a device; 0 after an error in `known`."""
        value, device = ctypes.c_int(), self.device(index)
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device, known=known)
        return value.value

    def l2_bytes(self, index: int) -> int:
        """Return the size of a device's L2 cache in bytes; 0 if unknown."""
        return self.attribute(_L2_BYTES, index)

    def device_name(self, index: int) -> str:
        """Return the product name of a device."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), self.device(index))
        return name.value.decode()

    def device_uuid(self, index: int) -> bytes:
        """Return the 16 bytes of a device's UUID."""
        found = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), self.device(index))
        return bytes(found)

    def context(self, index: int) -> int:
        """Return the primary context of a device; it is kept until the process ends."""
        if index not in self._contexts:
            device = self.device(index)
            self._contexts[index] = self._made("cuDevicePrimaryCtxRetain", ctypes.c_void_p, device)
        return self._contexts[index]

    def use(self, index: int) -> None:
        """Make the primary context of a device current in this thread."""
        self.call("cuCtxSetCurrent", self.context(index))

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Make the primary context of a device current in this thread, for the body."""
        self.call("cuCtxPushCurrent_v2", self.context(index))
        try:
            yield
        finally:
            self._made("cuCtxPopCurrent_v2", ctypes.c_void_p)

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread copy, allocate and free in the body while another thread captures a
        graph.
        """
        mode = ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED))
        exchange = functools.partial(self.call, "cuThreadExchangeStreamCaptureMode", mode)
        if exchange(known=NO_CONTEXT):
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(BackendError):  # it would take the place of the body's error
                exchange()

    def synchronize(self) -> None:
        """Wait for all work in the current context; raises the error of an earlier launch."""
        self.call("cuCtxSynchronize")

    # Memory

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        """Return the address of new device memory."""
        return self._made("cuMemAlloc_v2", ctypes.c_uint64, size)

    def free(self, address: int) -> None:
        """Free memory from `allocate`."""
        self.call("cuMemFree_v2", address)

    def allocate_host(self, size: int) -> int:
        """Return the address of new pinned memory, which has the same address on the device."""
        return self._made("cuMemHostAlloc", ctypes.c_void_p, size, _PORTABLE | _MAPPED)

    def free_host(self, address: int) -> None:
        """Free memory from `allocate_host`."""
        self.call("cuMemFreeHost", address)

    def copy(self, target: int, source: int, size: int, stream: int = 0) -> None:
        """Queue a copy between device memory and pinned memory."""
        self.call("cuMemcpyAsync", target, source, size, stream)

    def copy_in(self, target: int, source: int, size: int) -> None:
        """Queue a copy from host memory. Unless the memory is pinned, it has been read on
        return.
        """
        self.call("cuMemcpyHtoDAsync_v2", target, source, size, 0)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of a device, after all earlier work on the default stream."""
        host = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", ctypes.addressof(host), address, size)
        return host.raw

    def write(self, address: int, data: bytes) -> None:
        """Write bytes to a device."""
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_char_p(data), len(data))

    def fill(self, address: int, value: int, count: int, width: int = 1, stream: int = 0) -> None:
        """Queue a fill with `count` values of 1, 2 or 4 bytes."""
        self.call(f"cuMemsetD{8 * width}Async", address, value, count, stream)

    # Memory made for sharing

    def can_share(self, index: int) -> bool:
        """Whether another process can map memory of a device through a file descriptor."""
        wanted = (_VIRTUAL_MEMORY, _FILE_DESCRIPTORS)
        return all(self.attribute(attribute, index, known={1}) for attribute in wanted)

    def granularity(self, index: int) -> int:
        """Return the granularity of sizes for `create` and `map`."""
        wanted = ctypes.byref(_shareable(index))
        return self._made("cuMemGetAllocationGranularity", ctypes.c_size_t, wanted, 0)

    def create(self, size: int, index: int) -> int:
        """Return a handle of new exportable memory, which has no address yet."""
        wanted = ctypes.byref(_shareable(index))
        return self._made("cuMemCreate", ctypes.c_uint64, size, wanted, 0)

    def export(self, handle: int) -> int:
        """Return a file descriptor through which another process can import the memory."""
        fd = self._made("cuMemExportToShareableHandle", ctypes.c_int, handle, _POSIX_DESCRIPTOR, 0)
        os.set_inheritable(fd, False)
        return fd

    def import_(self, fd: int) -> int:
        """Return a handle of the memory behind a descriptor; the descriptor stays open."""
        function = "cuMemImportFromShareableHandle"
        return self._made(function, ctypes.c_uint64, fd, _POSIX_DESCRIPTOR)

    def release(self, handle: int) -> None:
        """Release a handle; the memory lives as long as it is mapped anywhere."""
        self.call("cuMemRelease", handle)

    def map(self, handle: int, size: int, index: int, writable: bool = True) -> int:
        """Map the memory behind a handle for launches on a device; return its address."""
        address = self._made("cuMemAddressReserve", ctypes.c_uint64, size, 0, 0, 0)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.call, "cuMemAddressFree", address, size)
            self.call("cuMemMap", address, size, 0, handle, 0)
            on_error.callback(self.call, "cuMemUnmap", address, size)
            flags = _READ_WRITE if writable else _READ
            access = _Access(_Location(_ON_DEVICE, index), flags)
            self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            on_error.pop_all()
        return address

    def unmap(self, address: int, size: int) -> None:
        """Unmap memory from `map`."""
        self.call("cuMemUnmap", address, size)
        self.call("cuMemAddressFree", address, size)

    # Streams and events

    def stream(self, index: int) -> int:
        """Return a new stream of a device that does not wait for the default stream."""
        with self.on(index):  # this thread may not have a context yet
            return self._made("cuStreamCreate", ctypes.c_void_p, _NON_BLOCKING)

    def wait(self, stream: int) -> None:
        """Wait for all work queued on a stream."""
        self.call("cuStreamSynchronize", stream)

    def event(self) -> int:
        """Return a new event with timing enabled."""
        return self._made("cuEventCreate", ctypes.c_void_p, 0)

    def record(self, event: int) -> None:
        """Queue an event on the default stream."""
        self.call("cuEventRecord", event, 0)

    def has_happened(self, event: int) -> bool:
        """Whether the device has reached an event; does not wait."""
        return not self.call("cuEventQuery", event, known={_NOT_READY})

    def elapsed_ms(self, start: int, end: int) -> float:
        """Return the time between two events that have completed."""
        value = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(value), start, end)
        return value.value

    def drop_event(self, event: int) -> None:
        """Destroy an event."""
        self.call("cuEventDestroy_v2", event)

    # Graphs

    def capture(self, stream: int, queue: Callable[[], object]) -> int:
        """Return a graph of the work that `queue` puts on a stream other than the default one.

        Other threads are unrestricted meanwhile.
        """
        self.call("cuStreamBeginCapture_v2", stream, _CAPTURE_THREAD_LOCAL)
        try:
            queue()
        except BaseException:
            with contextlib.suppress(BackendError):  # it would take the place of that error
                self.call("cuGraphDestroy", self._end_capture(stream))
            raise
        graph = self._end_capture(stream)
        try:
            return self._made("cuGraphInstantiateWithFlags", ctypes.c_void_p, graph, 0)
        finally:
            self.call("cuGraphDestroy", graph)

    def _end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph.value or 0

    def replay(self, graph: int) -> None:
        """Queue a graph's work, after the work already queued on the default stream."""
        self.call("cuGraphLaunch", graph, 0)

    def drop_graph(self, graph: int) -> None:
        """Destroy a graph from `capture`."""
        self.call("cuGraphExecDestroy", graph)

    # Kernels

    def module(self, image: bytes) -> int:
        """Load PTX or a binary onto the current device."""
        return self._made("cuModuleLoadData", ctypes.c_void_p, ctypes.c_char_p(image))

    def function(self, module: int, name: str) -> int:
        """Return a kernel of a module."""
        return self._made("cuModuleGetFunction", ctypes.c_void_p, module, name.encode())

    def launch(
        self,
        function: int,
        grid: int,
        threads: int,
        arguments: Sequence[int | float],
        shared: int = 0,
        stream: int = 0,
    ) -> None:
        """Launch a kernel whose parameters are all 8 bytes wide: addresses, int64 and double."""
        values = [
            ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_uint64(argument)
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (grid, 1, 1, threads, 1, 1)
        self.call("cuLaunchKernel", function, *sizes, shared, stream, pointers, None)

    def _made(self, function: str, kind: Any, *arguments: Any) -> int:
        """Return the value that a call writes to its first parameter."""
        made = kind()
        self.call(function, ctypes.byref(made), *arguments)
        return made.value or 0


def _wide(argument: Any) -> Any:
    """An integer as 64 bits, as addresses and sizes are; a narrower parameter takes its part."""
    return ctypes.c_uint64(argument) if isinstance(argument, int) else argument


def _shareable(index: int) -> _Allocation:
    return _Allocation(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, index))
