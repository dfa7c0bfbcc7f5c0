"""triton.Config: checks, identity, text, and JSON form.

A stored row never becomes a `Config`. It has a config's digest, so it can only select one of the
declared configs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from safetune.errors import InvalidConfig, InvalidSetting, SettingWarning, with_nearest
from safetune.keys import encoding
from safetune.keys.identity import PLAIN, encode, hook_identity, in_process, is_layer, shown
from safetune.keys.written_key import of_a_library
from safetune.messages import logger, warn

if TYPE_CHECKING:
    from triton.runtime.autotuner import Config

#: The options of a config and their defaults, in the order of its parameters.
OPTION_DEFAULTS: dict[str, Any] = {
    "num_warps": 4,
    "num_stages": 3,
    "num_ctas": 1,
    "maxnreg": None,
    "ir_override": None,
}


def config_record(config: Config) -> dict[str, Any]:
    """Return a config as plain JSON data, its pre_hook as a digest of the hook's code."""
    record: dict[str, Any] = {name: encode(value) for name, value in config.all_kwargs().items()}
    if config.pre_hook is not None:
        record["pre_hook"] = hook_identity(config.pre_hook)
    return record


def config_digest(config: Config) -> str:
    """Return the identity of a config, equal in all processes and Triton versions."""
    return encoding.digest(config_record(config))


