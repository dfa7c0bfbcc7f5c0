"""Facts about a kind of device that Triton does not provide: one back end for each kind.

A back end answers or raises `BackendError`. It never guesses: a wrong answer would disturb a
capture, or send an address to a process where it is invalid. On a device without a back end nothing
is tuned in child processes (see `miss.resolve`).

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
    """Bytes of one device: free now, in all, and kept by torch's allocator without need."""

    free: int
    total: int
    unused: int


class Backend(Protocol):
    """One kind of device. Streams are raw handles; an index counts this process's devices."""

    @property
    def hidden(self) -> Mapping[str, str]:
        """The environment variables that hide every device of this kind from a process."""

    @property
    def torch_type(self) -> str:
        """The type that torch gives to devices of this kind, as in `torch.device(type, index)`."""

    def launch_stream(self) -> int:
        """Return the stream that a launch of this thread goes to."""

    def capture_id(self, stream: int) -> int:
        """Return the id of the graph capture that a stream is part of now; 0 without one.

        -1 where there is a capture that has no id. Asking disturbs no capture.
        """

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        """Let this thread copy and allocate while another thread captures a graph."""

    def reading(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Copy from a device to the host while another thread captures a graph.

        The work queued on the current stream is waited for, and nothing is added to that stream.
        """

    def is_known_pointer(self, address: int) -> bool:
        """Whether an address is device memory, or host memory that the driver has pinned."""

    def visible_environment(self) -> Mapping[str, str]:
        """Return the variables with which a child counts devices as this process does, and leaves
        no core file of one.
        """

    def why_not_shared(self, index: int) -> str:
        """Return why a child must not use a device; empty where it can.

        The reason names the device and ends with what to do.
        """

    def device_name(self, index: int) -> str:
        """Return the product name, which is part of every stored key."""

    def memory(self, index: int) -> Memory:
        """Return the memory of a device; a capture in another thread stays valid."""

    def release_unused(self, index: int) -> None:
        """Give the unused memory of torch's allocator back to the device."""

    def bytes_of(self, index: int) -> DeviceBytes:
        """Return the memory operations of a device without torch."""

    def synchronize(self) -> None:
        """Wait for everything that this process has launched on its current device."""

    def use(self, index: int) -> str:
        """Make a device this process's current one; return its UUID, or an empty string."""

    def works(self) -> bool:
        """Whether the current device still answers; after a sticky error it does not."""


#: The module of each back end, by the name that Triton's target has. It has a function `make`.
_MODULES = {"cuda": "safetune.both.cuda"}

#: Children without a device see none of a kind that has no back end here either.
_HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}

_made: dict[str, Backend | BackendError] = {}


def register(name: str, found: Backend | BackendError) -> None:
    """Use a back end for devices with this Triton target; an error says why there is not one."""
    _made[name] = found


def unregister(name: str) -> None:
    """Undo `register`."""
    _made.pop(name, None)


def current() -> Backend | None:
    """Return the back end of the device that this process launches on.

    None where it launches on none, or on one that has no back end.
    """
    name = triton_internals.target_name()
    found = None if name is None else _find(name)
    return None if isinstance(found, BackendError) else found


def describer() -> Callable[[int], cuda_driver.Description] | None:
    """Return a function that describes a device; None where Triton's driver does.

    While that is being made, the CUDA driver does. A process that has not used a GPU has another
    one do it: it may fork workers that use one, as long as its own driver is not started.
    """
    if triton_internals.first_driver.begin():
        return lambda index: cuda_driver.load().describe(index)
    if triton_internals.active_driver() is not None:
        return None
    return cuda_driver.described_elsewhere if cuda_driver.may_start() else None


def capture_under_way() -> int:
    """Return the id of the capture that a launch of this thread would be part of; 0 without one."""
    found = current()
    return 0 if found is None else found.capture_id(found.launch_stream())


def required() -> Backend:
    """Return the back end of the device; raises `BackendError` for an unknown one."""
    name = triton_internals.target_name()
    if name is None:
        raise BackendError("Triton finds no device in this process, so there is no back end to use")
    return named(name)


def named(name: str) -> Backend:
    """Return the back end for a Triton target; raises `BackendError` for an unknown one."""
    found = _find(name)
    if isinstance(found, BackendError):
        raise found
    return found


def all_work() -> bool:
    """Whether every device that this process has used a back end for still answers."""
    return all(found.works() for found in _made.values() if not isinstance(found, BackendError))


def why_missing(name: str) -> str:
    """Return why the device of a Triton target has no back end; empty where it has one."""
    found = _find(name)
    return str(found) if isinstance(found, BackendError) else ""


def hidden_environment() -> dict[str, str]:
    """Return the variables that hide every device from a process."""
    found = current()
    return {**_HIDDEN, **(found.hidden if found is not None else {})}


def _find(name: str) -> Backend | BackendError:
    if name not in _made:
        try:
            if name not in _MODULES:
                raise BackendError(f"isolation does not support the {name} back end yet")
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
    """Pause Python's garbage collector, in all threads.

    A miss allocates enough to start it, and if it destroys an older CUDA graph, a capture in global
    mode becomes invalid. Syntax trees start it often, and each time it walks the heap of torch.
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
