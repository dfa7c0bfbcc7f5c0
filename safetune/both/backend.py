"""Facts about a kind of device that Triton does not provide; one back end per kind.

A back end answers or raises `BackendError`. It never guesses: a wrong answer would disturb a
capture, or send an address to a process where it is invalid. Child processes tune nothing on a
device without a back end (see `miss.resolve`).

To add one, write a module like `cuda.py` and name it in `_MODULES`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from safetune import forks, triton_internals
from safetune.both import cuda_driver
from safetune.errors import BackendError
from safetune.frozen import dataclass

if TYPE_CHECKING:
    from safetune.both.device_bytes import DeviceBytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one device: free now, total, and cached unused by torch's allocator."""

    free: int
    total: int
    unused: int


class Backend(Protocol):
    """One kind of device. Streams are raw handles; an index counts the devices of this process."""

    @property
    def torch_type(self) -> str:
        """The device type in torch, as in `torch.device(type, index)`."""

    def launch_stream(self) -> int:
        """Return the stream that this thread launches on."""

    def capture_id(self, stream: int) -> int:
        """Return the id of the graph capture that a stream belongs to now; 0 if there is none.

        -1 if the capture has no id. Asking disturbs no capture.
        """

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        """Let this thread copy and allocate while another thread captures a graph."""

    def reading(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Copy from a device to the host while another thread captures a graph.

        Waits for the work queued on the current stream, and adds nothing to that stream.
        """

    def is_known_pointer(self, address: int) -> bool:
        """Whether an address is device memory, or host memory that the driver has pinned."""

    def visible_environment(self) -> Mapping[str, str]:
        """Return variables that make a child count devices as this process does, and that prevent
        GPU core dumps.
        """

    def why_not_shared(self, index: int) -> str:
        """Return why a child must not use a device; empty if it may.

        The reason names the device and ends with the remedy.
        """

    def device_name(self, index: int) -> str:
        """Return the product name, which is part of every stored key."""

    def memory(self, index: int) -> Memory:
        """Return the memory of a device; a capture in another thread stays valid."""

    def release_unused(self, index: int) -> None:
        """Return the unused memory of torch's allocator to the device."""

    def bytes_of(self, index: int) -> DeviceBytes:
        """Return the memory operations of a device, which do not need torch."""

    def synchronize(self) -> None:
        """Wait for everything that this process has launched on its current device."""

    def use(self, index: int) -> str:
        """Make a device this process's current one; return its UUID, or an empty string."""

    def works(self) -> bool:
        """Whether the current device still responds; after a sticky error it does not."""


#: The module of each back end, by the name that Triton's target has. It has a function `make`.
_MODULES = {"cuda": "safetune.both.cuda"}

#: The variables that hide all devices from a process.
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}

_made: dict[str, Backend | BackendError] = {}


def register(name: str, found: Backend | BackendError) -> None:
    """Register a back end for this Triton target, or the error that says why there is none."""
    _made[name] = found


def unregister(name: str) -> None:
    """Undo `register`."""
    _made.pop(name, None)


def current() -> Backend | None:
    """Return the back end of the device that this process launches on.

    None if it launches on no device, or on one without a back end.
    """
    name = triton_internals.target_name()
    found = None if name is None else _find(name)
    return None if isinstance(found, BackendError) else found


def describer() -> Callable[[int], cuda_driver.Description] | None:
    """Return a function that describes a device; None once Triton's driver does so.

    While Triton's driver is being created, the CUDA driver describes devices. If this process has
    not used a GPU, another process asks: starting the driver here would break CUDA in forked
    workers.
    """
    if triton_internals.first_driver.begin():
        return lambda index: cuda_driver.load().describe(index)
    if triton_internals.active_driver() is not None:
        return None
    return cuda_driver.described_elsewhere if cuda_driver.may_start() else None


def capture_under_way() -> int:
    """Return the id of the capture that a launch by this thread would join; 0 if there is none."""
    found = current()
    return 0 if found is None else found.capture_id(found.launch_stream())


def required() -> Backend:
    """Return the back end of the device; raises `BackendError` if the device is unknown."""
    name = triton_internals.target_name()
    if name is None:
        raise BackendError("Triton finds no device in this process, so nothing can be tuned here")
    return named(name)


def named(name: str) -> Backend:
    """Return the back end for a Triton target; raises `BackendError` if the target is unknown."""
    found = _find(name)
    if isinstance(found, BackendError):
        raise found
    return found


def all_work() -> bool:
    """Whether all devices whose back end this process has used still respond."""
    return all(found.works() for found in _made.values() if not isinstance(found, BackendError))


def why_missing(name: str) -> str:
    """Return why the device of a Triton target has no back end; empty if it has one."""
    found = _find(name)
    return str(found) if isinstance(found, BackendError) else ""


def _find(name: str) -> Backend | BackendError:
    if name not in _made:
        try:
            if name not in _MODULES:
                raise BackendError(f"safetune cannot isolate configs on {name} devices yet")
            _made[name] = importlib.import_module(_MODULES[name]).make()
        except BackendError as error:
            _made[name] = BackendError(str(error))  # its frames would keep the caller's tensors
    return _made[name]


#: Pauses of Python's garbage collector; nothing else turns it off.
_pausing = forks.lock()
_pauses = 0
_resume = False


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's garbage collector in all threads.

    A miss allocates enough to trigger it. If it then destroys an older CUDA graph, a capture in
    global mode becomes invalid. Syntax trees trigger it often, and every collection walks torch's
    heap.
    """
    global _pauses, _resume
    with _pausing:
        if not _pauses:
            _resume = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _pausing:
            _pauses = max(_pauses - 1, 0)
            if not _pauses and _resume:
                gc.enable()


def _end_pauses() -> None:
    """In a forked child, which has none of the threads that paused it."""
    global _pauses
    if _pauses and _resume:
        gc.enable()
    _pauses = 0


forks.register("tuning", after_in_child=_end_pauses)
