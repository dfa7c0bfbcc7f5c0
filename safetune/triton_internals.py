"""Every use of private parts of Triton: check a new Triton version against this file.

Triton 3.6 to 3.9 are supported. If possible, code detects a difference by the feature itself,
otherwise by `version`. tests/test_triton_internals.py pins each function here, and `make
test-internals` runs it on the oldest Triton.

Triton is imported when a function is called: `safetune list` works without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from safetune import forks
from safetune.errors import SafetuneWarning
from safetune.messages import warn

Function = Callable[..., Any]

#: The newest Triton whose launcher is known; a newer one launches by its own path.
NEWEST = (3, 9)

_UNSET = object()

#: Options of the compiler. Triton takes them from the keywords of the launch for which it compiles,
#: also where the kernel has a parameter of that name.
COMPILE_OPTIONS = frozenset(
    {
        *("num_warps", "num_ctas", "num_stages", "warp_size", "maxnreg", "cluster_dims", "arch"),
        *("ptx_version", "ptx_options", "ir_override", "enable_fp_fusion", "enable_reflect_ftz"),
        *("launch_cooperative_grid", "launch_pdl", "clc", "sched4reg", "supported_fp8_dtypes"),
        *("deprecated_fp8_dot_operand_dtypes", "default_dot_input_precision", "extern_libs"),
        *("allowed_dot_input_precisions", "max_num_imprecise_acc_default", "backend_name"),
        *("debug", "sanitize_overflow", "instrumentation_mode", "fpsan_homomorphic_casts"),
        *("min_shared_mem", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint"),
        *("allow_flush_denorm", "llvm_fn_attrs", "wgp_cu_mode"),
    }
)

#: Those that every config sets.
CONFIG_OPTIONS = frozenset({"num_warps", "num_ctas", "num_stages"})


#: The driver that `target_name` was last asked about, and the name of its target.
_last_target: tuple[Any, str] | None = None


def version() -> tuple[int, int]:
    """Return Triton's major and minor version."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def warn_if_newer() -> None:
    """Warn if Triton is newer than the supported versions."""
    if version() > NEWEST:
        newest = ".".join(map(str, NEWEST))
        warn(
            f"Triton {'.'.join(map(str, version()))} is newer than {newest}, the newest "
            "that this safetune supports: kernels launch through Triton's own path, which is "
            "slower; all else works as usual. Update safetune, or install an older Triton",
            SafetuneWarning,
        )


def active_driver() -> Any | None:
    """Return the driver that Triton launches through; None while it cannot launch on a device.

    Triton creates its driver only once torch uses a device, because that takes seconds.
    """
    from triton.runtime import driver

    if driver._active is None:
        if not _torch_uses_a_device():
            return None
        first_driver.wait()
        try:
            return driver.active
        except RuntimeError:  # no device that Triton knows
            return None
    return driver._active


def target_name() -> str | None:
    """Return the name of the back end that Triton launches through, e.g. `cuda`, or None."""
    global _last_target
    if first_driver.begin():
        return "cuda"
    active = active_driver()
    if active is None:
        return None
    if _last_target is None or _last_target[0] is not active:
        _last_target = active, str(active.get_current_target().backend)
    return _last_target[1]


def _torch_uses_a_device() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


class FirstDriver:
    """Triton's driver for NVIDIA GPUs, while Triton creates it in a thread.

    A C compiler builds part of it, which takes 0.5 s unless Triton has it cached. Only a launch
    needs it, so a tuning begins meanwhile. Triton's own code waits for it: it has no lock, and
    launches through one driver refuse the tensor maps of a second one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._made: Any = None
        forks.register("tuning", after_in_child=self.start_over)

    def begin(self) -> bool:
        """Whether the driver is being created; starts creating it if it is the one that Triton
        needs.
        """
        from triton.runtime import driver

        if driver._active is not None or not _torch_uses_a_device():
            return False
        with self._lock:
            if self._thread is None and _is_built_for_nvidia():
                module: Any = sys.modules[type(driver).__module__]
                work = functools.partial(self._make, module._create_driver)
                module._create_driver = functools.partial(self._take, module._create_driver)
                self._thread = threading.Thread(target=work, name="safetune-driver", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be started
                    self._over.set()
            return self._thread is not None and not self._over.is_set()

    def current_device(self) -> int:
        """Return the device that the driver will report as current."""
        return int(sys.modules["torch"].cuda.current_device())

    def wait(self) -> None:
        """Wait until it is created; return at once if that has not begun."""
        if self._thread not in (None, threading.current_thread()):
            self._over.wait()

    def _make(self, make: Function) -> None:
        with contextlib.suppress(BaseException):  # a launch gets it again
            self._made = make()
        self._over.set()

    def _take(self, make: Function) -> Any:
        self.wait()
        return self._made or make()

    def start_over(self) -> None:
        """Forget the thread, which a forked child does not have."""
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = self._made = None


first_driver = FirstDriver()


def _is_built_for_nvidia() -> bool:
    """Whether the driver to be made is NVIDIA's, and one that a C compiler builds."""
    if os.environ.get("TRITON_DEFAULT_BACKEND", "nvidia") != "nvidia" or version() > NEWEST:
        return False
    from triton.backends import backends

    if [name for name, found in backends.items() if found.driver.is_active()] != ["nvidia"]:
        return False
    return hasattr(sys.modules[backends["nvidia"].driver.__module__], "CudaUtils")


