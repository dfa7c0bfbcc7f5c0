"""The tuning key: everything that two calls must share to share a choice."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetune.keys import device as devices
from safetune.keys import encoding
from safetune.keys.device import Device, Toolchain


@dataclass(frozen=True)
class KernelIdentity:
    """A kernel, by what it computes.

    Attributes:
        name: the function's name, without module or class.
        digest: over the sources of the kernel and of everything it calls or reads.
        atomics: whether it, or something it calls, has atomic operations.
        file, line: where it is defined, for people; not part of the identity.
    """

    name: str
    digest: str
    source: str = ""
    file: str = ""
    line: int = 0
    atomics: bool = False


@dataclass(frozen=True)
class TuningKey:
    """One thing to tune.

    Attributes:
        values: (name, encoded value) for each kept key name, in the key's order.
        dtypes: (name, dtype name) for each argument that has a dtype, in the kernel's order.
        options: (name, encoded value) for launch options that the caller passes, e.g. num_warps.
    """

    kernel: KernelIdentity
    values: tuple[tuple[str, Any], ...]
    dtypes: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...]
    device: Device
    toolchain: Toolchain

    def record(self) -> dict[str, Any]:
        """Return what distinguishes calls of one kernel, as plain JSON data."""
        return {
            "values": [list(pair) for pair in self.values],
            "dtypes": [list(pair) for pair in self.dtypes],
            "options": [list(pair) for pair in self.options],
        }

    @functools.cached_property
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
        key_names: the names in `key` that are kept, in the key's order.
        arg_names: the kernel's parameters, in its order.
        arguments: the call's arguments and launch options by name, without grid and warmup.
        index: the device's index in this process; -1 in Triton's interpreter.

    Raises:
        NoDevice: Triton finds no GPU.
    """
    device, toolchain = devices.interpreter() if index < 0 else devices.detect(index)
    return TuningKey(
        kernel=kernel,
        values=tuple(
            (name, encoding.encode(arguments[name])) for name in key_names if name in arguments
        ),
        dtypes=tuple(
            (name, encoding.dtype_name(arguments[name].dtype))
            for name in arg_names
            if hasattr(arguments.get(name), "dtype")
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
    return (*(known[name] for name in key_names if name in known), *dtypes)


def readable_key(
    key_names: Sequence[str], arg_names: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return Triton's key for a reader: a tensor in it as its dtype, so that none is kept alive."""
    key = triton_key(key_names, arg_names, arguments)
    return tuple(str(part.dtype) if hasattr(part, "dtype") else part for part in key)


def describe_call(call: Mapping[str, Any]) -> str:
    """Return the values and dtypes of a `TuningKey.record()` as people read them."""
    values = ", ".join(f"{name}={readable(value)}" for name, value in call["values"])
    dtypes = "/".join(dict.fromkeys(dtype for _, dtype in call["dtypes"]))
    return f"{values or 'any arguments'}{f' ({dtypes})' if dtypes else ''}"


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
