"""What is written down of a call, and the tensors that are made of it."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from safetune.errors import KernelNotTransferable
from safetune.frontend import call_counts, observers
from safetune.inputs import call_description
from safetune.inputs.spans import ALIGNMENT
from safetune.keys import encoding
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

    def test_floats_are_noise_and_the_rest_is_zeros(self, call_of: Any) -> None:
        call = call_of(
            torch.full((4096,), 1e9, dtype=torch.bfloat16),
            torch.ones(9).int(),
            torch.ones(9).bool(),
        )
        (noise, indices, flags), _ = call_description.rebuild(
            call_description.describe(call), "cpu"
        )
        assert abs(noise.float().mean()) < 0.1
        assert 0.9 < noise.float().std() < 1.1
        assert not indices.any()
        assert not flags.any()

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
            (object(), "dst is a object, which cannot be recorded"),
            (torch.zeros(9).data_ptr, "dst is a builtin_function_or_method"),
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

        def made(tensor: torch.Tensor, values: bool) -> torch.Tensor:
            data = call_description.describe(call_of(tensor), values)
            (found,), _ = call_description.rebuild(json.loads(encoding.dumps(data)), "cpu")
            return found

        return made

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_offsets_have_as_many_lengths_of_each_size(self, again: Any, dtype: Any) -> None:
        offsets = torch.tensor(self.OFFSETS, dtype=dtype)

        made = again(offsets, values=False)

        assert made.dtype == dtype
        assert (made[0], made[-1]) == (0, self.OFFSETS[-1])
        bits = [sorted(int(n).bit_length() for n in each.diff()) for each in (made, offsets)]
        assert bits[0] == bits[1]
        assert torch.equal(made, again(offsets, values=False)), "in every process"

    def test_the_values_of_offsets_are_not_in_the_record(self, call_of: Any) -> None:
        data = call_description.describe(call_of(torch.tensor(self.OFFSETS)))
        assert data["integers"] == [[0, {"lengths": [[1, 0], [2, 12], [1, 295], [1, 700]]}]]

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor([3, 1, 2]),
            torch.tensor([1, 2, 3]),
            torch.tensor([[0, 1], [2, 3]]),
            torch.tensor([0, 1, 2], dtype=torch.uint8),
            torch.tensor([False, True]),
            torch.tensor(7),
            torch.tensor([], dtype=torch.int64),
        ],
    )
    def test_other_integers_are_recorded_if_that_is_allowed(
        self, again: Any, call_of: Any, tensor: torch.Tensor
    ) -> None:
        data = call_description.describe(call_of(tensor))
        assert data["integers"] == []
        assert call_description.unknown(data, ["dst"]) == ["dst"]
        assert torch.equal(again(tensor, values=True), tensor)

    def test_values_of_a_view(self, again: Any) -> None:
        view = torch.arange(24, dtype=torch.int32).reshape(4, 6).t()[1:, ::2]
        made = again(view, values=True)
        assert torch.equal(made, view)
        assert made.stride() == view.stride()

    def test_values_that_are_too_many_are_left_out(self, call_of: Any) -> None:
        noise, few = torch.randint(0, 2**62, (1 << 15,)), torch.tensor([3, 1])
        data = call_description.describe(call_of(noise, noise, x=(few, few)), values=True)
        assert [number for number, _ in data["integers"]] == [0, 2, 3]

    def test_a_program_that_may_record_values_completes_an_earlier_record(
        self, copies: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def launch() -> dict[str, Any]:
            copies(blocks=(16, 32)).tuner[(7,)](dst, src, 100, FLAG=0)
            (call,) = recorded()
            return call.arguments

        dst, src = torch.ones(100).int(), torch.arange(100, 0, -1).int()
        assert launch()["integers"] == []
        monkeypatch.setenv("SAFETUNE_RECORD_VALUES", "1")
        assert [number for number, _ in launch()["integers"]] == [0, 1]
        monkeypatch.delenv("SAFETUNE_RECORD_VALUES")
        assert [number for number, _ in launch()["integers"]] == [0, 1], "what is known stays"


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
        done = fresh_process(script)
        assert done.returncode == 0, done.stderr
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
        assert line.endswith("disk is full; continuing in memory")

    def test_no_process_is_started_and_no_config_is_tried(
        self, copies: Any, cache_dir: Path
    ) -> None:
        made = copies(blocks=(16, 32))
        made()
        ((key, trials),) = open_lookup(Settings.current()).store.trials_of("copy_kernel")
        assert trials == []
        assert key.digest == recorded()[0].key
