"""The calls of a kernel: arguments by name, memory key, and the launch by Triton's path.

A `CallShape` is made once per way of calling (by position, by keyword, with which options). It is
straight-line code, so that a hit reads only the arguments it needs.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.errors import OutOfResources, PTXASError

from safetune import triton_internals, triton_launch
from safetune.config import check_conflicts
from safetune.errors import NoConfigs, TracingError
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.identity import base_function, code_of, encode
from safetune.keys.source_text import is_foreign_class
from safetune.launch import scratch_memory

if TYPE_CHECKING:
    from safetune.keys.identity import KernelIdentity
    from safetune.keys.key_names import KeyReport
    from safetune.keys.lazy_key import Basis
    from safetune.keys.tuning_key import KeyNames
    from safetune.launch.key_state import KeyState, KeyStates
    from safetune.settings import MeasurePolicy, MissPolicy, SearchBudget

#: What the compiled kernel sees for every dropped name. Triton makes a constant of an integer 1,
#: so the argument costs nothing at launch either.
PIN = 1

#: What a launch says beside the kernel's arguments.
LAUNCH_KEYWORDS = frozenset({"grid", "warmup"})

#: Exceptions that Triton raises before anything has run on the device.
CLEAN_FAILURES = (OutOfResources, CompilationError, CompileTimeAssertionFailure, PTXASError)

#: Equal values of these are the same value, once their classes are equal too.
_SCALARS: frozenset[type] = frozenset({int, bool, float, str, type(None)})

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def named_arguments(
    arg_names: Sequence[str], args: Sequence[Any], kwargs: Kwargs | None = None
) -> dict[str, Any]:
    """Return a call's arguments by name."""
    named = dict(zip(arg_names, args, strict=False))
    return named if kwargs is None else {**named, **kwargs}


def device_index(args: Args, kwargs: Kwargs) -> int:
    """Return the device of the first argument that is on one; -1 if all are on the CPU.

    Includes items of tuples and the `base` of a tensor descriptor or of a tensor read as another
    dtype. A CPU tensor may be pinned memory beside tensors on a device.
    """
    for value in (*args, *kwargs.values()):
        get_device = getattr(getattr(value, "base", value), "get_device", None)
        if get_device is not None:
            index = int(get_device())
        elif isinstance(value, tuple):
            index = device_index(value, {})
        else:
            continue
        if index >= 0:
            return index
    return -1


def heuristic_values(kernel: Any, named: Kwargs) -> tuple[Any, dict[str, Any]]:
    """Return the kernel below heuristics, and the values that they set for a call, by name."""
    values: dict[str, Any] = {}
    while isinstance(kernel, Heuristics):
        values = set_by(kernel, named, values)
        kernel = kernel.fn
    return kernel, values


def set_by(heuristics: Heuristics, named: Kwargs, values: Kwargs) -> dict[str, Any]:
    """Return `values` and the heuristics' values for a call; each heuristic sees the values before
    it.
    """
    found = dict(values)
    for name, heuristic in heuristics.values.items():
        found[name] = heuristic({**named, **found})
    return found


def own_heuristics(kernel: Any) -> tuple[Any, list[Heuristics]]:
    """Return the layer below a tuner's heuristics, and those that launch like Triton's own: neither
    a subclass nor a tool runs code of its own.
    """
    found: list[Heuristics] = []
    while (
        type(kernel) is Heuristics
        and "run" not in vars(kernel)
        and triton_internals.has_own(Heuristics, "run")
    ):
        found.append(kernel)
        kernel = kernel.fn
    return kernel, found


#: On while a launch prunes, maybe by a function that wraps `torch_compile.one_config`.
_pruning: ContextVar[bool] = ContextVar("safetune_a_launch_prunes", default=False)


def is_pruning() -> bool:
    """Whether a launch prunes now. Unlike the variable, this travels with what refers to it."""
    return _pruning.get()


def pruned_configs(tuner: Autotuner, named: Kwargs, kwargs: Kwargs) -> list[Config]:
    """Return the configs that any tuner leaves for one call.

    Triton's code reads the arguments from `tuner.nargs`, so it runs on a copy of the tuner.
    """
    before = _pruning.set(True)
    try:
        view = copy.copy(tuner)
        view.nargs = dict(named)
        return list(view.prune_configs(dict(kwargs)))
    finally:
        _pruning.reset(before)


