"""Compiles configs on all usable cores, in children that see no GPU.

Each child has one job running and one queued, so it does not idle while the parent measures. If a
child dies or exceeds its deadline, the config that it was compiling fails, and another child takes
its queued job. The caller may let the pool give up a config that compiles for much longer than the
others; that config has no result. An idle child is kept for a short time, for the next tuning.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from safetune.both import protocol
from safetune.both.protocol import Answer, Compile, Release
from safetune.errors import WorkerUnavailable
from safetune.isolation.child_handle import START_S, Child, ChildFailed, idle, start_job
from safetune.isolation.fork_server import COMPILER, plain_server, system_errors
from safetune.outcome import Binary, Outcome, Verdict

_PURPOSE = "compiles"

#: The most unanswered jobs of a child.
_DEPTH = 2
#: A compile is given up after this many times the median: in 44 tunings on an H200 every config
#: that took as long was at least 1.5 times as slow as the best one.
_SLOW = 3.0
#: None is given up before. A start of a child or a busy core delays short compiles by as much.
_LEAST_S = 2.0
#: A job larger than this is not put behind another: the pipe might not take it.
_QUEUED_BYTES = 1 << 15

#: Messages of Python, C++, LLVM and ptxas about refused memory.
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|LLVM ERROR: out of memory|[Mm]emory allocation failure"
    r"|Cannot allocate memory"
)


@dataclass(frozen=True)
class Compiled:
    """The compilation of one config: its outcome and, if that is ok, its results."""

    config: int
    outcome: Outcome
    binary: Binary | None = None


@dataclass
class _Slot:
    """A child and its unanswered jobs: a config, or None for `Start` and `Release`."""

    child: Child
    used: bool  # by an earlier tuning
    begun: float  # when its job at work was
    jobs: deque[int | None]


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, by affinity and cgroup quota."""
    cpus = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, int(quota) // int(period))
    return max(1, cpus)


