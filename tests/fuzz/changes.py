"""What changes between launches: of the kernel, the tuner, what is around them, and of Triton."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction

from tests.fuzz.events import CHANGES, Change
from tests.fuzz.kernels import source_that_reads
from tests.fuzz.sides import Side

#: By the name of a change: what it does to one side.
_on_a_side: dict[str, Callable[[Side, int], None]] = {}


def _change(name: str) -> Callable[..., Any]:
    def register(function: Callable[[Side, int], None]) -> Callable[[Side, int], None]:
        _on_a_side[name] = function
        return function

    return register


@_change("cache cleared")
def _cache_cleared(side: Side, number: int) -> None:
    side.tuner.cache.clear()


@_change("cache assigned")
def _cache_assigned(side: Side, number: int) -> None:
    side.salt = number
    side.tuner.cache = {}


@_change("choices written")
def _choices_written(side: Side, number: int) -> None:
    side.salt = -1 - number % 4
    configs = side.tuner.configs
    for key in list(side.tuner.cache):
        side.tuner.cache[key] = configs[-side.salt % len(configs)]


@_change("config in place")
def _config_in_place(side: Side, number: int) -> None:
    config = side.tuner.configs[number % len(side.tuner.configs)]
    kind = number // 8 % 3
    if kind == 0:
        config.kwargs["BLOCK"] = (16, 32, 64)[number // 32 % 3]
    elif kind == 1:
        config.num_warps = (1, 2, 4)[number // 32 % 3]
    else:
        config.kwargs = {"BLOCK": (16, 32, 64)[number // 32 % 3]}


@_change("config hook in place")
def _config_hook(side: Side, number: int) -> None:
    config = side.tuner.configs[number % len(side.tuner.configs)]
    config.pre_hook = (
        None if config.pre_hook else lambda args: side.log.append(("hook", dict(args)))
    )


@_change("configs assigned")
def _configs_assigned(side: Side, number: int) -> None:
    side.tuner.configs = [side.config_of(config) for config in reversed(side.spec.configs)]
    side.tuner.cache.clear()


@_change("config appended")
def _config_appended(side: Side, number: int) -> None:
    if not any(config.kwargs == {"BLOCK": 128} for config in side.tuner.configs):
        side.tuner.configs.append(triton.Config({"BLOCK": 128}))
        side.tuner.cache.clear()


@_change("config removed")
def _config_removed(side: Side, number: int) -> None:
    if len(side.tuner.configs) > 1:
        side.tuner.configs.pop()
        side.tuner.cache.clear()


@_change("keys assigned")
def _keys_assigned(side: Side, number: int) -> None:
    names = [each.name for each in side.spec.parameters if not each.set_by and each.name != "BLOCK"]
    start = number % len(names)
    side.keys = [*names[start:], *names[:start]][: 1 + number // 64 % 3]
    side.tuner.keys = list(side.keys)
    side.tuner.cache.clear()


@_change("jit debug")
def _jit_debug(side: Side, number: int) -> None:
    if side.mode != "interpreter":
        side.jit.debug = None if side.jit.debug else True


@_change("pre-run hook")
def _pre_run_hook(side: Side, number: int) -> None:
    hooks = side.jit.pre_run_hooks
    if hooks:
        hooks.clear()
    else:
        hooks.append(lambda *args, **kwargs: side.log.append(("pre-run hook", args, kwargs)))


@_change("instance run")
def _instance_run(side: Side, number: int) -> None:
    _toggle_run(side, side.jit)


@_change("heuristics run")
def _heuristics_run(side: Side, number: int) -> None:
    layers = [*side.below, *side.above]
    if layers:
        _toggle_run(side, layers[number % len(layers)])


def _toggle_run(side: Side, kernel: Any) -> None:
    if vars(kernel).pop("run", None) is None:
        run = kernel.run

        def replaced(*args: Any, **kwargs: Any) -> Any:
            side.log.append(("replaced run", args, _without_grid(kwargs)))
            return run(*args, **kwargs)

        vars(kernel)["run"] = replaced


def _without_grid(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "grid"}


@_change("heuristic replaced")
def _heuristic_replaced(side: Side, number: int) -> None:
    if (found := _other_heuristic(side, number)) is not None:
        layer, target, function = found
        layer.values[target] = function


@_change("heuristics assigned")
def _heuristics_assigned(side: Side, number: int) -> None:
    if (found := _other_heuristic(side, number)) is not None:
        layer, target, function = found
        layer.values = {**layer.values, target: function}


def _other_heuristic(side: Side, number: int) -> tuple[Any, str, Any] | None:
    """Return a layer, a name that it sets, and the other function for it."""
    named = list(side.spec.heuristics())
    if not named:
        return None
    name, heuristic = named[number % len(named)]
    place, index, _ = name.split("_", 2)
    layer = getattr(side, place)[int(index)]
    is_first = layer.values[heuristic.target].__name__ == name
    return layer, heuristic.target, getattr(side.module, f"{name}_other" if is_first else name)


@_change("heuristics kernel")
def _heuristics_kernel(side: Side, number: int) -> None:
    if side.below and side.below[-1].fn in (side.jit, side.other):
        last = side.below[-1]
        last.fn = side.other if last.fn is side.jit else side.jit
        _note_kernel(side, last.fn)


@_change("kernel assigned")
def _kernel_assigned(side: Side, number: int) -> None:
    first = side.below[0] if side.below and number % 2 else side.jit
    side.tuner.fn = side.other if side.tuner.fn is not side.other else first
    _note_kernel(side, side.tuner.fn)


@_change("heuristics around kernel")
def _heuristics_around(side: Side, number: int) -> None:
    def registers(args: dict[str, Any]) -> int:
        side.log.append(("registers", dict(args)))
        return 96

    fn = side.tuner.fn
    added = type(fn) is Heuristics and fn.values.keys() == {"maxnreg"}
    side.tuner.fn = fn.fn if added else Heuristics(fn, fn.arg_names, {"maxnreg": registers})


def _note_kernel(side: Side, kernel: Any) -> None:
    """Note what the body reads now; that of `other` reads all that it does not pass on."""
    side.reads["kernel"] = _without_callees(side) if kernel is side.other else set()


def _without_callees(side: Side) -> set[str]:
    return {each.name for each in side.spec.parameters if each.read in ("body", "")}


@_change("source replaced")
def _source_replaced(side: Side, number: int) -> None:
    if side.mode != "stub":
        return
    side.jit._unsafe_update_src(source_that_reads(side.spec, side.jit.src))
    side.reads["source"] = _without_callees(side)
    _binaries_cleared(side, number)


@_change("callee redefined")
def _callee_redefined(side: Side, number: int) -> None:
    called = [each for each in side.spec.parameters if each.read in ("callee", "ignores")]
    if not called:
        return
    parameter = called[number % len(called)]
    name = f"part_{parameter.name}"
    function = side.module.body
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        now, other = cells[name].cell_contents, getattr(side.module, f"{name}_other")
        cells[name].cell_contents = other
    else:
        now, other = getattr(side.module, name), getattr(side.module, f"{name}_other")
        setattr(side.module, name, other)
    setattr(side.module, f"{name}_other", now)
    side.reads[name] = set() if side.reads[name] else {parameter.name}
    side.tuner.cache.clear()  # what decides the config is other names now
    if side.mode == "stub":
        side.jit.hash = side.other.hash = None
        _binaries_cleared(side, number)


@_change("global changed")
def _global_changed(side: Side, number: int) -> None:
    changed = 3 if side.module.SCALE.value == 2 else 2
    side.module.SCALE = triton.language.constexpr(changed)


@_change("metadata assigned")
def _metadata_assigned(side: Side, number: int) -> None:
    def metadata(grid: Any, binary: Any, args: dict[str, Any]) -> dict[str, int]:
        side.log.append(("metadata", tuple(grid), dict(args)))
        return {"bytes": 2}

    side.jit.launch_metadata = metadata


@_change("binaries cleared")
def _binaries_cleared(side: Side, number: int) -> None:
    if side.machine is not None:
        for jit in (side.jit, side.other):
            jit.device_caches.clear()
            for device in (0, 1):
                side.machine.generations[id(jit), device] += 1


@_change("binaries of a device cleared")
def _device_cleared(side: Side, number: int) -> None:
    device = number % 2
    if side.machine is not None:
        if device in side.jit.device_caches:
            side.jit.device_caches[device][0].clear()
        side.machine.generations[id(side.jit), device] += 1


@_change("copied")
def _copied(side: Side, number: int) -> None:
    made = copy.copy(side.tuner)
    for layer in side.above:
        if layer.fn is side.tuner:
            layer.fn = made
    side.top = made if side.top is side.tuner else side.top
    side.tuner = made


@_change("deep copy")
def _deep_copy(side: Side, number: int) -> None:
    try:
        copy.deepcopy(side.tuner)
        side.log.append(("deep copy",))
    except Exception as error:
        side.log.append(("deep copy", type(error)))


class Switches:
    """Triton's own switches and hooks, for both sides at once; the sides are told apart at a call.

    Attributes:
        current: the side that launches now.
    """

    def __init__(self) -> None:
        self.current: Side | None = None
        self._run, self._call = JITFunction.run, CudaLauncher.__call__

    def note(self, what: str, *seen: Any) -> None:
        """Add to the log of the side that launches."""
        if self.current is not None:
            self.current.log.append((what, *seen))

    def apply(self, change: Change) -> None:
        """Turn a switch of Triton's, if this change is one."""
        runtime, compilation = knobs.runtime, knobs.compilation
        if change.what == "debug":
            runtime.debug = not runtime.debug
        elif change.what == "instrumentation":
            compilation.instrumentation_mode = "" if compilation.instrumentation_mode else "iisan"
        elif change.what == "fpsan" and hasattr(type(compilation), "fpsan_homomorphic_casts"):
            compilation.fpsan_homomorphic_casts = not compilation.fpsan_homomorphic_casts
        elif change.what == "inspection hook":
            hook = None if runtime.add_stages_inspection_hook else self._inspect
            runtime.add_stages_inspection_hook = hook
        elif change.what in ("enter hook", "exit hook"):
            chain, hook = {
                "enter hook": (runtime.launch_enter_hook, self._enter),
                "exit hook": (runtime.launch_exit_hook, self._leave),
            }[change.what]
            (chain.remove if hook in chain.calls else chain.add)(hook)
        elif change.what == "class run":
            JITFunction.run = self._replaced_run if JITFunction.run is self._run else self._run
        elif change.what == "launcher class":
            is_own = CudaLauncher.__call__ is self._call
            CudaLauncher.__call__ = self._replaced_call if is_own else self._call

    def _inspect(self, *args: Any) -> Any:
        self.note("inspection hook")
        return "key", "hash"

    def _enter(self, metadata: Any) -> None:
        self.note("enter hook", metadata.get())

    def _leave(self, metadata: Any) -> None:
        self.note("exit hook", metadata.get())

    @property
    def _replaced_run(self) -> Any:
        run, note = self._run, self.note

        def replaced(jit: Any, *args: Any, **kwargs: Any) -> Any:
            note("class run", args, _without_grid(kwargs))
            return run(jit, *args, **kwargs)

        return replaced

    @property
    def _replaced_call(self) -> Any:
        call, note = self._call, self.note

        def replaced(launcher: Any, *args: Any) -> Any:
            note("launcher class", args[:4])
            return call(launcher, *args)

        return replaced

    def reset(self) -> None:
        """Put everything back as it was."""
        for name in ("debug", "add_stages_inspection_hook"):
            vars(knobs.runtime).pop(name, None)
        for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
            vars(knobs.compilation).pop(name, None)
        for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            chain.calls[:] = [
                each for each in chain.calls if each not in (self._enter, self._leave)
            ]
        JITFunction.run, CudaLauncher.__call__ = self._run, self._call


@contextlib.contextmanager
def switches() -> Iterator[Switches]:
    """Yield Triton's switches, and put all back at the end."""
    made = Switches()
    try:
        yield made
    finally:
        made.reset()


def apply(change: Change, sides: tuple[Side, Side], turned: Switches) -> None:
    """Make a change on both sides."""
    turned.apply(change)
    function = _on_a_side.get(change.what)
    if function is not None:
        for side in sides:
            function(side, change.number)


assert _on_a_side.keys() <= CHANGES.keys()