def refuse_vmap(kernel: str, arguments: Iterable[Any] = ()) -> None:
    """Raise `TracingError` under torch.vmap, which supports no Triton kernel."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    if any(level.key() == functorch.TransformType.Vmap for level in stack) or any(
        isinstance(value, torch.Tensor) and functorch.is_batchedtensor(value) for value in arguments
    ):
        raise TracingError(
            f"{kernel} was called under torch.vmap, which cannot batch a Triton kernel: add the "
            "batch to its grid, or wrap the launch in a torch.library.custom_op with register_vmap"
        )


class Tuner(Protocol):
    """A tuner as all code below the decorator sees it. The first five attributes are Triton's.

    Attributes:
        fn: the kernel below the tuner: a jit function, or heuristics around one.
        base_fn: the Python function.
        keys: the names in `key=`, as written.
        key_names: the names among them whose values have separate choices.
        basis: the objects that were read to classify the names.
        needs_scratch: whether a launch has requested global scratch memory.
        hooks, limits, proposer, workloads: `inputs.call.Hooks`, `tuning.requests.Limits`,
            `tuning.search.Proposer`, `inputs.workload.DeclaredWorkload`s.
        isolation: `worker`, `config` or `inline`.
        on_miss, measure, same_bits: None to follow SAFETUNE_ON_MISS, SAFETUNE_MEASURE,
            SAFETUNE_SAME_BITS.
        budget: None to measure every config.
        tuning_phases: of the last tuning, in seconds.
    """

    fn: Any
    base_fn: Any
    arg_names: list[str]
    keys: list[str]
    configs: list[Config]
    key_names: KeyNames
    key_report: KeyReport
    basis: Basis
    states: KeyStates
    shapes: CallShapes
    best_config: Config
    needs_scratch: bool
    hooks: Any
    limits: Any
    proposer: Any
    workloads: list[Any]
    isolation: str
    on_miss: MissPolicy | None
    measure: MeasurePolicy | None
    same_bits: bool | None
    budget: SearchBudget | None
    tuning_phases: dict[str, float]

    @property
    def identity(self) -> KernelIdentity:
        """The identity of the kernel and the functions around it."""

    def launch_with(
        self, config: Config, values: dict[str, Any], grid: Any, args: Args, kwargs: dict[str, Any]
    ) -> Any:
        """Launch by Triton's path, with the given values of the tuner's heuristics."""

    def report(
        self,
        key: tuple[Any, ...],
        choice: Config,
        timings: dict[Config, list[float]],
        phases: Mapping[str, float] | None = None,
    ) -> None:
        """Report a choice as Triton's tuner does."""

    def first_time(self, topic: str) -> bool:
        """Whether this is the first call with this topic, for warnings that appear once."""


@dataclass(frozen=True)
class Launched:
    """A launch by Triton's own path."""

    result: Any  # Triton's return value
    config: Config | None  # None if the config took the place of another
    options: Kwargs  # set by the config for this launch, by name
    values: Kwargs  # set by the heuristics for this launch, by name


#: Launches another config after a clean failure: (specialisation, config, error) → Triton's result.
Relaunch = Callable[[Any, Config, Exception], Any]


