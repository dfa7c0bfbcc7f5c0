"""Which tensors are copied, what is drawn instead, and what is seen before there is a child."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy
import pytest
import torch

from safetune.child.arguments import Arguments
from safetune.errors import InvalidSetting, NotReproducible
from safetune.inputs import memory_budget, pointers
from safetune.inputs.call import owners_of
from safetune.inputs.snapshot import Snapshot
from safetune.settings import Settings, parse_size

KIB = 1 << 10
FLOAT_TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def snapshot_of(limit: int | None, **tensors: torch.Tensor) -> Snapshot:
    return Snapshot(list(tensors.values()), list(tensors), limit)


def rebuilt(snapshot: Snapshot) -> list[torch.Tensor]:
    tensors = Arguments(snapshot.layout, os.dup(snapshot.fd)).tensors
    snapshot.close()
    return tensors


def test_a_storage_within_another_one_is_part_of_its_block():
    """As of arrays of NumPy's, which share memory without sharing a storage."""
    array = numpy.arange(64, dtype=numpy.float32)
    parts = [torch.from_numpy(part) for part in (array, array[8:16], array[32:])]
    snapshot = snapshot_of(None, whole=parts[0], inner=parts[1], last=parts[2])
    assert [block.size for block in snapshot.layout.blocks] == [array.nbytes]
    whole, inner, last = rebuilt(snapshot)
    whole.zero_()
    assert torch.cat([inner, last]).count_nonzero() == 0


