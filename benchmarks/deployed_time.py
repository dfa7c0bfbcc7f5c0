"""How long a launch takes as it is deployed: in a CUDA graph, each launch on other tensors.

What a graph reads in a launch is what a model reads: weights come from memory, and what is small is
in the L2 cache. Written apart from the product, whose choices it judges.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import device_time
import recording

if TYPE_CHECKING:
    from choice_problems import Work

#: A graph has at least so many launches, on at least so many sets of tensors. More sets if they fit
#: into twice the L2 cache, at most the last number.
LAUNCHES, SETS, MOST_SETS = 48, 8, 64
ROUNDS = 15


def medians(
    work: Work, launches: Mapping[str, Callable[[Work], object]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the milliseconds of a launch, by name, from rounds over all in changing order."""
    if recording.interpreted():
        timed = {
            name: device_time.timed(functools.partial(launch, work), 2)
            for name, launch in launches.items()
        }
        return {name: statistics.median(times) for name, times in timed.items()}
    sets = _sets(work)
    graphs = {name: _graph(launch, sets) for name, launch in launches.items()}
    count, order = _count(len(sets)), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in order.sample([*graphs], len(graphs)):
            times[name].append(_replay(graphs[name]) / count)
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def _sets(work: Work) -> list[Work]:
    import torch

    tensors = [arg for arg in work.args if isinstance(arg, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    wanted = -(-2 * torch.cuda.get_device_properties().L2_cache_size // size)
    count = min(max(SETS, wanted), MOST_SETS)
    return [work, *(replace(work, args=_copied(work.args)) for _ in range(count - 1))]


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.clone() if hasattr(arg, "clone") else arg for arg in args)


def _count(sets: int) -> int:
    return sets * -(-LAUNCHES // sets)


def _graph(launch: Callable[[Work], object], sets: list[Work]) -> Any:
    import torch

    launch(sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(_count(len(sets))):
            launch(sets[number % len(sets)])
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay(graph: Any) -> float:
    """Return the milliseconds of a replay, which follows another one at once."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
