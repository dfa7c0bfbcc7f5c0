"""`safetune tune --ray ADDRESS`: an actor for each GPU of a Ray cluster; Ray places them.

An actor starts the worker that `--devices` starts: actors on one node are the workers of a shard.
Choices go through the shared store, and what a worker tells comes back through Ray.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetune.cli.workers import DroppedOut, Event, LocalWorker, gather
from safetune.errors import InvalidSetting, NoDevice
from safetune.settings import Settings

#: How long Ray may take to start all actors; where GPUs are taken, it waits for them.
_START_S = 600.0


def tune_on_ray(
    address: str, arguments: Sequence[str], interpreted: bool
) -> Iterator[tuple[str, Event]]:
    """Run a worker on each GPU of a cluster; yield their events as `gather` does.

    In the interpreter, on each CPU that Ray has.
    """
    if not Settings.current().shared:
        raise InvalidSetting(
            "--ray needs SAFETUNE_SHARED, a store that all nodes of the cluster reach: "
            "file:///directory or postgresql://host/database"
        )
    try:
        import ray
    except ImportError as error:
        raise InvalidSetting(f"--ray: {error}; pip install 'safetune[ray]'") from error
    ray.init(address, log_to_driver=True, logging_level="ERROR")
    try:
        workers = _workers(ray, "CPU" if interpreted else "GPU", arguments)
        yield from gather(workers)
    finally:
        ray.shutdown()


class Actor:
    """Runs one worker on its node."""

    def node(self) -> str:
        """Return where it is."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def tune(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: str
    ) -> Iterator[Event]:
        """Yield the events of a worker; raises `DroppedOut`."""
        if os.path.isdir(directory):
            os.chdir(directory)
        worker = LocalWorker("", arguments, variables)
        try:
            yield from worker.events()
        finally:
            worker.stop()


class _RayWorker:
    """A worker in an actor."""

    def __init__(self, name: str, actor: Any, arguments: Sequence[str]) -> None:
        self.name, self._actor = name, actor
        variables = {n: v for n, v in os.environ.items() if n.startswith(("SAFETUNE_", "TRITON_"))}
        self._told = actor.tune.options(num_returns="streaming").remote(
            list(arguments), variables, os.getcwd()
        )

    def events(self) -> Iterator[Event]:
        """Yield what it tells."""
        import ray

        try:
            for told in self._told:
                yield ray.get(told)
        except ray.exceptions.RayActorError as error:
            raise DroppedOut("its actor ended, or its node did") from error
        except ray.exceptions.RayTaskError as error:
            raise DroppedOut(str(error.cause)) from error

    def stop(self) -> None:
        """End its actor, and the process that it has started."""
        import ray

        ray.kill(self._actor)


def _workers(ray: Any, kind: str, arguments: Sequence[str]) -> list[_RayWorker]:
    """Start an actor for each GPU or CPU of the cluster."""
    count = int(ray.cluster_resources().get(kind, 0))
    if not count:
        raise NoDevice(f"--ray: the cluster has no {kind}; TRITON_INTERPRET=1 tunes on its CPUs")
    each = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1}
    actors = [ray.remote(**each)(Actor).remote() for _ in range(count)]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=_START_S)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes), 1)}
    sizes, seen, now = Counter(nodes), Counter[str](), time.time()
    workers = []
    for actor, node in zip(actors, nodes, strict=True):
        seen[node] += 1
        place = f"--shard={numbers[node]}/{len(numbers)}"
        worker = f"--worker={seen[node]}/{sizes[node]}@{now}"
        name = f"node {numbers[node]} {kind} {seen[node] - 1}"
        workers.append(_RayWorker(name, actor, [place, worker, *arguments]))
    return workers
