"""Replacements for the memory operations of Triton's interpreter.

All loads, stores and atomics of a kernel, through pointers, block pointers and descriptors, end in
the few methods of the interpreter's builder that this module replaces. Each access is recorded and
translated to real addresses; Triton's own method then performs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from safetune.verify.watch import Access, Watch


class Instruments:
    """The replacements for one builder and one launch, under the names of the builder's methods."""

    def __init__(self, watch: Watch, builder: Any, each_program: Callable[[], object]) -> None:
        self._watch = watch
        self._builder = builder
        self._each_program = each_program
        self._relaxed = False  # whether volatile loads are those of a relaxed poll
        # Triton before 3.9 lacks some.
        names = [name for name in vars(Instruments) if hasattr(builder, name) and name[0] != "_"]
        self._own: Any = SimpleNamespace(**{name: getattr(builder, name) for name in names})
        # The target of an atomic without a mask whose address is not in any argument.
        self._nowhere = np.zeros(2, dtype=np.uint64)

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods by name in the builder."""
        return {name: getattr(self, name) for name in vars(self._own)}

    def set_grid_idx(self, *ids: int) -> None:
        """Begin a program, which need not touch any memory."""
        self._each_program()
        self._watch.check_time((f"program {ids}",))
        self._own.set_grid_idx(*ids)

    def create_masked_load(
        self, pointer: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        """Load; a volatile load, which is part of an atomic load, may wait for another program."""
        volatile = named["is_volatile"] if "is_volatile" in named else rest[-1]
        access = Access.POLL if volatile else Access.READ
        acquires = bool(volatile) and not self._relaxed
        real, allowed = self._watched(access, pointer, mask, acquires=acquires)
        return self._own.create_masked_load(real, allowed, other, *rest, **named)

    def create_atomic_load(self, pointer: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Load a value that another program may be storing atomically."""
        real, allowed = self._watched(Access.POLL, pointer, mask, acquires=_acquires(sem))
        return self._own.create_masked_load(real, allowed, None, None, True)

    def create_atomic_poll(
        self, pointer: Any, expected: Any, timeout: Any, sem: Any, scope: Any
    ) -> Any:
        """Load, volatile, until the value is the expected one."""
        self._relaxed = not _acquires(sem)
        try:
            return self._own.create_atomic_poll(pointer, expected, timeout, sem, scope)
        finally:
            self._relaxed = False

    def create_masked_store(
        self, pointer: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        """Store as many bytes as the pointer's elements have."""
        real, allowed = self._watched(Access.STORE, pointer, mask)
        return self._own.create_masked_store(
            real, _as_stored(pointer, value), allowed, *rest, **named
        )

    def create_atomic_store(self, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Store a value that another program may be polling."""
        real, allowed = self._watched(Access.ATOMIC, pointer, mask, releases=_releases(sem))
        return self._own.create_masked_store(real, _as_stored(pointer, value), allowed, None)

    def create_atomic_cas(
        self, pointer: Any, compare: Any, value: Any, sem: Any, scope: Any
    ) -> Any:
        """Compare and swap."""
        real, _ = self._updated(pointer, None, sem)
        return self._own.create_atomic_cas(real, compare, value, sem, scope)

    def create_atomic_rmw(
        self, op: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        """Apply an atomic update: add, exchange and so on."""
        real, allowed = self._updated(pointer, mask, sem)
        return self._own.create_atomic_rmw(op, real, value, allowed, sem, scope)

    def _updated(self, pointer: Any, mask: Any, sem: Any) -> tuple[Any, Any]:
        """Record an atomic update; return the real pointer and mask."""
        orders = {"acquires": _acquires(sem), "releases": _releases(sem)}
        real, allowed = self._watched(Access.ATOMIC, pointer, mask, **orders)
        real.data[~allowed.data] = self._nowhere.ctypes.data
        return real, allowed

    def _watched(self, access: Access, pointer: Any, mask: Any, **orders: bool) -> tuple[Any, Any]:
        """Record an operation; return the real pointer and mask."""
        addresses = np.atleast_1d(pointer.data)
        if mask is None:
            active = np.ones(addresses.shape, dtype=bool)
        else:  # of a block pointer, Triton 3.6 gives the array itself
            active = np.asarray(mask if isinstance(mask, np.ndarray) else mask.data, dtype=bool)
            active = np.broadcast_to(active, addresses.shape)
        self._watch.enter(self._builder.grid_idx)
        itemsize = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        real, allowed = self._watch.access(access, addresses, active, itemsize, **orders)
        shape = pointer.data.shape
        return (
            TensorHandle(real.reshape(shape), pointer.dtype),
            TensorHandle(allowed.reshape(shape), self._builder.get_int1_ty()),
        )


def _as_stored(pointer: Any, value: Any) -> Any:
    """Return a value in the width of the pointer's elements; a histogram is wider than its type."""
    element = pointer.get_element_ty()
    wanted = interpreter._get_np_dtype(element)
    if value.data.dtype.itemsize == wanted.itemsize:
        return value
    return TensorHandle(value.data.astype(wanted), element)


def _acquires(sem: Any) -> bool:
    return sem.name in ("ACQUIRE", "ACQUIRE_RELEASE")


def _releases(sem: Any) -> bool:
    return sem.name in ("RELEASE", "ACQUIRE_RELEASE")
