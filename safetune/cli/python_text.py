"""A stored config as the source of a `triton.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What `Config` takes beside its kwargs, with the value that it is created with by default.
_OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "ir_override": None}


def python_config(record: Mapping[str, Any]) -> str:
    """Return the source of a stored config; its hook is only mentioned."""
    own = {*_OPTIONS, "pre_hook"}
    kwargs = ", ".join(f'"{n}": {_value(record[n])}' for n in sorted(record) if n not in own)
    options = [
        f"{name}={record[name]!r}"
        for name, default in _OPTIONS.items()
        if (name in ("num_warps", "num_stages") and name in record)
        or record.get(name, default) != default
    ]
    text = f"triton.Config({', '.join([f'{{{kwargs}}}', *options])}),"
    return f"{text}  # and its pre_hook" if record.get("pre_hook") is not None else text


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
