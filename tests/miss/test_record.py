"""What is written down of a call, and the tensors that are made of it."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune.errors import KernelNotTransferable
from safetune.frontend import call_counts, observers
from safetune.inputs import call_description
from safetune.inputs.spans import ALIGNMENT
from safetune.keys import encoding
from safetune.miss import record
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.local.store import Store
from safetune.store.lookup import open_lookup
from safetune.store.records import CallCount, RecordedCall


@pytest.fixture(autouse=True)
def _record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "record")


def recorded() -> list[RecordedCall]:
    return open_lookup(Settings.current()).store.calls()


@pytest.fixture
def call_of(copies: Any) -> Any:
    """A function that makes a call with any arguments: what is described is not launched."""
    call = Miss(copies(blocks=(16,)).tuner, (torch.zeros(1),), {"grid": (1,)}).call
    return lambda *args, **kwargs: replace(call, args=args, kwargs=kwargs)


class TestRebuilt:
    def test_tensors_lie_as_they_did(self, call_of: Any) -> None:
        """Shape, strides, offset, alignment, and what shares memory with what."""
        memory = torch.randn(1000)
        tensors = [
            memory[3:].view(torch.int32)[:50],
            memory[100:900].view(40, 20).t(),
            memory[100:200],
            torch.empty(0),
            torch.zeros((), dtype=torch.float64),
            torch.randn(7).expand(3, 7),
            torch.ones(5, dtype=torch.bool),
        ]
        call = call_of(*tensors[:4], x=(tensors[4], [tensors[5]], tensors[6]))

        args, kwargs = call_description.rebuild(call_description.describe(call), "cpu")

        made = [*args, kwargs["x"][0], *kwargs["x"][1], kwargs["x"][2]]
        for before, after in zip(tensors, made, strict=True):
            for fact in ("shape", "dtype", "device"):
                assert getattr(after, fact) == getattr(before, fact)
            assert after.stride() == before.stride()
            assert after.data_ptr() % ALIGNMENT == before.data_ptr() % ALIGNMENT
        apart = [t.data_ptr() - tensors[0].data_ptr() for t in tensors[:3]]
        assert [t.data_ptr() - made[0].data_ptr() for t in made[:3]] == apart

    def test_floats_are_noise(self, call_of: Any) -> None:
        call = call_of(
            torch.full((4096,), 1e9, dtype=torch.bfloat16),
        )
        (noise,), _ = call_description.rebuild(call_description.describe(call), "cpu")
        assert abs(noise.float().mean()) < 0.1
        assert 0.9 < noise.float().std() < 1.1

    def test_plain_values_are_what_they_were(self, call_of: Any) -> None:
        values = (1, 1.5, True, None, "text", -(2**70), (1, (2.0, [True])), tl.bfloat16)
        kwargs = {"dtype": torch.float16, "inf": float("-inf"), "constant": tl.constexpr(3)}
        call = call_of(*values[:5], **dict(zip("abc", values[5:], strict=True)), **kwargs)

        data = call_description.describe(call)
        args, named = call_description.rebuild(json.loads(encoding.dumps(data)), "cpu")

        assert args == values[:5]
        assert [type(value) for value in args] == [type(value) for value in values[:5]]
        assert tuple(named[name] for name in "abc") == values[5:]
        assert named["dtype"] is torch.float16
        assert named["inf"] == float("-inf")
        assert (type(named["constant"]), named["constant"].value) == (tl.constexpr, 3)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (object(), "dst has a object, which cannot be recorded"),
            (torch.zeros(9).data_ptr, "dst has a builtin_function_or_method"),
            (torch.zeros(2, 2).to_sparse(), "no plain storage"),
        ],
    )
    def test_values_that_cannot_be_recorded_are_refused(
        self, call_of: Any, value: Any, reason: str
    ) -> None:
        with pytest.raises(KernelNotTransferable, match=reason):
            call_description.describe(call_of(value))

    def test_an_address(self, call_of: Any) -> None:
        tensor = torch.zeros(1 << 20)
        with pytest.raises(KernelNotTransferable, match="dst holds an address of this process"):
            call_description.describe(call_of(tensor.data_ptr()))


class TestIntegers:
    OFFSETS = (0, 5, 5, 300, 1000, 1007)

    @pytest.fixture
    def again(self, call_of: Any) -> Any:
        """A function that returns a tensor as it is made again from what was recorded of it."""

        def made(tensor: torch.Tensor) -> torch.Tensor:
            data = call_description.describe(call_of(tensor))
            (found,), _ = call_description.rebuild(json.loads(encoding.dumps(data)), "cpu")
            return found

        return made

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_offsets_have_as_many_lengths_of_each_size(self, again: Any, dtype: Any) -> None:
        offsets = torch.tensor(self.OFFSETS, dtype=dtype)

        made = again(offsets)

        assert made.dtype == dtype
        assert (made[0], made[-1]) == (0, self.OFFSETS[-1])
        bits = [sorted(int(n).bit_length() for n in each.diff()) for each in (made, offsets)]
        assert bits[0] == bits[1]
        assert torch.equal(made, again(offsets)), "in every process"

    def test_the_values_of_offsets_are_not_in_the_record(self, call_of: Any) -> None:
        data = call_description.describe(call_of(torch.tensor(self.OFFSETS)))
        assert data["integers"] == [[0, {"lengths": [[1, 0], [2, 12], [1, 295], [1, 700]]}]]

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor([3, 1, 2]),
            torch.tensor([[0, 1], [2, 900]]),
            torch.tensor([[-5, 1], [2, 9]], dtype=torch.int16).t(),
            torch.tensor([0, 255, 2], dtype=torch.uint8),
            torch.tensor([1, 2, 7], dtype=torch.uint32),
            torch.tensor([[False, True]]),
            torch.tensor([-(2**63), 2**63 - 1]),
        ],
        ids=str,
    )
    def test_other_integers_are_drawn_from_their_range(
        self, again: Any, call_of: Any, tensor: torch.Tensor
    ) -> None:
        values = tensor.to(torch.int64)
        data = call_description.describe(call_of(tensor))
        assert data["integers"][0][1]["range"] == [int(values.min()), int(values.max())]
        assert call_description.unknown(data, ["dst"]) == []
        assert call_description.drawn(data, ["dst"]) == ["dst"]
        made = again(tensor)
        assert (made.dtype, made.stride()) == (tensor.dtype, tensor.stride())
        assert values.min() <= made.to(torch.int64).min()
        assert made.to(torch.int64).max() <= values.max()

    def test_the_values_of_others_are_not_in_the_record(self, call_of: Any) -> None:
        data = call_description.describe(call_of(torch.tensor([3, 77, 1234])))
        assert data["integers"] == [[0, {"range": [3, 1234], "rising": True}]]
        assert "77" not in encoding.dumps(data)

    def test_offsets_that_begin_later_never_fall(self, again: Any) -> None:
        made = again(torch.tensor([7, 20, 20, 500, 900]))
        assert (made.diff() >= 0).all()

    @pytest.mark.parametrize(
        "value", [torch.tensor(7), torch.full((3, 2), 5), torch.ones(4, dtype=torch.bool)]
    )
    def test_a_range_of_one_value_is_that_value(
        self, again: Any, call_of: Any, value: torch.Tensor
    ) -> None:
        assert torch.equal(again(value), value)
        assert call_description.drawn(call_description.describe(call_of(value)), ["dst"]) == []

    def test_an_empty_tensor_needs_no_values(self, again: Any) -> None:
        assert again(torch.tensor([], dtype=torch.int64)).numel() == 0

    def test_under_capture_nothing_is_read(self, call_of: Any) -> None:
        data = call_description.describe(call_of(torch.tensor([3, 1])), read=False)
        assert data["integers"] == []
        assert call_description.unknown(data, ["dst"]) == ["dst"]


class Pair(NamedTuple):
    """A class of this module, as a library passes them."""

    data: Any
    step: int = 1


@dataclass
class Block:
    data: Any
    size: int


@dataclass(frozen=True)
class Frozen:
    kept: Any
    made: int = field(init=False, default=3)


class Kind(Enum):
    ROW = "row"
    COLUMN = "column"


class Number(IntEnum):
    TWO = 2


class Tuple(tuple[Any, ...]):
    """A tuple with a class of its own, which keeps no names."""


def double(x: Any) -> Any:
    return x * 2


@triton.jit
def jitted(x):
    return x * 3


def nested() -> Any:
    class Local(NamedTuple):
        data: Any

    return Local(1)


def renamed() -> Any:
    made = Block(1, 2)
    made.other = 5  # type: ignore[attr-defined]
    return made


class TestClasses:
    @pytest.mark.parametrize(
        "value",
        [
            Pair(1.5, 3),
            Pair(Pair(2), 4),
            (Pair((1, 2)), [Block(3, 4)]),
            Frozen(Kind.ROW),
            Kind.COLUMN,
            Number.TWO,
            torch.Size([3, 4]),
            tl.constexpr(Kind.ROW),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_come_back_as_they_were(self, call_of: Any, value: Any) -> None:
        data = json.loads(encoding.dumps(call_description.describe(call_of(value))))
        (made,), _ = call_description.rebuild(data, "cpu")
        assert repr(made) == repr(value)
        assert type(made) is type(value)
        assert made == value

    def test_of_tensors(self, call_of: Any) -> None:
        memory = torch.ones(8, dtype=torch.int32)
        call = call_of(Pair(memory), Block(memory[2:], 6), TensorDescriptor(memory, [8], [1], [4]))
        data = json.loads(encoding.dumps(call_description.describe(call)))
        (pair, block, descriptor), _ = call_description.rebuild(data, "cpu")
        assert [type(made) for made in (pair, block, descriptor)] == [Pair, Block, TensorDescriptor]
        assert torch.equal(pair.data, memory)
        assert descriptor.base is pair.data
        assert block.data.data_ptr() == pair.data.data_ptr() + 8

    def test_one_tensor_passed_twice_is_one(self, call_of: Any) -> None:
        x = torch.zeros(4)
        call = call_of(x, (x, x[:]), z=Pair(x))
        (one, (two, other)), named = call_description.rebuild(
            call_description.describe(call), "cpu"
        )
        assert one is two is named["z"].data
        assert other is not one
        assert other.data_ptr() == one.data_ptr()

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (Tuple((1, 2)), "dst has a Tuple, which cannot be recorded"),
            (nested(), "dst has a Local, .*nested.<locals>.Local does not lead to it"),
            (double, "dst has a function, which cannot be recorded"),
            (jitted, "dst has a (JIT|Interpreted)Function, which cannot be recorded"),
            ((1, Pair(object())), "dst has a object, which cannot be recorded"),
            (renamed(), "dst has a Block, .* it has attributes beside its fields: other"),
        ],
    )
    def test_what_would_come_back_as_something_else_is_refused(
        self, call_of: Any, value: Any, reason: str
    ) -> None:
        with pytest.raises(KernelNotTransferable, match=reason):
            call_description.describe(call_of(value))

    @pytest.mark.parametrize(
        ("value", "name", "other", "reason"),
        [
            (Pair(1), "Pair", Block, "now has different fields"),
            (Pair(1), "Pair", print, "is now a different class"),
            (Kind.ROW, "Kind", Pair, "is now a different class"),
            (Block(1, 2), "Block", None, "is now a different class"),
        ],
    )
    def test_what_is_not_as_it_was_is_not_made(
        self,
        call_of: Any,
        monkeypatch: pytest.MonkeyPatch,
        value: Any,
        name: str,
        other: Any,
        reason: str,
    ) -> None:
        """Nor is anything called that a record names: another program may have written it."""
        data = call_description.describe(call_of(value))
        monkeypatch.setattr(sys.modules[__name__], name, other)
        with pytest.raises(LookupError, match=reason):
            call_description.rebuild(data, "cpu")

    def test_of_a_script(self, call_of: Any) -> None:
        data = json.loads(
            encoding.dumps(call_description.describe(call_of(Pair(1)))).replace(
                f"{__name__}:Pair", "__main__:Pair"
            )
        )
        (made,), _ = call_description.rebuild(data, "cpu", main={"Pair": Pair})
        assert type(made) is Pair
        assert call_description.modules(data) == set()


class TestCounts:
    def counts(self) -> dict[int, CallCount]:
        call_counts.end()
        return {call.arguments["call"]["values"][0][1]: call.count for call in recorded()}

    def test_every_launch_of_each_key_counts(self, copies: Any) -> None:
        """Also of a process that comes later, and of a key that has a choice."""
        made = copies(blocks=(16, 32))
        for n in (100, 101, 100, 100):
            made(n)
        assert {n: count.calls for n, count in self.counts().items()} == {100: 3, 101: 1}
        copies(blocks=(16, 32))(100)
        assert {n: count.calls for n, count in self.counts().items()} == {100: 4, 101: 1}

    def test_some_launches_are_timed_but_not_the_first(self, copies: Any) -> None:
        made = copies(blocks=(16, 32))
        for _ in range(20):
            made()
        made(101)
        counts = self.counts()
        assert counts[100].timed == 5, "the 2nd, 3rd, 4th, 8th and 16th"
        assert counts[100].timed_ms > 0
        assert counts[101].each_ms is None

    def test_after_the_mode_has_changed_nothing_counts(
        self, copies: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = copies(blocks=(16, 32))
        made()
        made()
        monkeypatch.setenv("SAFETUNE_MODE", "frozen")
        made()
        assert observers.active == ()
        made()
        assert self.counts()[100].calls == 2

    def test_a_program_counts_until_its_end_and_so_does_a_worker_that_it_forks(
        self, fresh_process: Any, tmp_path: Path
    ) -> None:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM)
        fresh_process(script, warm=True)
        (call,) = recorded()
        assert call.count.calls == 3 + 2


PROGRAM = """
import multiprocessing, torch, triton, triton.language as tl
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n"])
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) * 2, mask=offset < n)