class CallShape:
    """One way of calling one kernel."""

    def __init__(self, tuner: Tuner, positional: int, keywords: tuple[str, ...]) -> None:
        self._tuner = tuner
        self._positions = {name: i for i, name in enumerate(tuner.arg_names[:positional])}
        self._where = {
            **{name: f"a[{i}]" for name, i in self._positions.items()},
            **{name: f"k[{name!r}]" for name in keywords if name not in LAUNCH_KEYWORDS},
        }
        self._parameters = tuner.arg_names
        self._constexprs = constexpr_names(tuner.fn)
        #: Names among the arguments that the compiled kernel gets as a constant.
        self.pins = tuple(name for name in tuner.key_report.pinned if name in self._where)
        #: (args, kwargs) → the memory key: kept values with their types, dtypes, extra options.
        self.key = self._key_function(tuner.key_names)

    def launch(
        self,
        config: Config,
        args: Args,
        kwargs: Kwargs,
        values: Kwargs | None = None,
        state: KeyState | None = None,
        relaunch: Relaunch | None = None,
    ) -> Launched:
        """Launch a call with a config by Triton's path.

        Args:
            values: of the heuristics for this launch; None to call them.
            state: of the call's key, if it may launch another config instead of this one.
            relaunch: called if Triton cannot launch the config; None to raise its error.
        """
        tuner = self._tuner
        tuner.best_config = config
        options = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**named_arguments(tuner.arg_names, args, kwargs), **options})
        below, heuristics = own_heuristics(tuner.fn)
        if triton_internals.is_watched(below):  # by one who is to see the caller's values
            pinned, passed = args, dict(kwargs)
        else:
            pinned, passed = self.pinned(args, kwargs)
        passed = dict(**passed, **options)  # TypeError if the call passes a config's name
        named = named_arguments(tuner.arg_names, pinned, passed)
        if values is None:
            values = {}
            for each in heuristics:
                values = set_by(each, named, values)
        below_it = {**named, **values}
        specialise = functools.partial(specialisation, tuner.fn, tuner.arg_names, below_it)
        if state is not None and (other := state.allowed(config, specialise)) is not config:
            return replace(self.launch(other, args, kwargs), config=None)
        run = functools.partial(below.run, *pinned, **{**passed, **values})
        try:
            result = scratch_memory.launch(run) if tuner.needs_scratch else run()
        except RuntimeError as error:
            if tuner.needs_scratch or not triton_launch.lacks_allocator(error):
                refuse_vmap(tuner.base_fn.__name__, args)
                raise
            tuner.needs_scratch = True
            result = scratch_memory.launch(run)
        except CLEAN_FAILURES as error:
            if relaunch is None:
                raise
            return Launched(relaunch(specialise(), config, error), None, options, values)
        return Launched(result, config, options, values)

    def pinned(self, args: Args, kwargs: Kwargs) -> tuple[Args, dict[str, Any]]:
        """Return the arguments with every dropped constexpr or integer replaced by `PIN`.

        The grid still sees the caller's values.
        """
        originals: dict[str, Any] = {}
        new_args, new_kwargs = list(args), dict(kwargs)
        for name in self.pins:
            position = self._positions.get(name)
            holder: Any = new_kwargs if position is None else new_args
            index: Any = name if position is None else position
            if self.pinnable(name, holder[index]):
                originals[name], holder[index] = holder[index], PIN
        grid = new_kwargs.get("grid")
        if originals and callable(grid):
            new_kwargs["grid"] = functools.partial(_grid_of, grid, originals)
        return tuple(new_args), new_kwargs

    def pinnable(self, name: str, value: Any) -> bool:
        """Whether other values of a dropped argument would compile again."""
        return name in self._constexprs or isinstance(value, int)

    def _key_function(self, keys: KeyNames) -> Callable[[Args, Kwargs], Any]:
        # Every part has its place whatever the order of the keywords, so that no two calls that
        # differ in what is passed as what can meet.
        parts, buckets = [], keys.buckets
        for name in keys:
            value = self._where.get(name)
            if value and name in buckets:
                parts.append(f"typed(buckets[{name!r}]({value}))")
            else:
                parts += [f"plain({value})", f"{value}.__class__"] if value else ["None", "None"]
        for name in self._parameters:
            value = self._where.get(name)
            parts.append(f"type_of({value})" if value else "None")
            if value and name not in keys:
                parts.append(f"None if {value}.__class__ in without_code else code({value})")
        for name, value in sorted(self._where.items()):
            if name not in self._parameters:  # a launch option, such as num_warps
                parts += [repr(name), f"plain({value})", f"{value}.__class__"]
        parts.append("device(a, k)")
        source = f"lambda a, k: ({', '.join(parts)},)"
        names = {
            "plain": _plain,
            "typed": _typed,
            "buckets": buckets,
            "type_of": encoding.element_type,
            "without_code": _without_code,
            "code": _code,
            "device": device_index,
        }
        return eval(source, names)  # type: ignore[no-any-return]


