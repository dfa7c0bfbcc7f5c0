"""Everything that reaches behind Triton's public face: a new Triton is checked against this file.

Supported are Triton 3.6 to 3.9. A difference between them is told by the feature itself where it
can be, else by `version`. tests/test_triton_internals.py pins each function here, and
`make test-internals` runs it on the oldest Triton.

Triton is imported when a function is called: `safetune list` works without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]

#: The newest Triton whose launcher is known; a newer one is launched with more of its own code.
NEWEST = (3, 9)

#: The driver that `target_name` was last asked about, and the name of its target.
_last_target: tuple[Any, str] | None = None


def version() -> tuple[int, int]:
    """Return Triton's major and minor version."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def active_driver() -> Any | None:
    """Return the driver that Triton launches through; None while it cannot launch on a device.

    Has Triton make its driver only once torch uses a device: making it takes seconds.
    """
    from triton.runtime import driver

    if driver._active is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        try:
            return driver.active
        except RuntimeError:  # no device that Triton knows
            return None
    return driver._active


def target_name() -> str | None:
    """Return the name of the back end that Triton launches through, e.g. `cuda`, or None."""
    global _last_target
    active = active_driver()
    if active is None:
        return None
    if _last_target is None or _last_target[0] is not active:
        _last_target = active, str(active.get_current_target().backend)
    return _last_target[1]


#: What each back end has said, by the name and architecture of its target.
backend_hashes: dict[tuple[str, Any], str] = {}


def backend_hash(target: Any) -> str:
    """Return what a back end said of itself when it was first asked, e.g. the version of ptxas."""
    from triton.compiler.compiler import make_backend

    found = str(make_backend(target).hash())
    return backend_hashes.setdefault((target.backend, target.arch), found)


def use_backend_hashes(hashes: Mapping[tuple[str, Any], str]) -> None:
    """Look up compiled kernels as the process does that has these hashes."""
    from triton.backends import backends

    for compiler in (backend.compiler for backend in backends.values()):
        ask = compiler._ask = getattr(compiler, "_ask", compiler.hash)
        compiler.hash = lambda self, ask=ask: (
            hashes.get((self.target.backend, self.target.arch)) or ask(self)
        )


