"""The processes of a tuning on several GPUs, which take keys from one list.

Each runs `safetune tune --worker`. A worker makes its plan and prints its keys. Then it reads a key
from its standard input, tunes it and prints that it is done, until there is no more. It prints
events, one line of JSON each. If a worker ends early, another one takes its key.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from safetune.cli.command import in_another_process
from safetune.cli.output import counted, echo
from safetune.errors import SafetuneError

if TYPE_CHECKING:
    from safetune.offline.plan import Planned
    from safetune.offline.shards import Shard

Event = dict[str, Any]

#: How long a process that was killed may take to end; a call of the driver may keep it.
_END_S = 10.0


class DroppedOut(SafetuneError):
    """A worker ended early."""


class Worker(Protocol):
    """A process that tunes keys, on this machine or on another one."""

    name: str

    def ask(self, key: str | None = None) -> Iterator[Event]:
        """Name a key, "" if there is none left; yield its events until it is `done` or has ended.

        First without a key, until its `plan` is made. Raises `DroppedOut`.
        """

    def stop(self) -> None:
        """End it, if it runs."""


class _Keys:
    """The keys of all workers: the worker that has each, and the finished ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all: set[str] = set()
        self._taken: set[str] = set()
        self._done: set[str] = set()
        self._lost = Counter[str]()  # by workers that dropped out

    def take(self, keys: Sequence[str]) -> str | None:
        """Return the first of a worker's keys that no other one has; None when all are done.

        Waits while others have all remaining keys, because they may drop out. A key in which a
        worker dropped out comes last.
        """
        with self._changed:
            self._all.update(keys)
            while not self._done.issuperset(keys):
                if free := [key for key in keys if key not in self._taken]:
                    key = min(free, key=self._lost.__getitem__)
                    self._taken.add(key)
                    return key
                self._changed.wait()
        return None

    def end(self, key: str, done: bool) -> None:
        """Note that a key is done, or that its worker has dropped out."""
        with self._changed:
            if done:
                self._done.add(key)
            else:
                self._taken.discard(key)
                self._lost[key] += 1
            self._changed.notify_all()

    @property
    def left(self) -> int:
        """The number of keys that are not done."""
        return len(self._all - self._done)


def gather(workers: Sequence[Worker]) -> Iterator[tuple[str, Event]]:
    """Let the workers tune all keys; yield their events with the worker's name, as they come.

    An event `dropped` has the reason why a worker ended early. Raises `DroppedOut` if no worker
    finishes, or a key is left that no other worker has in its plan.
    """
    events: queue.SimpleQueue[tuple[Worker, Event | Exception | None]] = queue.SimpleQueue()
    keys = _Keys()

    def work(worker: Worker) -> None:
        end = None
        try:
            _work(worker, keys, lambda event: events.put((worker, event)))
        except Exception as error:
            end = error
        events.put((worker, end))

    for worker in workers:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    running, finished = len(workers), 0
    while running:
        worker, event = events.get()
        if isinstance(event, dict):
            yield worker.name, event
            continue
        running -= 1
        finished += event is None
        if event is not None:
            worker.stop()
            then = "the others take over its work" if running or finished else "no device is left"
            echo(f"Warning: {worker.name} dropped out: {event}; {then}", err=True)
            yield worker.name, {"dropped": str(event)}
    if not finished or keys.left:
        what = "no device finished the list"
        if finished:
            what = f"a device dropped out and left {counted(keys.left, 'key')} untuned"
        raise DroppedOut(
            f"{what}, for the reasons above; finished tunings are stored, so run the command again"
        )


def _work(worker: Worker, keys: _Keys, tell: Callable[[Event], None]) -> None:
    """Let a worker tune keys until all of its plan are done.

    Its events for a key count once the key is done; otherwise another worker sends them again.
    """
    own: list[str] = []
    for event in worker.ask():
        own = list(event.get("plan", own))
        tell(event)
    while key := keys.take(own):
        told, done = [], False
        try:
            for event in worker.ask(key):
                if "tried" in event:
                    tell(event)
                else:
                    told.append(event)
            done = True
        finally:
            keys.end(key, done)
        for event in told:
            tell(event)
    for event in worker.ask(""):
        tell(event)


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
        self._events = self._read()

    def ask(self, key: str | None = None) -> Iterator[Event]:
        """Name a key, "" if there is none left; yield its events until it is done or has ended."""
        assert self._process.stdin is not None
        if key is not None:
            with contextlib.suppress(OSError):  # it has ended: so do its events
                os.write(self._process.stdin.fileno(), f"{key}\n".encode())
        for event in self._events:
            yield event
            if "plan" in event or "done" in event:
                return
        code = self._process.wait()
        if code or key != "":
            from safetune.isolation.child_handle import exit_text

            raise DroppedOut(f"its process ended with {exit_text(code)}")

    def stop(self) -> None:
        """End it, if it runs."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _read(self) -> Iterator[Event]:
        """Yield the events that it prints; other output goes to standard error."""
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
        messages.join()

    def _relay(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        echo(f"{self.name}: {line.rstrip()}", err=True)


def tune_on(
    devices: Mapping[str, Mapping[str, str]], arguments: Sequence[str]
) -> Iterator[tuple[str, Event]]:
    """Run a worker for each device; yield their events as `gather` does.

    Args:
        devices: by name, the variables that hide all other devices.
        arguments: the command line of the parent; a worker ignores --devices and --ray.
    """
    workers: list[LocalWorker] = []
    try:
        for number, (name, variables) in enumerate(devices.items(), 1):
            own = f"--worker={number}/{len(devices)}"
            workers.append(LocalWorker(name, [own, *arguments], variables))
        yield from gather(workers)
    finally:
        for worker in workers:
            worker.stop()


def use_cores(part: Shard) -> None:
    """Restrict this process to its part of the CPU cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2 * part.count:
        first, last = ((part.index + i) * len(cores) // part.count for i in (0, 1))
        os.sched_setaffinity(0, cores[first:last])


def use_cores_of_rank(rank: Shard) -> None:
    """Do the same, unless the launcher has bound this process to some cores."""
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(0) == os.sched_getaffinity(1):
            use_cores(rank)


class Parent:
    """The process that has started this worker, the first of four as `1/4`.

    It names the keys to tune, and gets their events. This process ends when that one does.
    """

    def __init__(self, worker: str) -> None:
        from safetune.offline.shards import Shard

        number, count = map(int, worker.split("/"))
        self.part = Shard(number - 1, count)
        use_cores(self.part)
        self._out = os.dup(sys.stdout.fileno())
        self._telling = threading.Lock()
        self._named: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, event: Event) -> None:
        """Print an event on the original standard output."""
        with self._telling, open(self._out, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def named(self, tunings: Iterable[Planned]) -> Iterator[Planned]:
        """Yield the tunings of each key that the parent names, and report them as done."""
        of_key: dict[str, list[Planned]] = {}
        for planned in tunings:
            of_key.setdefault(planned.key, []).append(planned)
        while key := self._named.get():
            yield from of_key[key]
            self.tell({"done": key})

    def _listen(self) -> None:
        """Read keys; the parent writes one at a time."""
        while line := os.read(0, 4096):  # sys.stdin's lock would stay held when this process exits
            self._named.put(line.decode().strip())
        os.kill(os.getpid(), signal.SIGTERM)
