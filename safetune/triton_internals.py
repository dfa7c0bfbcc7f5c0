"""Everything that reaches behind Triton's public face, in one place.

Triton 3.6 to 3.9. What differs between versions is told by the feature itself, or by `VERSION`.
tests/test_triton_internals.py pins each function here, and runs on every supported Triton.
"""

from __future__ import annotations

import sys
from typing import Any

#: The driver that `target_name` was last asked about, and the name of its target.
_last_target: tuple[Any, str] | None = None


def active_driver() -> Any | None:
    """Return the driver that Triton launches through; None while it cannot launch on a device.

    Makes Triton create its driver only once torch uses a device: that takes seconds, and imports
    torch.
    """
    from triton.runtime import driver

    if driver._active is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        try:
            return driver.active
        except RuntimeError:  # no device that Triton knows
            return None
    return driver._active


def target_name() -> str | None:
    """Return the name of the back end that Triton launches through, e.g. `cuda`, or None."""
    global _last_target
    active = active_driver()
    if active is None:
        return None
    if _last_target is None or _last_target[0] is not active:
        _last_target = active, str(active.get_current_target().backend)
    return _last_target[1]
