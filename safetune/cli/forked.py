"""Runs code of a target in a forked process, which it may crash or hang, and goes on in another.

This process imports neither torch nor the target, so each forked one may use a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any

from safetune.cli.output import describe, innermost, show_traceback
from safetune.errors import SafetuneError, TargetError
from safetune.frozen import dataclass

#: The numbers of a kernel, of one of its workloads, and of a config.
Place = tuple[int, ...]

#: A row of the output, after the name of its list.
Result = tuple[str, Any]

_PR_SET_PDEATHSIG = 1

#: How long a process that is done may take to end what it has started.
_END_S = 10.0


@dataclass(frozen=True)
class Step:
    """What a process does next."""

    place: Place
    failed: Result  # if the process ends in this step; its row gets the reason as `error`
    limit_s: float = 0.0  # no limit


#: Yields each step before it begins, and then its results; leaves out the places that are over.
Work = Callable[[Container[Place]], Iterator["Step | Result"]]


def results(work: Work) -> Iterator[Result]:
    """Yield all results of some work.

    Raises:
        SafetuneError: the work raised it.
        TargetError: the process ended before the first step.
    """
    over: set[Place] = set()
    ended = True
    while ended:
        step, ended = Step((), ("", {})), False
        with (
            tempfile.TemporaryFile("w+") as stack,
            _forked(work, over, stack) as (process, receiver),
        ):
            try:
                while message := _received(process, receiver):
                    if isinstance(message, Exception):
                        raise message
                    if isinstance(message, Step):
                        step = message
                    else:
                        over.add(step.place)
                        yield message
                process.join(_END_S)  # it ends the processes that the target has started
            except (EOFError, OSError):
                process.join()
                ended, reason = True, _reason(process.exitcode or 0, step, stack)
        if ended:
            if not step.place:
                raise TargetError(reason)
            over.add(step.place)
            name, row = step.failed
            yield name, {**row, "error": reason}


def _received(process: BaseProcess, receiver: Connection) -> Any:
    """Return the next message; raises `EOFError` once the process has ended.

    A process that the target has forked has the pipe open, too, so that its end may never come.
    """
    assert process.pid is not None
    handle = os.pidfd_open(process.pid)
    try:
        if receiver not in wait([receiver, handle]):
            raise EOFError
    finally:
        os.close(handle)
    return receiver.recv()


def begin_limit(limit_s: float) -> None:
    """Give this process so long from now on, instead of what was left."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)


@contextlib.contextmanager
def _forked(*arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(receiver, sender, os.getpid(), *arguments))
    process.start()
    sender.close()
    try:
        with receiver:
            yield process, receiver
    finally:
        process.kill()
        process.join()


def _send(
    receiver: Connection,
    sender: Connection,
    parent: int,
    work: Work,
    over: Container[Place],
    stack: IO[str],
) -> None:
    error: Exception | None
    receiver.close()  # else nothing would tell this process that nobody reads any more
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the caller may have it ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no second traceback
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGALRM, stack, all_threads=False, chain=True)
    import torch

    torch.set_num_threads(1)  # where it had threads, they did not survive the fork
    try:
        for message in work(over):
            if isinstance(message, Step):
                begin_limit(message.limit_s)
            sender.send(message)
        error = None
    except Exception as raised:
        show_traceback()
        error = raised if isinstance(raised, SafetuneError) else TargetError(describe(raised))
    sys.stdout.flush()
    sender.send(error)


def _reason(code: int, step: Step, stack: IO[str]) -> str:
    """Return why a process ended, with the line of the target, if it crashed or hung there."""
    from safetune.isolation.child_handle import exit_text

    stack.seek(0)
    frames = re.findall(r'File "(.*)", line (\d+) in', stack.read())
    inner = itertools.takewhile(lambda frame: frame[0] != __file__, frames)
    line = innermost(reversed([*inner]))
    if code == -signal.SIGALRM:
        return (
            f"no end within run_timeout_s={step.limit_s:g}{line}. Programs run one after another, "
            "so one that waits for a later one hangs."
        )
    return f"its process ended with {exit_text(code)}{line}"
