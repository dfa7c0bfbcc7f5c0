"""What the parent asks of its children, and what a tuning is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from triton.runtime.autotuner import Config

from safetune.keys.tuning_key import TuningKey
from safetune.launch.call_shape import named_arguments
from safetune.store.records import KeyRecord


@dataclass(frozen=True)
class Hooks:
    """What runs around a launch, in the child. The first five are those of `triton.autotune`.

    Attributes:
        scratch: arguments whose contents are nobody's result, so that they are not compared.
        reference: called with the arguments by name, returns what written ones should hold.
        inputs: called with the arguments by name, tensors as meta tensors; returns what to tune on.
    """

    pre_hook: Callable[..., object] | None = None
    post_hook: Callable[..., object] | None = None
    reset_to_zero: tuple[str, ...] = ()
    restore_value: tuple[str, ...] = ()
    do_bench: Callable[..., Any] | None = None
    scratch: tuple[str, ...] = ()
    reference: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    inputs: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    def identity_parts(self) -> tuple[Any, ...]:
        """Return what a kernel's identity covers besides the kernel; digests rest on the order."""
        return (
            self.pre_hook,
            self.post_hook,
            self.do_bench,
            self.reset_to_zero,
            self.restore_value,
            self.scratch,
            self.reference,
            self.inputs,
        )


@dataclass(frozen=True)
class Limits:
    """How long a child may take, and how many configs it may live for.

    Attributes:
        compile_timeout_s: for one config's compilation.
        run_timeout_s: for one config's launches, all of them together.
        fresh_process: a new measuring child for every config.
        compile_memory_bytes: what a compile child, and each process that it starts, may allocate.
    """

    compile_timeout_s: float = 300.0
    run_timeout_s: float = 30.0
    fresh_process: bool = False
    compile_memory_bytes: int = 8 << 30


@dataclass(frozen=True)
class Call:
    """One launch, as its caller wrote it.

    Attributes:
        kernel: the object below the autotuner: a jit function, or heuristics around one.
        args, kwargs: without `grid` and `warmup`.
        pins: for each dropped name, the constant that the compiled kernel sees.
        index: the device's index in this process; -1 in the interpreter.
    """

    kernel: Any
    arg_names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grid: Any
    pins: Mapping[str, Any]
    hooks: Hooks
    index: int

    @property
    def interpreted(self) -> bool:
        """Whether the kernel runs in Triton's interpreter: nothing to compile, no device."""
        return self.index < 0

    def named(self) -> dict[str, Any]:
        """Return the arguments by name, with the caller's values."""
        return named_arguments(self.arg_names, self.args, self.kwargs)

    def pinned(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments as the compiled kernel gets them."""
        pins = self.pins
        positional = named_arguments(self.arg_names, self.args)
        args = tuple(pins.get(name, value) for name, value in positional.items())
        return args, {name: pins.get(name, value) for name, value in self.kwargs.items()}


@dataclass(frozen=True)
class TuningRequest:
    """One miss.

    Attributes:
        configs: those left after pruning, in the order they were declared.
        declared: digest over the whole declared list; a choice made from another is not final.
        force: measure everything again, and open the next generation.
        marks: for every outcome.
    """

    key: TuningKey
    call: Call
    configs: tuple[Config, ...]
    declared: str
    limits: Limits = field(default_factory=Limits)
    force: bool = False
    marks: tuple[str, ...] = ()


def key_record(key: TuningKey) -> KeyRecord:
    """Return the row that a key's trials and choice point at."""
    return KeyRecord(
        digest=key.digest,
        kernel_name=key.kernel.name,
        kernel_digest=key.kernel.digest,
        kernel_source=key.kernel.source,
        kernel_file=key.kernel.file,
        kernel_line=key.kernel.line,
        device_digest=key.device.digest,
        device=key.device.record(),
        toolchain=key.toolchain.record(),
        call=key.record(),
    )


def owners_of(named: dict[str, Any], tensors: Sequence[Any]) -> list[str]:
    """Return the arguments that each tensor is or is part of, as `x, y`; nothing for a hook's."""
    owners: dict[int, list[str]] = {id(tensor): [] for tensor in tensors}
    for name, value in named.items():
        for leaf in leaves(value):
            if name not in owners.get(id(leaf), [name]):
                owners[id(leaf)].append(name)
    return [", ".join(owners[id(tensor)]) for tensor in tensors]


def leaves(value: Any) -> Iterator[Any]:
    """Yield an argument's tensors and plain values: of a tuple, or a descriptor's base."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from leaves([getattr(value, field.name) for field in fields(value)])
    else:
        yield value
