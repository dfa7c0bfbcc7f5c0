"""Times launches as they are deployed: as replays of a CUDA graph, over copies of the arguments.

Successive launches use different copies. All copies together exceed the L2 cache, so a launch reads
its inputs from memory. For small launches the copies do not fill the cache, as in a model whose
previous kernel has just written the inputs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from safetune import triton_launch
from safetune.both import backend
from safetune.both.protocol import GRAPH_LAUNCHES
from safetune.both.timing import Launch, Sample, Timer, measure
from safetune.child.arguments import Arguments, Copy
from safetune.child.stand_ins import StandIn
from safetune.inputs.memory_budget import FLUSH

if TYPE_CHECKING:
    from safetune.both.device_bytes import DeviceBytes
    from safetune.both.protocol import Budget
    from safetune.child.device import DeviceTimer, Scratch
    from safetune.outcome import Timing

#: The copies exceed the L2 cache this many times, if no more than so many are needed for that.
CACHES, MOST_COPIES = 2, 64
#: Bytes between two copies, so that a write beside one reaches no other.
_BETWEEN = 1 << 16


class NotReplayable(Exception):
    """Launches of a config cannot be timed as graph replays; the text says why."""


class Rotation:
    """The arguments of a call, and copies of all arguments in device memory.

    Aliasing and alignment are preserved. A kernel that changes its arguments in place works on the
    result of its last launch until `refill`.
    """

    def __init__(self, arguments: Arguments, where: Any, cache_bytes: int) -> None:
        blocks = {
            number: block
            for number, block in enumerate(arguments.blocks)
            if block.spec.device == where.name and not block.spec.is_pinned
        }
        self._blocks = blocks
        self.copies: list[Mapping[int, Copy]] = []
        size = sum(block.spec.size for block in blocks.values())
        wanted = -(-CACHES * cache_bytes // max(1, size))
        with contextlib.suppress(MemoryError):
            while len(self) < min(max(2, wanted), MOST_COPIES) and where.has_room(size):
                self.copies.append(
                    {
                        number: Copy.like(block.spec, where.allocate, _BETWEEN)
                        for number, block in blocks.items()
                    }
                )
        self._fill(blocks)

    def __len__(self) -> int:
        """Return the number of copies, the arguments themselves included."""
        return 1 + len(self.copies)

    def refill(self) -> None:
        """Copy the arguments' present content into all copies, where launches have written."""
        self._fill(number for number, block in self._blocks.items() if block.written)

    def _fill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            block = self._blocks[number]
            for held in self.copies:
                block.bytes.copy(held[number].run.address, *block.live.run)


class _Graph(NamedTuple):
    """A graph that can be replayed, of some launches."""

    handle: int
    launches: int
    scratch: Any  # the memory that its launches were given


class _ReplayTimer(Timer):
    """Counts replays of a graph as launches."""

    def __init__(self, timer: DeviceTimer, launches: int) -> None:
        super().__init__(long_ms=timer.long_ms)
        self._timer, self._launches = timer, launches

    def samples(self, launch: Launch, before: Launch, after: Launch, count: int) -> list[Sample]:
        return self._timer.replays(launch, self._launches, count)


@dataclass(eq=False)
class Replays:
    """Times configs of one call as graph replays.

    Args:
        tensors: of the call, in the order of `arguments.views`.
        scratch: provides scratch memory for launches.
    """

    arguments: Arguments
    tensors: Sequence[Any]
    where: DeviceBytes
    timer: DeviceTimer
    scratch: Scratch
    _graphs: dict[tuple[int, str], _Graph] = field(default_factory=dict)

    @functools.cached_property
    def _rotation(self) -> Rotation:
        return Rotation(self.arguments, self.where, self.where.l2_bytes() or FLUSH // CACHES)

    def time(
        self, config: int, launch_now: Callable[[], functools.partial[Any]], budget: Budget
    ) -> Timing:
        """Return the time of a launch, over `budget.least` replays.

        Args:
            launch_now: returns the call of Triton's launcher that the graph repeats.

        Raises `NotReplayable`, and the errors of a capture.
        """
        name = config, budget.way
        if name not in self._graphs:
            self._graphs[name] = self._captured(launch_now(), budget.way)
        graph = self._graphs[name]
        self.arguments.restore()
        if budget.way == "graph":
            self._rotation.refill()
        replay = functools.partial(self.where.driver.replay, graph.handle)
        timer = _ReplayTimer(self.timer, graph.launches)
        return replace(measure(replay, _nothing, _nothing, timer, budget), stage=budget.way)

    def _captured(self, launch: functools.partial[Any], way: str) -> _Graph:
        stream = self.where.side_stream  # no graph can be captured on the default one
        head = (*launch.args[: triton_launch.STREAM], stream)
        arguments = launch.args[triton_launch.STREAM + 1 :]
        calls = [(*head, *moved) for moved in self._in_turn(arguments, way)]
        run, driver = launch.func, self.where.driver
        driver.synchronize()  # the stream waits for nothing
        run(*calls[0])  # it gets its scratch memory, and what is loaded late is
        driver.wait(stream)
        launches = len(calls) * -(-GRAPH_LAUNCHES // len(calls))

        def queue() -> None:
            for number in range(launches):
                run(*calls[number % len(calls)])

        with backend.no_collection():  # memory that is freed meanwhile would end the capture
            handle = driver.capture(stream, queue)
        graph = _Graph(handle, launches, self.scratch.memory)
        driver.replay(graph.handle)
        driver.synchronize()
        return graph

    def _in_turn(self, arguments: Sequence[Any], way: str) -> list[list[Any]]:
        """Return the arguments of launches that follow each other, before they start over."""
        if way != "graph":
            return [[*arguments]]
        if len(self._rotation) < 2:
            raise NotReplayable("the device has no room for a second copy of the arguments")
        turns = [[*arguments]]
        for held in self._rotation.copies:
            places = {
                id(tensor): self._over(held[view.block], number)
                for number, (tensor, view) in enumerate(
                    zip(self.tensors, self.arguments.views, strict=True)
                )
                if view.block in held
            }
            turns.append([_moved(argument, places) for argument in arguments])
        return turns

    def _over(self, held: Copy, number: int) -> Any:
        """Return the tensor of this number over a copy of its block."""
        tensor = self.tensors[number]
        if not isinstance(tensor, StandIn):
            return self.arguments.tensor(held, number)
        address = self.arguments.elements(number, held).address
        spec = self.arguments.views[number]
        return StandIn(spec, address, tensor.device, self.where, held.memory)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            for graph in self._graphs.values():
                self.where.driver.drop_graph(graph.handle)


def _nothing() -> None:
    """Do nothing between two replays."""


def _moved(argument: Any, places: Mapping[int, Any]) -> Any:
    """Return an argument of a launch with other tensors, by the `id` of those in their places.

    A descriptor, or what reads a tensor as another dtype, has it as its base.
    """
    if id(argument) in places:
        return places[id(argument)]
    if isinstance(argument, tuple):
        items = [_moved(item, places) for item in argument]
        named = hasattr(argument, "_fields")
        return type(argument)(*items) if named else type(argument)(items)
    if id(getattr(argument, "base", None)) in places:
        made = copy.copy(argument)
        object.__setattr__(made, "base", places[id(argument.base)])
        return made
    return argument
