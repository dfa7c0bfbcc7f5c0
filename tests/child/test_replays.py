"""Times of launches as replays of a graph: what they work on in turn, and what is captured."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune.both import backend
from safetune.both.cuda_driver import DriverError
from safetune.both.device_bytes import DeviceBytes
from safetune.both.protocol import GRAPH_LAUNCHES, Budget
from safetune.child import memory, stand_ins
from safetune.child.arguments import Arguments
from safetune.child.device import DeviceTimer, Scratch
from safetune.child.memory import HostBytes
from safetune.child.replays import MOST_COPIES, NotReplayable, Replays, Rotation
from safetune.inputs.snapshot import Snapshot
from tests.libcuda import stub

KIB = 1 << 10


class Narrow(HostBytes):
    """A host with room for a number of copies."""

    def __init__(self, copies: int) -> None:
        self.left = copies

    def has_room(self, size: int) -> bool:
        self.left -= 1
        return self.left >= 0


def arguments_of(*tensors: torch.Tensor) -> Arguments:
    snapshot = Snapshot(tensors)
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    snapshot.close()
    return arguments


def tensors_of(arguments: Arguments, rotation: Rotation) -> list[list[torch.Tensor]]:
    """The tensors of each copy, the arguments' own first."""
    views = list(enumerate(arguments.views))
    copies = [[arguments.tensor(held[v.block], i) for i, v in views] for held in rotation.copies]
    return [arguments.tensors, *copies]


class TestRotation:
    @pytest.mark.parametrize(
        ("cache", "copies"),
        [(0, 2), (4 * KIB, 2), (40 * KIB, 10), (41 * KIB, 11), (1 << 30, MOST_COPIES)],
    )
    def test_all_together_exceed_the_cache_twice(self, cache: int, copies: int) -> None:
        arguments = arguments_of(torch.zeros(4 * KIB, dtype=torch.uint8), torch.zeros(KIB))
        assert len(Rotation(arguments, HostBytes(), cache)) == copies

    @pytest.mark.parametrize("room", [0, 3])
    def test_fewer_where_there_is_no_room(self, room: int) -> None:
        arguments = arguments_of(torch.zeros(KIB))
        assert len(Rotation(arguments, Narrow(room), 1 << 20)) == 1 + room

    def test_copies_have_the_bits_the_alignment_and_the_aliasing_of_the_arguments(self) -> None:
        odd = torch.frombuffer(bytearray(range(64)), dtype=torch.uint8, offset=3)
        packed = torch.randn(4, 3, 8)
        arguments = arguments_of(odd, packed[:, 0], packed)
        own, *others = tensors_of(arguments, Rotation(arguments, HostBytes(), 0))
        assert others
        places = {tensor.data_ptr() for tensor in own}
        for tensors in others:
            for tensor, mine in zip(tensors, own, strict=True):
                assert torch.equal(tensor, mine)
                assert tensor.stride() == mine.stride()
                assert tensor.data_ptr() % 256 == mine.data_ptr() % 256
                assert tensor.data_ptr() not in places
            tensors[1].fill_(7.0)
            assert (tensors[2][:, 0] == 7.0).all()
            assert not (own[1] == 7.0).any()

    def test_what_launches_have_written_is_put_back(self) -> None:
        arguments = arguments_of(torch.zeros(8), torch.ones(8))
        rotation = Rotation(arguments, HostBytes(), KIB)
        turns = tensors_of(arguments, rotation)
        turns[0][0].fill_(3.0)  # by which the first one is known to be written
        arguments.restore()
        for written, _ in turns[1:]:
            written.fill_(float("nan"))
        rotation.refill()
        assert all((written == 0).all() and (read == 1).all() for written, read in turns)


