"""What Triton compiles a kernel once more for, beyond a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config, Heuristics

from safetune.keys import encoding
from safetune.launch.call_shape import LAUNCH_KEYWORDS, CallForm, constexpr_names

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner


def specialisation(
    tuner: Autotuner,
    form: CallForm,
    config: Config,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what decides which binary of a config a call needs: at least what Triton tells apart.

    The tuner's heuristics see the config, and what they say is a part of that.
    """
    args, kwargs = form.pinned(args, kwargs)
    _, said = below_heuristics(tuner.fn, args, {**kwargs, **config.all_kwargs()})
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs, **said}
    constants = constexpr_names(tuner.fn)
    return tuple(
        (name, _exact(value) if name in constants or name not in tuner.arg_names else _kind(value))
        for name, value in sorted(named.items())
        if name not in LAUNCH_KEYWORDS
    )


def below_heuristics(
    kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return what is below a kernel's heuristics, and what they say for a launch, by name."""
    said: dict[str, Any] = {}
    while type(kernel) is Heuristics:
        for name, heuristic in kernel.values.items():
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs, **said}
            said[name] = heuristic(named)
        kernel = kernel.fn
    return kernel, said


def _exact(value: Any) -> Any:
    return encoding.dumps(encoding.encode(value))


def _kind(value: Any) -> Any:
    """What Triton looks at of an argument that is no constant."""
    if isinstance(value, (bool, float)):
        return type(value).__name__
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        return encoding.dtype_name(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return _exact(value)
