"""Runs a kernel in Triton's interpreter and records which program accesses each element.

A comparison of results cannot detect two programs that store the same value to one element; this
check finds the element by its two owners. It does not change the given tensors, and runs nothing on
a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from triton.runtime.autotuner import Autotuner, Config, Heuristics

from safetune.config import backend_options, check_conflicts, config_text
from safetune.errors import InvalidConfig, InvalidSetting
from safetune.inputs.call import default_values, grid_sizes
from safetune.keys.identity import base_function
from safetune.launch.call_shape import heuristic_values, named_arguments, pruned_configs
from safetune.verify.findings import findings_of, is_of, written_by
from safetune.verify.instruments import Instruments
from safetune.verify.interpretation import interpret, is_jit
from safetune.verify.memory import Memory
from safetune.verify.report import OverlapReport
from safetune.verify.watch import CLASHES, Watch

#: The default of `timeout_s`: seconds that a launch may take in the interpreter.
TIMEOUT_S = 600.0

_OPTIONS = ("config", "outputs", "allow", "timeout_s")


def check_overlap(
    kernel: Any,
    grid: Any,
    /,
    *args: Any,
    config: Config | None = None,
    outputs: Sequence[str] = (),
    allow: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    **kwargs: Any,
) -> OverlapReport:
    """Run one launch in Triton's interpreter and report the programs that break write ownership.

    docs/verify.md lists the findings.

    Args:
        kernel: under `@triton.jit`, `@triton.heuristics`, `@triton.autotune` or `@safetune`,
            decorated for the compiler or the interpreter.
        grid: as in `kernel[grid](...)`: one to three sizes, or a function of the arguments.
        args, kwargs: of the launch. Tensors may be on any device; their whole storages are copied
            to the CPU.
        config: the config of a tuner to run; optional if the tuner has only one config.
        outputs: names of arguments whose every element must be written.
        allow: names of arguments whose elements several programs may access. Such accesses are
            notes; accesses outside of these arguments remain findings.
        timeout_s: seconds in the interpreter.

    Raises:
        InvalidConfig: `config` is missing, is given without a tuner, or sets a name that the call
            also passes.
        InvalidSetting: the kernel, the grid, an output or an argument is invalid.
        NotInterpretable: the interpreter cannot run the kernel, or the kernel raised.
        KernelNotTransferable: a tensor has no plain storage to copy.
    """
    options: Any = {"config": config, "outputs": outputs, "allow": allow, "timeout_s": timeout_s}
    return check_launch(kernel, grid, args, kwargs, **options)


def check_launch(
    kernel: Any,
    grid: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    config: Config | None,
    outputs: Sequence[str],
    allow: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    each_program: Callable[[], object] = lambda: None,
    at_end: Callable[[], object] = lambda: None,
) -> OverlapReport:
    """Do what `check_overlap` does, for arguments of any name; call a function for each program."""
    jit, function = base_function(kernel)
    if not is_jit(jit):
        raise InvalidSetting(f"{function.__name__} is a {type(jit).__name__}, not a Triton kernel")
    named = _named(kernel, args, kwargs)
    _check_names(kernel, kwargs)
    memory = Memory(named)
    copies = {name: memory.copied(value) for name, value in named.items()}
    text = _apply_decorators(kernel, config, named, copies)
    values = {**default_values(kernel), **named}
    if missing := [name for name in jit.arg_names if name not in values]:
        raise InvalidSetting(
            f"no value for {', '.join(missing)}; {function.__name__} takes "
            f"{', '.join(jit.arg_names)}: pass all of them, or a config that sets them"
        )
    x, y, z = (*grid_sizes(grid(values) if callable(grid) else grid), 1, 1)[:3]
    sizes = (x, y, z)
    watch = Watch(memory, sizes, timeout_s)
    _check_tensors(function.__name__, memory, outputs=outputs, allow=allow)
    addressed = {name: memory.addressed(value) for name, value in copies.items()}
    interpret(
        function,
        addressed,
        sizes,
        lambda builder: Instruments(watch, builder, each_program).methods(),
    )
    at_end()
    idle = sorted(set(range(math.prod(sizes))) - watch.storing) if watch.storing else []
    findings = findings_of(memory, watch, outputs)
    allowed = [each for each in findings if each.kind in CLASHES and is_of(each.argument, allow)]
    return OverlapReport(
        kernel=function.__name__,
        config=text,
        grid=sizes,
        findings=tuple(finding for finding in findings if finding not in allowed),
        written=written_by(memory, watch, outputs),
        idle_programs=tuple(watch.ids(program) for program in idle),
        allowed=tuple(allowed),
    )


def configs_for(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Config]:
    """Return the configs of a tuner that its prune function leaves for a launch."""
    kwargs = dict(kwargs)
    if isinstance(kernel, Heuristics):
        kernel, values = heuristic_values(kernel, _named(kernel, args, kwargs))
        kwargs |= values
    if not isinstance(kernel, Autotuner):
        raise InvalidSetting(f"{kernel!r} has no configs: use check_overlap")
    return pruned_configs(kernel, named_arguments(kernel.arg_names, args), kwargs)


def _named(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = kernel.arg_names
    if len(args) > len(names):
        raise InvalidSetting(
            f"{len(args)} arguments given, but the kernel takes {', '.join(names)}"
        )
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise InvalidSetting(f"{', '.join(twice)} given both by position and by name; drop one")
    return named_arguments(names, args, kwargs)


def _apply_decorators(
    kernel: Any, config: Config | None, named: dict[str, Any], copies: dict[str, Any]
) -> str:
    """Add the values of heuristics and of the config to both dicts; return the config as text.

    Heuristics get the caller's tensors, because they only read; a config's hook gets the copies.
    """
    text = ""
    while not is_jit(kernel):
        below, added = heuristic_values(kernel, named)
        if isinstance(kernel, Autotuner):
            if config is None and len(kernel.configs) > 1:
                raise InvalidConfig(
                    f"{kernel.base_fn.__name__} has {len(kernel.configs)} configs: pass config="
                )
            config = config or kernel.configs[0]
            check_conflicts(kernel.base_fn.__name__, config, named)
            text, added = config_text(config), config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook({**copies, **added})
        _check_names(kernel, added)
        named.update(added)
        copies.update(added)
        kernel = kernel.fn if below is kernel else below
    if config is not None and not text:
        raise InvalidConfig(
            f"config={config_text(config)}: {kernel.__name__} does not have a tuner; pass the "
            "values of the config as arguments of the call"
        )
    return text


def _check_names(kernel: Any, names: Iterable[str]) -> None:
    """Raise `InvalidSetting` for names that no launch takes; Triton raises when it compiles."""
    parameters = kernel.arg_names
    unknown = sorted(set(names) - {*parameters} - backend_options())
    if unknown:
        raise InvalidSetting(
            f"unknown name {', '.join(unknown)}: {base_function(kernel)[1].__name__} has the "
            f"parameters {', '.join(parameters)}, Triton has launch options (num_warps, ...), and "
            f"check_overlap has {', '.join(_OPTIONS)}"
        )


def _check_tensors(kernel: str, memory: Memory, **given: Sequence[str]) -> None:
    names = [view.name for view in memory.views]
    for option, wanted in given.items():
        if isinstance(wanted, str) or any(name not in names for name in wanted):
            raise InvalidSetting(
                f"{option}={wanted!r} must be a list of tensor arguments of {kernel}, which are "
                f"{', '.join(names)}"
            )


def interpreted_as(kernel: Any, grid: Any, workload: Mapping[str, Any], config: Config) -> str:
    """Return a config as the interpreter sees it, without launch options: equal texts run alike.

    Empty if a hook or a heuristic may read the whole config, so that none is known to run alike.
    """
    parameters = kernel.arg_names
    if not isinstance(kernel, Autotuner) or not is_jit(kernel.fn) or config.pre_hook is not None:
        return ""
    seen = {name: value for name, value in config.all_kwargs().items() if name in parameters}
    values = {**default_values(kernel), **workload, **config.all_kwargs()}
    sizes = grid_sizes(grid(values) if callable(grid) else grid)
    return repr((sorted(seen.items()), tuple(sizes)))
