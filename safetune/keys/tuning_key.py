"""The tuning key: everything that two calls must share to share a choice."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
