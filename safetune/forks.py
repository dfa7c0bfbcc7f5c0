"""Hooks around `os.fork` and at exit: the only module that registers any, in a declared order.

A forked child has its parent's memory but none of its threads: locks that another thread held stay
locked, and connections, descriptors and child processes still belong to the parent. Each module
with such state registers hooks here, for one of `STAGES`. After a fork the stages run from first to
last. Before a fork, and at exit, they run from last to first, so that a user of a resource stops
before the resource. Within a stage, hooks run in the order of registration.

A hook that raises is logged, and the others still run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from safetune.messages import logger

Stage = Literal[
    "database",  # connections to SQLite are closed before a fork, and opened again after it
    "shared store",  # the threads that pull are the parent's
    "fork servers",
    "child processes",  # children that wait for work; at exit they go before their servers
    "tuning",  # locks of devices and of tunings under way
    "launches",  # locks and generated launch functions of every tuner
    "background",  # the queue of background tuning, which a fork has not
    "report",  # what `install` counts and prints
]
STAGES: tuple[str, ...] = get_args(Stage)

Hook = Callable[[], object]

_FORK_EVENTS = ("before", "after_in_parent", "after_in_child")

#: By event and stage: what returns the hook, or None where its object is gone.
_hooks: dict[tuple[str, str], list[Callable[[], Hook | None]]] = {
    (event, stage): [] for event in (*_FORK_EVENTS, "at_exit") for stage in STAGES
}


def register(stage: Stage, **hooks: Hook) -> None:
    """Call hooks around every fork of this process, and when it exits: `before`, `after_in_parent`,
    `after_in_child`, `at_exit`.

    A method is called only while its object lives; registering it does not keep the object alive.
    """
    _listen()
    for event, hook in hooks.items():
        is_method = isinstance(hook, types.MethodType)
        kept = weakref.WeakMethod(hook) if is_method else functools.partial(_same, hook)
        _hooks[event, stage].append(kept)


def lock(kind: Callable[[], Any] = threading.Lock) -> Any:
    """Return a lock that is free in a forked child, whichever thread of its parent held it.

    Only for a lock that is not held across a fork.
    """
    made = kind()
    register("database", after_in_child=made._at_fork_reinit)
    return made


T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801
    """Backport of Python 3.12's `cached_property`: it has no lock that a fork could inherit
    locked.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = contextlib.nullcontext()


def _same(hook: Hook) -> Hook:
    return hook


def register_worker_exit(owner: object, hook: Hook) -> None:
    """Call `hook` when a multiprocessing worker ends; forked workers skip `atexit`."""
    from multiprocessing import util

    finalize = functools.partial(util.Finalize, None, hook, exitpriority=0)
    util.register_after_fork(owner, lambda _: finalize())
    finalize()


@functools.cache
def _listen() -> None:
    atexit.register(_run, "at_exit")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**{event: functools.partial(_run, event) for event in _FORK_EVENTS})


def _run(event: str) -> None:
    hooks = [hook for stage in STAGES for kept in _hooks[event, stage] if (hook := kept())]
    if event in ("before", "at_exit"):
        hooks.reverse()
    for hook in hooks:
        try:
            hook()
        except Exception:
            logger.exception("%r failed at a fork or at exit", hook)
