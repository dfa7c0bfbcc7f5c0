"""`safetune tune --ray ADDRESS`: the worker of `--devices` in an actor for each GPU of a cluster.

Ray places the actors. Their events come back through Ray, and the choices go through the shared
store.
"""

from __future__ import annotations

import os
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
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address, log_to_driver=True, logging_level="ERROR")
    kind = "CPU" if interpreted else "GPU"
    actor = ray.remote(**{f"num_{kind.lower()}s": 1})(Actor)
    variables = {n: v for n, v in os.environ.items() if n.startswith(("SAFETUNE_", "TRITON_"))}
    workers: list[_RayWorker] = []
    try:
        for node in (node for node in ray.nodes() if node["Alive"]):
            count = int(node["Resources"].get(kind, 0))
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for number in range(1, count + 1):
                words = [f"--worker={number}/{count}", *arguments]
                placed = actor.options(scheduling_strategy=there)
                started = placed.remote(words, variables, os.getcwd())
                workers.append(_RayWorker(f"Ray {kind} {len(workers)}", started))
        if not workers:
            raise NoDevice(
                f"--ray: the cluster has no {kind}; TRITON_INTERPRET=1 tunes on its CPUs"
            )
        yield from gather(workers)
    finally:
        ray.shutdown()


class Actor:
    """Runs one worker on its node, in this directory if the node has it."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: str
    ) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)
        self._worker = LocalWorker("", arguments, variables)

    def ask(self, key: str | None) -> Iterator[Event]:
        """Ask the worker."""
        yield from self._worker.ask(key)


class _RayWorker:
    """A worker in an actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor

    def ask(self, key: str | None = None) -> Iterator[Event]:
        """Ask the actor, which Ray may have to place first."""
        import ray

        try:
            if key is None:
                ray.get(self._actor.__ray_ready__.remote(), timeout=_START_S)
            for event in self._actor.ask.options(num_returns="streaming").remote(key):
                yield ray.get(event)
        except ray.exceptions.RayActorError as error:
            raise DroppedOut("its actor or its node died") from error
        except ray.exceptions.RayTaskError as error:
            raise DroppedOut(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            raise DroppedOut(f"Ray did not start its actor: {error}") from error

    def stop(self) -> None:
        """End its actor, and the actor's process."""
        import ray

        ray.kill(self._actor)
