"""The tuning key: everything that two calls must have in common to share a choice.

Its parts are the kernel, the call's values, dtypes and options, the device and the toolchain. The
device is queried at the first miss: `import safetune` touches no GPU.

`tuner.cache` shows the keys of Triton's tuner: the value of each name in `key=`, then the dtype of
each tensor. A tuning key may omit a name or have its bucket instead, so several of Triton's keys
may mean the same tuning key.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from safetune import forks, triton_internals
from safetune.both import backend
from safetune.errors import BackendError, InvalidSetting, NoDevice
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.identity import KernelIdentity, code_of, encode

if TYPE_CHECKING:
    from safetune.settings import MeasurePolicy

#: The device, back end and target of kernels in Triton's interpreter.
INTERPRETER = "interpreter"

#: The parts of a key that distinguish the calls of one kernel.
CALL = ("values", "dtypes", "options")

#: What a bucket may be, beside a dtype: equal values of these are the same in every process.
_PLAIN = frozenset({int, bool, str, float})


@dataclass(frozen=True)
class Bucket:
    """The function of a bucketed name, checked at every call."""

    kernel: str
    name: str
    function: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Return the value's bucket; raises `InvalidSetting`."""
        while type(value).__name__ == "constexpr":
            value = value.value
        try:
            bucket = self.function(value)
        except Exception as error:
            raise InvalidSetting(
                f"key of {self.kernel}: the function for {self.name!r} raised "
                f"{type(error).__name__} for {value!r:.80}: {error}"
            ) from error
        if type(bucket) in _PLAIN or encoding.is_dtype(bucket):
            return bucket
        raise InvalidSetting(
            f"key of {self.kernel}: the function for {self.name!r} returned {bucket!r:.80} "
            f"({type(bucket).__name__}) for {value!r:.80}; return an int, bool, str, float or dtype"
        )


class KeyNames(list[str]):
    """The names in a key, in order, and the functions of the bucketed ones."""

    def __init__(self, names: Iterable[str], buckets: Mapping[str, Bucket]) -> None:
        super().__init__(names)
        self.buckets = dict(buckets)


def value_in_key(key_names: Sequence[str], name: str, value: Any) -> Any:
    """Return an argument's value in the key: its bucket, if the name has one."""
    bucket = getattr(key_names, "buckets", {}).get(name)
    return value if bucket is None else bucket(value)


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
    #: (name, encoded value or bucket) for each kept key name, in the key's order; then the
    #: functions that the call passes as other arguments.
    values: tuple[tuple[str, Any], ...]
    #: (name, dtype name) for each argument that has a dtype, in the kernel's order; for a tensor
    #: descriptor with the order of its dimensions.
    dtypes: tuple[tuple[str, str], ...]
    #: (name, encoded value) for launch options that the caller passes, e.g. num_warps, and for the
    #: policy `measure`, where it is given.
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
        """Return the key whose `record` is `call`, from the records of device and toolchain."""
        environment = tuple(sorted(toolchain["environment"].items()))
        return cls(
            kernel=kernel,
            device=Device(**device),
            toolchain=Toolchain(**{**toolchain, "environment": environment}),
            **{part: tuple(map(tuple, call[part])) for part in CALL},
        )

    def record(self) -> dict[str, Any]:
        """Return what distinguishes the calls of one kernel, as plain JSON data."""
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
    measure: MeasurePolicy | None = None,
) -> TuningKey:
    """Return the key of a call. No other code makes keys, so all callers find the same choice.

    Args:
        key_names: the names in `key` that are kept.
        arguments: the call's arguments and launch options by name, without grid and warmup.
        index: the device's index in this process; -1 in Triton's interpreter.
        measure: the policy for short kernels, if one was given.

    Raises `NoDevice` if Triton finds no GPU.
    """
    device, toolchain = interpreter() if index < 0 else detect(index)
    values = [
        (name, encode(value_in_key(key_names, name, arguments[name]), of_call=True))
        for name in key_names
        if name in arguments
    ]
    passed = [(n, code_of(arguments.get(n))) for n in arg_names if n not in key_names]
    policy = () if measure is None else (("measure", measure.value),)
    return TuningKey(
        kernel=kernel,
        values=(*values, *((name, code) for name, code in passed if code is not None)),
        dtypes=tuple(
            (name, encoding.type_name(kind))
            for name in arg_names
            if (kind := encoding.element_type(arguments.get(name))) is not None
        ),
        options=(
            *(
                (name, encode(value, of_call=True))
                for name, value in sorted(arguments.items())
                if name not in arg_names
            ),
            *policy,
        ),
        device=device,
        toolchain=toolchain,
    )


def describe_call(call: Mapping[str, Any]) -> str:
    """Return the values and dtypes of a `TuningKey.record()` as people read them.

    Escapes them for the log, because they may come from a file by anybody.
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

    A file of choices has the parts instead, so it cannot claim a false identity.
    """
    return encoding.digest([kernel_name, kernel_digest, call, device, toolchain])