def _grid_of(grid: Callable[..., Any], originals: Kwargs, arguments: dict[str, Any]) -> Any:
    """Call a grid function on Triton's own dict, which it may change, with the caller's values."""
    arguments.update(originals)
    result = grid(arguments)
    arguments.update(dict.fromkeys(originals, PIN))
    return result


class CallShapes:
    """The call shapes of one kernel so far."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._report: KeyReport | None = None
        self._known: dict[Any, CallShape] = {}

    def of(self, args: Args, kwargs: Kwargs) -> CallShape:
        """Return the shape of a call, made at the first call of its kind.

        Raises:
            InvalidConfig: the call passes a name that every config sets, or there is no config.
        """
        if not self._tuner.configs:
            raise NoConfigs(
                f"configs of {self._tuner.base_fn.__name__} is now empty, and a launch needs "
                "one: add a triton.Config"
            )
        report = self._tuner.key_report
        if report is not self._report:  # classified again
            self._known, self._report = {}, report
        kind = (len(args), *kwargs)
        shape = self._known.get(kind)
        if shape is None:
            tuner = self._tuner
            options = [frozenset(config.all_kwargs()) for config in tuner.configs]
            set_by_all = Config(dict.fromkeys(sorted(frozenset.intersection(*options))))
            passed = {*tuner.arg_names[: len(args)], *kwargs}
            check_conflicts(tuner.base_fn.__name__, set_by_all, passed)
            shape = self._known[kind] = CallShape(tuner, len(args), tuple(kwargs))
            tuner.states.learn(named_arguments(tuner.arg_names, args, kwargs))
        return shape


def constexpr_names(kernel: Any) -> frozenset[str]:
    """Return the parameters annotated as `tl.constexpr`."""
    annotations = base_function(kernel)[1].__annotations__
    return frozenset(name for name, kind in annotations.items() if "constexpr" in str(kind))


def specialisation(kernel: Any, arg_names: Sequence[str], named: Kwargs) -> Any:
    """Return the values that decide which binary of a config a call needs: at least as fine as
    Triton's.

    Args:
        kernel: the one below the tuner: a jit function, or heuristics around one.
        named: the arguments of the kernel below the tuner's heuristics, by name.
    """
    constants = constexpr_names(kernel)
    return tuple(
        (name, _exact(value) if name in constants or name not in arg_names else _kind(value))
        for name, value in sorted(named.items())
        if name not in LAUNCH_KEYWORDS
    )


def _exact(value: Any) -> Any:
    return encoding.dumps(encode(value, of_call=True))


def _kind(value: Any) -> Any:
    """The properties that Triton looks at of an argument that is not a constant."""
    if isinstance(value, (bool, float)):
        return type(value).__name__
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        return encoding.dtype_name(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if is_dataclass(value) and not isinstance(value, type):  # such as a tensor descriptor
        return tuple(_kind(getattr(value, field.name)) for field in fields(value))
    return _exact(value)


def _typed(value: Any) -> Any:
    return _plain(value), value.__class__


#: Classes whose objects bring no functions with them into a call.
_without_code: set[type] = {*_SCALARS}


def _code(value: Any) -> str | None:
    """The functions in an argument that is not in the key, as a dictionary can hold them."""
    code, kind = code_of(value), type(value)
    if code is not None:
        return encoding.dumps(code)
    is_atom = is_foreign_class(kind) and not (kind.__dictoffset__ or kind.__itemsize__)
    is_atom = is_atom and not (callable(value) or issubclass(kind, (tuple, list, dict, set)))
    if is_atom or encoding.is_dtype(value) or hasattr(kind, "data_ptr"):
        _without_code.add(kind)
    return None


def _plain(value: Any) -> Any:
    """A key value as a dictionary can hold it, with its types, without keeping a tensor alive."""
    if value.__class__ in _SCALARS:
        return value if value == value else repr(value)  # no NaN is equal to another
    if encoding.is_dtype(value):
        return value
    return encoding.dumps(encode(value, of_call=True))
