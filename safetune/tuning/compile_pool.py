"""Compiles configs on all usable cores, in children that see no GPU.

Each child has one job at work and one waiting, so that it never idles while the parent is busy
measuring. A child that dies or overruns its deadline costs the config it was compiling: another
child takes its place, and the job that was waiting.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from safetune.errors import WorkerUnavailable
from safetune.outcome import Outcome, Verdict
from safetune.tuning import process, wire
from safetune.tuning.answers import reply_outcome
from safetune.tuning.worker import Child, ChildFailed

#: What a run-side verdict is called when it happens to a compiler.
_COMPILE_VERDICTS = {
    Verdict.TIMEOUT: Verdict.COMPILE_TIMEOUT,
    Verdict.DIED: Verdict.COMPILE_CRASH,
}
_DEPTH = 2


@dataclass(frozen=True)
class Compiled:
    """One config's compilation: its outcome and, if that is ok, what the metadata says."""

    config: int
    outcome: Outcome
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Slot:
    child: Child
    jobs: deque[int] = field(default_factory=deque)
    deadline: float = 0.0


def _pool_size(cpus: int) -> int:
    """All cores, less one where there are enough for the measuring child to have its own."""
    return cpus - 1 if cpus >= 4 else cpus


class CompilePool:
    """Compiles the specs of one kernel.

    Args:
        kernel: the packed jit function (`kernel_ref.pack`).
        timeout_s: for one config.
    """

    def __init__(self, kernel: bytes, timeout_s: float, size: int | None = None) -> None:
        self._kernel = kernel
        self._timeout_s = timeout_s
        self._size = size or _pool_size(process.usable_cpus())

    def compile(self, specs: Mapping[int, bytes]) -> Iterator[Compiled]:
        """Yield each config's result as it is done, in no particular order.

        Raises:
            WorkerUnavailable: no child can be started.
        """
        waiting = deque(specs)
        slots: dict[int, _Slot] = {}
        try:
            while waiting or slots:
                self._fill(slots, waiting, specs)
                yield from self._collect(slots, waiting, specs)
        finally:
            for slot in slots.values():
                slot.child.kill()

    def _fill(
        self, slots: dict[int, _Slot], waiting: deque[int], specs: Mapping[int, bytes]
    ) -> None:
        while waiting and len(slots) < self._size:
            try:
                child = Child(gpu_blind=True)
            except WorkerUnavailable:
                if not slots:
                    raise
                self._size = len(slots)  # as many as the system allows
                break
            slots[child.pipe.fileno()] = _Slot(child)
            self._feed(slots[child.pipe.fileno()], waiting, specs, depth=1)
        for slot in slots.values():
            self._feed(slot, waiting, specs, depth=_DEPTH)

    def _feed(
        self, slot: _Slot, waiting: deque[int], specs: Mapping[int, bytes], depth: int
    ) -> None:
        while waiting and len(slot.jobs) < depth:
            config = waiting.popleft()
            if not slot.jobs:
                slot.deadline = time.monotonic() + self._timeout_s
            slot.jobs.append(config)
            job = {"op": "compile", "kernel_size": len(self._kernel)}
            slot.child.tell(job, self._kernel + specs[config], timeout_s=self._timeout_s)

    def _collect(
        self, slots: dict[int, _Slot], waiting: deque[int], specs: Mapping[int, bytes]
    ) -> Iterator[Compiled]:
        poll = select.poll()
        for fd in slots:
            poll.register(fd, select.POLLIN)
        soonest = min(slot.deadline for slot in slots.values())
        ready = {fd for fd, _ in poll.poll(max(0.0, soonest - time.monotonic()) * 1000)}
        now = time.monotonic()
        for fd, slot in list(slots.items()):
            if fd not in ready and slot.deadline > now:
                continue
            compiled, alive = self._result(slot)
            if alive:
                slot.deadline = time.monotonic() + self._timeout_s
                self._feed(slot, waiting, specs, _DEPTH)
            else:
                waiting.extendleft(reversed(slot.jobs))
            if not alive or not slot.jobs:
                del slots[fd]
                slot.child.kill()
            yield compiled

    def _result(self, slot: _Slot) -> tuple[Compiled, bool]:
        config = slot.jobs.popleft()
        try:
            reply, _ = slot.child.answer(max(0.001, slot.deadline - time.monotonic()))
            return Compiled(config, reply_outcome(reply), reply.get("facts", {})), True
        except ChildFailed as failure:
            outcome = failure.outcome
        except wire.ProtocolError as error:
            outcome = Outcome(Verdict.PROTOCOL_ERROR, message=str(error))
        verdict = _COMPILE_VERDICTS.get(outcome.verdict, outcome.verdict)
        message = outcome.message
        if verdict is Verdict.COMPILE_TIMEOUT:
            message = f"not compiled within {self._timeout_s:g} s"
        return Compiled(config, replace(outcome, verdict=verdict, message=message)), False
