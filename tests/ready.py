"""Whether a descriptor is ready. `select.select` cannot be asked of one above 1023, which the
processes of a long run have; `poll` can.
"""

from __future__ import annotations

import select


def is_ready(descriptor: int, within_s: float = 0.0) -> bool:
    """Whether there is something to read, or a process has ended, now or within some seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