def launch(times):
    for _ in range(times):
        double[(2,)](torch.ones(30), 30)

launch(3)
worker = multiprocessing.get_context("fork").Process(target=launch, args=(2,))
worker.start()
worker.join()
assert worker.exitcode == 0
"""


class TestRecording:
    def test_one_row_for_each_key(self, copies: Any) -> None:
        made = copies(blocks=(16, 32))
        assert [made(), made(), made(flag=1), made(101)] == [16] * 4
        assert [copies(blocks=(16, 32))(), copies(blocks=(16, 32))(102)] == [16, 16]
        found = recorded()
        assert [call.arguments["call"]["values"] for call in found] == [
            [["n", 100]],
            [["n", 101]],
            [["n", 102]],
        ]
        assert list(found[0].arguments["grids"].values()) == [[7], [4]]
        assert {call.name for call in found} == {"copy_kernel"}

    def test_a_call_with_a_choice_is_recorded_too(self, copies: Any, packed: Any) -> None:
        """Else the part of a program's calls that has a choice could not be told."""
        made = copies(blocks=(16, 32))
        packed(made, 32)
        assert made() == 32
        assert [call.arguments["call"]["values"] for call in recorded()] == [[["n", 100]]]

    def test_recorded_calls_have_a_limit(self, copies: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(Store, "most_calls", 2)
        made = copies(blocks=(16, 32))
        for n in (100, 101, 102):
            made(n)
        assert len(recorded()) == 2

    def test_a_call_that_cannot_be_rebuilt_says_why(self, copies: Any) -> None:
        made = copies(blocks=(16, 32))
        memory = torch.zeros(1 << 20)
        made.tuner[(7,)](torch.zeros(100), torch.zeros(100), 100, FLAG=memory.data_ptr())
        assert recorded()[0].arguments["problem"].startswith("FLAG holds an address")

    @pytest.mark.parametrize(
        "value", [object(), Tuple((1, 2)), [b"bytes"]], ids=lambda value: type(value).__name__
    )
    def test_the_recording_process_says_so_once_with_the_argument_s_name(
        self, copies: Any, caplog: pytest.LogCaptureFixture, value: Any
    ) -> None:
        record._log_once.cache_clear()
        made = copies(blocks=(16, 32))
        calls = [(torch.zeros(n), torch.zeros(n), n) for n in (9, 8)]
        store = open_lookup(Settings.current()).store
        with caplog.at_level(logging.WARNING, "safetune"):
            for args in calls:
                request = Miss(made.tuner, args, {"grid": (7,)}).request()
                call = replace(request.call, kwargs={"FLAG": value})
                record.remember(replace(request, call=call), store)
        (line,) = caplog.messages
        assert "copy_kernel is counted, but" in line
        assert "FLAG has a " in line
        assert len(recorded()) == 2

    def test_a_store_that_cannot_be_written_costs_a_line(
        self, copies: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = open_lookup(Settings.current()).store
        connection = sqlite3.connect(store.path)
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON call "
            "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
        connection.close()
        made = copies(blocks=(16, 32))
        with caplog.at_level(logging.WARNING, "safetune"):
            assert [made(n) for n in (100, 101, 102)] == [16] * 3
        (line,) = (text for text in caplog.messages if "disk is full" in text)
        assert line.endswith("disk is full; this process keeps its choices in memory")

    def test_no_process_is_started_and_no_config_is_tried(
        self, copies: Any, cache_dir: Path
    ) -> None:
        made = copies(blocks=(16, 32))
        made()
        ((key, trials),) = open_lookup(Settings.current()).store.trials_of("copy_kernel")
        assert trials == []
        assert key.digest == recorded()[0].key
