"""Runs code of a target in a forked process, which it may crash or hang, and goes on in another.

This process imports neither torch nor the target, so each forked one may use a GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

from rich.console import Console

from safetune.cli.output import innermost, show_traceback
from safetune.errors import SafetuneError, TargetError
from safetune.frozen import dataclass

#: The numbers of a kernel, of one of its workloads, and of a config.
Place = tuple[int, ...]

#: A row of the output, after the name of its list.
Result = tuple[str, Any]


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
            Console(stderr=True).status("") as status,
        ):
            try:
                while message := receiver.recv():
                    if isinstance(message, Exception):
                        raise message
                    if isinstance(message, Step):
                        step = message
                        status.update("  ".join([*step.failed[1].values()][:3]))
                    else:
                        over.add(step.place)
                        yield message
            except EOFError:
                process.join()
                ended, reason = True, _reason(process.exitcode or 0, step, stack)
        if ended:
            if not step.place:
                raise TargetError(reason)
            over.add(step.place)
            name, row = step.failed
            yield name, {**row, "error": reason}


def begin_limit(limit_s: float) -> None:
    """Give this process so long from now on, instead of what was left."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)


@contextlib.contextmanager
def _forked(*arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        with receiver:
            yield process, receiver
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, work: Work, over: Container[Place], stack: IO[str]) -> None:
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
    except SafetuneError as raised:
        show_traceback()
        error = raised
    sys.stdout.flush()
    sender.send(error)


def _reason(code: int, step: Step, stack: IO[str]) -> str:
    """Return why a process ended, with the line of the target, if it crashed or hung there."""
    from safetune.isolation.child_handle import exit_text

    stack.seek(0)
    frames = re.findall(r'File "(.*)", line (\d+) in', stack.read())
    line = innermost(reversed(frames))
    if code == -signal.SIGALRM:
        return (
            f"no end within run_timeout_s={step.limit_s:g}{line}. Programs run one after another, "
            "so one that waits for a later one hangs."
        )
    return f"its process ended with {exit_text(code)}{line}"
