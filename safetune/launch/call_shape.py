"""How a kernel is called: arguments by name, memory key, and the launch by Triton's own path.

A `CallShape` is made once for each way of calling (positionally, by keyword, with which options):
straight-line code, so that a hit reads the arguments it needs and nothing else.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.errors import OutOfResources, PTXASError

from safetune import triton_internals, triton_launch
from safetune.config import check_conflicts
from safetune.errors import TracingError
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.kernel_digest import base_function
from safetune.launch import scratch_memory

if TYPE_CHECKING:
    from safetune.keys.key_names import KeyReport
    from safetune.keys.lazy_key import Basis
    from safetune.launch.key_state import KeyState, KeyStates

#: What the compiled kernel sees for every dropped name. Triton makes a constant of an integer 1,
#: so the argument costs nothing at launch either.
PIN = 1

#: What a launch says beside the kernel's arguments.
LAUNCH_KEYWORDS = frozenset({"grid", "warmup"})

#: Exceptions that Triton raises before anything has run on the device.
CLEAN_FAILURES = (OutOfResources, CompilationError, CompileTimeAssertionFailure, PTXASError)

#: Equal values of these are the same value, once their classes are equal too.
_SCALARS = frozenset({int, bool, float, str, type(None)})

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def named_arguments(
    arg_names: Sequence[str], args: Sequence[Any], kwargs: Kwargs | None = None
) -> dict[str, Any]:
    """Return a call's arguments by name."""
    named = dict(zip(arg_names, args, strict=False))
    return named if kwargs is None else {**named, **kwargs}


def device_index(args: Args, kwargs: Kwargs) -> int:
    """Return the device of the first tensor among the arguments; -1 for the CPU or without one.

    The `base` of a tensor descriptor, or of a tensor that is read as another dtype, is one too.
    """
    for value in (*args, *kwargs.values()):
        get_device = getattr(getattr(value, "base", value), "get_device", None)
        if get_device is not None:
            return int(get_device())
    return -1


def heuristic_values(kernel: Any, named: Kwargs) -> tuple[Any, dict[str, Any]]:
    """Return the kernel below heuristics, and the values that these set for a call, by name."""
    values: dict[str, Any] = {}
    while isinstance(kernel, Heuristics):
        values = set_by(kernel, named, values)
        kernel = kernel.fn
    return kernel, values


def set_by(heuristics: Heuristics, named: Kwargs, values: Kwargs) -> dict[str, Any]:
    """Return `values` and what the heuristics set for a call; each sees what is set before it."""
    found = dict(values)
    for name, heuristic in heuristics.values.items():
        found[name] = heuristic({**named, **found})
    return found


def own_heuristics(kernel: Any) -> tuple[Any, list[Heuristics]]:
    """Return what is below a tuner's heuristics, and these, as far as they launch as Triton's do:
    neither a subclass nor a tool runs code of its own.
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


def pruned_configs(tuner: Autotuner, named: Kwargs, kwargs: Kwargs) -> list[Config]:
    """Return the configs that any tuner leaves for one call.

    Triton's code reads the arguments from `tuner.nargs`, so it runs on a copy of the tuner.
    """
    view = copy.copy(tuner)
    view.nargs = dict(named)
    return list(view.prune_configs(dict(kwargs)))


def refuse_vmap(kernel: str, arguments: Iterable[Any] = ()) -> None:
    """Raise `TracingError` under torch.vmap, which no Triton kernel can be run under."""
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
    """What a launch reads of a tuner. The first five are those of Triton's tuner.

    Attributes:
        fn: the kernel below the tuner: a jit function, or heuristics around one.
        base_fn: the Python function.
        keys: names of the arguments whose values have a choice of their own.
        basis: what was read to find out that nothing reads the dropped names.
        needs_scratch: whether a launch has asked for global scratch memory.
    """

    fn: Any
    base_fn: Any
    arg_names: list[str]
    keys: list[str]
    configs: list[Config]
    key_report: KeyReport
    basis: Basis
    states: KeyStates
    shapes: CallShapes
    best_config: Config
    needs_scratch: bool

    def launch_with(
        self, config: Config, values: dict[str, Any], grid: Any, args: Args, kwargs: dict[str, Any]
    ) -> Any:
        """Launch by Triton's path, with values that the tuner's heuristics have given."""


@dataclass(frozen=True)
class Launched:
    """A launch by Triton's own path."""

    result: Any  # what Triton returned
    config: Config | None  # None if the config took the place of another
    options: Kwargs  # what the config set for this launch, by name
    values: Kwargs  # what the heuristics set for this launch, by name


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
        self.key = self._key_function(tuner.keys)

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
            values: what the heuristics have said for this launch; None to call them.
            state: of the call's key, where that may launch another config in place of this one.
            relaunch: called where Triton cannot launch the config; None to raise its error.
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
        passed = dict(**passed, **options)  # TypeError if the call passes what the config sets
        named = named_arguments(tuner.arg_names, pinned, passed)
        if values is None:
            values = {}
            for each in heuristics:
                values = set_by(each, named, values)
        specialise = functools.partial(specialisation, tuner, {**named, **values})
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
        """Whether a dropped argument would compile again for another value of it."""
        return name in self._constexprs or isinstance(value, int)

    def _key_function(self, keys: Sequence[str]) -> Callable[[Args, Kwargs], Any]:
        # Every part has its place whatever the order of the keywords, so that no two calls that
        # differ in what is passed as what can meet.
        parts, buckets = [], getattr(keys, "buckets", {})
        for name in keys:
            value = self._where.get(name)
            if value and name in buckets:
                parts.append(f"typed(buckets[{name!r}]({value}))")
            else:
                parts += [f"plain({value})", f"{value}.__class__"] if value else ["None", "None"]
        for name in self._parameters:
            if name not in self._constexprs:
                value = self._where.get(name)
                parts.append(f"type_of({value})" if value else "None")
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
    """The shapes of the calls of one kernel so far."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._report: KeyReport | None = None
        self._known: dict[Any, CallShape] = {}

    def of(self, args: Args, kwargs: Kwargs) -> CallShape:
        """Return the shape of a call, made at the first call of its kind.

        Raises:
            InvalidConfig: the call passes what every config sets.
        """
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
        return shape


def constexpr_names(kernel: Any) -> frozenset[str]:
    """Return the parameters annotated as `tl.constexpr`."""
    annotations = base_function(kernel)[1].__annotations__
    return frozenset(name for name, kind in annotations.items() if "constexpr" in str(kind))


def specialisation(tuner: Tuner, named: Kwargs) -> Any:
    """Return what decides which binary of a config a call needs: at least what Triton tells apart.

    Args:
        named: what the kernel below the tuner's heuristics gets, by name.
    """
    constants = constexpr_names(tuner.fn)
    return tuple(
        (name, _exact(value) if name in constants or name not in tuner.arg_names else _kind(value))
        for name, value in sorted(named.items())
        if name not in LAUNCH_KEYWORDS
    )


def _exact(value: Any) -> Any:
    return encoding.dumps(encoding.encode(value))


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
    return _exact(value)


def _typed(value: Any) -> Any:
    return _plain(value), value.__class__


def _plain(value: Any) -> Any:
    """A key value as a dictionary can hold it, with its types, without keeping a tensor alive."""
    if value.__class__ in _SCALARS:
        return value if value == value else repr(value)  # no NaN is equal to another
    if encoding.is_dtype(value):
        return value
    return encoding.dumps(encoding.encode(value))
