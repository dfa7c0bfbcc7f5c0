"""`SAFETUNE_MODE=background`: one thread tunes queued keys while the program runs.

The caller packs its call and copies its inputs before its launch returns; the thread does the rest
and replaces the fallback with the choice.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune import forks
from safetune.config import config_text
from safetune.errors import KernelNotTransferable, NoWorkingConfig, WorkerUnavailable
from safetune.frozen import dataclass
from safetune.inputs.call import Call, leaves
from safetune.isolation.fork_server import close_servers, system_errors
from safetune.messages import logger
from safetune.miss import candidates, failures, reporting
from safetune.outcome import Mark
from safetune.store.local.store import Store
from safetune.tuning.bench import LaunchBench, Ready
from safetune.tuning.requests import TuningRequest
from safetune.tuning.single_flight import WaitBudget
from safetune.tuning.tuner import tune

if TYPE_CHECKING:
    from safetune.launch.call_shape import Tuner
    from safetune.launch.key_state import KeyState
    from safetune.settings import Settings

#: Seconds that the end of the process waits for the running tuning to end its children.
_LEAVE_S = 10.0


class Stopped(BaseException):
    """The process is ending. The tuning stops, and no config is to blame."""


@dataclass(frozen=True)
class Job:
    """One queued tuning."""

    state: KeyState
    bench: BackgroundBench  # with the request, without the caller's arguments, and copies of them
    fallback: Config  # which the key launches meanwhile
    store: Store
    hold: bool  # keep the choice back until `sync`
    tuner: Tuner
    size: int  # the bytes of the copied inputs
    #: Set when the tuning has ended, with or without a choice.
    over: threading.Event = field(default_factory=threading.Event)


class BackgroundBench(LaunchBench):
    """A bench whose answers count until the process ends. The program may be at work meanwhile,
    so that all outcomes are marked.
    """

    _queued = True

    def __init__(self, request: TuningRequest) -> None:
        request = replace(request, marks=(*request.marks, Mark.CONTENDED.value))
        with system_errors():
            super().__init__(request)
        # A queued call keeps none of the caller's tensors, and no process.
        self.request = self._request = request.without_arguments

    def close(self) -> None:
        """Free the copied inputs, if no tuning has used them."""
        self._exit.close()

    def compiled(self, /, *args: Any, **kwargs: Any) -> Iterator[Ready]:
        """Yield as `LaunchBench` does, until the process ends."""
        for found in super().compiled(*args, **kwargs):
            _worker.check()
            yield found
        _worker.check()

    def _asked(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the child's answer; if this process is ending, the child may be gone."""
        try:
            return super()._asked(*args, **kwargs)
        finally:
            _worker.check()


def tune_meanwhile(
    tuner: Tuner, state: KeyState, request: TuningRequest, store: Store, settings: Settings
) -> Config:
    """Copy the call's inputs, queue it for tuning, and return the fallback."""
    call, limit = request.call, settings.copy_limit
    size = _input_bytes(call) if call.hooks.inputs is None else 0
    config = candidates.fallback(request, store)
    if size > limit:
        logger.warning(
            "tune %s offline for %s: its inputs have %d bytes, but SAFETUNE_COPY_LIMIT "
            "allows %d; until then it runs with %s",
            request.key.kernel.name,
            request.key,
            size,
            limit,
            config_text(config),
        )
        return state.set_fallback(config)
    if not _worker.has_room(size, limit):
        logger.info("%s will be queued later: too many copied inputs wait", request.key.kernel.name)
        return state.set_fallback(config, failures.Retry())
    try:
        bench = BackgroundBench(request)
    except (KernelNotTransferable, WorkerUnavailable) as error:
        return failures.fall_back(state, request, config, error)
    state.set_fallback(config)
    _worker.submit(Job(state, bench, config, store, settings.world_size > 1, tuner, size))
    return config


def _input_bytes(call: Call) -> int:
    """Return the size of the storages behind the call's tensors."""
    values = leaves([*call.args, *call.kwargs.values()])
    storages = [v.untyped_storage() for v in values if hasattr(v, "untyped_storage")]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def wait(state: KeyState) -> bool:
    """Wait until no tuning of this key is queued or running; return whether there was one."""
    jobs = [job for job in list(_worker.jobs) if job.state is state]
    for job in jobs:
        while not job.over.wait(1.0) and not _worker.stopping:
            pass
    return bool(jobs)


class _Worker:
    """The queue and its thread, started at the first job."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.stopping = False
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._thread is None and not self.stopping:
                self._start()
            if self.stopping:
                job.bench.close()
                return
            self.jobs.append(job)
            self._queue.put(job)

    def has_room(self, size: int, limit: int) -> bool:
        """Whether this many bytes fit beside the queued calls' bytes; a single call always fits."""
        waiting = [job.size for job in list(self.jobs)]
        return not waiting or sum(waiting) + size <= limit

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="safetune-background", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process is ending, or cannot start another thread
            self._thread, self.stopping = None, True

    def check(self) -> None:
        """Raise `Stopped` when the process is ending."""
        if self.stopping:
            raise Stopped

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                _tune(job)
            except Stopped:
                return
            except Exception:
                logger.exception(
                    "background tuning of %s failed", job.bench.request.key.kernel.name
                )
            finally:
                job.bench.close()
                self.jobs.remove(job)
                over = job.over
                del job  # and the copied tensors with it, not only when the next job comes
                over.set()

    def stop(self) -> None:
        """End the running tuning and its children: the process is ending."""
        with self._lock:
            self.stopping = True
        if self._thread is not None:
            close_servers()
            self._queue.put(None)
            self._thread.join(_LEAVE_S)


def _tune(job: Job) -> None:
    request = job.bench.request
    try:
        with reporting.observing(request, job.store, quiet=True) as tally:
            budget = WaitBudget(check=_worker.check)
            result = tune(request, job.store, tally, bench=job.bench, wait_budget=budget)
    except (KernelNotTransferable, NoWorkingConfig, WorkerUnavailable) as error:
        if _worker.stopping:
            raise Stopped from error
        failures.fall_back(job.state, request, job.fallback, error)
    else:
        if job.hold:
            job.state.held = result.choice
        else:
            job.state.set_choice(result.choice)
        reporting.report_result(job.tuner, request, result)


_worker = _Worker()


def _start_over() -> None:
    """Start over in a fork, which lacks the thread: keys that were queued keep their fallback."""
    global _worker
    waiting, _worker = _worker.jobs[1:], _Worker()
    for job in waiting:  # the first may run: its children are the parent's
        job.bench.close()


forks.register("background", after_in_child=_start_over, at_exit=lambda: _worker.stop())
