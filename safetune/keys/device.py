"""The device and the toolchain, which a choice depends on besides the kernel and its arguments.

Nothing here is read before the first miss: `import safetune` touches no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safetune import triton_internals
from safetune.errors import NoDevice
from safetune.isolation import backend
from safetune.keys import encoding

INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Device:
    """A kind of device; two cards with equal fields share their choices.

    Attributes:
        name: the product name, or `interpreter`.
        capability: the back end's architecture, e.g. `90` for an H100.
        sm_count: multiprocessors.
        shared_memory_bytes: the most that one program can have.
    """

    name: str
    capability: str
    sm_count: int
    shared_memory_bytes: int

    def record(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return asdict(self)

    @functools.cached_property
    def digest(self) -> str:
        """The device's identity in the store."""
        return encoding.digest(self.record())


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the settings that turn a kernel into a binary.

    Attributes:
        triton: its version.
        backend: the back end's own hash (for NVIDIA: ptxas version and architecture).
        target: back end, architecture and warp size.
        environment: the switches that change code generation, as sorted (name, value) pairs.
    """

    triton: str
    backend: str
    target: str
    environment: tuple[tuple[str, str], ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return {**asdict(self), "environment": dict(self.environment)}


def interpreter() -> tuple[Device, Toolchain]:
    """Return the device and toolchain of Triton's interpreter: numpy on this machine's CPU."""
    import triton

    device = Device(INTERPRETER, "cpu", 0, 0)
    return device, Toolchain(triton.__version__, INTERPRETER, INTERPRETER)


@functools.lru_cache(maxsize=256)
def detect(index: int) -> tuple[Device, Toolchain]:
    """Return the device with this index and the toolchain for it, from Triton's active driver.

    Raises:
        NoDevice: Triton finds no GPU; the message says what to set.
    """
    active = active_driver()
    return _device(active, index), _toolchain(active, index)


def active_driver() -> Any:
    """Return Triton's active driver; raises `NoDevice` where there is none."""
    from triton.runtime import driver

    try:
        return driver.active
    except RuntimeError as error:
        raise NoDevice(
            f"Triton finds no GPU ({error}). Set TRITON_INTERPRET=1 before the kernel is "
            "decorated to run it in Triton's interpreter, or SAFETUNE_MODE=off to tune nothing."
        ) from error


def index_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the device of the first tensor among the arguments; -1 for the CPU or without one."""
    for value in (*args, *kwargs.values()):
        get_device = getattr(value, "get_device", None)
        if get_device is not None:
            return int(get_device())
    return -1


def current_index() -> int:
    """Return the index of the device that Triton launches on now; raises `NoDevice`."""
    return int(active_driver().get_current_device())


def _device(active: Any, index: int) -> Device:
    properties = active.utils.get_device_properties(index)
    target = _target(active, index)
    found = backend.current()
    return Device(
        name=f"{target.backend}:{target.arch}" if found is None else found.device_name(index),
        capability=str(target.arch),
        sm_count=int(properties["multiprocessor_count"]),
        shared_memory_bytes=int(properties["max_shared_mem"]),
    )


def _toolchain(active: Any, index: int) -> Toolchain:
    import triton

    target = _target(active, index)
    return Toolchain(
        triton=triton.__version__,
        backend=triton_internals.backend_hash(target),
        target=f"{target.backend}:{target.arch}:{target.warp_size}",
        environment=tuple(sorted(triton_internals.code_generation_switches().items())),
    )


def _target(active: Any, index: int) -> Any:
    """The compile target of one device; Triton only tells that of the current one."""
    if active.get_current_device() == index:
        return active.get_current_target()
    previous = active.get_current_device()
    active.set_current_device(index)
    try:
        return active.get_current_target()
    finally:
        active.set_current_device(previous)