#: What each back end has said, by the name and architecture of its target.
backend_hashes: dict[tuple[str, Any], str] = {}


def backend_hash(target: Any) -> str:
    """Return a back end's description of itself, from the first request, e.g. ptxas's version."""
    from triton.compiler.compiler import make_backend

    found = str(make_backend(target).hash())
    return backend_hashes.setdefault((target.backend, target.arch), found)


def use_backend_hashes(hashes: Mapping[tuple[str, Any], str]) -> None:
    """Look up compiled kernels like the process that has these hashes."""
    from triton.backends import backends

    for compiler in (backend.compiler for backend in backends.values()):
        ask = compiler._ask = getattr(compiler, "_ask", compiler.hash)
        compiler.hash = lambda self, ask=ask: (
            hashes.get((self.target.backend, self.target.arch)) or ask(self)
        )


def has_own(cls: Any, method: str) -> bool:
    """Whether a method of a Triton class is Triton's own: no tool has replaced it."""
    function = getattr(cls, method)
    return getattr(function, "__globals__", None) is vars(sys.modules[cls.__module__])


def is_watched(kernel: Any) -> bool:
    """Whether hooks of a kernel, or a tool that replaced its `run`, see the arguments of
    launches.
    """
    from triton.runtime.jit import JITFunction

    replaced = "run" in vars(kernel) or not has_own(JITFunction, "run")
    return replaced or bool(getattr(kernel, "pre_run_hooks", None))


def code_generation_switches() -> dict[str, str]:
    """Return the settings of this process that change the code which Triton generates."""
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    switches = dict(get_cache_invalidating_env_vars())
    switches["default_fp_fusion"] = knobs.language.default_fp_fusion
    rare = [
        *((knobs.runtime, "debug"), (knobs.compilation, "instrumentation_mode")),
        *((knobs.compilation, "override"), (knobs.compilation, "fpsan_homomorphic_casts")),
        *((knobs.nvidia, name) for name in ("ptxas_options", "mock_ptx_version")),
    ]
    switches |= {name: value for of, name in rare if (value := getattr(of, name, None))}
    if library := knobs.nvidia.libdevice_path:
        switches["libdevice"] = _file_digest(library)
    return {str(name): str(value) for name, value in switches.items()}


@functools.cache
def _file_digest(path: str) -> str:
    """Return the digest of a file, which may lie elsewhere on another node; empty without one."""
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


class FilesHash:
    """Triton's hash of its files, which its disk cache needs: computed in 0.5 s in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compute: Function | None = None
        forks.register("tuning", after_in_child=self._start_over)

    def begin(self, known: Callable[[Function], str] = lambda compute: compute()) -> None:
        """Compute it in a thread, for Triton too; `known` returns it, or the result of its
        argument.

        Without a thread, it is computed on request.
        """
        from triton.runtime import cache

        if self._compute is None:
            self._compute = functools.cache(functools.partial(known, cache.triton_key))
            cache.triton_key = self.get
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._try, name="safetune-hash", daemon=True).start()

    def get(self) -> str:
        """Return it, waiting if necessary; empty if the computation has not begun."""
        with self._lock:
            return "" if self._compute is None else str(self._compute())

    def _try(self) -> None:
        with contextlib.suppress(OSError):  # a launch gets it again
            self.get()

    def _start_over(self) -> None:
        self._lock = threading.Lock()


files_hash = FilesHash()


def use_files_hash(found: str) -> None:
    """Look up compiled kernels like the process that has this hash."""
    from triton.runtime import cache

    cache.triton_key = lambda: found


def private_copy(kernel: Any) -> tuple[Any, Any]:
    """Return shallow copies of a kernel and of its jit function; None for unknown kinds."""
    from triton.runtime.autotuner import Heuristics
    from triton.runtime.jit import JITFunction

    copied = copy.copy(kernel)
    gluon = sys.modules.get("triton.experimental.gluon._runtime")  # imported with its kernels
    if type(kernel) in (JITFunction, getattr(gluon, "GluonJITFunction", JITFunction)):
        copied.device_caches = defaultdict(copied.create_binder)
        return copied, copied
    if type(kernel) is not Heuristics:
        return kernel, None
    copied.fn, jit = private_copy(kernel.fn)
    return copied, jit


def has_launch_hooks(jit: Any) -> bool:
    """Whether user code runs between a call and Triton's compile step."""
    from triton import knobs

    inspection = getattr(knobs.runtime, "add_stages_inspection_hook", None)
    return bool(jit.pre_run_hooks) or inspection is not None


