"""The tuning key: everything that two calls must share to share a choice.

Its parts are the kernel, the call's values, dtypes and options, the device and the toolchain. The
device is first asked for at the first miss: `import safetune` touches no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from safetune import forks, triton_internals
from safetune.errors import BackendError, InvalidSetting, NoDevice
from safetune.frozen import dataclass
from safetune.isolation import backend
from safetune.keys import encoding

#: The device, back end and target of kernels in Triton's interpreter.
INTERPRETER = "interpreter"

#: The parts of a key that distinguish the calls of one kernel.
CALL = ("values", "dtypes", "options")

#: What a bucket may be, beside a dtype: equal values of these are the same in every process.
_PLAIN = frozenset({int, bool, str, float})


@dataclass(frozen=True)
class Bucket:
    """The function for a name, which is checked whenever it is called."""

    kernel: str
    name: str
    function: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Return the value's bucket; raises `InvalidSetting`."""
        while type(value).__name__ == "constexpr":
            value = value.value
        try:
            found = self.function(value)
        except Exception as error:
            raise InvalidSetting(
                f"key of {self.kernel}: the function for {self.name!r} raised "
                f"{type(error).__name__} for {value!r:.80}: {error}"
            ) from error
        if type(found) in _PLAIN or encoding.is_dtype(found):
            return found
        raise InvalidSetting(
            f"key of {self.kernel}: the function for {self.name!r} returned {found!r:.80}, a "
            f"{type(found).__name__}, for {value!r:.80}; return an int, bool, str, float or dtype"
        )


class KeyNames(list[str]):
    """The names in a key, in its order, and the function for each that is there by its bucket."""

    def __init__(self, names: Iterable[str], buckets: Mapping[str, Bucket]) -> None:
        super().__init__(names)
        self.buckets = dict(buckets)


def value_in_key(key_names: Sequence[str], name: str, value: Any) -> Any:
    """Return what stands in the key for an argument: its bucket, if the name has one."""
    bucket = getattr(key_names, "buckets", {}).get(name)
    return value if bucket is None else bucket(value)


