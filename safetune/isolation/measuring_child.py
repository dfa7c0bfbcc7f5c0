"""The child that runs and times the configs of one call on one device."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from safetune import triton_internals
from safetune.both import protocol
from safetune.both.protocol import Answer, Budget, Prepare
from safetune.errors import InvalidSetting, KernelNotTransferable, WorkerUnavailable
from safetune.isolation import child_handle
from safetune.isolation.child_handle import START_S, Child, ChildFailed, idle, start_job
from safetune.isolation.fork_server import COMPILER, plain_server, server
from safetune.outcome import CLEAN, TRANSIENT, Group, Outcome, OutputReport, Verdict


class TorchNeeded(Exception):
    """A child without torch could not do a job; the next child has torch."""


@dataclass(eq=False)
class MeasuringChild:
    """The measuring child of one call on one device, replaced after each outcome that is not clean.

    Args:
        call: the packed call, whose files have the descriptors `fds`.
        run_timeout_s: for one job.
        fresh: do not reuse the child of an earlier tuning.
        with_torch: use a child with torch; without it, a call may turn out to need one.
    """

    call: Prepare
    fds: tuple[int, ...]
    run_timeout_s: float
    fresh: bool = False
    with_torch: bool = True
    _child: Child | None = field(default=None, init=False)
    _coming: Future[Child] | None = field(default=None, init=False)

    def begin(self) -> None:
        """Start the child while others compile; the first job waits for it."""
        coming: Future[Child] = Future()
        # The tuning may be over, and its files closed, before the child is ready.
        with contextlib.ExitStack() as opened:
            fds = []
            for fd in map(os.dup, self.fds):
                opened.callback(os.close, fd)
                fds.append(fd)
            copies = opened.pop_all()

        def prepare() -> None:
            try:
                coming.set_result(self._prepared(tuple(fds)))
            except BaseException as error:
                coming.set_exception(error)
            finally:
                copies.close()

        thread = threading.Thread(target=prepare, name="safetune-measuring-child", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started; the first job starts the child
            copies.close()
        else:
            self._coming = coming

    def wait(self) -> Child:
        """Return the child once it is ready for a job; raises `WorkerUnavailable`."""
        if self._child is None:
            coming, self._coming = self._coming, None
            self._child = self._prepared(self.fds) if coming is None else coming.result()
        return self._child

    def spec_of(self, config: int) -> tuple[Outcome, bytes]:
        """Return the compiler's input for a config, if the outcome is ok."""
        answer, blob = self._ask(protocol.Specify(config))
        return answer.outcome, blob

    def measure(
        self,
        config: int,
        budget: Budget | None,
        groups: Sequence[Group] | None = None,
        limit_s: float | None = None,
    ) -> tuple[Outcome, OutputReport | None]:
        """Run one config and, with a budget, time it. Whatever the config does, the result is an
        outcome.

        With `groups`, its result is compared with theirs, and an ok outcome has a report. `limit_s`
        replaces `run_timeout_s`.
        """
        known = None if groups is None else tuple(groups)
        answer, _ = self._ask(protocol.Measure(config, budget, known), limit_s)
        outcome, report = answer.outcome, answer.report
        if not outcome.ok:
            return outcome, None
        timed, compared = outcome.timing is not None, report is not None
        if timed != (budget is not None) or compared != (known is not None):
            self.replace()
            message = "the answer to a measurement has no time or no report"
            return Outcome(Verdict.PROTOCOL_ERROR, message=message), None
        return outcome, report

    def repeat(self, config: int, time_ms: float) -> Answer:
        """Launch a config again for some time; see `protocol.Answer.varied`."""
        return self._ask(protocol.Repeat(config, time_ms))[0]

    def bits(self, config: int) -> tuple[int, ...]:
        """Return `protocol.Answer.bits` of a config; empty if a launch fails."""
        return self._ask(protocol.Bits(config))[0].bits

    def in_turn(self, budgets: Mapping[int, Budget]) -> dict[int, Outcome]:
        """Time configs one after another; return the successful ones before the first failure.

        The child gets all jobs at the start, so it never waits between two.
        """
        found: dict[int, Outcome] = {}
        child = self.wait()
        for config, budget in budgets.items():
            child.send(protocol.Measure(config, budget), timeout_s=self.run_timeout_s)
        for config in budgets:
            try:
                answer, _ = child.answer(self.run_timeout_s)
            except ChildFailed:
                self._child = None
                break
            if answer.outcome.timing is None or answer.torch:
                self.replace()
                break
            found[config] = answer.outcome
        return found

    def replace(self) -> None:
        """Use a fresh child from now on."""
        if self._coming is not None:
            self._coming.add_done_callback(_kill_unwanted)
            self._coming = None
        if self._child is not None:
            self._child.kill()
            self._child = None

    def release(self) -> None:
        """Leave the child to the next tuning on this device; if there is none, it exits by
        itself.
        """
        if self._child is None:
            self.replace()
            return
        with contextlib.suppress(ChildFailed):
            self._child.ask(protocol.Release(), timeout_s=self.run_timeout_s)
            idle.keep(_measures_on(self.call.index, self.with_torch), self._child)
        self._child = None

    def _ask(self, job: protocol.OfCall, limit_s: float | None = None) -> tuple[Answer, bytes]:
        answer, blob = self._answered(job, limit_s)
        if answer.outcome.killed:  # perhaps from outside, or out of memory
            answer, blob = self._answered(job, limit_s)
        if answer.torch:
            self.with_torch = True
            self.replace()
            raise TorchNeeded
        return answer, blob

    def _answered(self, job: protocol.Job, limit_s: float | None) -> tuple[Answer, bytes]:
        child = self.wait()
        try:
            answer, blob = child.ask(job, timeout_s=limit_s or self.run_timeout_s)
        except ChildFailed as failure:
            self._child = None
            return Answer(failure.outcome), b""
        if answer.outcome.verdict not in CLEAN:
            self.replace()
        return answer, blob

    def _prepared(self, fds: tuple[int, ...]) -> Child:
        index = self.call.index
        child_handle.check_device(index)
        with_torch = self.with_torch
        purposes = [_measures_on(index, kind) for kind in (True, False) if kind or not with_torch]
        child = None
        for purpose in () if self.fresh else purposes:
            child = child or idle.take(purpose)
        if child is not None:
            try:  # the environment may have changed since
                child.ask(start_job(gpu_blind=index < 0), timeout_s=START_S)
            except (ChildFailed, WorkerUnavailable):  # it has ended, or its server and so it, too
                child = None
        forks = server if with_torch else plain_server
        modules = (COMPILER,) if with_torch and index >= 0 else ()
        child = child or Child(index < 0, index, forks, modules=modules)
        triton_internals.first_driver.wait()  # or the child would build it, too
        try:
            answer, _ = child.ask(self.call, fds, timeout_s=max(START_S, self.run_timeout_s))
            outcome, reason = answer.outcome, answer.outcome.message
            self.with_torch |= answer.torch
        except ChildFailed as failure:
            outcome, reason = failure.outcome, str(failure)
        if outcome.ok:
            return child
        child.kill()
        if outcome.detail == InvalidSetting.__name__:
            raise InvalidSetting(reason)
        passes = outcome.killed or outcome.verdict in TRANSIENT
        raise (WorkerUnavailable if passes else KernelNotTransferable)(
            f"a tuning process could not rebuild the call: {reason}"
        )


def _measures_on(index: int, with_torch: bool) -> str:
    return f"measures on {index}{' with torch' if with_torch else ''}"


def _kill_unwanted(coming: Future[Child]) -> None:
    if coming.exception() is None:
        coming.result().kill()


def drop_idle(index: int) -> None:
    """Kill the idle child of a device; on return its memory is free."""
    for with_torch in (True, False):
        child = idle.take(_measures_on(index, with_torch))
        if child is not None:
            child.kill()
