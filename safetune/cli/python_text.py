"""A stored config as the source of a `triton.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetune.cli.output import config_parts


def python_config(record: Mapping[str, Any]) -> str:
    """Return the source of a stored config; its hook is only mentioned."""
    kwargs, options = config_parts(record)
    hook = "  # and its pre_hook" * (options.pop("pre_hook", None) is not None)
    given = ", ".join(f'"{name}": {_value(value)}' for name, value in kwargs.items())
    parts = [f"{{{given}}}", *(f"{name}={value!r}" for name, value in options.items())]
    return f"triton.Config({', '.join(parts)}),{hook}"


def _value(value: Any) -> str:
    """Return an encoded value, as `keys.encoding.encode` makes it, as source."""
    if not isinstance(value, dict):
        return repr(value)
    if "tuple" in value:
        parts = [_value(each) for each in value["tuple"]]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if "dict" in value:
        return f"{{{', '.join(f'{_value(k)}: {_value(v)}' for k, v in value['dict'])}}}"
    if "dtype" in value:
        return f"tl.{value['dtype']}"
    return f'float("{value["float"]}")' if "float" in value else str(value.get("repr", value))
