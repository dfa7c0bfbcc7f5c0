"""Hooks around `os.fork` and at exit: the only module that registers any, in a declared order.

A forked child has the memory of its parent, but none of its threads: locks that another thread held
stay locked, and connections, descriptors and child processes are still the parent's. Each module
that keeps such state registers here what to do about it, for one of `STAGES`. After a fork the
stages run from first to last. Before a fork, and at exit, they run from last to first, so that what
uses a thing is stopped before that thing. Within a stage it goes by the order of registration.

A hook that raises is logged, and the others still run.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable
from typing import Literal, get_args

Stage = Literal[
    "database",  # connections to SQLite are closed before a fork, and opened again after it
    "shared store",  # the thread, the descriptors and the unsent records are the parent's
    "fork servers",
    "child processes",  # children that wait for work; at exit they go before their servers
    "tuning",  # locks of devices and of tunings under way
    "launches",  # locks and generated launch functions of every tuner
    "background",  # the queue of background tuning, whose keys are untried again
    "report",  # what `install` counts and prints
]
STAGES: tuple[str, ...] = get_args(Stage)

Hook = Callable[[], object]

logger = logging.getLogger("safetune")

_Hooks = dict[str, list[Hook]]
_before: _Hooks = {stage: [] for stage in STAGES}
_in_parent: _Hooks = {stage: [] for stage in STAGES}
_in_child: _Hooks = {stage: [] for stage in STAGES}
_at_exit: _Hooks = {stage: [] for stage in STAGES}


def register(
    stage: Stage,
    *,
    before: Hook | None = None,
    after_in_parent: Hook | None = None,
    after_in_child: Hook | None = None,
    at_exit: Hook | None = None,
) -> None:
    """Have hooks called around every fork of this process, and when it exits."""
    _listen()
    for hooks, hook in (
        (_before, before),
        (_in_parent, after_in_parent),
        (_in_child, after_in_child),
        (_at_exit, at_exit),
    ):
        if hook is not None:
            hooks[stage].append(hook)


def register_worker_exit(owner: object, hook: Hook) -> None:
    """Have `hook` called where a worker of multiprocessing ends: it skips `atexit` if forked."""
    from multiprocessing import util

    finalize = functools.partial(util.Finalize, None, hook, exitpriority=0)
    util.register_after_fork(owner, lambda _: finalize())
    finalize()


@functools.cache
def _listen() -> None:
    atexit.register(_run_backwards, _at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=functools.partial(_run_backwards, _before),
            after_in_parent=functools.partial(_run, _in_parent),
            after_in_child=functools.partial(_run, _in_child),
        )


def _run(hooks: _Hooks) -> None:
    for stage in STAGES:
        for hook in tuple(hooks[stage]):
            _call(hook)


def _run_backwards(hooks: _Hooks) -> None:
    for stage in reversed(STAGES):
        for hook in reversed(hooks[stage]):
            _call(hook)


def _call(hook: Hook) -> None:
    try:
        hook()
    except Exception:
        logger.exception("%r failed around a fork or at exit", hook)