def compile_arguments(jit: Any, launch: Callable[[], object], device: int) -> tuple[Any, ...]:
    """Run `launch` up to Triton's compile step, and return the compiler's input: the signature, the
    constants, the attributes, the options and the target.
    """
    captured: list[tuple[Any, ...]] = []
    caches = jit.device_caches
    _, _, target, backend, binder = caches[device]
    # Empty caches, so that Triton gets as far as its compile step; it launches nothing when that
    # returns None, as it may under a hook's veto.
    jit.device_caches = {device: ({}, {}, target, backend, binder)}
    jit._do_compile = lambda *arguments: captured.append(arguments)
    try:
        launch()
    finally:
        del jit._do_compile
        jit.device_caches = caches
    _, signature, _, constexprs, options, attrs, _ = captured[0]
    return signature, constexprs, attrs, dict(options.__dict__), target


def replace_autotune(make: Callable[[Function], Function]) -> None:
    """Replace `triton.autotune` by `make(triton.autotune)`, wherever Triton exports its own.

    A library's replacement stays, e.g. vLLM's, which keeps the first config only.
    """
    import triton
    from triton.runtime import autotuner

    exporting = (autotuner, triton.runtime, triton)
    own = [m for m in exporting if getattr(m.autotune, "__globals__", None) is vars(autotuner)]
    if own:
        ours = make(own[0].autotune)
        for module in own:
            module.autotune = ours


def before_first_tuner(act: Callable[[], object]) -> None:
    """Call `act` once, right before the first tuner of Triton's class is created."""
    from triton.runtime.autotuner import Autotuner

    make, once = Autotuner.__init__, threading.Lock()

    @functools.wraps(make)
    def act_first(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if Autotuner.__init__ is act_first:  # else a tool calls this from its own
            Autotuner.__init__ = make
        if once.acquire(blocking=False):
            act()
        make(self, *args, **kwargs)

    Autotuner.__init__ = act_first


#: Methods of Triton's tuner class that a framework may replace to choose configs itself.
_POLICIES = ("run", "_bench", "prune_configs", "check_disk_cache", "do_bench")

#: Replacements by `replace_tuner_methods`, and the methods they replaced.
_beneath: dict[Function, Function] = {}


def _tuner_method(name: str) -> Any:
    """Return a method of Triton's tuner class as it was before safetune replaced it."""
    from triton.runtime.autotuner import Autotuner

    method = vars(Autotuner).get(name)
    method = getattr(method, "func", method)  # of a cached property
    return _beneath.get(method, method)


def replaced_methods() -> dict[str, Function]:
    """Return the methods of Triton's tuner class that something other than safetune has
    replaced.
    """
    from triton.runtime import autotuner

    own = vars(autotuner)
    methods = {name: _tuner_method(name) for name in _POLICIES}
    return {
        name: method
        for name, method in methods.items()
        if method is not None and getattr(method, "__globals__", None) is not own
    }


def replace_tuner_methods(run: Function, bench: Function) -> None:
    """Replace `run` and `_bench` of Triton's own tuner class, which other libraries extend."""
    from triton.runtime.autotuner import Autotuner

    _beneath[run], _beneath[bench] = _tuner_method("run"), _tuner_method("_bench")
    Autotuner.run, Autotuner._bench = run, bench


def knobs_set_in_code() -> dict[str, dict[str, Any]]:
    """Return the Triton knobs set in code, by group; the others follow environment variables.

    Also those that the import of Triton has set: the variable may have changed since.
    """
    from triton import knobs

    groups: dict[str, dict[str, Any]] = {}
    for name, group in vars(knobs).items():
        is_group = isinstance(group, knobs.base_knobs)
        for knob, value in {**vars(type(group)), **vars(group)}.items() if is_group else ():
            if isinstance(value, (bool, int, str)) and not knob.startswith("_"):
                groups.setdefault(name, {})[knob] = value
    return groups


#: What the last `set_knobs` has set: group, knob and value before.
_replaced_knobs: list[tuple[str, str, Any]] = []


def set_knobs(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Set knobs from `knobs_set_in_code`; undoes the previous call."""
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
