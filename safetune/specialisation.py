"""What Triton compiles a kernel once more for, beyond a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safetune import canonical
from safetune.call_form import CallForm, constexpr_names

if TYPE_CHECKING:
    from safetune.autotuner import Autotuner


def specialisation(
    tuner: Autotuner, form: CallForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what decides which binary a call needs: at least what Triton tells apart."""
    args, kwargs = form.pinned(args, kwargs)
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    constants = constexpr_names(tuner.fn)
    return tuple(
        (name, _exact(value) if name in constants or name not in tuner.arg_names else _kind(value))
        for name, value in sorted(named.items())
        if name not in ("grid", "warmup")
    )


def _exact(value: Any) -> Any:
    return canonical.dumps(canonical.encode(value))


def _kind(value: Any) -> Any:
    """What Triton looks at of an argument that is no constant."""
    if isinstance(value, (bool, float)):
        return type(value).__name__
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        return canonical.dtype_name(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return _exact(value)
