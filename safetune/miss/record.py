"""`SAFETUNE_MODE=record`: stores a call of each key, for tuning offline and for counting.

A store keeps one call per key, with shapes and plain values. safetune reads only integer tensors,
once per key and process: lengths between offsets, and the range of other values. A failure here is
a line in the log, never an error.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from safetune.errors import KernelNotTransferable
from safetune.inputs import call_description
from safetune.keys.identity import base_function
from safetune.keys.written_key import kept_names
from safetune.messages import logger
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord, RecordedCall
from safetune.tuning.requests import TuningRequest

#: Why a call that torch.compile has traced cannot be rebuilt.
TRACED = (
    "torch.compile shows neither its grid nor its tensors' shapes: call safetune.prepare before "
    "you compile, or tune a workload of the kernel"
)

_ONLY_COUNTED = "is counted, but `safetune tune --recorded` cannot replay it"


def remember(
    request: TuningRequest, store: Store, problem: str = "", captured: bool = False
) -> None:
    """Store a call, or the reason why it cannot be rebuilt, if its key is new to the store.

    Never raises.

    Args:
        captured: the call is part of a CUDA graph capture, so no tensor can be read.
    """
    try:
        _, function = base_function(request.call.kernel)
        call = RecordedCall(
            key=request.key.digest,
            name=request.key.kernel.name,
            place=f"{function.__module__}:{function.__qualname__}",
            arguments=_arguments(request, problem, captured),
            created=time.time(),
        )
        store.put_key(KeyRecord.of(request.key))
        if store.put_call(call):
            logger.info("%s is recorded for %s", call.name, request.key)
    except Exception as error:
        _log_once(request.key.kernel.name, f"{type(error).__name__}: {error}")


def _arguments(request: TuningRequest, problem: str, captured: bool) -> dict[str, Any]:
    """Return the call as JSON data, or why it cannot be rebuilt from such data."""
    facts: dict[str, Any] = {
        "kernel": request.key.kernel.digest,
        "call": request.key.record(),
        "declared": request.declared,
    }
    if names := kept_names(base_function(request.call.kernel)[1]):
        facts["keep"] = names
    if problem:
        return {**facts, "problem": problem, "configs": list(request.by_digest)}
    try:
        described = call_description.describe(request.call, read=not captured)
        return {**facts, **described, "grids": _grids(request)}
    except KernelNotTransferable as error:
        _log_once(request.key.kernel.name, str(error), _ONLY_COUNTED)
        return _arguments(request, str(error), captured)


def _grids(request: TuningRequest) -> dict[str, list[int]]:
    """Return the grid of each config that has one; a grid function ends with its process."""
    sizes = zip(request.by_digest, request.grids.sizes, strict=True)
    return {digest: list(grid) for digest, grid in sizes if grid}


@functools.cache
def _log_once(kernel: str, reason: str, what: str = "is not recorded") -> None:
    logger.warning("a call of %s %s: %s", kernel, what, reason)