class Launched:
    """What Triton's launcher is called with, in the place of a kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_once_at = -1

    def __call__(self, *arguments: Any) -> None:
        if len(self.calls) == self.fails_once_at:
            self.fails_once_at = -1
            raise RuntimeError("no")
        self.calls.append(arguments)


class Card:
    """A call of two tensors on the library's device, and what times it."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        snapshot = Snapshot(tensors, index=0)
        self.arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
        snapshot.close()
        self.tensors = stand_ins.of(self.arguments)
        where = backend.required().bytes_of(0)
        self.driver = where.driver
        self.scratch = Scratch(where)
        of_call = self.arguments, self.tensors
        self.replays = Replays(*of_call, where, DeviceTimer(where), self.scratch)
        self.launched = Launched()

    def time(self, way: str, *arguments: Any, config: int = 0) -> Any:
        stream = 0
        call = (8, 1, 1, stream, "function", *(arguments or self.tensors), 16)
        launch = functools.partial(self.launched, *call)
        return self.replays.time(config, lambda: launch, Budget(least=4, time_ms=0.0, way=way))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with stub.holding_tensors():
        backend.required().bytes_of(0).driver.use(0)
        made = Card(torch.zeros(5 << 20), torch.ones(5 << 20))  # 40 MiB; the cache has 50
        yield made
        del made.replays
    memory.bytes_on.cache_clear()


def places(calls: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
    return [(call[5].data_ptr(), call[6].data_ptr()) for call in calls]


class TestReplays:
    def test_launches_take_the_copies_in_turn_on_a_stream_of_their_own(self, card: Card) -> None:
        timing = card.time("graph")
        assert (timing.stage, timing.count) == ("graph", 4)
        first, *captured = card.launched.calls
        found = places(captured)
        assert found[0] == places([first])[0] == tuple(t.data_ptr() for t in card.tensors)
        assert len(found) >= GRAPH_LAUNCHES
        assert len({*found}) == 3, "of 40 MiB each"
        assert found == found[:3] * (len(found) // 3)
        assert {call[3] for call in card.launched.calls} == {77}
        assert {(*call[:3], call[4], call[7]) for call in captured} == {(8, 1, 1, "function", 16)}

    def test_one_that_is_hot_stays_on_the_arguments(self, card: Card) -> None:
        assert card.time("hot").stage == "hot"
        assert {*places(card.launched.calls)} == {tuple(t.data_ptr() for t in card.tensors)}

    def test_a_config_is_captured_once(self, card: Card) -> None:
        for _ in range(2):
            card.time("graph")
        count = len(card.launched.calls)
        card.time("graph", config=1)
        assert len(card.launched.calls) == 2 * count

    def test_tensors_within_arguments_are_others_too(self, card: Card) -> None:
        out, read = card.tensors
        described = TensorDescriptor(read, [64, 64], [64, 1], [16, 16])
        card.time("graph", out, ((described, 3), 4))
        parts = [call[6] for call in card.launched.calls]
        assert len({inner.base.data_ptr() for (inner, _), _ in parts}) == 3
        assert {(*inner.block_shape, *rest, last) for (inner, *rest), last in parts} == {
            (16, 16, 3, 4)
        }
        assert described.base is read

    def test_scratch_memory_stays_as_long_as_a_graph_uses_it(self, card: Card) -> None:
        before = stub.used(stub.library())
        for config, size in enumerate((1 << 20, 1 << 24)):
            card.scratch.allocate(size, 16, None)
            card.time("hot", config=config)
        assert stub.used(stub.library()) >= before + (1 << 20) + (1 << 24)

    def test_a_launch_that_fails_in_a_capture_ends_it(self, card: Card) -> None:
        card.launched.fails_once_at = 5
        with pytest.raises(RuntimeError, match="no"):
            card.time("graph")
        assert card.time("graph").stage == "graph"

    def test_a_capture_that_the_driver_refuses(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for function in ("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphLaunch"):
            with monkeypatch.context() as patch:
                patch.setenv("LIBCUDA_FAIL", f"{function}=901")
                with pytest.raises(DriverError, match=function):
                    card.time("graph")
        assert card.time("graph").stage == "graph"

    def test_without_room_for_a_second_copy(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DeviceBytes, "has_room", lambda self, size: False)
        with pytest.raises(NotReplayable, match="no room for a second copy"):
            card.time("graph")