class TestLimit:
    def test_the_largest_go_first_and_no_more_than_needed(self):
        sizes = {"a": 2 * KIB, "b": 8 * KIB, "c": 4 * KIB}
        tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
        floats = {name: tensor.view(torch.float32) for name, tensor in tensors.items()}
        for limit, drawn in [
            (14 * KIB, ()),
            (14 * KIB - 1, ("b",)),
            (6 * KIB, ("b",)),
            (6 * KIB - 1, ("b", "c")),
            (0, ("a", "b", "c")),
            (None, ()),
        ]:
            snapshot = snapshot_of(limit, **floats)
            assert snapshot.regenerated == drawn
            left = sum(sizes[name] for name in sizes if name not in drawn)
            assert os.fstat(snapshot.fd).st_size == max(1, left)
            snapshot.close()
            whole = snapshot_of(limit, **tensors)
            assert whole.regenerated == (), "bytes are copied"
            whole.close()

    def test_a_tensor_of_a_hook_is_copied(self):
        tensor = torch.randn(KIB)
        snapshot = Snapshot([tensor], [""], limit=0)
        (copy,) = rebuilt(snapshot)
        assert torch.equal(copy, tensor)

    def test_all_views_of_a_block_are_drawn_together(self):
        packed = torch.randn(3, KIB)
        snapshot = snapshot_of(0, q=packed[0], k=packed[1], other=packed.view(-1))
        assert snapshot.regenerated == ("q", "k", "other")
        query, key, other = rebuilt(snapshot)
        assert torch.equal(other[:KIB], query)
        assert torch.equal(other[KIB : 2 * KIB], key)
        assert not torch.equal(query, key)

    @pytest.mark.parametrize("kind", ["two types", "off the grid"])
    def test_a_block_with_no_one_type_is_copied(self, kind: str):
        whole = torch.zeros(4 * KIB + 2, dtype=torch.uint8)
        floats = whole[:-2].view(torch.float32)
        other = floats.view(torch.bfloat16)
        if kind == "off the grid":
            memory = bytearray(4 * KIB + 2)
            floats = torch.frombuffer(memory, dtype=torch.float16, offset=1, count=KIB)
            other = torch.frombuffer(memory, dtype=torch.float16, offset=2, count=KIB)
        snapshot = snapshot_of(0, floats=floats, other=other)
        assert snapshot.regenerated == ()
        snapshot.close()

    @pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
    def test_a_draw_is_like_the_sample(self, dtype: torch.dtype):
        torch.manual_seed(1)
        parts = torch.rand(40 * KIB) + 1.0
        tensor = torch.view_as_complex(parts.view(-1, 2)) if dtype.is_complex else parts.to(dtype)
        (copy,) = rebuilt(snapshot_of(0, x=tensor))
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        flat = (torch.view_as_real(copy) if dtype.is_complex else copy).flatten().float()
        assert 1.0 <= flat.min() < flat.max() <= 2.0
        assert abs(flat.mean() - 1.5) < 0.05
        assert 0.2 < flat.std() < 0.32
        again = rebuilt(snapshot_of(0, x=tensor))[0]
        assert torch.equal(again.view(torch.uint8), copy.view(torch.uint8))

    def test_values_that_are_not_finite_do_not_spread(self):
        mask = torch.full((KIB,), float("-inf"))
        mask[::2] = 0.0
        nothing = torch.full((KIB,), float("nan"))
        for tensor in rebuilt(snapshot_of(0, mask=mask, nothing=nothing)):
            assert torch.equal(tensor, torch.zeros(KIB))

    def test_bytes_after_the_last_element_are_zero(self):
        storage = torch.full((4 * KIB + 3,), 255, dtype=torch.uint8).untyped_storage()
        tensor = torch.empty(0).set_(storage, 0, (KIB,), (1,)).fill_(2.0)
        snapshot = snapshot_of(0, x=tensor)
        arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
        snapshot.close()
        assert torch.equal(arguments.tensors[0], tensor)
        address, size = arguments.blocks[0].live.run
        assert ctypes.string_at(address + size - 3, 3) == bytes(3)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("0", 0),
            ("4096", 4096),
            ("64K", 64 * KIB),
            ("64 KiB", 64 * KIB),
            ("3M", 3 * KIB**2),
            ("512mib", 512 * KIB**2),
            ("2G", 2 * KIB**3),
            ("10GiB", 10 * KIB**3),
        ],
    )
    def test_sizes_of_the_copy_limit_are_read_with_their_units(
        self, text: str, size: int, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("SAFETUNE_COPY_LIMIT", text)
        assert Settings.current().copy_limit == size

    def test_default(self):
        assert Settings.current().copy_limit == 2 * KIB**3

    @pytest.mark.parametrize("text", ["", "much", "1.5G", "-1", "1T", "1 000", "1B", "٣"])
    def test_a_limit_that_is_not_a_size_is_refused(self, text: str):
        with pytest.raises(InvalidSetting, match=r"NAME=.* is not a size"):
            parse_size("NAME", text)


class TestPointers:
    def test_a_bounded_number_of_values_is_asked_for(self):
        many = torch.arange(1 << 22) + (1 << 40)
        asked = pointers.plausible(many)
        assert 500 < len(asked) <= 1024
        assert asked[-1] - asked[0] > 1 << 21, "from all over"

    def test_numbers_below_and_above_the_address_space_are_not_plausible(self):
        assert pointers.plausible(torch.tensor([0, 1 << 31, (1 << 32) - 1, 1 << 56, -5])) == []
        assert pointers.plausible(torch.tensor([1 << 32, 1 << 32, 7])) == [1 << 32]
        assert pointers.plausible(torch.tensor([1 << 40], dtype=torch.uint64)) == [1 << 40]
        assert pointers.plausible(torch.tensor([1.0 * (1 << 40)])) == []
        assert pointers.plausible(torch.empty(0, dtype=torch.int64)) == []

    def test_only_what_may_be_written_is_live(self):
        live = pointers.is_live(interpreted=True)
        buffer = torch.zeros(1 << 20)
        live_now = pointers.is_live(interpreted=True)
        assert live_now(buffer.data_ptr())
        assert live_now(buffer.data_ptr() + 4 * buffer.numel() - 1)
        code = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value
        assert code is not None
        assert not live(code)
        assert not live(1 << 33)


class TestOwners:
    def test_owners_are_named_through_tuples_and_objects(self):
        x, y, z, hooks = (torch.zeros(1) for _ in range(4))
        named = {"a": x, "b": (x, [y]), "c": {"k": z}, "n": 3}
        assert owners_of(named, [x, y, z, hooks]) == ["a, b", "b", "c", ""]


class TestRoom:
    def test_the_machine_s_memory_is_the_limit(self, tmp_path: Path):
        free = memory_budget.host_free(tmp_path, tmp_path / "none")
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert 0 < free <= 2 * total

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_cgroup_s_limit_counts_with_that_of_every_group_above(
        self, version: int, tmp_path: Path
    ):
        """Files as the kernel writes them; the page cache that it would drop is not counted."""
        top = tmp_path if version == 2 else tmp_path / "memory"
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        for folder, limit in ((top / "job", 1 << 20), (top / "job" / "step", 1 << 30)):
            folder.mkdir(parents=True)
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{700 << 10}\n")
            (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {100 << 10}\n")
        (top / "memory.max").write_text("max\n")
        own = tmp_path / "own"
        own.write_text("0::/job/step\n" if version == 2 else "9:cpu:/\n4:memory:/job/step\n")
        assert memory_budget.host_free(tmp_path, own) == (1 << 20) - (600 << 10)

    def test_arguments_that_do_not_fit_are_named_largest_first(self):
        with pytest.raises(NotReproducible) as caught:
            memory_budget.check_host(
                1 << 60, {"x": 1 << 30, "weights": 3 << 30, "y": 1, "z": 2 << 30}
            )
        text = str(caught.value)
        assert "weights (3 GiB), z (2 GiB), x (1 GiB), but" in text
        assert "`inputs=`" in text