@dataclass(frozen=True)
class KernelIdentity:
    """A kernel, by what it computes; `source`, `file` and `line` are for people."""

    name: str
    digest: str  # over the sources of the kernel and of everything it calls or reads
    source: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Device:
    """A kind of device; two cards with equal fields share their choices."""

    name: str  # the product name, or `interpreter`
    capability: str  # the back end's architecture, e.g. `90` for an H100
    sm_count: int
    shared_memory_bytes: int  # the most that one program can have

    def record(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return asdict(self)

    @forks.cached_property
    def digest(self) -> str:
        """The device's identity in the store."""
        return encoding.digest(self.record())


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the settings that turn a kernel into a binary."""

    triton: str
    backend: str  # the back end's own hash (for NVIDIA: ptxas version and architecture)
    target: str  # back end, architecture and warp size
    environment: tuple[tuple[str, str], ...] = ()  # switches that change code generation, sorted

    def record(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return {**asdict(self), "environment": dict(self.environment)}


@dataclass(frozen=True)
class TuningKey:
    """One thing to tune."""

    kernel: KernelIdentity
    #: (name, encoded value or bucket) for each kept key name, in the key's order.
    values: tuple[tuple[str, Any], ...]
    #: (name, dtype name) for each argument that has a dtype, in the kernel's order; for a tensor
    #: descriptor with the order of its dimensions.
    dtypes: tuple[tuple[str, str], ...]
    #: (name, encoded value) for launch options that the caller passes, e.g. num_warps.
    options: tuple[tuple[str, Any], ...]
    device: Device
    toolchain: Toolchain

    @classmethod
    def of_record(
        cls,
        kernel: KernelIdentity,
        call: Mapping[str, Any],
        device: Mapping[str, Any],
        toolchain: Mapping[str, Any],
    ) -> TuningKey:
        """Return the key whose `record` is `call`, with the records of device and toolchain."""
        environment = tuple(sorted(toolchain["environment"].items()))
        return cls(
            kernel=kernel,
            device=Device(**device),
            toolchain=Toolchain(**{**toolchain, "environment": environment}),
            **{part: tuple(map(tuple, call[part])) for part in CALL},
        )

    def record(self) -> dict[str, Any]:
        """Return what distinguishes calls of one kernel, as plain JSON data."""
        return {part: [list(pair) for pair in getattr(self, part)] for part in CALL}

    @forks.cached_property
    def digest(self) -> str:
        """The key's identity in the store."""
        return key_digest(
            self.kernel.name,
            self.kernel.digest,
            self.record(),
            self.device.record(),
            self.toolchain.record(),
        )

    def __str__(self) -> str:
        return describe_call(self.record())


def tuning_key(
    kernel: KernelIdentity,
    key_names: Sequence[str],
    arg_names: Sequence[str],
    arguments: Mapping[str, Any],
    index: int,
) -> TuningKey:
    """Return the key of a call. No other code makes one, so every caller finds the same choice.

    Args:
        key_names: the names in `key` that are kept.
        arguments: the call's arguments and launch options by name, without grid and warmup.
        index: the device's index in this process; -1 in Triton's interpreter.

    Raises `NoDevice` where Triton finds no GPU.
    """
    device, toolchain = interpreter() if index < 0 else detect(index)
    return TuningKey(
        kernel=kernel,
        values=tuple(
            (name, encoding.encode(value_in_key(key_names, name, arguments[name])))
            for name in key_names
            if name in arguments
        ),
        dtypes=tuple(
            (name, encoding.type_name(kind))
            for name in arg_names
            if (kind := encoding.element_type(arguments.get(name))) is not None
        ),
        options=tuple(
            (name, encoding.encode(value))
            for name, value in sorted(arguments.items())
            if name not in arg_names
        ),
        device=device,
        toolchain=toolchain,
    )


def triton_key(
    key_names: Sequence[str], arg_names: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return what Triton's tuner keeps a call's config under: the key's values, then the dtypes."""
    known = {name: value for name, value in arguments.items() if name in arg_names}
    dtypes = [str(value.dtype) for value in known.values() if hasattr(value, "dtype")]
    values = (value_in_key(key_names, name, known[name]) for name in key_names if name in known)
    return (*values, *dtypes)


def readable_key(
    key_names: Sequence[str], arg_names: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return Triton's key for a reader: a tensor in it as its dtype, so that none is kept alive."""
    key = triton_key(key_names, arg_names, arguments)
    return tuple(str(part.dtype) if hasattr(part, "dtype") else part for part in key)


def describe_call(call: Mapping[str, Any]) -> str:
    """Return the values and dtypes of a `TuningKey.record()` as people read them.

    They may come from a file that anybody wrote, and are logged.
    """
    values = ", ".join(f"{name}={readable(value)}" for name, value in call["values"])
    dtypes = "/".join(dict.fromkeys(dtype for _, dtype in call["dtypes"]))
    text = f"{values or 'any arguments'}{f' ({dtypes})' if dtypes else ''}"
    return encoding.visible(text)


def key_digest(
    kernel_name: str,
    kernel_digest: str,
    call: dict[str, Any],
    device: dict[str, Any],
    toolchain: dict[str, Any],
) -> str:
    """Return the identity of a key in the store, from its parts as plain data.

    A file of choices holds the parts, so that no key in it can be other than what it says.
    """
    return encoding.digest([kernel_name, kernel_digest, call, device, toolchain])


def readable(value: Any) -> Any:
    """Return an encoded value as people read it."""
    if isinstance(value, dict) and len(value) == 1:
        return next(iter(value.values()))
    return value.get("repr", value) if isinstance(value, dict) else value


def interpreter() -> tuple[Device, Toolchain]:
    """Return the device and toolchain of Triton's interpreter: numpy on this machine's CPU."""
    import triton

    device = Device(INTERPRETER, "cpu", 0, 0)
    return device, Toolchain(triton.__version__, INTERPRETER, INTERPRETER)


def detect(index: int) -> tuple[Device, Toolchain]:
    """Return a device and the toolchain for it, from Triton's driver; raises `NoDevice`."""
    return _detected(index, tuple(sorted(triton_internals.code_generation_switches().items())))


@functools.lru_cache(maxsize=256)
def _detected(index: int, switches: tuple[tuple[str, str], ...]) -> tuple[Device, Toolchain]:
    import triton

    ask = backend.describer()
    target, device = _described(index) if ask is None else _told(ask, index)
    toolchain = Toolchain(
        triton=triton.__version__,
        backend=triton_internals.backend_hash(target),
        target=f"{target.backend}:{target.arch}:{target.warp_size}",
        environment=switches,
    )
    return device, toolchain


def forget_devices() -> None:
    """Ask for every device anew."""
    _detected.cache_clear()


def _told(ask: Callable[[int], Sequence[Any]], index: int) -> tuple[Any, Device]:
    from triton.backends.compiler import GPUTarget

    try:
        target, name, capability, *sizes = ask(index)
    except BackendError:
        return _described(index)
    return GPUTarget(target, capability, 32), Device(name, str(capability), *sizes)


def _described(index: int) -> tuple[Any, Device]:
    active = active_driver()
    target = _target(active, index)
    properties = active.utils.get_device_properties(index)
    found = backend.current()
    return target, Device(
        name=f"{target.backend}:{target.arch}" if found is None else found.device_name(index),
        capability=str(target.arch),
        sm_count=int(properties["multiprocessor_count"]),
        shared_memory_bytes=int(properties["max_shared_mem"]),
    )


def active_driver() -> Any:
    """Return Triton's active driver; raises `NoDevice` without one."""
    from triton.runtime import driver

    triton_internals.first_driver.wait()
    try:
        return driver.active
    except RuntimeError as error:
        raise NoDevice(
            f"Triton finds no GPU ({error}). Set TRITON_INTERPRET=1 before the kernel is "
            "decorated to run it in Triton's interpreter, or SAFETUNE_MODE=off to tune nothing."
        ) from error


def current_index() -> int:
    """Return the index of the device that Triton launches on now; raises `NoDevice`."""
    if triton_internals.first_driver.begin():
        return triton_internals.first_driver.current_device()
    if triton_internals.target_name() is None and backend.describer() is not None:
        return 0  # nothing has started the driver, so no other device was chosen
    return int(active_driver().get_current_device())


def _target(active: Any, index: int) -> Any:
    """The compile target of one device; Triton only tells that of the current one."""
    previous = active.get_current_device()
    if previous == index:
        return active.get_current_target()
    active.set_current_device(index)
    try:
        return active.get_current_target()
    finally:
        active.set_current_device(previous)
