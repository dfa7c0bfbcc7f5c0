"""Triton 3.9 unloads a kernel from the device when Python collects it; not during a capture."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from safetune.keys import device

_lock = threading.Lock()
_captures = 0
_unload: Callable[[Any], object] | None = None


@contextlib.contextmanager
def modules_stay_loaded() -> Iterator[None]:
    """Leave kernels that are collected meanwhile on the device, for as long as the process lives.

    Triton 3.9's `CompiledKernel.__del__` calls cuModuleUnload, and Python's collector may run at
    any allocation. The driver may refuse that call under capture, and a graph that has captured a
    launch of the kernel needs its code. Triton 3.6 never unloads.
    """
    utils = device.active_driver().utils
    if not hasattr(utils, "unload_module"):
        yield
        return
    _begin(utils)
    try:
        yield
    finally:
        _end(utils)


def _begin(utils: Any) -> None:
    global _captures, _unload
    with _lock:
        _captures += 1
        if _captures == 1:
            _unload, utils.unload_module = utils.unload_module, _leave


def _end(utils: Any) -> None:
    global _captures
    with _lock:
        _captures -= 1
        if not _captures:
            utils.unload_module = _unload


def _leave(module: Any) -> None:
    """Takes the place of the driver's call."""
