"""The values that a text works with, as far as it tells them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from safetune.config import OPTION_DEFAULTS, shown_options
from safetune.frozen import dataclass


class _Unknown:
    """A value that the text does not tell."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


class Items(list[Any]):
    """A list, tuple or set; not `complete` where the text may add others or leave some out."""

    def __init__(self, items: Iterable[Any] = (), complete: bool = True) -> None:
        super().__init__(items)
        self.complete = complete


@dataclass(frozen=True)
class WrittenConfig:
    """A `triton.Config`."""

    node: ast.Call
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    pre_hook: Any = None

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """What equals that of a config which is the same; None where a value is not known."""
        parts = [*self.kwargs.items(), *self.options.items()]
        if any(value is UNKNOWN for _, value in parts) or self.pre_hook is UNKNOWN:
            return None
        return (*sorted((name, repr(value)) for name, value in parts), id(self.pre_hook))

    def __str__(self) -> str:
        parts = {**self.kwargs, **shown_options(self.options)}
        return " ".join(f"{name}={value!r}" for name, value in parts.items())


#: The parameters of `triton.Config`, in their order.
POSITIONS = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg", "pre_hook", "ir_override")


def written_config(node: ast.Call, args: list[Any], keywords: Mapping[str, Any]) -> WrittenConfig:
    """Return the config that a call of `triton.Config` makes."""
    given = {**dict(zip(POSITIONS, args, strict=False)), **keywords}
    kwargs = given.get("kwargs", {})
    options = {name: given.get(name, default) for name, default in OPTION_DEFAULTS.items()}
    known = kwargs if isinstance(kwargs, Mapping) else {}
    return WrittenConfig(node, known, options, given.get("pre_hook"))
