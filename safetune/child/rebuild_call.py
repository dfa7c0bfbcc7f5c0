"""A call rebuilt in the child, with the caller's inputs or those of `inputs=`.

The tensors of `inputs=` go through a memory file like the caller's, so all configs start from the
same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.child import failures, stand_ins
from safetune.child.arguments import Arguments
from safetune.errors import InvalidSetting, with_nearest
from safetune.inputs import kernel_pickle
from safetune.inputs.call import Call, may_be_address, tensors_in
from safetune.inputs.spans import Absent, Layout
from safetune.keys.identity import base_function

if TYPE_CHECKING:
    import torch

    from safetune.inputs.caller_view import CallerView


@dataclass(frozen=True)
class Rebuilt:
    """A call, and the objects that it uses."""

    arguments: Arguments
    #: Those of the call in order: with `torch` its own, else stand-ins for them.
    tensors: Sequence[Any]
    call: Call
    configs: list[Config]
    torch: bool
    kept: Any = None  # objects that addresses in the inputs may point to
    view: CallerView | None = None  # the caller's state that hooks may read, with torch


def rebuild(
    layout: Layout,
    blob: bytes,
    fd: int,
    use_device: Callable[[], object] = lambda: None,
    view: bytes = b"",
) -> Rebuilt:
    """Return the packed call with the tensors in the memory file `fd`.

    `use_device` makes the call's device current, also in torch if that is imported.

    Raises `InvalidSetting` if `inputs=` raises or does not return what the call needs.
    """
    arguments = Arguments(layout, fd)
    if "torch" not in sys.modules and stand_ins.can_stand_in(layout):
        tensors = stand_ins.of(arguments)
        call, configs = kernel_pickle.unpack(blob, tensors, stand_ins.Shape)
        # Unpacking imports the modules that the user's functions refer to.
        if "torch" not in sys.modules and _is_plain(call):
            return Rebuilt(arguments, tensors, call, configs, torch=False)
    import torch  # noqa: F401 - its device is set before anything is made with it

    use_device()
    found: CallerView | None = kernel_pickle.unpack(view) if view else None
    return replace(_with_torch(arguments, layout, blob, found), view=found)


def _is_plain(call: Call) -> bool:
    """Whether stand-ins have all that is known to be asked of a call's tensors."""
    hooks, named = call.hooks, call.named()
    changed = [named.get(name) for name in (*hooks.restore_value, *hooks.reset_to_zero)]
    tensors = [tensor for value in changed for tensor in tensors_in(value)]
    dense = all(x.is_dense() for x in tensors if isinstance(x, stand_ins.StandIn))
    return dense and hooks.do_bench is None and hooks.inputs is None and hooks.reference is None


def _with_torch(
    arguments: Arguments, layout: Layout, blob: bytes, view: CallerView | None
) -> Rebuilt:
    metas = {number: _meta(tensor) for number, tensor in layout.absent.items()}
    tensors = _merged(arguments.tensors, metas)
    if view is not None and not metas:
        tensors = [view.tensors[number].on(tensor) for number, tensor in enumerate(tensors)]
    call, configs = kernel_pickle.unpack(blob, tensors)
    if call.hooks.inputs is None:
        return Rebuilt(arguments, tensors, call, configs, torch=True)
    from safetune.inputs.snapshot import Snapshot

    made = _made(call, {id(meta): layout.absent[number] for number, meta in metas.items()})
    table = kernel_pickle.TensorTable()
    captured = [table.number(tensor) for tensor in arguments.tensors]
    packed = kernel_pickle.pack(made, "what `inputs=` returned", table)
    snapshot = Snapshot(table.tensors, index=call.index)
    kept = (call, made) if _may_point(made, table.tensors) else None
    del arguments, call, made, table  # their memory is freed before the copies are made
    arguments = Arguments(snapshot.layout, snapshot.fd)
    hooks = [arguments.tensors[number] for number in captured]
    call, configs = kernel_pickle.unpack(blob, _merged(hooks, metas))
    values = kernel_pickle.unpack(packed, arguments.tensors)
    args, kwargs = call.with_values(values)
    call = replace(call, args=args, kwargs=kwargs)
    return Rebuilt(arguments, arguments.tensors, call, configs, True, kept)


def values_of(call: Call, parameter: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `inputs=` or `reference=` returns for these arguments, by name.

    Raises `InvalidSetting` if the function raises or does not return values by argument name: a
    mistake in the program, which a retry does not cure.
    """
    function = getattr(call.hooks, parameter)
    what = described(call, parameter)
    try:
        returned: Any = function(dict(arguments))
    except (Exception, SystemExit) as error:
        if failures.is_lack_of_memory(error):
            raise
        raise InvalidSetting(f"{what} raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, Mapping):
        raise InvalidSetting(
            f"{what} returned {returned!r:.80}; it must return a dict of values by argument name"
        )
    if unknown := [name for name in returned if name not in arguments]:
        raise InvalidSetting(
            f"{what} returned a value for {with_nearest(unknown, arguments)}, which the call does "
            f"not pass; it passes {', '.join(arguments)}"
        )
    return dict(returned)


def described(call: Call, parameter: str) -> str:
    """Return a decorator parameter and its kernel as text for messages."""
    return f"{parameter}= of {base_function(call.kernel)[1].__name__}"


def _made(call: Call, absent: Mapping[int, Absent]) -> dict[str, Any]:
    """Call the factory and check its result."""
    import torch

    named, what = call.named(), described(call, "inputs")
    torch.manual_seed(0)
    made = values_of(call, "inputs", named)
    needed = [name for name, value in named.items() if _has_meta(value)]
    if missing := [name for name in needed if name not in made or _has_meta(made[name])]:
        raise InvalidSetting(f"{what} returned no value for {', '.join(missing)}")
    for name in needed:
        if isinstance(named[name], torch.Tensor):
            _check_kind(what, name, absent[id(named[name])], made[name])
    return made


def _check_kind(what: str, name: str, expected: Absent, value: Any) -> None:
    """The kernel is compiled for the caller's types and runs on the caller's kind of device."""
    import torch

    wanted, got = f"torch.{expected.dtype} tensor on {expected.device}", type(value).__name__
    if isinstance(value, torch.Tensor):
        got = f"{value.dtype} tensor on {value.device.type}"
    if got != wanted:
        raise InvalidSetting(f"{what} returned a {got} for {name}, not a {wanted}")


def _has_meta(value: Any) -> bool:
    """Whether a meta tensor is in a value, however deep."""
    table = kernel_pickle.TensorTable()
    kernel_pickle.pack(value, "an argument", table)
    return any(tensor.is_meta for tensor in table.tensors)


def _may_point(made: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the made values may contain addresses."""
    import torch

    integers = [tensor for tensor in tensors if tensor.dtype in (torch.int64, torch.uint64)]
    return bool(integers) or any(map(may_be_address, made.values()))


def _merged(
    present: Sequence[torch.Tensor], metas: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """All tensors of the packed call in its order."""
    tensors = list(present)
    for number in sorted(metas):
        tensors.insert(number, metas[number])
    return tensors


def _meta(absent: Absent) -> torch.Tensor:
    import torch

    dtype = getattr(torch, absent.dtype)
    return torch.empty_strided(absent.shape, absent.stride, dtype=dtype, device="meta")
