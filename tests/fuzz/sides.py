"""The two sides of a comparison: stock `triton.autotune`, and safetune, each with its own kernel.

A side launches, and notes in its log all that can be observed: what heuristics, hooks, layers and
grids were called with, the binary and the arguments that the launcher got, and an error's type.
Where a kernel really runs, what it wrote is observed too.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.autotuner import Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from safetune import safetune
from tests.binding import tell_binding
from tests.fuzz import programs
from tests.fuzz.events import Call, Made, Tensor, arguments
from tests.fuzz.kernels import SIZE, ConfigSpec, Layer, Parameter, Spec
from tests.launch.conftest import Machine

#: The name of every kernel's module: both sides' kernels are the same to Triton.
MODULE = "safetune_fuzz_kernel"

#: In a binary, beside the parameters: its hash, as Triton has it.
HASH = "the hash"

Record = tuple[Any, ...]

#: Handles of the stub's functions: as a driver's, each is another, on both sides.
_HANDLES = itertools.count(7)


class Stub(Machine):
    """The stub driver; the log has each launch, with what Triton would have compiled for it."""

    def __init__(self, log: list[Record], launcher: str) -> None:
        super().__init__()
        self.log = log
        self.launcher = launcher
        self.kernels: list[CompiledKernel] = []
        #: By jit function and device: how often the binaries were thrown away.
        self.generations: Counter[Any] = Counter()

    def unload(self) -> None:
        for kernel in self.kernels:
            kernel.module = None

    def _binary(self, src: Any, options: dict[str, Any]) -> CompiledKernel:
        kernel = CompiledKernel.__new__(CompiledKernel)
        self.kernels.append(kernel)
        place = id(src.fn), self.device
        made = self.device, self.generations[place], binary_of(src, options)
        kernel.src, kernel.name, kernel.hash, kernel.metadata_group = src, "kernel", made, {}
        kernel.metadata = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
        kernel.packed_metadata = (4, 1, 0)
        kernel.module, kernel._module_pid, kernel.function = 1, None, next(_HANDLES)
        names = list(src.signature)

        def launch(
            grid: tuple[Any, ...], stream: int, function: int, metadata: Any, *rest: Any
        ) -> None:
            enter, leave, args = rest
            assert function == kernel.function, "another binary's function"
            if enter is not None:
                enter(metadata)
            named = ByParameter(zip(names, map(_address, args), strict=True))
            thrown_away = self.generations[place] - made[1]
            self.log.append(("launch", made[0], thrown_away, made[2], grid, stream, named))
            if leave is not None:
                leave(metadata)

        kernel._run = _cuda_launcher(launch) if self.launcher == "cuda" else _launcher(launch)
        return kernel


def _launcher(launch: Callable[..., None]) -> Callable[..., None]:
    def run(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        _, metadata, enter, leave, *args = rest
        launch((x, y, z), stream, function, metadata, enter, leave, args)

    return run


def _cuda_launcher(launch: Callable[..., None]) -> Any:
    """Return Triton's own launcher above a function instead of the driver's."""
    from triton.backends.nvidia.driver import CudaLauncher

    def run(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, _, _, _, metadata, enter, leave, *_, args = rest
        launch((x, y, z), stream, function, metadata, enter, leave, args)

    made = CudaLauncher.__new__(CudaLauncher)
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    switches = {"launch_cooperative_grid": False, "launch_pdl": False, "gsan_enabled": False}
    vars(made).update(sizes, **aligned, **switches, num_ctas=1)
    vars(made).update(launch=run, arg_annotations=None, kernel_signature=b"")
    return made


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def binary_of(src: Any, options: Mapping[str, Any]) -> ByParameter:
    """Return what decides the code of a binary: the source, then by parameter, then the options."""
    names = list(src.signature)
    options = {name: str(value) for name, value in sorted(options.items())}
    found = ByParameter({"": {"source": src.fn.cache_key, **options}})
    for name, kind in src.signature.items():
        found[name] = [str(kind)]
    for path, value in src.constants.items():
        found[names[path[0]]].append((path[1:], value))
    for path, attributes in src.attrs.items():
        if path[0] < len(names):  # else it is of an inspection hook
            found[names[path[0]]].append((path[1:], str(attributes)))
    return found


def plain(value: Any) -> Any:
    """Return a value with its type, as something that can be compared, whichever side has it."""
    if id(value) in programs.described:
        return "made", *programs.described[id(value)]
    if isinstance(value, torch.Tensor):
        where = value.storage_offset(), value.data_ptr() % 16, tuple(value.shape)
        return "tensor", type(value).__name__, str(value.dtype), where
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(plain, value)
    if isinstance(value, triton.language.core.tensor):  # the interpreter's
        return ("address",) if value.dtype.is_ptr() else plain(value.handle.data.item())
    if isinstance(value, triton.language.constexpr):
        return "constexpr", plain(value.value)
    return ("callable",) if callable(value) else (type(value).__name__, repr(value))


class Side:
    """A kernel, its tuner, and what is around them.

    Attributes:
        mode: `stub`, `interpreter` or `gpu`.
        keys: the key as it was given last.
        top: the outermost layer, which is launched.
        below: the layers below the tuner, outermost first; `above` likewise, innermost first.
        reads: the parameters that the kernel reads now, and each of its callees. All other readers
            note what they get.
        once_unread: whether the key has had a name that the kernel does not read.
        by_triton: how many launches bound their arguments by Triton's own code.
    """

    def __init__(self, spec: Spec, mode: str, path: Path, code: Any, ours: bool) -> None:
        self.spec, self.mode, self.ours = spec, mode, ours
        self.log: list[Record] = []
        self.machine = Stub(self.log, spec.launcher) if mode == "stub" else None
        self.by_triton = self.salt = 0
        self.once_unread = False
        self.memory = _memory(mode)
        jit = InterpretedFunction if mode == "interpreter" else JITFunction
        self.module = ModuleType(MODULE)
        vars(self.module).update(LOG=self.log, jit=jit, Jit=jit, __file__=str(path))
        sys.modules[MODULE] = self.module
        exec(code, vars(self.module))
        kind = self.module.Below if spec.jit_subclass else jit
        self.jit = self.kernel_of(self.module.body, kind)
        self.other = self.kernel_of(self.module.other, jit)
        self.below: list[Any] = []
        kernel = self.jit
        for number in reversed(range(len(spec.below))):
            kernel = self.layer(spec.below[number], f"below_{number}", kernel)
            self.below.insert(0, kernel)
        self.keys = list(spec.key)
        self.tuner = self._tuned(kernel)
        self.above: list[Any] = []
        self.top = self.tuner
        for number, layer in enumerate(spec.above):
            self.top = self.layer(layer, f"above_{number}", self.top)
            self.above.append(self.top)
        self.reads = self._readers()

    def kernel_of(self, function: Any, kind: Any) -> Any:
        """Return a kernel of a function; on the stub driver it is counted when Triton binds."""
        spec = self.spec
        if self.mode == "interpreter":
            return kind(function)
        options = {
            "do_not_specialize": list(spec.not_specialized),
            "do_not_specialize_on_alignment": list(spec.not_aligned),
            "launch_metadata": getattr(self.module, f"metadata_{spec.metadata}", None),
        }
        made = self.machine.kernel_of if self.machine is not None else _real
        jit = made(function, kind, **options)
        tell_binding(jit, self._bound)
        return jit

    def _bound(self) -> None:
        self.by_triton += 1

    def layer(self, layer: Layer, place: str, kernel: Any) -> Any:
        """Return a layer around a kernel."""
        if layer.kind == "wrapper":
            return self.module.Wrapper(kernel)
        kind = Heuristics if layer.kind == "heuristics" else self.module.Subclass
        values = {h.target: getattr(self.module, f"{place}_{h.target}") for h in layer.heuristics}
        return kind(kernel, kernel.arg_names, values)

    def config_of(self, config: ConfigSpec) -> triton.Config:
        """Return a config of this side's own."""
        hook = getattr(self.module, f"config_hook_{config.hook}", None)
        return triton.Config(
            {"BLOCK": config.block},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.maxnreg,
            pre_hook=hook,
        )

    def _tuned(self, kernel: Any) -> Any:
        configs = [self.config_of(config) for config in self.spec.configs]
        options: dict[str, Any] = {"configs": configs, "key": list(self.spec.key)}
        options["do_bench"] = lambda launch, quantiles: [1.0] * 3
        if self.ours:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tuner = safetune(**options, phantom=self.spec.phantom)(kernel)
            tuner._miss = self._miss
        else:
            tuner = triton.autotune(**options)(kernel)
            tuner.prune_configs = lambda kwargs: [self.chosen({**self.tuner.nargs, **kwargs})]
        return tuner

    def _miss(self, key: Any, args: Any, kwargs: Any) -> triton.Config:
        named = {**dict(zip(self.tuner.arg_names, args, strict=False)), **kwargs}
        config = self.tuner.cache[key] = self.chosen(named)
        return config

    def chosen(self, named: Mapping[str, Any]) -> triton.Config:
        """Return the config for a call: by the key names that the kernel surely reads, and dtypes.

        Stock Triton asks at each launch, safetune when its key has no choice.
        """
        configs = self.tuner.configs
        if self.salt < 0:
            return configs[-self.salt % len(configs)]
        parts: list[Any] = [self.salt]
        for each in self.spec.parameters:
            value = named.get(each.name)
            if each.name in ("grid", "warmup"):
                continue  # for Triton's tuner these are the launch's
            if hasattr(value, "dtype"):
                parts += [str(value.dtype)] * (each.kind != "constant")
            elif each.name in self.keys and self._surely_reads(each):
                shown = programs.described.get(id(value)) or (repr(value) if value else "")
                parts.append((each.name, type(value).__name__, shown))
        return configs[zlib.crc32(repr(parts).encode()) % len(configs)]

    def _surely_reads(self, parameter: Parameter) -> bool:
        """Whether the kernel has always read a parameter, and still does."""
        called = self.reads.get(f"part_{parameter.name}", set())
        return parameter.read == "body" or (parameter.read == "callee" and len(called) > 0)

    def _readers(self) -> dict[str, set[str]]:
        found = {"body": {each.name for each in self.spec.parameters if each.read == "body"}}
        for each in self.spec.parameters:
            if each.read in ("callee", "ignores"):
                found[f"part_{each.name}"] = {each.name} if each.read == "callee" else set()
        return found

    @property
    def unread(self) -> set[str]:
        """The parameters that the kernel does not read now, nor what it calls."""
        return {each.name for each in self.spec.parameters}.difference(*self.reads.values())

    def value(self, value: Any) -> Any:
        """Return an argument of this side's own."""
        if value == "dtype":
            return torch.float16
        if isinstance(value, Made):
            return programs.made(value.kind, value.number)
        if not isinstance(value, Tensor):
            return value
        found = self.memory[value.dtype][value.start :]
        kinds: dict[str, Callable[[], Any]] = {
            "parameter": lambda: torch.nn.Parameter(found, requires_grad=False),
            "subclass": lambda: found.as_subclass(_Subclass),
            "empty": lambda: found[:0],
            "transposed": lambda: found[:16].view(4, 4).t(),
        }
        return kinds.get(value.kind, lambda: found)()

    def launch(self, call: Call) -> list[Record]:
        """Launch a call; return all that was observed."""
        args, kwargs = arguments(self.spec, call)
        args, kwargs = [*map(self.value, args)], {n: self.value(v) for n, v in kwargs.items()}
        if self.machine is not None:
            driver._active = self.machine
            self.machine.device, self.machine.stream = call.device, call.stream
        if not self.ours:
            self.tuner.cache.clear()
        self.log.clear()
        grid = self.grid(*call.grid)
        result = None
        try:
            if call.how == "getitem":
                result = self.top[grid](*args, **kwargs)
            else:
                result = self.top.run(*args, grid=grid, warmup=call.how == "warmup", **kwargs)
            self.log.append(("returned", self._returned(result)))
        except Exception as error:
            self.log.append(("error", type(error), str(error)))
        else:
            best = self.tuner.best_config
            chosen = [i for i, config in enumerate(self.tuner.configs) if config is best]
            self.log.append(("best config", chosen))
        log = [_hooked(record, result) for record in self.log]
        return [(kind, *map(_kept, rest)) for kind, *rest in log]

    def _returned(self, result: Any) -> Any:
        if self.machine is not None:
            return result and result.hash[2]
        if not isinstance(result, CompiledKernel):
            return result
        names = ("num_warps", "num_stages", "num_ctas", "maxnreg", "debug")
        options = {name: getattr(result.metadata, name, None) for name in names}
        return ByParameter({**binary_of(result.src, options), HASH: result.hash})

    def grid(self, kind: str, number: int) -> Any:
        """Return a grid of a kind, which notes what it is called with."""
        size = 1 + number % 3

        def function(meta: dict[str, Any]) -> tuple[int, ...]:
            self.log.append(("grid", tuple(meta), dict(meta)))
            return size, 1 + len(meta) % 2

        def changes(meta: dict[str, Any]) -> tuple[int, ...]:
            names = [each.name for each in self.spec.parameters if each.kind == "integer"]
            if names:
                meta[names[number % len(names)]] = 5
            return (size,)

        def moves(meta: dict[str, Any]) -> tuple[int, ...]:
            if self.machine is not None:
                self.machine.device = 1 - self.machine.device
            return (size,)

        def raises(meta: dict[str, Any]) -> tuple[int, ...]:
            raise ArithmeticError("a grid of the fuzzer")

        grids: dict[str, Any] = {
            "tuple": (size, 1 + number // 3),
            "function": function,
            "partial": functools.partial(function),
            "changes": changes,
            "device": moves,
            "raises": raises,
            "list": [size, 2],
            "integer": size,
            "empty": (),
            "four": (size, 1, 1, 2),
            "numpy": (numpy.int64(size),),
        }
        return grids[kind]


class _Subclass(torch.Tensor):
    pass


class ByParameter(dict[str, Any]):
    """Something that a record has of each parameter, so that one can be left out."""


def _hooked(record: Record, binary: Any) -> Record:
    """Return a launch hook's record with whether the function is the launched binary's.

    Its handle is compared with nothing else: each side has loaded binaries of its own.
    """
    if record[0] not in ("enter hook", "exit hook"):
        return record
    what, seen = record
    launched = getattr(binary, "function", None)
    return what, {**seen, "function": seen["function"] == launched}


def _kept(value: Any) -> Any:
    """Return a part of a record as it stays the same when the next launch changes arguments."""
    if isinstance(value, ByParameter):
        return ByParameter((name, plain(each)) for name, each in value.items())
    return value if isinstance(value, type) else plain(value)


def _real(function: Any, kind: type[JITFunction], **options: Any) -> JITFunction:
    return kind(function, **options)


@functools.cache
def _numbers(mode: str) -> dict[str, torch.Tensor]:
    numbers = torch.arange(4 * SIZE, device="cuda" if mode == "gpu" else "cpu") * 7 % 5
    names = ("float32", "float16", "int32", "bool", "int8")
    return {name: numbers.to(getattr(torch, name)) for name in names}


def _memory(mode: str) -> dict[str, torch.Tensor]:
    """Return memory by dtype: the same for both sides if nothing is written, else a copy."""
    found = _numbers(mode)
    return found if mode == "stub" else {name: each.clone() for name, each in found.items()}
