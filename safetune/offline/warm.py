"""Compiles the kernels that a frozen program will launch, for devices that are not present.

In: workloads and recorded calls, the stored choices, and their device descriptions. Out: entries of
Triton's disk cache. A stand-in for Triton's driver answers like the device, so that a call takes
the path of a launch up to the compiler; compile children do the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Config

from safetune import triton_compile, triton_internals
from safetune.both import backend
from safetune.config import config_text
from safetune.errors import WorkloadError
from safetune.frozen import dataclass
from safetune.inputs import compile_spec
from safetune.isolation.compile_pool import CompilePool
from safetune.keys import tuning_key
from safetune.keys.identity import base_function
from safetune.keys.tuning_key import Device
from safetune.launch.call_shape import Launched
from safetune.messages import logger
from safetune.miss import candidates
from safetune.miss.resolve import stored
from safetune.offline import replay, tasks
from safetune.offline.tasks import OfflineKernel, Task
from safetune.settings import Settings
from safetune.store.lookup import Lookup, open_lookup
from safetune.store.records import KeyRecord

if TYPE_CHECKING:
    from safetune.both.backend import Backend

#: Where the config of a call is from.
STORED, FALLBACK, ONLY = "stored", "fallback", "the only config"


@dataclass(frozen=True)
class Described:
    """A device as a stored choice describes it: its properties, and the compilation target.

    It acts as the back end of an absent device, as far as a launch needs one.
    """

    torch_type: ClassVar[str] = "meta"
    needs_torch: ClassVar[bool] = False

    device: Device
    target: str  # e.g. `cuda:90:32`

    @classmethod
    def of(cls, key: KeyRecord) -> Described | None:
        """Return a key's device; None for the interpreter, and where another version wrote it."""
        if key.device["name"] == tuning_key.INTERPRETER:
            return None
        with contextlib.suppress(TypeError, KeyError):
            return cls(Device(**key.device), str(key.toolchain["target"]))
        return None

    def device_name(self, index: int) -> str:
        """Return the product name in the stored keys."""
        return self.device.name

    def launch_stream(self) -> int:
        """Return the default stream."""
        return 0

    def capture_id(self, stream: int) -> int:
        """Return 0: there is no capture."""
        return 0

    def is_known_pointer(self, address: int) -> bool:
        """Return False: nothing is in device memory."""
        return False

    @property
    def gpu_target(self) -> GPUTarget:
        """The target in Triton's form."""
        name, architecture, warp_size = self.target.split(":")
        arch = int(architecture) if architecture.isdigit() else architecture
        return GPUTarget(name, arch, int(warp_size))


@dataclass(frozen=True)
class Warmed:
    """One call on one device: the config that a frozen program launches, and its binary.

    `error` says why there is no binary; `was_there`: nothing had to be compiled.
    """

    kernel: str
    call: str
    device: str
    key: str = ""  # its digest
    config: str = ""
    origin: str = ""
    was_there: bool = False
    error: str = ""


@dataclass(frozen=True)
class _Job:
    made: Warmed
    jit: Any
    packed: bytes
    is_cached: bool


def devices_of(
    keys: Iterable[KeyRecord], kernels: Sequence[OfflineKernel], name: str | None = None
) -> list[Described]:
    """Return the devices of these kernels' stored keys whose names contain `name`."""
    digests = {kernel.tuner.identity.digest for kernel in kernels}
    found = {
        described
        for key in keys
        if key.kernel_digest in digests and (described := Described.of(key))
        if name is None or name.lower() in described.device.name.lower()
    }
    return sorted(found, key=lambda each: (each.device.name, each.target))


def declared(
    kernel: OfflineKernel, dtypes: Sequence[str] = (), shapes: Sequence[str] = ()
) -> list[Task]:
    """Return the tasks of a kernel's workloads, with tensors that have no memory if possible."""
    try:
        found = [task for stream in tasks.streams(kernel, "meta", dtypes) for task in stream]
    except WorkloadError:  # its code reads the contents of tensors
        found = [task for stream in tasks.streams(kernel, "cpu", dtypes) for task in stream]
    return [task for task in found if not shapes or task.workload.name in shapes]


def warm(
    calls: Iterable[Task], described: Described, lookup: Lookup, timeout_s: float
) -> list[Warmed]:
    """Compile the binaries for these calls on one device into Triton's disk cache."""
    with as_device(described):
        found = [_job(task, described, lookup) for task in calls]
        done = [job for job in found if isinstance(job, Warmed)]
        jobs = [job for job in found if isinstance(job, _Job)]
        by_kernel: dict[int, list[_Job]] = {}
        for job in jobs:
            by_kernel.setdefault(id(job.jit), []).append(job)
        for of_kernel in by_kernel.values():
            done += _compiled(of_kernel, timeout_s)
    return done