def declared_digest(configs: Iterable[Config], same_bits: bool = False) -> str:
    """Return the identity of a list of configs to choose from, in any order.

    A choice with `same_bits` has a separate identity.
    """
    policies = ["same_bits"] * same_bits
    return encoding.digest([*sorted(map(config_digest, configs)), *policies])


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to show to people: warps, stages, and any others that are set."""
    always = ("num_warps", "num_stages")
    names = [name for name in OPTION_DEFAULTS if name in options]
    return {n: options[n] for n in names if n in always or options[n] != OPTION_DEFAULTS[n]}


def config_text(config: Config) -> str:
    """Return a config as text: its kwargs by name, then the options that are not defaults."""
    kwargs = {name: config.kwargs[name] for name in sorted(config.kwargs)}
    parts = kwargs | shown_options(vars(config))
    return " ".join(f"{name}={_shown(value)}" for name, value in parts.items())


def _shown(value: Any) -> Any:
    is_function = inspect.isfunction(value) or is_layer(value)
    return shown(value) if is_function else value


def check_configs(
    kernel_name: str, configs: Iterable[Config] | None, parameters: Sequence[str]
) -> list[Config]:
    """Return the configs to try, without duplicates; Triton's default config for an empty list.

    If the caller's list needs no change, returns that list, because the caller may add to it later.

    Raises:
        InvalidConfig: an entry is not a `triton.Config`, or sets something that is neither a kernel
            parameter nor an option of an installed back end.
    """
    from triton.runtime.autotuner import Config

    if configs is not None and not isinstance(configs, Iterable):
        raise InvalidConfig(
            f"configs={configs} of {kernel_name} is not a list of triton.Configs; write [...]"
        )
    checked: list[Config] = []
    seen: set[Any] = set()
    for position, config in enumerate(configs or ()):
        if not (isinstance(config, Config) and isinstance(config.kwargs, Mapping)):
            raise InvalidConfig(
                f"configs[{position}] of {kernel_name} is {config!r} ({type(config).__name__}); "
                "it must be a triton.Config, e.g. triton.Config({'BLOCK': 128}, num_warps=4)"
            )
        names = config.kwargs
        check_functions(kernel_name, {f"configs[{position}].pre_hook": config.pre_hook})
        if unknown := [n for n in names if n not in parameters and n not in backend_options()]:
            raise InvalidConfig(
                f"configs[{position}] of {kernel_name} sets {with_nearest(unknown, parameters)}, "
                f"which is neither a parameter of the kernel ({', '.join(parameters)}) nor a "
                "back-end option"
            )
        if (parts := _parts(config)) in seen:
            text = (
                f"configs[{position}] of {kernel_name} is listed twice "
                f"({config_text(config)}); the second is dropped"
            )
            if of_a_library.get():
                logger.info("%s", text)
            else:
                warn(text, SettingWarning)
            continue
        checked.append(config)
        seen.add(parts)
    if isinstance(configs, list) and len(checked) == len(configs) > 0:
        return configs
    return checked or [Config({})]


def _parts(config: Config) -> tuple[Any, ...]:
    """Return what a config sets, values that are not plain as the objects that they are.

    What those are is known once the whole module is there, see `distinct`.
    """
    values = (*sorted(config.all_kwargs().items()), ("pre_hook", config.pre_hook))
    plain = {*PLAIN, float}
    return tuple((n, type(v), repr(v) if type(v) in plain else id(v)) for n, v in values)


def distinct(configs: Iterable[Config]) -> tuple[Config, ...]:
    """Return the first config of each digest, in order, whatever `==` says."""
    found: dict[str, Config] = {}
    for config in configs:
        found.setdefault(config_digest(config), config)
    return tuple(found.values())


def _is_plain(config: Config) -> bool:
    values = config.kwargs.values()
    return config.pre_hook is None and all(type(v) in PLAIN or type(v) is float for v in values)


def without_identity(configs: Iterable[Config]) -> str:
    """Return the name of a config value that has no identity in other processes; empty without
    one.
    """
    for config in configs:
        if _is_plain(config):
            continue
        for name, data in config_record(config).items():
            if in_process(data):
                return name
    return ""


def check_conflicts(kernel_name: str, config: Config, passed: Iterable[str]) -> None:
    """Raise `InvalidConfig` if the call passes a name that the config sets."""
    conflicts = sorted(set(passed) & set(config.all_kwargs()))
    if conflicts:
        raise InvalidConfig(
            f"Conflicting meta-parameters: {', '.join(conflicts)}. The configs of {kernel_name} "
            "set them, and so does this call: leave them out of the call or of the configs."
        )


@functools.cache
def backend_options() -> frozenset[str]:
    """Return the launch options of all installed back ends, without loading a driver."""
    from triton.backends import backends

    return frozenset(
        field.name
        for backend in backends.values()
        for value in vars(sys.modules[backend.compiler.__module__]).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
        for field in dataclasses.fields(value)
    )


def check_names(
    kernel: str, arg_names: list[str], parameters: Mapping[str, Iterable[str] | None]
) -> None:
    """Raise `InvalidSetting` for a name that is not an argument of the kernel."""
    for parameter, names in parameters.items():
        if not (names is None or isinstance(names, Iterable)):
            raise InvalidSetting(
                f"{parameter}={names!r} of {kernel} is not a list of argument names; write "
                f'{parameter}=["{arg_names[0]}"]'
            )
        unknown = [name for name in names or () if name not in arg_names]
        if unknown and isinstance(names, str):
            raise InvalidSetting(
                f'{parameter}={names!r} of {kernel} is one string; write {parameter}=["{names}"]'
            )
        if unknown:
            raise InvalidSetting(
                f"{parameter} of {kernel} contains names that are not kernel arguments: "
                f"{with_nearest(unknown, arg_names)}. "
                f"Valid argument names are: {', '.join(arg_names)}."
            )


def check_functions(kernel: str, parameters: Mapping[str, object]) -> None:
    """Raise `InvalidSetting` unless each value is None, a function or a proposer."""
    for parameter, value in parameters.items():
        proposes = parameter == "proposer"
        function = getattr(value, "propose", None) if proposes else value
        if value is not None and not callable(function):
            wanted = "an object with a method `propose`" if proposes else "a function"
            raise InvalidSetting(f"{parameter}={value!r} of {kernel} is not {wanted}")


def check_seconds(owner: str, **limits: Any) -> None:
    """Raise `InvalidSetting` for a limit that is not a positive number."""
    for name, value in limits.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 < value < float("inf")):
            raise InvalidSetting(f"{name}={value!r} of {owner} must be a number of seconds over 0")


def space(*, where: Callable[[Any], object] | None = None, **values: Iterable[Any]) -> list[Config]:
    """Return a list of configs: every combination of the values, the last name varying fastest.

    `space(BM=[64, 128], num_warps=[4, 8], where=lambda c: c.BM >= 16 * c.num_warps)`. The names
    num_warps, num_stages, num_ctas, maxnreg and ir_override are Triton's; any other is a
    parameter of the kernel.

    Args:
        where: returns whether to keep a combination, which has its values as attributes.

    Raises:
        InvalidSetting: the values of a name are not a list, or no combination is left.
    """
    from triton.runtime.autotuner import Config

    for name, given in values.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise InvalidSetting(f"{name}={given!r} is not a list of values; write {name}=[...]")
    products = itertools.product(*values.values())
    combinations = [dict(zip(values, chosen, strict=True)) for chosen in products]
    kept = [c for c in combinations if where is None or where(SimpleNamespace(**c))]
    if not kept:
        raise InvalidSetting(
            f"none of {len(combinations)} configs is left: where= rejects all, or a list is empty"
        )
    return [
        Config(
            {name: value for name, value in chosen.items() if name not in OPTION_DEFAULTS},
            **{name: chosen[name] for name in OPTION_DEFAULTS if name in chosen},
        )
        for chosen in kept
    ]


def tupled(names: Any) -> Any:
    """Return names in a form that can be read repeatedly; a single string, and what is no list,
    stay as they are.
    """
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else names
