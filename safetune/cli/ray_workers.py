"""`safetune tune --ray ADDRESS`: the worker of `--devices` in an actor for each GPU of a cluster.

Ray places the actors. Their events come back through Ray, and the choices go through the shared
store.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetune.cli.workers import DroppedOut, Event, LocalWorker, gather
from safetune.errors import InvalidSetting, NoDevice
from safetune.settings import Settings

#: How long Ray may take to start an actor; where GPUs are taken, it waits for them.
_START_S = 600.0


def tune_on_ray(
    address: str, arguments: Sequence[str], interpreted: bool
) -> Iterator[tuple[str, Event]]:
    """Run a worker on each GPU of a cluster; yield their events as `gather` does.

    In the interpreter, on each CPU that Ray has.
    """
    if not Settings.current().shared:
        raise InvalidSetting(
            "--ray needs SAFETUNE_SHARED, the URL of a store that all nodes can reach: "
            "file:///directory or postgresql://host/database"
        )
    try:
        import ray
    except ImportError as error:
        raise InvalidSetting(f"--ray: {error}; pip install 'safetune[ray]'") from error
    ray.init(address, log_to_driver=True, logging_level="ERROR")
    kind = "CPU" if interpreted else "GPU"
    try:
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        sizes = {node: int(resources.get(kind, 0)) for node, resources in nodes.items()}
        if not any(sizes.values()):
            raise NoDevice(
                f"--ray: the cluster has no {kind}; TRITON_INTERPRET=1 tunes on its CPUs"
            )
        wanted = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1}
        places = defaultdict[str, Iterator[int]](itertools.count)
        actor = ray.remote(**wanted)(Actor)
        yield from gather(
            [
                _RayWorker(f"Ray {kind} {number}", actor.remote(), arguments, sizes, places)
                for number in range(sum(sizes.values()))
            ]
        )
    finally:
        ray.shutdown()


class Actor:
    """Runs one worker on its node."""

    _worker: LocalWorker

    def node(self) -> str:
        """Return its place."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def plan(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: str
    ) -> Iterator[Event]:
        """Start the worker, in this directory if the node has it."""
        if os.path.isdir(directory):
            os.chdir(directory)
        self._worker = LocalWorker("", arguments, variables)
        yield from self._worker.plan()

    def tune(self, key: str) -> Iterator[Event]:
        """Start tuning a key."""
        yield from self._worker.tune(key)

    def finish(self) -> Iterator[Event]:
        """Ask the worker to end."""
        yield from self._worker.finish()


class _RayWorker:
    """A worker in an actor.

    Args:
        sizes: how many actors each node may have.
        places: how many it has, a counter for each.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        arguments: Sequence[str],
        sizes: Mapping[str, int],
        places: Mapping[str, Iterator[int]],
    ) -> None:
        self.name, self._actor, self._arguments = name, actor, arguments
        self._sizes, self._places = sizes, places

    def plan(self) -> Iterator[Event]:
        """Yield its events until its plan is made. Ray places the actor first."""
        import ray

        try:
            node = ray.get(self._actor.node.remote(), timeout=_START_S)
        except ray.exceptions.RayError as error:
            raise DroppedOut(f"Ray did not start its actor: {error}") from error
        number = next(self._places[node]) + 1
        worker = f"--worker={number}/{max(number, self._sizes.get(node, 1))}"
        variables = {n: v for n, v in os.environ.items() if n.startswith(("SAFETUNE_", "TRITON_"))}
        yield from self._told("plan", [worker, *self._arguments], variables, os.getcwd())

    def tune(self, key: str) -> Iterator[Event]:
        """Yield its events until a key is done."""
        return self._told("tune", key)

    def finish(self) -> Iterator[Event]:
        """Yield its events until it ends."""
        return self._told("finish")

    def stop(self) -> None:
        """End its actor, and the actor's process."""
        import ray

        ray.kill(self._actor)

    def _told(self, method: str, *arguments: object) -> Iterator[Event]:
        """Yield the results of a method of the actor."""
        import ray

        try:
            told = getattr(self._actor, method).options(num_returns="streaming")
            for event in told.remote(*arguments):
                yield ray.get(event)
        except ray.exceptions.RayActorError as error:
            raise DroppedOut("its actor or its node died") from error
        except ray.exceptions.RayTaskError as error:
            raise DroppedOut(str(error.cause)) from error
