"""The caller's state that hooks may read besides bytes: tensor attributes, torch settings.

Hooks run in a child, on tensors rebuilt from bytes, which lack this state. Only calls with hooks
pay for it, and only a child with torch reads it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from safetune.errors import KernelNotTransferable
from safetune.inputs import kernel_pickle


@dataclass(frozen=True)
class TensorFacts:
    """The facts of a tensor besides its elements."""

    requires_grad: bool
    is_leaf: bool
    kind: bytes  # its class, packed; empty for `torch.Tensor`
    attributes: dict[str, Any] = field(default_factory=dict)  # of its own, that are plain data

    def on(self, tensor: Any) -> Any:
        """Return a tensor with the same elements and, as far as possible, these facts."""
        import torch

        if self.requires_grad and not self.is_leaf:  # which a hook may change in place
            leaf = torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
            with torch.enable_grad():
                result = leaf * 1
            result.data, tensor = tensor, result
        if self.kind:
            with contextlib.suppress(Exception):  # a class may refuse in any way
                kind = kernel_pickle.unpack(self.kind)
                parameter = kind is torch.nn.Parameter
                tensor = kind(tensor, False) if parameter else tensor.as_subclass(kind)
        tensor.__dict__.update(self.attributes)
        return tensor.requires_grad_() if self.requires_grad and self.is_leaf else tensor


@dataclass(frozen=True)
class CallerView:
    """The facts of tensors by their number, and the settings of the calling thread by name.

    `kinds` are those of the devices whose autocast settings count.
    """

    tensors: dict[int, TensorFacts]
    kinds: list[str]
    settings: dict[str, Any]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Run the user's code under these settings; safetune's own runs under the child's."""
        before = _settings(self.kinds)
        _change(self.kinds, self.settings)
        try:
            yield
        finally:
            _change(self.kinds, before)


def _access(kinds: Iterable[str]) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return how to read and to change each setting, by name."""
    import torch

    access: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "grad": (torch.is_grad_enabled, torch.set_grad_enabled),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    }
    for kind in kinds:
        access[f"autocast {kind}"] = (
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        access[f"autocast {kind} dtype"] = (
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        )
    return access


def _settings(kinds: Iterable[str]) -> dict[str, Any]:
    return {name: read() for name, (read, _) in _access(kinds).items()}


def _change(kinds: Iterable[str], settings: dict[str, Any]) -> None:
    for name, (read, write) in _access(kinds).items():
        if read() != settings[name]:
            write(settings[name])


def packed(tensors: Sequence[Any]) -> bytes:
    """Return the view for hooks of a call with these tensors."""
    if not tensors:
        return b""
    import torch

    facts = {number: _facts_of(tensor) for number, tensor in enumerate(tensors)}
    kinds = sorted({"cpu", *(tensor.device.type for tensor in tensors)} - {"meta"})
    kinds = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
    view = CallerView(facts, kinds, _settings(kinds))
    return kernel_pickle.pack(view, "the settings of torch")


def _facts_of(tensor: Any) -> TensorFacts:
    import torch

    kind = b""
    if type(tensor) is not torch.Tensor:
        with contextlib.suppress(KernelNotTransferable):
            kind = kernel_pickle.pack(type(tensor), "a class", by_value=[type(tensor)])
    try:
        attributes = {name: v for name, v in vars(tensor).items() if _is_data(v)}
    except Exception:  # `__dict__` may be code of a subclass
        attributes = {}
    return TensorFacts(tensor.requires_grad, tensor.is_leaf, kind, attributes)


def _is_data(value: Any) -> bool:
    """Whether a value is plain: other attributes of a parameter may hold a whole model."""
    import torch

    if type(value) in (tuple, list, set, frozenset, torch.Size):
        return all(map(_is_data, value))
    if type(value) is dict:
        return all(map(_is_data, [*value, *value.values()]))
    plain = (type(None), bool, int, float, str, bytes, torch.dtype)
    return type(value) in plain or isinstance(value, enum.Enum)