@dataclass(eq=False)
class CompilePool:
    """Compiles the specs of one kernel, starting with the first `add`.

    Args:
        kernel: returns the packed jit function (`compile_spec.pack_for_compiler`).
        timeout_s: for one config.
        size: the most children; by default one per core, minus one for the measuring child if there
            are enough cores.
        memory_bytes: the limit for a child and for each process that it starts; 0: no limit.
        most_shared: see `triton_compile.compiled_binary`.
        may_give_up: whether a config may end without a result: once at least as many configs have
            compiled as are unfinished, and it takes more than `_SLOW` times their median and
            `least_s`.
    """

    kernel: Callable[[], bytes]
    timeout_s: float
    size: int | None = None
    memory_bytes: int = 0
    most_shared: int = 0
    may_give_up: Callable[[int], bool] = lambda config: False
    least_s: float = _LEAST_S

    def __post_init__(self) -> None:
        cpus = usable_cpus()
        self._size = self.size or (cpus - 1 if cpus >= 4 else cpus)
        #: Of each config that was compiled to the end: one that fails ends early, as does one that
        #: needs too much shared memory, and they say nothing of the others.
        self._took_s: list[float] = []
        self._specs: dict[int, bytes] = {}
        self._waiting: deque[int] = deque()
        self._unfinished: set[int] = set()  # the configs without a result
        self._done: deque[Compiled] = deque()  # results that no one has asked for yet
        self._slots: dict[int, _Slot] = {}
        self._killed: set[int] = set()
        self._launcher = True

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        """Abandon all pending compilations."""
        self._waiting.clear()
        while self._slots:
            self._slots.popitem()[1].child.kill()

    def add(self, config: int, spec: bytes) -> None:
        """Queue a config for compilation; raises `WorkerUnavailable` if no child can be started."""
        self._specs[config] = spec
        self._waiting.append(config)
        self._unfinished.add(config)
        self._fill()

    def results(self) -> Iterator[Compiled]:
        """Yield each config's result when it is done, in no particular order; raises like `add`.

        A config that was given up has no result.
        """
        while self._unfinished or self._done:
            self.work(0.0 if self._done else protocol.SIGNAL_S)
            if self._done:
                yield self._done.popleft()

    def work(self, wait_s: float = 0.0) -> None:
        """Keep the children busy, and wait at most this long for one; raises like `add`."""
        self._fill()
        self._collect(wait_s)

    def _fill(self) -> None:
        while self._waiting and len(self._slots) < self._size:
            try:
                self._start()
            except WorkerUnavailable:
                if not self._slots:
                    raise
                self._size = len(self._slots)  # as many as the system allows
        for slot in self._slots.values():
            self._feed(slot)

    def _start(self) -> None:
        kernel = self.kernel()
        kept = idle.take(_PURPOSE)  # it has not answered its `Release` yet
        with system_errors():
            child = kept or Child(True, forks=plain_server, started=False, modules=(COMPILER,))
        child.send(start_job(True, self.memory_bytes, kernel))
        jobs: deque[int | None] = deque([None] * child.unanswered)
        slot = _Slot(child, kept is not None, time.monotonic(), jobs)
        self._slots[child.pipe.fileno()] = slot
        self._give(slot)

    def _feed(self, slot: _Slot) -> None:
        while self._waiting and len(slot.jobs) < _DEPTH:
            if slot.jobs and len(self._specs[self._waiting[0]]) > _QUEUED_BYTES:
                return
            self._give(slot)

    def _give(self, slot: _Slot) -> None:
        config = self._waiting.popleft()
        if not slot.jobs:
            slot.begun = time.monotonic()
        slot.jobs.append(config)
        first, self._launcher = self._launcher, False
        job = Compile(self._specs[config], self.most_shared, launcher=first)
        slot.child.send(job, timeout_s=self.timeout_s)

    def _limit_s(self, config: int | None) -> float:
        """Return how long a job may take by now."""
        if config is None:
            return START_S
        if len(self._took_s) < len(self._unfinished) or not self.may_give_up(config):
            return self.timeout_s
        slow_s = _SLOW * statistics.median(self._took_s)
        return min(self.timeout_s, max(self.least_s, slow_s))

    def _collect(self, wait_s: float) -> None:
        """Take the answers that are there, or that come."""
        if not self._slots:
            return
        poll = select.poll()
        for fd in self._slots:
            poll.register(fd, select.POLLIN)
        ends = {fd: slot.begun + self._limit_s(slot.jobs[0]) for fd, slot in self._slots.items()}
        wait_s = min(max(0.0, min(ends.values()) - time.monotonic()), wait_s)
        ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
        for slot in self._slots.values():
            slot.child.cut_output()
        now = time.monotonic()
        due = [fd for fd, deadline in ends.items() if fd in ready or deadline <= now]
        for fd in due:
            self._advance(fd, ends[fd])

    def _advance(self, fd: int, deadline: float) -> None:
        """Read a child's next answer, or notice that none came, and keep the result."""
        slot = self._slots[fd]
        config = slot.jobs.popleft()
        alive, given_up = True, False
        try:
            answer, _ = slot.child.answer(max(0.001, deadline - time.monotonic()))
        except ChildFailed as failure:
            answer, alive = Answer(failure.outcome), False
            late = failure.outcome.verdict is Verdict.TIMEOUT
            given_up = late and config is not None and deadline < slot.begun + self.timeout_s
        outcome = self._outcome(answer.outcome)
        if answer.binary is not None and answer.binary.compile_s:
            self._took_s.append(answer.binary.compile_s)
        # The memory that it still holds would be missing for the next config.
        alive = alive and outcome.detail != "memory"
        slot.begun = time.monotonic()
        if alive:
            self._feed(slot)
        else:
            self._waiting.extendleft(job for job in reversed(slot.jobs) if job is not None)
            slot.jobs.clear()
        if not slot.jobs:
            del self._slots[fd]
            if alive:
                slot.child.send(Release())  # the next tuning reads the answer
                idle.keep(_PURPOSE, slot.child, most=usable_cpus())
            else:
                slot.child.kill()
        if config is not None and given_up:
            self._unfinished.discard(config)
        elif config is not None and outcome.killed and config not in self._killed:
            self._killed.add(config)  # perhaps from outside: once more, after the others
            self._waiting.append(config)
        elif config is not None:
            self._done.append(Compiled(config, outcome, answer.binary))
            self._unfinished.discard(config)
        elif not alive and not slot.used:
            self._size = len(self._slots)
            if not self._size:
                reason = f"{outcome.message} {outcome.stderr}".strip()
                raise WorkerUnavailable(f"a compile process ended before its first job: {reason}")

    def _outcome(self, outcome: Outcome) -> Outcome:
        """Return a child's outcome as the outcome of the config that it was compiling."""
        if outcome.verdict is Verdict.TIMEOUT:
            message = f"not compiled within {self.timeout_s:g} s"
            return replace(outcome, verdict=Verdict.COMPILE_TIMEOUT, message=message)
        if outcome.verdict is Verdict.DIED:
            outcome = replace(outcome, verdict=Verdict.COMPILE_CRASH)
        failed = outcome.verdict in (Verdict.COMPILE_ERROR, Verdict.COMPILE_CRASH)
        text = f"{outcome.detail} {outcome.message} {outcome.stderr}"
        if not (self.memory_bytes and failed and _NO_MEMORY.search(text)):
            return outcome
        gib = self.memory_bytes / (1 << 30)
        message = f"{outcome.message}\na compile process may allocate at most {gib:g} GiB"
        return replace(outcome, detail="memory", message=message.strip())
