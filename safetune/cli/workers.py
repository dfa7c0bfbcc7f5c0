"""The processes of a tuning on several GPUs: each runs `safetune tune --worker` and prints events.

An event is one line of JSON on standard output: what is to be done, where the worker is, or a
finished tuning. The workers need no director: they share the list by `offline.shards`. A worker
that ends early, or is silent for long, drops out, and the others do its work.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from safetune.cli.command import in_another_process
from safetune.cli.output import echo
from safetune.errors import SafetuneError

if TYPE_CHECKING:
    from safetune.offline.shards import Part, Shard

Event = dict[str, Any]

#: A worker that tells nothing for this long is stopped; before its first event it makes a plan.
_SILENT_S, _PLAN_S = 180.0, 600.0
#: How long a process that was killed may take to end; a call of the driver may keep it.
_END_S = 10.0

#: Exit codes of a worker that went through the whole list: all is well, a kernel does not work.
_FINISHED = (0, 1)


class DroppedOut(SafetuneError):
    """A worker ended before it went through the whole list."""


class Worker(Protocol):
    """A process that tunes, here or elsewhere."""

    name: str

    def events(self) -> Iterator[Event]:
        """Yield what it reports, until it has finished; raises `DroppedOut`."""

    def stop(self) -> None:
        """End it, if it runs."""


def gather(workers: Sequence[Worker], silent_s: float = _SILENT_S) -> Iterator[tuple[str, Event]]:
    """Yield the events of all workers with the worker's name, as they come.

    An event `dropped` has the reason for which a worker ended early, or was stopped. Raises
    `DroppedOut` where no worker finishes.
    """
    events: queue.SimpleQueue[tuple[Worker, Event | Exception | None]] = queue.SimpleQueue()

    def read(worker: Worker) -> None:
        end = None
        try:
            for event in worker.events():
                events.put((worker, event))
        except Exception as error:
            end = error
        events.put((worker, end))

    heard = {}
    for worker in workers:
        heard[worker.name] = time.monotonic() + _PLAN_S
        threading.Thread(target=read, args=(worker,), daemon=True).start()
    finished = 0
    while heard:
        now = time.monotonic()
        silent = [w for w in workers if now - heard.get(w.name, math.inf) > silent_s]
        try:
            worker, event = events.get(timeout=0 if silent else silent_s / 10)
        except queue.Empty:
            if not silent:
                continue
            worker, event = silent[0], DroppedOut(f"it has told nothing for {silent_s:g} s")
        if worker.name not in heard:  # it was stopped
            continue
        heard[worker.name] = time.monotonic()
        if isinstance(event, dict):
            yield worker.name, event
            continue
        del heard[worker.name]
        finished += event is None
        if event is not None:
            worker.stop()
            then = "the others do its work" if heard or finished else "no device is left"
            echo(f"Warning: {worker.name} drops out: {event}; {then}", err=True)
            yield worker.name, {"dropped": str(event)}
    if not finished:
        raise DroppedOut(
            "no device finished the list, for the reasons above; what was tuned is stored: run the "
            "command again"
        )


class LocalWorker:
    """A process of this machine with one GPU, or none in the interpreter."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            in_another_process("tune", *arguments),
            stdin=subprocess.PIPE,  # the worker ends when this process does
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            env={**os.environ, **environment},
        )

    def events(self) -> Iterator[Event]:
        """Yield the events that it prints; all else that it prints goes to standard error."""
        process = self._process
        assert process.stdout is not None
        messages = threading.Thread(target=self._relay, daemon=True)
        messages.start()
        for line in process.stdout:
            event = None
            with contextlib.suppress(ValueError):
                event = json.loads(line)
            if isinstance(event, dict):
                yield event
            else:
                self._pass_on(line)
        code = process.wait()
        messages.join()
        if code not in _FINISHED:
            raise DroppedOut(ending(code))

    def stop(self) -> None:
        """End it, if it runs."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _relay(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        echo(f"{self.name}: {line.rstrip()}", err=True)


def ending(code: int) -> str:
    """Return how a process ended, by its exit code."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"


def tune_on(
    devices: Mapping[str, Mapping[str, str]], arguments: Sequence[str]
) -> Iterator[tuple[str, Event]]:
    """Run a worker for each device; yield their events as `gather` does.

    Args:
        devices: the variables that leave each one, by its name.
        arguments: the command line of the parent; in a worker --devices and --ray mean nothing.
    """
    workers: list[LocalWorker] = []
    now = time.time()
    try:
        for number, (name, variables) in enumerate(devices.items(), 1):
            own = f"--worker={number}/{len(devices)}@{now}"
            workers.append(LocalWorker(name, [own, *arguments], variables))
        yield from gather(workers)
    finally:
        for worker in workers:
            worker.stop()


def use_cores(number: int, count: int) -> None:
    """Leave this process its part of the CPU cores: the `number`-th of `count`, from 0."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2 * count:
        first, last = ((number + i) * len(cores) // count for i in (0, 1))
        os.sched_setaffinity(0, cores[first:last])


def use_cores_of_rank(number: int, count: int) -> None:
    """Do the same in a process that its launcher has not bound to some cores."""
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(0) == os.sched_getaffinity(1):
            use_cores(number, count)


def begin_worker(text: str, shard: Shard) -> Part:
    """Return the part of a worker, `2/4@SECONDS`, of a shard.

    Has this process end with its parent, and use its part of the CPU cores.
    """
    from safetune.offline.shards import Part, Shard

    numbers, _, since = text.partition("@")
    number, count = map(int, numbers.split("/"))
    use_cores(number - 1, count)

    def wait_for_parent() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would stay held when this process exits
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_parent, daemon=True).start()
    return Part(Shard(shard.index, shard.count, number - 1, count), float(since))


def printer() -> Callable[[Event], None]:
    """Return a function that prints an event on what is now standard output."""
    out = os.dup(sys.stdout.fileno())

    def tell(event: Event) -> None:
        with open(out, "w", encoding="utf-8", closefd=False) as file:
            file.write(json.dumps(event) + "\n")

    return tell