@dataclass(frozen=True)
class Launch:
    """The launch of a task by a frozen program."""

    key: str
    config: Config
    origin: str
    run: Callable[[], Launched]


def launch_of(task: Task, lookup: Lookup, warmup: bool = False) -> Launch:
    """Return the launch of a task; with `warmup` it compiles the kernel, but runs nothing."""
    tuner, workload, miss = task.kernel.tuner, task.workload, tasks.miss_of(task)
    request = miss.request()
    if len(request.configs) == 1:
        config, origin = request.configs[0], ONLY
    else:
        choice = stored(tuner, request, lookup).config
        config = choice or candidates.best_known(request, lookup)
        origin = FALLBACK if choice is None else STORED
    passed = {**miss.call.kwargs, "warmup": warmup}
    run = functools.partial(tuner.launch_with, config, None, workload.grid, workload.args, passed)
    return Launch(request.key.digest, config, origin, run)


def preload(*kernels: Any, dtypes: Sequence[str] = ()) -> int:
    """Load the binaries of these kernels before their first launch; return the number loaded.

    For each workload, in these dtypes or its own, and for each recorded call of a kernel under
    @safetune: compiles the config of a launch, or finds it in Triton's disk cache, and loads it on
    the current device. Later launches of these calls do not compile and do not call Triton's
    compile hooks, with which servers report or refuse compilations. Nothing is launched or tuned.
    Binaries that cannot be loaded are logged.
    """
    lookup = open_lookup(Settings.current())
    found = tasks.find_kernels(dict(enumerate(kernels)))  # type: ignore[arg-type]
    calls = [task for kernel in found for task in declared(kernel, dtypes)]
    of_these = {kernel.name for kernel in found}
    recorded = [call for call in lookup.store.calls() if call.name in of_these]
    unreadable: list[replay.LeftOut] = []
    calls += replay.shapes(replay.with_kernels(recorded, found, []), unreadable)
    for each in unreadable:
        logger.warning("%s is not loaded: %s", each.words, each.reason)
    loaded = set()
    for task in calls:
        try:
            binary = launch_of(task, lookup, warmup=True).run().result
            binary.run  # noqa: B018 - Triton loads it when it is asked how to run it
        except Exception as error:
            logger.warning("%s %s is not loaded: %s", task.kernel.name, task.workload.name, error)
        else:
            loaded.add(id(binary))
    return len(loaded)


def _job(task: Task, described: Described, lookup: Lookup) -> _Job | Warmed:
    kernel, words = task.kernel, f"{task.workload.name} {task.dtype}".strip()
    jit, _ = base_function(kernel.tuner.fn)
    facts = (kernel.name, words, described.device.name)
    try:
        launch = launch_of(task, lookup)
        triton_compile.forget_binaries(jit)  # of the device before
        spec = triton_internals.compile_arguments(jit, launch.run, 0)
        is_cached = triton_compile.cached_binary(jit, spec) is not None
    except Exception as error:  # the user's prune functions, heuristics and hooks
        return Warmed(*facts, error=f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        triton_compile.forget_binaries(jit)
    made = Warmed(*facts, launch.key, config_text(launch.config), launch.origin)
    return _Job(made, jit, compile_spec.packed(jit, spec), is_cached)


def _compiled(jobs: Sequence[_Job], timeout_s: float) -> Iterator[Warmed]:
    """Compile the jobs of one kernel; jobs of one binary once."""
    jit = jobs[0].jit
    missing = list(dict.fromkeys(job.packed for job in jobs if not job.is_cached))
    errors: dict[bytes, str] = {}
    with CompilePool(lambda: compile_spec.pack_for_compiler(jit), timeout_s) as pool:
        for number, packed in enumerate(missing):
            pool.add(number, packed)
        for result in pool.results():
            if not result.outcome.ok:
                lines = result.outcome.message.strip().splitlines()
                reason = f"{result.outcome.label} {lines[-1] if lines else ''}".strip()
                errors[missing[result.config]] = reason
    for job in jobs:
        error = errors.get(job.packed, "")
        yield replace(job.made, was_there=job.is_cached, error=error)


@contextlib.contextmanager
def as_device(described: Described) -> Iterator[None]:
    """Let this process compile for a device, and create the keys that a process on it would."""
    device, target = described.device, described.gpu_target
    properties = {
        "multiprocessor_count": device.sm_count,
        "max_shared_mem": device.shared_memory_bytes,
    }
    backend.register(target.backend, cast("Backend", described))
    tuning_key.forget_devices()
    try:
        with triton_compile.compiling_for(target, properties):
            yield
    finally:
        backend.unregister(target.backend)
        tuning_key.forget_devices()
