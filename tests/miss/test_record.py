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
from safetune.inputs import call_description
from safetune.inputs.spans import ALIGNMENT
from safetune.keys import encoding
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.local.store import Store
from safetune.store.lookup import open_lookup
from safetune.store.records import RecordedCall


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
            torch.full((4096,), 1e9, dtype=torch.bfloat16), torch.arange(9), torch.ones(9).bool()
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

    def test_a_call_with_a_choice_is_not_recorded(self, copies: Any, packed: Any) -> None:
        made = copies(blocks=(16, 32))
        packed(made, 32)
        assert made() == 32
        assert recorded() == []

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