#: What encoded functions, classes and objects have their name under, beside their digest.
_NAMED = ("function", "class", "object")


def readable(value: Any) -> Any:
    """Return an encoded value as people read it."""
    if not isinstance(value, dict) or not value:
        return value
    return next(value[kind] for kind in (*_NAMED, *value) if kind in value)


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
    """Query every device again at its next use."""
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


def _target(active: Any, index: int) -> Any:
    """Return the target of a device; Triton has that of the current device only."""
    current = active.get_current_device()
    if current == index:
        return active.get_current_target()
    active.set_current_device(index)
    try:
        return active.get_current_target()
    finally:
        active.set_current_device(current)


def active_driver() -> Any:
    """Return Triton's active driver; raises `NoDevice` without one."""
    from triton.runtime import driver

    triton_internals.first_driver.wait()
    try:
        return driver.active
    except RuntimeError as error:
        raise NoDevice(
            f"Triton finds no GPU ({error}). Set TRITON_INTERPRET=1 before the kernel is "
            "decorated to run it in Triton's interpreter, or SAFETUNE_MODE=off to turn tuning off."
        ) from error


def current_index() -> int:
    """Return the index of the device that Triton launches on now; raises `NoDevice`."""
    if triton_internals.first_driver.begin():
        return triton_internals.first_driver.current_device()
    if triton_internals.target_name() is None and backend.describer() is not None:
        return 0  # nothing has started the driver, so no other device was chosen
    return int(active_driver().get_current_device())


#: The common properties of one key's calls: the values of the kept names, and the dtypes.
Meaning = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Layout:
    """The argument behind each part of a Triton key, learned from a call."""

    names: tuple[str, ...]  # names in `key=` that the call passes
    tensors: tuple[str, ...]  # arguments with a dtype, in the order of the call

    @classmethod
    def of(
        cls, names: Sequence[str], arg_names: Sequence[str], arguments: Mapping[str, Any]
    ) -> Layout:
        """Return the layout of the keys of calls like this one."""
        known = {name: value for name, value in arguments.items() if name in arg_names}
        tensors = tuple(name for name, value in known.items() if hasattr(value, "dtype"))
        return cls(tuple(name for name in names if name in known), tensors)

    def key(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return Triton's key of a call, which keeps no tensor alive."""
        values = (arguments[name] for name in self.names)
        return (*map(plain, values), *(str(arguments[name].dtype) for name in self.tensors))

    def meaning(self, key: Any, key_names: KeyNames) -> Meaning | None:
        """Return the meaning of a Triton key; None for a key with another layout."""
        parts = (*self.names, *self.tensors)
        if not isinstance(key, tuple) or len(key) != len(parts):
            return None
        values = dict(zip(self.names, key, strict=False))
        dtypes = dict(zip(self.tensors, key[len(self.names) :], strict=True))
        try:
            return (
                *(
                    (n, _compared(value_in_key(key_names, n, values[n])))
                    for n in key_names
                    if n in values
                ),
                *sorted((name, str(dtype)) for name, dtype in dtypes.items()),
            )
        except InvalidSetting:  # no bucket for such a value: a key of another layout
            return None


def triton_key(
    names: Sequence[str], arg_names: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the key of a call in Triton's tuner: the key's values, then the dtypes."""
    return Layout.of(names, arg_names, arguments).key(arguments)


def guessed(names: Sequence[str], key: Any) -> Iterator[Layout]:
    """Yield the layout of a key if every name is passed, before any call."""
    if isinstance(key, tuple) and len(key) >= len(names):
        tensors = (f"tensor {number}" for number in range(len(key) - len(names)))
        yield Layout(tuple(names), tuple(tensors))


def plain(value: Any) -> Any:
    """Return a part of a key in hashable form: a tensor as its dtype."""
    if isinstance(value, (list, tuple)):
        parts = tuple(map(plain, value))
        is_kept = isinstance(value, tuple) and all(map(operator.is_, parts, value))
        return value if is_kept else parts
    while type(value).__name__ == "constexpr":
        value = value.value
    if hasattr(value, "dtype"):
        return str(value.dtype)
    try:
        hash(value)
    except TypeError:
        return encoding.dumps(encode(value, of_call=True))
    return value


#: The comparison of objects whose class has none.
_BY_ADDRESS: Any = object.__eq__


def _compared(value: Any) -> Any:
    """Return what compares as the value does, also once it was written as JSON.

    Functions, and objects that are equal to themselves alone, compare by their identity: two with
    one share a choice.
    """
    value = plain(value)
    if isinstance(value, tuple):
        return tuple(map(_compared, value))
    if encoding.is_dtype(value) or value != value:
        return str(value)
    if callable(value) or type(value).__eq__ is _BY_ADDRESS:
        return encoding.dumps(encode(value, of_call=True))
    return value
