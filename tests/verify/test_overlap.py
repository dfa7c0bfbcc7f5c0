"""`check_overlap`: what two programs must not do to one element, found on small kernels."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import safetune, triton_internals
from safetune.errors import InvalidConfig, InvalidSetting, NotInterpretable
from safetune.verify import watch
from safetune.verify.overlap import check_overlap, configs_for

pytestmark = pytest.mark.internals

zeros = torch.zeros


def line_of(kernel: Any, text: str) -> str:
    """The place of a kernel's line, as a report names it."""
    code = kernel.fn.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    first = code.co_firstlineno
    number = next(n for n, line in enumerate(lines[first - 1 :], first) if text in line)
    return f"test_overlap.py:{number}"


@triton.jit
def rows_kernel(y, rows, stride, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """Program p stores the same value to ROWS rows from p * STEP on."""
    row = tl.program_id(0) * STEP + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    pointers = y + row[:, None] * stride + columns[None, :]
    tl.store(pointers, 1.0 + tl.zeros([ROWS, COLUMNS], tl.float32), mask=(row < rows)[:, None])


class TestTwoStores:
    def test_one_row_of_equal_values(self) -> None:
        """Comparing results cannot see it."""
        y = zeros(7, 16)

        report = check_overlap(rows_kernel, (2,), y, 7, 16, ROWS=4, STEP=3, COLUMNS=16)

        found = report.find("overlap", "y")
        assert not report.ok
        assert len(report.findings) == 1
        assert (found.elements, found.rows) == (16, 1)
        assert found.places[0].index == (3, 0)
        assert found.places[0].programs == ((0, 0, 0), (1, 0, 0))
        assert found.places[0].lines == (line_of(rows_kernel, "tl.store"),)
        assert str(report) == (
            "rows_kernel, grid 2 x 1 x 1: 1 finding\n"
            "  y: 16 elements stored by several programs\n"
            f"      [3, 0] programs 0, 1 at {found.places[0].lines[0]}"
        )

    def test_none(self) -> None:
        report = check_overlap(
            rows_kernel, (2,), zeros(7, 16), 7, 16, ROWS=4, STEP=4, COLUMNS=16, outputs=["y"]
        )

        assert report.ok
        assert [(w.written, w.elements) for w in report.written] == [(112, 112)]
        assert str(report) == "rows_kernel, grid 2 x 1 x 1: every write has one owner"

    def test_one_that_is_allowed_is_a_note_and_what_is_left_out_a_finding(self) -> None:
        report = check_overlap(
            *(rows_kernel, (2,), zeros(8, 16), 7, 16),
            ROWS=4,
            STEP=3,
            COLUMNS=16,
            outputs=["y"],
            allow=["y"],
        )

        assert [each.kind.value for each in report.findings] == ["unwritten"]
        assert [each.kind.value for each in report.allowed] == ["overlap"]

    def test_what_is_allowed_for_one_argument_is_a_finding_in_another(self) -> None:
        @triton.jit
        def two(counts, bad):
            program = tl.program_id(0)
            tl.store(counts + program // 2, 1.0)
            tl.store(bad + program // 2, 1.0)

        report = check_overlap(two, (4,), zeros(2), zeros(2), allow=["counts"])

        assert [finding.argument for finding in report.findings] == ["bad"]
        assert [finding.argument for finding in report.allowed] == ["counts"]

    def test_every_writer_is_named(self) -> None:
        report = check_overlap(rows_kernel, (10,), zeros(4, 16), 4, 16, ROWS=4, STEP=0, COLUMNS=16)

        found = report.find("overlap")
        assert (found.elements, found.rows, found.most_programs) == (64, 4, 10)
        assert found.places[0].programs == tuple((p, 0, 0) for p in range(10))
        assert "programs 0, 1, 2, 3, 4, 5, 6, 7 and 2 more at" in str(report)

    def test_the_same_program_may_store_twice(self) -> None:
        @triton.jit
        def twice(y):
            tl.store(y + tl.program_id(0), 1.0)
            tl.store(y + tl.program_id(0), 2.0)

        assert check_overlap(twice, (4,), zeros(4), outputs=["y"]).ok

    def test_the_callers_tensors_stay_as_they_are(self) -> None:
        y = torch.randn(7, 16)
        before = y.clone()

        check_overlap(rows_kernel, (2,), y, 7, 16, ROWS=4, STEP=4, COLUMNS=16)

        assert torch.equal(y, before)

    def test_three_axes(self) -> None:
        @triton.jit
        def cube(y, W: tl.constexpr, D: tl.constexpr):
            x, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
            tl.store(y + (x * W + j) * D + k // 2, 1.0)

        found = check_overlap(cube, (2, 3, 4), zeros(2, 3, 4), 3, 4).find("overlap")

        assert (found.elements, found.rows) == (12, 6)
        assert found.places[0].index == (0, 0, 0)
        assert found.places[0].programs == ((0, 0, 0), (0, 0, 1))
        assert "[1, 2, 1] programs (1, 2, 2), (1, 2, 3)" not in str(found)
        assert "[0, 1, 0] programs (0, 1), (0, 1, 1)" in str(found)

    def test_another_size_of_element(self) -> None:
        """One program stores a word of two halves, the next one its second half."""

        @triton.jit
        def mixed(y):
            program = tl.program_id(0)
            if program == 0:
                tl.store(y.to(tl.pointer_type(tl.int32), bitcast=True), 0)
            else:
                tl.store(y + program, 1.0)

        y = zeros(8, dtype=torch.float16)
        found = check_overlap(mixed, (4,), y).find("overlap")

        assert [place.index for place in found.places] == [(1,)]
        assert found.places[0].programs == ((0, 0, 0), (1, 0, 0))

    @pytest.mark.parametrize("shared", [False, True], ids=["two storages", "one storage"])
    def test_more_than_the_log_holds(self, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
        """What is found is reported all the same, and programs as far as they are known."""

        @triton.jit
        def both(first, second):
            tl.store(first + tl.arange(0, 16), 1.0)
            tl.store(second + tl.arange(0, 16), 1.0)

        monkeypatch.setattr(watch, "_MAX_LOGGED", 16)
        tensors = zeros(32).split(16) if shared else (zeros(16), zeros(16))
        report = check_overlap(both, (3,), *tensors)

        assert [(f.argument, f.elements) for f in report.findings] == [
            ("first", 16),
            ("second", 16),
        ]
        known = [(0, 0, 0), (1, 0, 0)]
        found = report.find("overlap", "second")
        assert list(found.places[0].programs) == ([] if shared else known)
        assert found.most_programs == (0 if shared else 2)
        assert list(report.find("overlap", "first").places[0].programs) == known

    def test_several_outputs(self) -> None:
        @triton.jit
        def two(good, bad):
            program = tl.program_id(0)
            tl.store(good + program, 1.0)
            tl.store(bad + program // 2, 1.0)

        report = check_overlap(two, (4,), zeros(4), zeros(2))

        assert [finding.argument for finding in report.findings] == ["bad"]


@triton.jit
def add_kernel(y, x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, value + 1, mask=offsets < n)


class TestAliases:
    def test_in_place(self) -> None:
        x = torch.randn(100)

        report = check_overlap(add_kernel, (4,), x, x, 100, 32, outputs=["x"])

        assert report.ok
        assert [written.argument for written in report.written] == ["y, x"]

    def test_a_shifted_alias_is_a_race(self) -> None:
        """A program reads what its neighbour stores: right or wrong by which one is first."""
        whole = torch.randn(101)

        report = check_overlap(add_kernel, (4,), whole[1:], whole[:100], 100, 32)

        assert [finding.kind.value for finding in report.findings] == ["read_write"] * 2
        found = report.find("read_write", "y")
        assert [place.index for place in found.places] == [(31,)]
        assert found.elements == 3
        assert found.places[0].programs == ((0, 0, 0), (1, 0, 0))
        assert set(found.places[0].lines) == {
            line_of(add_kernel, "tl.load"),
            line_of(add_kernel, "tl.store"),
        }

    def test_two_storages_over_the_same_memory(self) -> None:
        numbers = torch.randn(101).numpy()
        left, right = torch.from_numpy(numbers[:100]), torch.from_numpy(numbers[1:])

        assert not check_overlap(add_kernel, (4,), right, left, 100, 32).ok

    def test_a_later_read_of_an_earlier_store(self) -> None:
        @triton.jit
        def chain(y):
            program = tl.program_id(0)
            tl.store(y + program, tl.load(y + program - 1, mask=program > 0, other=0.0))

        found = check_overlap(chain, (4,), zeros(4)).find("read_write")

        assert found.elements == 3
        assert found.places[0].index == (0,)


@triton.jit
def two_outputs(left, right, first, second):
    """Every program stores one element through each."""
    tl.store(left + first, 1.0)
    tl.store(right + second, 2.0)


class TestSharedStorage:
    @pytest.mark.parametrize(
        ("first", "second", "arguments"),
        [(0, 1, ["left", "right"]), (8, 99, ["left, right", "right"]), (8, 0, ["right"])],
        ids=["its own", "of the other", "both"],
    )
    def test_parts_of_one_storage(self, first: int, second: int, arguments: list[str]) -> None:
        buffer = zeros(16)

        report = check_overlap(two_outputs, (2,), buffer[:8], buffer[8:], first, second)

        assert [finding.argument for finding in report.findings] == arguments

    def test_one_tensor_given_twice(self) -> None:
        y = zeros(4)

        (finding,) = check_overlap(two_outputs, (2,), y, y, 1, 1).findings

        assert finding.argument == "left, right"

    def test_accesses_outside_of_a_shared_storage(self) -> None:
        buffer = zeros(16)

        report = check_overlap(two_outputs, (1,), buffer[:8], buffer[8:], 0, 100)

        finding = report.find("outside")
        assert finding is not None
        assert finding.argument == "left, right"


class TestAtomics:
    @pytest.mark.parametrize("name", ["add", "max", "min", "xchg", "and", "or", "xor"])
    def test_all_programs_may_update_one_element(self, name: str) -> None:
        update = getattr(tl, f"atomic_{name}")

        @triton.jit
        def reduce(y):
            update(y, tl.program_id(0))

        report = check_overlap(reduce, (4,), zeros(1, dtype=torch.int32), outputs=["y"])

        assert report.ok
        assert report.written[0].written == 1

    def test_masked_tiles(self) -> None:
        @triton.jit
        def reduce(y, n):
            offsets = tl.arange(0, 16)
            tl.atomic_add(y + offsets, 1.0, mask=offsets < n)

        report = check_overlap(reduce, (4,), zeros(16), 9)

        assert report.ok
        assert report.notes == ("y: 9 of 16 elements are written",)

    def test_a_plain_store_to_what_others_add_to(self) -> None:
        @triton.jit
        def start_and_add(y):
            if tl.program_id(0) == 0:
                tl.store(y, 0.0)
            tl.atomic_add(y, 1.0)

        found = check_overlap(start_and_add, (4,), zeros(1)).find("mixed")

        assert found.places[0].programs == ((0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0))
        assert "stored and atomically updated by different programs" in str(found)

    @pytest.mark.parametrize("sem", ["relaxed", "acq_rel"])
    @pytest.mark.parametrize("reader", [0, 2, 4])
    def test_one_of_those_that_add_reads_the_sums(self, reader: int, sem: str) -> None:
        """Split-k whose last program is so by its id. A tile's atomics order nothing."""

        @triton.jit
        def split(out, sums, READER: tl.constexpr, SEM: tl.constexpr):
            offsets = tl.arange(0, 16)
            tl.atomic_add(sums + offsets, 1.0, sem=SEM)
            if tl.program_id(0) == READER:
                tl.store(out + offsets, 2 * tl.load(sums + offsets))

        report = check_overlap(split, (5,), zeros(16), zeros(16), reader, sem)

        found = report.find("read_write", "sums")
        assert len(report.findings) == 1
        assert found.elements == 16
        assert {(0, 0, 0), (reader, 0, 0)} <= set(found.places[0].programs)
        assert {line_of(split, "atomic_add"), line_of(split, "tl.load")} == set(
            found.places[0].lines
        )

    @pytest.mark.parametrize("writer", [0, 2, 4])
    @pytest.mark.parametrize("size", [1, 16])
    def test_one_of_those_that_add_stores(self, size: int, writer: int) -> None:
        @triton.jit
        def reset(sums, SIZE: tl.constexpr, WRITER: tl.constexpr):
            pointers = sums if SIZE == 1 else sums + tl.arange(0, SIZE)
            tl.atomic_add(pointers, 1.0, sem="relaxed")
            if tl.program_id(0) == WRITER:
                tl.store(pointers, 0.0)

        report = check_overlap(reset, (5,), zeros(size), size, writer)

        found = report.find("mixed", "sums")
        assert len(report.findings) == 1
        assert found.elements == size
        assert {(0, 0, 0), (writer, 0, 0)} <= set(found.places[0].programs)

    def test_compare_and_swap(self) -> None:
        @triton.jit
        def first_wins(y):
            tl.atomic_cas(y, 0, tl.program_id(0) + 1)

        y = zeros(1, dtype=torch.int32)
        assert check_overlap(first_wins, (4,), y).ok


def make_locked(sem: str) -> Any:
    @triton.jit
    def locked(y, lock):
        offsets = tl.arange(0, 16)
        while tl.atomic_cas(lock, 0, 1, sem=sem) == 1:
            pass
        tl.store(y + offsets, tl.load(y + offsets) + 1)
        tl.atomic_xchg(lock, 0, sem=sem)

    return locked


class TestOrder:
    """Accesses that a lock or a counter puts in order are not a race."""

    def test_a_lock(self) -> None:
        lock = zeros(1, dtype=torch.int32)

        assert check_overlap(make_locked("acq_rel"), (4,), zeros(16), lock).ok

    @pytest.mark.parametrize("sem", ["relaxed", "acquire", "release"])
    def test_half_a_lock_orders_nothing(self, sem: str) -> None:
        lock = zeros(1, dtype=torch.int32)

        report = check_overlap(make_locked(sem), (4,), zeros(16), lock)

        assert report.find("overlap").elements == 16

    @pytest.mark.skipif(not hasattr(tl, "atomic_load"), reason="Triton 3.9 has them")
    @pytest.mark.parametrize("sem", ["acquire", "relaxed"])
    @pytest.mark.parametrize("polls", [False, True])
    def test_atomic_loads_and_stores(self, polls: bool, sem: str) -> None:
        @triton.jit
        def store(flag, y, POLLS: tl.constexpr, SEM: tl.constexpr):
            if tl.program_id(0) == 0:
                tl.store(y, 1.0)
                tl.atomic_store(flag, 1, sem="release")
            else:
                if POLLS:
                    tl.atomic_poll(flag, 1, sem=SEM)
                else:
                    tl.atomic_load(flag, sem=SEM)
                tl.store(y, 2.0)

        report = check_overlap(store, (2,), zeros(1, dtype=torch.int32), zeros(1), polls, sem)

        assert report.ok == (sem == "acquire")

    def test_a_third_programs_lock_orders_nothing(self) -> None:
        @triton.jit
        def bystander(y, lock):
            program = tl.program_id(0)
            if program > 0:
                tl.atomic_xchg(lock, 0)
            if program != 1:
                tl.store(y, 1.0)

        report = check_overlap(bystander, (3,), zeros(1), zeros(1, dtype=torch.int32))

        assert report.find("overlap").places[0].programs == ((0, 0, 0), (2, 0, 0))

    def test_two_locks_order_nothing(self) -> None:
        @triton.jit
        def locked(y, locks):
            lock = locks + tl.program_id(0) % 2
            while tl.atomic_cas(lock, 0, 1) == 1:
                pass
            tl.store(y, 1.0)
            tl.atomic_xchg(lock, 0)

        report = check_overlap(locked, (4,), zeros(1), zeros(2, dtype=torch.int32))

        assert report.find("overlap").places[0].programs == tuple((p, 0, 0) for p in range(4))

    @pytest.mark.parametrize("counted", [True, False])
    def test_the_last_program_adds_up(self, counted: bool) -> None:
        """It knows by a counter that it is the last one; without that it reads what may come."""

        @triton.jit
        def reduce(y, partials, counter, COUNTED: tl.constexpr):
            program, count = tl.program_id(0), tl.num_programs(0)
            tl.store(partials + program, 1.0)
            if COUNTED:
                last = tl.atomic_add(counter, 1) == count - 1
            else:
                last = program == count - 1
            if last:
                offsets = tl.arange(0, 16)
                tl.store(y, tl.sum(tl.load(partials + offsets, mask=offsets < count, other=0.0)))

        counter = zeros(1, dtype=torch.int32)
        report = check_overlap(reduce, (5,), zeros(1), zeros(5), counter, counted)

        found = report.find("read_write", "partials")
        assert report.ok == counted
        assert counted or found.elements == 4

    @pytest.mark.parametrize("sem", ["acq_rel", "relaxed"])
    def test_the_last_program_reads_and_resets_the_sums(self, sem: str) -> None:
        """Split-k as it should be: the last one to add, by a counter, which it sets back, too."""

        @triton.jit
        def split(out, sums, counter, SEM: tl.constexpr):
            offsets = tl.arange(0, 16)
            tl.atomic_add(sums + offsets, 1.0, sem="relaxed")
            if tl.atomic_add(counter, 1, sem=SEM) == tl.num_programs(0) - 1:
                tl.store(out + offsets, 2 * tl.load(sums + offsets))
                tl.store(sums + offsets, 0.0)
                tl.store(counter, 0)

        counter = zeros(1, dtype=torch.int32)
        report = check_overlap(split, (5,), zeros(16), zeros(16), counter, sem, outputs=["out"])

        kinds = [(f.kind.value, f.argument) for f in report.findings]
        races = [("mixed", "sums"), ("mixed", "counter"), ("read_write", "sums")]
        assert kinds == ([] if sem == "acq_rel" else races)

    @pytest.mark.parametrize("stores", [False, True])
    @pytest.mark.parametrize("forgets", [-1, 0, 1])
    def test_a_program_that_adds_and_does_not_count_is_found(
        self, forgets: int, stores: bool
    ) -> None:
        """The last one has not seen its sum: that is the first atomic on it, or the last."""

        @triton.jit
        def split(sums, counter, FORGETS: tl.constexpr, STORES: tl.constexpr):
            offsets, program = tl.arange(0, 16), tl.program_id(0)
            if program < 2:
                tl.atomic_add(sums + offsets, 1.0)
            if program != FORGETS and tl.atomic_add(counter, 1) == 2 - (FORGETS >= 0):
                if STORES:
                    tl.store(sums + offsets, 0.0)
                else:
                    tl.load(sums + offsets)

        counter = zeros(1, dtype=torch.int32)
        report = check_overlap(split, (3,), zeros(16), counter, forgets, stores)

        found = report.find("mixed" if stores else "read_write", "sums")
        assert report.ok == (forgets < 0)
        assert report.ok or found.places[0].programs == ((forgets, 0, 0), (2, 0, 0))

    def test_an_atomic_before_the_stores_orders_nothing(self) -> None:
        @triton.jit
        def ticket(y, counter):
            tl.atomic_add(counter, 1)
            tl.store(y, 1.0)

        report = check_overlap(ticket, (3,), zeros(1), zeros(1, dtype=torch.int32))

        assert report.find("overlap").elements == 1

    def test_a_program_that_waits_for_a_later_one_is_ended(self) -> None:
        @triton.jit
        def wait(flag):
            if tl.program_id(0) == 0:
                while tl.load(flag, volatile=True) == 0:
                    pass
            tl.atomic_xchg(flag, 1)

        with pytest.raises(NotInterpretable, match=r"timeout_s=0\.2.*test_overlap\.py:\d+"):
            check_overlap(wait, (2,), zeros(1, dtype=torch.int32), timeout_s=0.2)

    def test_a_grid_of_any_size_is_ended(self) -> None:
        """Where no program touches memory, too; and nothing is made for those to come."""

        @triton.jit
        def idle(y):
            pass

        with pytest.raises(NotInterpretable, match=r"timeout_s=0\.2.* now at program \(0, "):
            check_overlap(idle, (2**31 - 1, 65535, 65535), zeros(1), timeout_s=0.2)


@triton.jit
def store_at(y, offset, BLOCK: tl.constexpr):
    tl.store(y + offset + tl.arange(0, BLOCK), 1.0)


class TestOutside:
    @pytest.mark.parametrize(
        ("offset", "index", "where"),
        [
            (12, 16, "4 bytes past its end"),
            (-2, -2, "8 bytes before its storage"),
            (2**40, 2**40, f"{4 * (2**40 - 15)} bytes past its end"),
            (-(2**31), -(2**31), f"{2**33} bytes before its storage"),
        ],
    )
    def test_a_store_outside_the_storage_is_found_and_not_done(
        self, offset: int, index: int, where: str
    ) -> None:
        """The memory there is not touched, whatever is in it."""
        y, neighbour = zeros(16), zeros(16)

        @triton.jit
        def store(y, neighbour, offset, BLOCK: tl.constexpr):
            store_at(y, offset, BLOCK)

        report = check_overlap(store, (1,), y, neighbour, offset, 8)

        found = report.find("outside")
        assert found.argument == "y"
        assert found.places[0].index == (index,)
        assert found.places[0].where == where
        assert found.places[0].lines == (line_of(store_at, "tl.store"),)
        assert "stored outside its storage" in str(found)

    def test_an_offset_that_32_bits_do_not_hold(self) -> None:
        @triton.jit
        def store(y, row, stride):
            tl.store(y + row * stride, 1.0)

        found = check_overlap(store, (1,), zeros(16), 2**16, 2**15).find("outside")

        assert found.places[0].index == (-(2**31),)

    def test_a_store_to_a_part_of_the_storage_that_no_argument_has_is_found(self) -> None:
        """A slice's neighbours are other people's data; no guard band sees that."""
        whole = zeros(4, 16)

        @triton.jit
        def store(y, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
            for row in tl.static_range(ROWS):
                tl.store(y + row * stride + tl.arange(0, BLOCK), 1.0)

        report = check_overlap(store, (1,), whole[:, 4:8], 16, 4, 8)

        found = report.find("gap", "y")
        assert len(report.findings) == 1
        assert found.elements == 16
        assert [place.index for place in found.places] == [(4,), (5,), (6,)]
        assert found.places[0].where == "in its storage, outside every argument"
        assert check_overlap(store, (1,), whole[:, 4:8], 16, 4, 4).ok
        assert check_overlap(store, (1,), whole, 16, 4, 16, outputs=["y"]).ok

    def test_a_read(self) -> None:
        found = check_overlap(add_kernel, (4,), zeros(128), zeros(100), 128, 32).find("outside")

        assert (found.argument, found.access, found.elements) == ("x", "read", 28)

    def test_an_atomic(self) -> None:
        @triton.jit
        def add(y):
            tl.atomic_add(y + 5, 1.0)
            tl.atomic_cas(y.to(tl.pointer_type(tl.int32), bitcast=True) - 1, 0, 1)

        found = check_overlap(add, (1,), zeros(5)).find("outside")

        assert (found.access, found.elements) == ("atomic", 2)
        assert "updated outside its storage" in str(found)

    def test_an_address_outside_every_argument_is_found(self) -> None:
        @triton.jit
        def store(y, address):
            tl.store(address.to(tl.pointer_type(tl.float32), bitcast=True), 1.0)

        address = zeros(1).data_ptr()
        found = check_overlap(store, (1,), zeros(1), address).find("outside")

        assert found.argument == ""
        assert f"address {address:#x}" in str(found)

    def test_masked_lanes_may_point_anywhere(self) -> None:
        @triton.jit
        def store(y, n):
            offsets = tl.arange(0, 16)
            tl.store(y + offsets.to(tl.int64) * 2**33, 1.0, mask=offsets < n)

        assert check_overlap(store, (1,), zeros(1), 1).ok


class TestUnwritten:
    def test_an_output_must_be_written_whole(self) -> None:
        y = zeros(7, 16)

        report = check_overlap(
            rows_kernel, (2,), y, 5, 16, ROWS=4, STEP=4, COLUMNS=16, outputs=["y"]
        )

        found = report.find("unwritten", "y")
        assert (found.elements, found.rows) == (32, 2)
        assert [place.index for place in found.places] == [(5, 0), (6, 0)]
        assert report.notes == ()

    def test_else_it_is_a_note(self) -> None:
        report = check_overlap(rows_kernel, (3,), zeros(7, 16), 5, 16, ROWS=4, STEP=4, COLUMNS=16)

        assert report.ok
        assert report.notes == (
            "y: 80 of 112 elements are written",
            "1 of 3 programs write nothing, the first of them 2",
        )
        assert report.idle_programs == ((2, 0, 0),)

    def test_an_output_that_is_never_written(self) -> None:
        report = check_overlap(add_kernel, (1,), zeros(4), zeros(4), 0, 16, outputs=["y"])

        assert report.find("unwritten").elements == 4

    def test_a_launch_that_writes_nothing_has_a_note(self) -> None:
        report = check_overlap(add_kernel, (1,), zeros(4), zeros(4), 0, 16)

        assert report.ok
        assert report.notes == ("no argument is written",)

    def test_no_elements(self) -> None:
        report = check_overlap(add_kernel, (0,), zeros(0), zeros(0), 0, 16, outputs=["y"])

        assert report.ok

    def test_strided(self) -> None:
        """Only the elements of the view count, by their index in it."""
        y = zeros(6, 10).t()[::2]

        @triton.jit
        def store(y, rows, columns, stride0, stride1):
            row = tl.program_id(0)
            for column in range(columns):
                tl.store(y + row * stride0 + column * stride1, 1.0, mask=row + column != 5)

        report = check_overlap(store, (5,), y, *y.shape, *y.stride(), outputs=["y"])

        assert [place.index for place in report.find("unwritten").places] == [
            (0, 5),
            (1, 4),
            (2, 3),
        ]
        assert len(report.findings) == 1


class TestPointers:
    @pytest.mark.skipif(
        triton_internals.version() >= (3, 9), reason="Triton 3.9 has no block pointers"
    )
    def test_block_pointers(self) -> None:
        @triton.jit
        def store(y, rows, columns, STEP: tl.constexpr):
            block = tl.make_block_ptr(
                y, (rows, columns), (columns, 1), (tl.program_id(0) * STEP, 0), (4, 8), (1, 0)
            )
            tl.store(block, tl.zeros([4, 8], tl.float32), boundary_check=(0, 1))

        assert check_overlap(store, (2,), zeros(7, 5), 7, 5, STEP=4, outputs=["y"]).ok
        found = check_overlap(store, (2,), zeros(7, 5), 7, 5, STEP=3).find("overlap")
        assert (found.elements, found.places[0].index) == (5, (3, 0))

    @pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
    def test_descriptors(self, host: bool) -> None:
        @triton.jit
        def store(y, rows, columns, STEP: tl.constexpr, HOST: tl.constexpr):
            if HOST:
                block = y
            else:
                block = tl.make_tensor_descriptor(y, [rows, columns], [columns, 1], [4, 8])
            block.store([tl.program_id(0) * STEP, 0], tl.zeros([4, 8], tl.float32))

        y = zeros(7, 8)
        given = TensorDescriptor.from_tensor(y, [4, 8]) if host else y
        assert check_overlap(store, (2,), given, 7, 8, 4, host, outputs=["y"]).ok
        found = check_overlap(store, (2,), given, 7, 8, 3, host).find("overlap", "y")
        assert (found.elements, found.places[0].index) == (8, (3, 0))
        assert check_overlap(store, (2,), given, 7, 8, 8, host).notes == (
            "y: 32 of 56 elements are written",
            "1 of 2 programs write nothing, the first of them 1",
        )

    def test_an_address_that_is_read_from_memory_is_outside_of_all_arguments(self) -> None:
        @triton.jit
        def store(table):
            address = tl.load(table + tl.program_id(0))
            tl.store(address.to(tl.pointer_type(tl.float32), bitcast=True), 1.0)

        tensors = [zeros(1) for _ in range(4)]
        table = torch.tensor([tensor.data_ptr() for tensor in tensors])
        found = check_overlap(store, (4,), table).find("outside")
        assert (found.argument, found.elements) == ("", 4)
        assert not any(tensor.any() for tensor in tensors)

    def test_a_tuple_of_tensors(self) -> None:
        @triton.jit
        def store(both):
            tl.store(both[0] + tl.program_id(0), 1.0)
            tl.store(both[1], 1.0)

        report = check_overlap(store, (4,), (zeros(4), zeros(1)), outputs=["both[0]"])

        assert [finding.argument for finding in report.findings] == ["both[1]"]

    def test_a_reinterpreted_tensor(self) -> None:
        @triton.jit
        def store(y):
            offsets = tl.arange(0, 4)
            tl.store(y + offsets, tl.zeros([4], tl.int8).to(tl.float8e5, bitcast=True))

        y = triton.reinterpret(zeros(4, dtype=torch.int8), tl.float8e5)

        assert check_overlap(store, (1,), y, outputs=["y"]).ok
        assert not check_overlap(store, (2,), y).ok

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        @triton.jit
        def store(y, BLOCK: tl.constexpr):
            tl.store(y + tl.program_id(0) * BLOCK + tl.arange(0, 4), tl.full([4], 1, tl.int32))

        assert check_overlap(store, (3,), zeros(12, dtype=dtype), 4, outputs=["y"]).ok
        assert check_overlap(store, (3,), zeros(10, dtype=dtype), 3).find("overlap").elements == 2


CONFIGS = [triton.Config({"BLOCK": 32, "STEP": step}) for step in (32, 31)]


def grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["STEP"]),)


def stepping(y, n, BLOCK: tl.constexpr, STEP: tl.constexpr):
    offsets = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(y + offsets, 1.0, mask=offsets < n)


tuner_of = {
    "triton": triton.autotune(configs=CONFIGS, key=["n"])(triton.jit(stepping)),
    "safetune": safetune(configs=CONFIGS, key=["n"])(triton.jit(stepping)),
}


@pytest.mark.parametrize("kind", tuner_of)
class TestTuners:
    def test_each_config(self, kind: str) -> None:
        call = (tuner_of[kind], grid, zeros(100), 100)
        reports = [check_overlap(*call, outputs=["y"], config=config) for config in CONFIGS]

        assert [report.ok for report in reports] == [True, False]
        assert [report.grid for report in reports] == [(4, 1, 1)] * 2
        assert reports[1].config.startswith("BLOCK=32 STEP=31")
        assert configs_for(tuner_of[kind], (zeros(100), 100), {}) == CONFIGS

    def test_one_config(self, kind: str) -> None:
        assert not check_overlap(tuner_of[kind], grid, zeros(100), 100, config=CONFIGS[1]).ok

    def test_a_tuner_with_several_configs_needs_one_that_is_named(self, kind: str) -> None:
        with pytest.raises(InvalidConfig, match="stepping has 2 configs: pass config="):
            check_overlap(tuner_of[kind], grid, zeros(100), 100)

    def test_an_argument_that_the_config_sets_too_is_refused(self, kind: str) -> None:
        with pytest.raises(InvalidConfig, match="STEP"):
            check_overlap(tuner_of[kind], grid, zeros(100), 100, STEP=3, config=CONFIGS[0])


class TestSize:
    def test_atomics_on_an_element_of_each_program(self) -> None:
        """What is kept of each is not as long as the grid: a large one would not fit."""

        @triton.jit
        def count(y):
            tl.atomic_add(y + tl.program_id(0), 1.0)

        tracemalloc.start()
        try:
            assert check_overlap(count, (1500,), zeros(1500), outputs=["y"]).ok
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak < 6e6  # 1500 times 1500 numbers are 18e6 bytes


class TestDecorators:
    def test_heuristics_inside_and_outside_of_a_tuner(self) -> None:
        step = triton.heuristics({"STEP": lambda args: args["BLOCK"] - 1})
        configs = [triton.Config({"BLOCK": 32})]
        inside = triton.autotune(configs=configs, key=["n"])(step(triton.jit(stepping)))
        block = triton.heuristics({"BLOCK": lambda args: 32 if args["n"] > 50 else 16})
        steps = [triton.Config({"STEP": 16}), triton.Config({"STEP": 32})]
        outside = block(safetune(configs=steps, key=["n"])(triton.jit(stepping)))

        assert check_overlap(inside, (4,), zeros(100), 100).find("overlap").elements == 3
        assert configs_for(outside, (zeros(100), 100), {}) == steps
        reports = [check_overlap(outside, grid, zeros(100), 100, config=config) for config in steps]
        assert [report.ok for report in reports] == [False, True]

    def test_hooks_of_a_config_write_to_copies(self) -> None:
        """They set what a launch starts from, and the blocks of descriptors."""
        seen = []

        def hook(args: dict[str, Any]) -> None:
            args["y"].fill_(args["STEP"])
            args["tile"].block_shape = [args["BLOCK"]]
            seen.append(args["y"])

        config = triton.Config({"BLOCK": 32, "STEP": 32}, pre_hook=hook)

        def kernel(y, tile, n, BLOCK: tl.constexpr, STEP: tl.constexpr):
            offsets = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
            tl.store(y + offsets, tl.load(y + offsets, mask=offsets < n), mask=offsets < n)
            tile.store([tl.program_id(0) * STEP], tl.zeros([BLOCK], tl.float32))

        tuner = triton.autotune(configs=[config], key=["n"])(triton.jit(kernel))
        y = zeros(100)
        tile = TensorDescriptor.from_tensor(zeros(100), [16])

        report = check_overlap(tuner, grid, y, tile, 100, outputs=["y", "tile"])

        assert report.ok
        assert (float(seen[0][0]), float(y[0])) == (32.0, 0.0)
        assert tile.block_shape == [16]

    def test_pruned_configs_are_left_out(self) -> None:
        def prune(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
            return [config for config in configs if config.kwargs["STEP"] != named["n"] % 32]

        tuner = triton.autotune(
            configs=CONFIGS, key=["n"], prune_configs_by={"early_config_prune": prune}
        )(triton.jit(stepping))

        assert configs_for(tuner, (zeros(63), 63), {}) == CONFIGS[:1]


class TestErrors:
    def test_no_kernel(self) -> None:
        with pytest.raises(InvalidSetting, match=r"decorate it with @triton\.jit first"):
            check_overlap(len, (1,))

    @pytest.mark.parametrize("sizes", [(), (1, 1, 1, 1), (-1,), 3, (2.5,), "12"])
    def test_no_grid(self, sizes: Any) -> None:
        with pytest.raises(InvalidSetting, match="one to three integers of 0 or more"):
            check_overlap(store_at, sizes, zeros(1), 0, 1)

    @pytest.mark.parametrize(
        ("named", "config"),
        [({"output": ["y"]}, {}), ({"BLOK": 4}, {}), ({}, {"BLOK": 4})],
        ids=["an option", "a parameter", "a config"],
    )
    def test_a_misspelt_name_is_an_error_with_the_valid_names(
        self, named: dict[str, Any], config: dict[str, Any]
    ) -> None:
        tuner = triton.autotune(configs=[triton.Config(config)], key=[])(add_kernel)
        (name,) = {**named, **config}

        message = rf"^unknown name {name}: add_kernel has the parameters y, x, n"
        with pytest.raises(InvalidSetting, match=message):
            check_overlap(tuner, (1,), zeros(4), zeros(4), 4, 16, **named)

    def test_an_argument_twice(self) -> None:
        with pytest.raises(InvalidSetting, match=r"^n given both by position and by name"):
            check_overlap(add_kernel, (1,), zeros(4), zeros(4), 4, 16, n=2)

    @pytest.mark.parametrize(
        "grid", [(1,), lambda meta: (meta["BLOCK"],)], ids=["sizes", "function"]
    )
    def test_an_argument_that_is_missing(self, grid: Any) -> None:
        with pytest.raises(InvalidSetting, match=r"^no value for n, BLOCK; add_kernel takes y, x"):
            check_overlap(add_kernel, grid, zeros(4), zeros(4))

    def test_an_array_over_a_tensors_memory(self) -> None:
        """It has a base, as what `triton.reinterpret` returns has."""
        with pytest.raises(NotInterpretable, match="add_kernel does not run"):
            check_overlap(add_kernel, (1,), zeros(4), zeros(4).numpy(), 4, 16)

    def test_a_config_without_a_tuner(self) -> None:
        """Where the parameter has a default, the launch would be another one than was meant."""
        with pytest.raises(InvalidConfig, match="add_kernel does not have a tuner; pass"):
            check_overlap(add_kernel, (1,), zeros(4), zeros(4), 4, 16, config=CONFIGS[0])

    def test_launch_options(self) -> None:
        options = {"num_warps": 8, "num_stages": 2, "num_ctas": 1, "maxnreg": 64}
        report = check_overlap(add_kernel, (1,), zeros(4), zeros(4), 4, 16, **options)

        assert report.ok

    @pytest.mark.parametrize("outputs", [["n"], ["z"], "y"])
    def test_no_such_output(self, outputs: Any) -> None:
        with pytest.raises(InvalidSetting, match="tensor arguments of add_kernel, which are y, x"):
            check_overlap(add_kernel, (1,), zeros(1), zeros(1), 1, 16, outputs=outputs)

    def test_no_configs(self) -> None:
        with pytest.raises(InvalidSetting, match="use check_overlap"):
            configs_for(add_kernel, (zeros(1), zeros(1), 1, 16), {})

    def test_operations_that_the_interpreter_does_not_have_are_an_error(self) -> None:
        @triton.jit
        def assembly(y):
            value = tl.inline_asm_elementwise("mov $0, $1;", "=r,r", [1], tl.int32, True, 1)
            tl.store(y, value)

        with pytest.raises(NotInterpretable, match=r"assembly does not run.*test_overlap\.py:\d+"):
            check_overlap(assembly, (1,), zeros(1))

    def test_an_exception_of_the_kernel_is_an_error(self) -> None:
        @triton.jit
        def failing(y, BLOCK: tl.constexpr):
            tl.static_assert(BLOCK > 16, "too small")

        with pytest.raises(NotInterpretable, match=r"AssertionError: too small"):
            check_overlap(failing, (1,), zeros(1), 16)
