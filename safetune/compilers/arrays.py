"""Arrays of torch, numpy and JAX, treated alike; none of the three needs to be installed."""

from __future__ import annotations

import sys
from typing import Any

from safetune.both import backend
from safetune.errors import InvalidSetting
from safetune.keys import encoding


def is_array(value: Any) -> bool:
    """Whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def is_traced(value: Any) -> bool:
    """Whether a value is JAX's placeholder for one while it traces a function."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def has_data(value: Any) -> bool:
    """Whether an array has data, unlike a meta tensor, a traced array or a bare shape."""
    if hasattr(value, "untyped_storage"):
        return value.device.type != "meta"
    return not is_traced(value) and hasattr(value, "__array__")


def plain(value: Any) -> Any:
    """Return a numpy scalar as Python's, a scalar type as its dtype, anything else unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, type) and issubclass(value, numpy.generic):
        return numpy.dtype(value)
    if not hasattr(value, "shape") and encoding.is_dtype(getattr(value, "dtype", None)):
        return value.dtype
    return value


def meta(value: Any) -> Any:
    """Return an array as a tensor without memory, any other value as it is."""
    if not is_array(value) or hasattr(value, "untyped_storage"):
        return value
    import torch

    return torch.empty(tuple(value.shape), dtype=_torch_dtype(value.dtype), device="meta")


def tensor(value: Any, index: int) -> Any:
    """Return an array as a torch tensor on the device, without a copy if it is there already."""
    if not is_array(value):
        return value
    import torch

    if hasattr(value, "untyped_storage") and value.device.type != "meta":
        return value
    device = f"{backend.required().torch_type}:{index}" if index >= 0 else "cpu"
    if not has_data(value):
        return torch.zeros(tuple(value.shape), dtype=_torch_dtype(value.dtype), device=device)
    if type(value).__module__.partition(".")[0] == "numpy":
        return torch.tensor(value, device=device)
    return torch.from_dlpack(value).to(device)


def _torch_dtype(dtype: Any) -> Any:
    import torch

    name = encoding.dtype_name(plain(dtype))
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidSetting(f"an argument has dtype {name}, which torch does not have")
    return found
