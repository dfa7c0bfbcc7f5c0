"""The part of `triton_internals` for launches: the launcher, obstacles to its use, allocators."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from safetune.frozen import dataclass
from safetune.triton_internals import Function, has_own

_UNSET = object()
#: The modules of which Triton wants a class to classify an argument, in any version.
_ARGUMENT_MODULES = {
    "torch",
    *("triton.experimental.gluon.nvidia.hopper", "triton.experimental.gluon.amd.gfx1250"),
    "triton.experimental.gluon.amd.cdna5",
}


@dataclass(frozen=True)
class Launcher:
    """The launcher of a compiled kernel: `run(x, y, z, stream, *head, *arguments)`.

    With `together`, the kernel's own arguments are one tuple.
    """

    run: Function
    head: tuple[Any, ...]
    together: bool


def launcher(kernel: Any, with_scratch: Function) -> Launcher | None:
    """Return the launcher of a kernel, for launches without hooks; None if only Triton can launch
    it.

    `with_scratch` calls its first argument with an allocator for scratch memory.
    """
    run, metadata = kernel.run, kernel.metadata
    if getattr(metadata, "profile_scratch_size", 0):
        return None
    packed, function, hooks = kernel.packed_metadata, kernel.function, (None, None, None)
    if getattr(metadata, "global_scratch_size", 0):
        return Launcher(functools.partial(with_scratch, run), (function, packed, *hooks), False)
    known = type(run).__module__ == "triton.backends.nvidia.driver"
    if not known or getattr(run, "gsan_enabled", False) or not has_own(type(run), "__call__"):
        return Launcher(run, (function, packed, *hooks), False)
    # Below CudaLauncher.__call__, which only provides scratch memory.
    start = (function, run.launch_cooperative_grid, run.launch_pdl)
    if not hasattr(run, "arg_annotations"):  # Triton 3.6
        return Launcher(run.launch, (*start, None, None, packed, *hooks), False)
    ends = (None, None, run.arg_annotations, run.kernel_signature)
    return Launcher(run.launch, (*start, packed, *hooks, *ends), True)


#: The place of the stream among the arguments of a launcher.
STREAM = 3


def repeated(run: Function, kernel: Any) -> functools.partial[Any] | None:
    """Return a function that repeats the launch that Triton makes when `run` is called.

    `run` is called here, up to that launch. None unless it is a single launch of this kernel.
    """
    launches: list[tuple[Any, ...]] = []
    launcher = kernel.run
    kernel._run = lambda *arguments: launches.append(arguments)
    try:
        run()
    finally:
        kernel._run = launcher
    return functools.partial(launcher, *launches[0]) if len(launches) == 1 else None


def own_jit_run() -> Any:
    """Return Triton's own `JITFunction.run`; None if a tool has replaced it."""
    from triton.runtime.jit import JITFunction

    return JITFunction.run if has_own(JITFunction, "run") else None


def has_hook_chains() -> bool:
    """Whether the hooks around a launch are lists, so that it shows whether they are empty."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return all(isinstance(hook, knobs.HookChain) for hook in hooks)


#: Python expressions over `launch_names` and, in the second, a `device`: what is in the way of a
#: launch past Triton's own path; what Triton has compiled; and whether Triton would refuse.
IN_THE_WAY = (
    "runtime_set != runtime_as_made and ("  # one comparison for four, where nothing was set
    "runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave"
    " or runtime.debug is not debug or runtime.add_stages_inspection_hook is not None)"
    " or enter.calls or leave.calls or jit.debug is not own_debug"
    " or compilation.instrumentation_mode"  # other switches count with it
    " or jit.pre_run_hooks or JITFunction.run is not jit_run or 'run' in overridden"
    " or CudaLauncher.__call__ is not launcher_call"
)
COMPILED = "jit.device_caches[device][0].get(binary)"
REFUSED = "jit.used_global_vals and changed(jit.used_global_vals)"


def switches(jit: Any) -> dict[str, Any]:
    """Return the values that this expression compares, except hooks, by their names there."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher

    return {
        "debug": knobs.runtime.debug,
        "own_debug": jit.debug,
        "launcher_call": CudaLauncher.__call__,
    }


def launch_names(jit: Any, jit_run: Any) -> dict[str, Any]:
    """Return the names in the expressions above, with the switches' current values."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.jit import JITFunction

    runtime_set = vars(knobs.runtime)
    as_made = {**runtime_set}
    if knobs.runtime.add_stages_inspection_hook is not None:
        as_made.pop("add_stages_inspection_hook", None)  # so that it is in the way
    return {
        **switches(jit),
        "CudaLauncher": CudaLauncher,
        "jit": jit,
        "overridden": vars(jit),
        "JITFunction": JITFunction,
        "jit_run": jit_run,
        "runtime": knobs.runtime,
        "runtime_set": runtime_set,
        "runtime_as_made": as_made,
        "compilation": knobs.compilation,
        "enter": knobs.runtime.launch_enter_hook,
        "leave": knobs.runtime.launch_exit_hook,
        "changed": _changed,
    }


def _changed(used: Mapping[Any, Any]) -> bool:
    """Whether a global that the kernel uses has changed, so that Triton would refuse to launch."""
    for (name, _), (value, names) in used.items():
        found = names.get(name, _UNSET)
        if found is not value and found != value:  # a comparison of constexprs is slow
            return True
    return False


def binary_name(jit: Any, device: Any, kernel: Any) -> Any | None:
    """Return the key of a binary in Triton's cache for a device; None if it is absent."""
    if device not in jit.device_caches:
        return None
    binaries = jit.device_caches[device][0]
    return next((name for name, binary in binaries.items() if binary is kernel), None)


def set_by_run(jit: Any) -> bool:
    """Whether a kernel parameter has the name of an option that Triton's `run` sets."""
    code = getattr(type(jit).run, "__code__", None)
    return code is None or not {*jit.arg_names}.isdisjoint(code.co_consts)


@contextlib.contextmanager
def default_allocator(allocate: Function) -> Iterator[None]:
    """Let Triton request scratch memory from `allocate`, unless the user has set an allocator."""
    from triton.runtime import _allocation

    if not isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        yield
        return
    token = _allocation._allocator.set(allocate)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def lacks_allocator(error: BaseException) -> bool:
    """Whether a launch raised this error because Triton has no allocator, so that nothing has
    run.
    """
    from triton.runtime import _allocation

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    null = _allocation.NullAllocator
    return trace is not None and trace.tb_frame.f_code is null.__call__.__code__


def prepare_specializing() -> None:
    """Let Triton classify arguments in a process without torch; imports the modules that this
    needs.

    Skips torch, which Triton 3.6 would import, and Gluon, whose import takes 0.1 s. Triton needs
    only classes from both, and an argument cannot have a class from a module that was not imported.
    It recognises other tensors by their attributes.
    """
    from types import ModuleType

    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    absent = _ARGUMENT_MODULES - sys.modules.keys()
    for name in absent:
        module: Any = ModuleType(name)
        module.__getattr__ = lambda attribute: type(attribute, (), {})
        sys.modules[name] = module
    try:
        native_specialize_impl(CUDABackend, 0, False, True, True)
    finally:
        for name in absent:
            del sys.modules[name]


def use_device_without_torch(index: int, capability: tuple[int, int]) -> None:
    """Let Triton launch on the default stream of one device, without asking torch."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    class Driver(CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = lambda: index
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device=index: capability

    driver.set_active(Driver())
