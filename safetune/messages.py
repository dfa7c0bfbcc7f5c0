"""Warnings, the log and lines of progress, all with one prefix.

The prefix is `safetune:`, or `safetune [rank 3]:` in one of several processes. A warning points to
the program's line, not to one of safetune's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Literal, NamedTuple

from safetune.errors import SafetuneWarning

#: The only logger. SAFETUNE_LOG sets its level.
logger = logging.getLogger("safetune")

#: Seconds until the first line of progress of a tuning without a terminal, and between two.
FIRST_S, EVERY_S = 10.0, 30.0

#: The packages between a program and safetune's code; a program's own line is outside of them.
_BETWEEN = frozenset(
    (
        *("safetune", "triton", "torch", "jax", "jax_triton"),
        *("concurrent", "contextlib", "functools", "runpy", "threading"),
    )
)


class Launcher(NamedTuple):
    """A launcher's variables for the rank of a process, global and within its node."""

    rank: str
    ranks: str
    local_rank: str
    local_ranks: str


#: A job's script under Slurm has SLURM_NTASKS too; only `srun` sets these.
LAUNCHERS = (
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(*(f"OMPI_COMM_WORLD_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def warn(text: str, category: type[SafetuneWarning], at: tuple[str, int] | None = None) -> None:
    """Warn at the program's current line, or at the file and line `at`.

    Raises the warning if the program's filters make it an error, except in a safetune thread and at
    exit, where no code of the program could catch it.
    """
    frame = _frame_of_the_program()
    message = category(f"{prefix()}{text}")
    file, line = at or (f"<{threading.current_thread().name}>", 0)
    module, registry = file.removesuffix(".py"), None
    if at is None and frame is not None:
        file, line, module = frame.f_code.co_filename, frame.f_lineno, frame.f_globals["__name__"]
        registry = frame.f_globals.setdefault("__warningregistry__", {})
    try:
        warnings.warn_explicit(message, category, file, line, module, registry)
    except SafetuneWarning:
        if frame is not None:
            raise
        warnings.showwarning(message, category, file, line)


@functools.cache
def warn_once(text: str, category: type[SafetuneWarning]) -> None:
    """Like `warn`, but at most once per message per process."""
    warn(text, category)


def _frame_of_the_program() -> FrameType | None:
    """Return the innermost frame of the program; None in a thread of safetune, and at exit."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__") or "safetune"  # code that safetune has generated
        if name.partition(".")[0] not in _BETWEEN:
            return frame
        frame = frame.f_back
    return None


def prefix() -> str:
    """Return the prefix of every message to the user, with this process's rank if it has one."""
    rank = _of_launcher("rank")
    return "safetune: " if rank is None else f"safetune [rank {rank}]: "


def is_first_of_node() -> bool:
    """Whether this process reports for its node: it is alone there, or has local rank 0."""
    return not _of_launcher("local_rank")


def _of_launcher(kind: Literal["rank", "local_rank"]) -> int | None:
    """Return a rank of one of several processes; None for a single one."""
    for launcher in LAUNCHERS:
        value, size = (os.environ.get(getattr(launcher, name), "") for name in (kind, "ranks"))
        if value.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(value)
    group: Any = sys.modules.get("torch.distributed")
    is_many = getattr(group, "is_initialized", bool)() and group.get_world_size() > 1
    return int(group.get_rank()) if is_many else None


def notebook() -> Any:
    """Return IPython's shell if this process is the kernel of a notebook; else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def one_line(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 key`, `2 keys`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def tell(text: str) -> None:
    """Write a line of progress: to the log if it takes INFO, else to standard error.

    Writes nothing if the log does not take warnings either, as with SAFETUNE_LOG=quiet.
    """
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif logger.isEnabledFor(logging.WARNING):
        _write(text)


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # the program has closed it
        sys.stderr.write(f"{prefix()}{text}\n")
        sys.stderr.flush()


class _Lines(logging.Handler):
    """Writes records that no handler of the program gets, instead of logging's last resort."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on standard error."""
        theirs = len(logger.handlers) > 1 or (logger.propagate and logging.getLogger().handlers)
        if not theirs:
            _write(self.format(record))


logger.addHandler(_Lines())
