"""Checks that a call's tensors fit a second time: in host memory, and on their devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from safetune.both import backend
from safetune.errors import NoMemory, NotReproducible

#: Device memory that a child needs besides tensors: its context with the code of the libraries, and
#: the buffer that flushes the L2 cache, at most.
CONTEXT = 512 << 20
FLUSH = 256 << 20
#: What is left to launches where there is little: their scratch memory.
MARGIN = 256 << 20

_GIB = 1 << 30


def sizes(owners: Sequence[str], storages: Sequence[int]) -> dict[str, int]:
    """Return the size of each argument's largest storage, in bytes."""
    found: dict[str, int] = {}
    for owner, size in zip(owners, storages, strict=True):
        found[owner] = max(size, found.get(owner, 0))
    return found


def check_host(needed: int, arguments: Mapping[str, int]) -> None:
    """Raise `NotReproducible`, naming the largest arguments, if the host has fewer bytes left."""
    free = host_free()
    if needed > free:
        raise too_large("host memory", needed, free, arguments)


def check_device(
    index: int, size: int, arguments: Mapping[str, int], drop_idle: Callable[[int], None]
) -> int:
    """Check that a device can hold another `size` bytes of arguments.

    If it could not hold them a third time, idle memory is released first: the idle child of an
    earlier tuning, by `drop_idle`, then the unused blocks of torch's allocator. If that is not
    enough, some bytes go through host memory.

    Return the bytes available for the third copy.

    Raises:
        NoMemory: they do not fit now.
        NotReproducible: they are too large for the device.
    """
    enough = 2 * size + FLUSH + CONTEXT
    device = backend.required()
    if device_free(index) < enough:
        drop_idle(index)
    if device_free(index) < enough and device.memory(index).unused:
        device.release_unused(index)
    needed, free = size + CONTEXT, device_free(index)
    if free < needed:
        error = too_large(f"memory on device {index}", needed, free, arguments)
        raise error if needed > device.memory(index).total else NoMemory(str(error))
    return max(0, free - size - FLUSH - CONTEXT - MARGIN)


def too_large(
    what: str, needed: int, free: int, arguments: Mapping[str, int], reason: object = ""
) -> NotReproducible:
    """Return the error that names the exceeded limit and the largest arguments."""
    largest = sorted(arguments, key=lambda name: -arguments[name])[:3]
    listing = ", ".join(
        f"{name or 'a hook'} ({arguments[name] / _GIB:.3g} GiB)" for name in largest
    )
    why = f" ({reason})" if reason else ""
    return NotReproducible(
        f"a tuning process needs {needed / _GIB:.3g} GiB of {what} for its copies of {listing}, "
        f"but {free / _GIB:.3g} GiB are free{why}: free some, tune offline, or give `inputs=` a "
        "function that makes smaller inputs there"
    )


def host_free(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that this process can still allocate within the machine and its cgroups."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    info = {name: int(kib) << 10 for name, kib, *_ in lines}
    return min(info["MemAvailable:"] + info["SwapFree:"], *_cgroup_free(root, own), 1 << 62)


def _cgroup_free(root: Path, own: Path) -> Iterator[int]:
    """Yield the bytes left by each memory limit of this process, the page cache not counted."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / "memory" if "memory" in controllers.split(",") else root
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        yield _left(folder)


def _left(folder: Path) -> int:
    if (folder / "memory.max").exists():  # the names of version 2, then of version 1
        limit, used, cache = "memory.max", "memory.current", "inactive_file"
    else:
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        cache = "total_inactive_file"
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    most, now = (int((folder / name).read_text()) for name in (limit, used))
    return max(0, most - now + int(statistics[cache]))


def device_free(index: int) -> int:
    """Return the free bytes of a device; a capture in another thread stays valid."""
    return backend.required().memory(index).free