def code_generation_switches() -> dict[str, str]:
    """Return the settings of this process that change the code which Triton generates."""
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    switches = dict(get_cache_invalidating_env_vars())
    switches["default_fp_fusion"] = knobs.language.default_fp_fusion
    if knobs.compilation.instrumentation_mode:
        switches["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    return {str(name): str(value) for name, value in switches.items()}


def hash_own_files() -> None:
    """Compute Triton's hash of its own files, which each compilation needs; it takes 0.5 s."""
    from triton.runtime import cache

    cache.triton_key()


@dataclass(frozen=True)
class Launcher:
    """How a compiled kernel is launched: `run(x, y, z, stream, *head, *arguments)`.

    With `together` the kernel's own arguments are one tuple.
    """

    run: Function
    head: tuple[Any, ...]
    together: bool


def launcher(kernel: Any, with_scratch: Callable[..., Any]) -> Launcher | None:
    """Return how to launch a kernel where there are no hooks; None where only Triton knows.

    `with_scratch` calls its first argument, with an allocator for scratch memory.
    """
    run, metadata = kernel.run, kernel.metadata
    if getattr(metadata, "profile_scratch_size", 0):
        return None
    packed, function, hooks = kernel.packed_metadata, kernel.function, (None, None, None)
    if getattr(metadata, "global_scratch_size", 0):
        return Launcher(functools.partial(with_scratch, run), (function, packed, *hooks), False)
    known = version() <= NEWEST and type(run).__module__ == "triton.backends.nvidia.driver"
    if not known or getattr(run, "gsan_enabled", False):
        return Launcher(run, (function, packed, *hooks), False)
    # Below CudaLauncher.__call__, which only provides scratch memory.
    start = (function, run.launch_cooperative_grid, run.launch_pdl)
    if not hasattr(run, "arg_annotations"):  # Triton 3.6
        return Launcher(run.launch, (*start, None, None, packed, *hooks), False)
    ends = (None, None, run.arg_annotations, run.kernel_signature)
    return Launcher(run.launch, (*start, packed, *hooks, *ends), True)


def own_jit_run() -> Any:
    """Return Triton's own `JITFunction.run`; None where a tool has replaced it."""
    from triton.runtime import jit

    run = jit.JITFunction.run
    return run if getattr(run, "__globals__", None) is vars(jit) else None


def has_hook_chains() -> bool:
    """Whether the hooks around a launch are lists, which can be seen to be empty."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return all(isinstance(hook, knobs.HookChain) for hook in hooks)


#: A switch of Triton 3.9 that decides the code which is generated.
_FPSAN = "fpsan_homomorphic_casts"

#: Python expressions over `launch_names` and, in the second, a `device`: what is in the way of a
#: launch past Triton's own path; what Triton has compiled; and whether Triton would refuse.
_IN_THE_WAY = (
    "runtime.launch_enter_hook is not enter or enter.calls"
    " or runtime.launch_exit_hook is not leave or leave.calls"
    " or runtime.debug is not debug or jit.debug is not own_debug"
    " or compilation.instrumentation_mode != instrumentation"
    " or runtime.add_stages_inspection_hook is not None"
    " or jit.pre_run_hooks or JITFunction.run is not jit_run or 'run' in overridden"
)
COMPILED = "jit.device_caches.get(device)"
REFUSED = "jit.used_global_vals and changed(jit.used_global_vals)"


def in_the_way() -> str:
    """Return the Python expression that says whether Triton's own path has to launch."""
    from triton import knobs

    has_fpsan = _FPSAN in vars(type(knobs.compilation))
    return _IN_THE_WAY + (" or fpsan() != sanitized" if has_fpsan else "")


def launch_names(jit: Any, jit_run: Any) -> dict[str, Any]:
    """Return the names in the expressions above, with the switches as they are now."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    return {
        "jit": jit,
        "overridden": vars(jit),
        "own_debug": jit.debug,
        "JITFunction": JITFunction,
        "jit_run": jit_run,
        "runtime": knobs.runtime,
        "compilation": knobs.compilation,
        "enter": knobs.runtime.launch_enter_hook,
        "leave": knobs.runtime.launch_exit_hook,
        "debug": knobs.runtime.debug,
        "instrumentation": knobs.compilation.instrumentation_mode,
        "fpsan": functools.partial(_fpsan, knobs.compilation.__dict__),
        "sanitized": _fpsan(knobs.compilation.__dict__),
        "changed": _changed,
    }


#: `os.environ` without its encoding, which takes as long as the rest of a launch.
_ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_FPSAN_VARIABLE: Any = getattr(os.environ, "encodekey", str)("TRITON_FPSAN_HOMOMORPHIC_CASTS")


def _fpsan(compilation: Mapping[str, Any]) -> Any:
    """Return the values that decide the switch; Triton 3.9 reads the environment at each launch."""
    return compilation.get(_FPSAN), _ENVIRONMENT.get(_FPSAN_VARIABLE)


def _changed(used: Mapping[Any, Any]) -> bool:
    """Whether a global that the kernel uses has changed, so that Triton would refuse to launch."""
    missing = object()
    return any(names.get(name, missing) != value for (name, _), (value, names) in used.items())


def compiled_on(jit: Any, device: Any) -> Any:
    """Return the cache of a kernel's binaries for a device; None before the first."""
    return jit.device_caches.get(device)


def private_copy(kernel: Any) -> tuple[Any, Any]:
    """Return shallow copies of a kernel and of its jit function; None for kinds not known here."""
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime.autotuner import Heuristics
    from triton.runtime.jit import JITFunction

    copied = copy.copy(kernel)
    if type(kernel) in (JITFunction, GluonJITFunction):
        copied.device_caches = defaultdict(copied.create_binder)
        return copied, copied
    if type(kernel) is not Heuristics:
        return kernel, None
    copied.fn, jit = private_copy(kernel.fn)
    return copied, jit


def has_launch_hooks(jit: Any) -> bool:
    """Whether code of the user's runs between a call and Triton's compile step."""
    from triton import knobs

    inspection = getattr(knobs.runtime, "add_stages_inspection_hook", None)
    return bool(jit.pre_run_hooks) or inspection is not None


def compile_arguments(jit: Any, launch: Callable[[], object], device: int) -> tuple[Any, ...]:
    """Run `launch` up to Triton's compile step, and return what it would compile: the signature,
    the constants, the attributes, the options and the target.
    """
    captured: list[tuple[Any, ...]] = []

    def stop(
        key: Any,
        signature: Any,
        index: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> None:
        captured.append((signature, constexprs, attrs, dict(options.__dict__), target))

    caches = jit.device_caches
    _, _, target, backend, binder = caches[device]
    # Empty caches, so that Triton gets as far as its compile step; it launches nothing when that
    # returns None, as it may under a hook's veto.
    jit.device_caches = {device: ({}, {}, target, backend, binder)}
    jit._do_compile = stop
    try:
        launch()
    finally:
        del jit._do_compile
        jit.device_caches = caches
    return captured[0]


@contextlib.contextmanager
def default_allocator(allocate: Function) -> Iterator[None]:
    """Have Triton ask `allocate` for scratch memory, unless the user has set an allocator."""
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
    """Whether a launch raised this because Triton has no allocator, so that nothing has run."""
    from triton.runtime import _allocation

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    null = _allocation.NullAllocator
    return trace is not None and trace.tb_frame.f_code is null.__call__.__code__


def set_default_profile_allocator(allocate: Function) -> None:
    """Have `allocate` serve instrumented kernels, for the whole process, where nothing else does.

    Triton 3.9 has a default of its own; 3.6 has none.
    """
    from triton.runtime import _allocation

    null = isinstance(_allocation._profile_allocator.get(), _allocation.NullAllocator)
    if null and not hasattr(_allocation, "has_profile_allocator"):
        _allocation.set_profile_allocator(allocate)


def unloader() -> Any | None:
    """Return the object whose `unload_module` Triton calls for a collected kernel; None in 3.6."""
    utils = getattr(active_driver(), "utils", None)
    return utils if hasattr(utils, "unload_module") else None


def replace_autotune(make: Callable[[Function], Function]) -> None:
    """Put what `make` returns for `triton.autotune` in its place, wherever Triton exports it."""
    import triton
    from triton.runtime import autotuner

    ours = make(autotuner.autotune)
    for module in (autotuner, triton.runtime, triton):
        module.autotune = ours


def replace_tuner_methods(run: Function, bench: Function) -> None:
    """Replace `run` and `_bench` of Triton's own tuner class, which other libraries extend."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.run, Autotuner._bench = run, bench


@contextlib.contextmanager
def compilations() -> Iterator[list[None]]:
    """Yield a list that gets an entry for each binary that Triton makes here meanwhile."""
    from triton import knobs

    made: list[None] = []
    listener = knobs.compilation.listener

    def listen(**event: Any) -> None:
        made.append(None)
        if listener is not None:
            listener(**event)

    knobs.compilation.listener = listen
    try:
        yield made
    finally:
        knobs.compilation.listener = listener


def knobs_set_in_code() -> dict[str, dict[str, Any]]:
    """Return Triton's knobs that were set in code, by group; others follow the environment."""
    from triton import knobs

    groups: dict[str, dict[str, Any]] = {}
    for name, group in vars(knobs).items():
        for knob, value in vars(group).items() if isinstance(group, knobs.base_knobs) else ():
            if isinstance(value, (bool, int, str)) and not knob.startswith("_"):
                groups.setdefault(name, {})[knob] = value
    return groups


_UNSET = object()

#: What the last `set_knobs` has set: group, knob and value before.
_replaced_knobs: list[tuple[str, str, Any]] = []


def set_knobs(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Set knobs as `knobs_set_in_code` returned them, and undo the last call."""
    from triton import knobs

    while _replaced_knobs:
        group, name, value = _replaced_knobs.pop()
        if value is _UNSET:
            delattr(getattr(knobs, group), name)
        else:
            setattr(getattr(knobs, group), name, value)
    for group, values in groups.items():
        owner = getattr(knobs, group)
        for name, value in values.items():
            _replaced_knobs.append((group, name, vars(owner).get(name, _UNSET)))
            setattr(owner, name, value)
