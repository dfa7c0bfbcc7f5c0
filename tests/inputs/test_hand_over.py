"""Copies of the arguments on a device, which a child maps: on a driver without a device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from safetune.both.device_bytes import DeviceBytes
from safetune.child import memory
from safetune.child.arguments import Arguments
from safetune.errors import TooMuchPinned
from safetune.inputs import hand_over, memory_budget
from safetune.inputs.snapshot import Snapshot, check_pinned, pinned_spans
from safetune.inputs.spans import Span
from tests.libcuda import stub

#: Maps shared memory as a child does, says what it holds, and does what it is told.
CHILD = """
import ctypes, os, sys
from safetune.both.cuda_driver import load
from safetune.both.device_bytes import DeviceBytes
fd, size, offset, what = map(int, sys.argv[1:])
where = DeviceBytes(load(), 0, "cuda:0")
mapped = where.mapped(fd, size)
print(where.read(mapped.address + offset, 4).decode(), flush=True)
if what == 1:
    ctypes.memset(mapped.address, 0, 4)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DeviceBytes, "tensor", stub.tensor)
    with stub.holding_tensors():
        yield
    memory.bytes_on.cache_clear()


def used() -> int:
    """Return what is held of both devices: not what waits for the garbage collector."""
    gc.collect()
    return sum(stub.used(stub.library(), device) for device in (0, 1))


def shared_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in found if "libcuda-shared" in link]


def rebuilt(snapshot: Snapshot) -> list[torch.Tensor]:
    layout = replace(snapshot.layout, fds=tuple(map(os.dup, snapshot.shared_fds)))
    return Arguments(layout, os.dup(snapshot.fd)).tensors


def tensors() -> list[torch.Tensor]:
    storage = torch.arange(5000, dtype=torch.float32)
    return [storage[3:700], storage[1000:].view(40, 100).t(), torch.arange(7), torch.empty(0)]


def test_all_blocks_of_a_device_are_in_one_piece_and_the_file_holds_none() -> None:
    given = tensors()
    before = used()
    snapshot = Snapshot(given, rooms={"cuda:0": 1 << 30})
    assert [device for device, _ in snapshot.layout.shared] == ["cuda:0"]
    assert os.fstat(snapshot.fd).st_size == 1
    for tensor, copy in zip(given, rebuilt(snapshot), strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.data_ptr() % 512 == copy.data_ptr() % 512 or not tensor.numel()
    given[0].fill_(-9.0)
    assert not rebuilt(snapshot)[0].eq(-9.0).any(), "it is a copy"
    snapshot.close()
    assert used() <= before + (1 << 20)
    assert shared_files() == []


def test_each_device_has_a_piece() -> None:
    given, found = tensors(), stub.span_on_a_device

    def span_of(tensor: torch.Tensor) -> Span:
        device = "cuda:1" if tensor is given[2] else "cuda:0"
        return replace(found(tensor), device=device)

    with stub.holding_tensors(span_of):
        snapshot = Snapshot(given, rooms={"cuda:0": 1 << 30, "cuda:1": 1 << 30})
    assert [device for device, _ in snapshot.layout.shared] == ["cuda:0", "cuda:1"]
    assert all(map(torch.equal, given, rebuilt(snapshot)))
    snapshot.close()
    assert shared_files() == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LIBCUDA_WITHOUT", "102"),
        ("LIBCUDA_WITHOUT", "103"),
        *[("LIBCUDA_FAIL", f"cuMem{call}=801") for call in ("Create", "Map", "SetAccess")],
        ("LIBCUDA_FAIL", "cuMemExportToShareableHandle=801"),
        ("LIBCUDA_FAIL", "cuMemAddressReserve=2"),
        ("LIBCUDA_FAIL", "cuMemcpyAsync=1"),
        ("LIBCUDA_MEMORY", "65536"),
    ],
)
def test_a_driver_that_refuses_gets_the_file(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    given, before = tensors(), used()
    monkeypatch.setenv(variable, value)
    snapshot = Snapshot(given, rooms={"cuda:0": 1 << 30})
    monkeypatch.delenv(variable)
    assert snapshot.layout.shared == snapshot.shared_fds == ()
    assert used() == before
    assert shared_files() == []
    assert all(map(torch.equal, given, rebuilt(snapshot)))
    snapshot.close()


@pytest.mark.parametrize("room", [100, 30_000, 1 << 20])
def test_with_little_room_outputs_come_first_and_the_rest_is_in_the_file(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(hand_over, "_CUT", 64)
    x, out = torch.arange(10_000.0), torch.arange(5000.0)
    snapshot = Snapshot([x, out], ["x", "out"], rooms={"cuda:0": room}, outputs=["out"])
    heads = [snapshot.layout.blocks[spec.block].head for spec in snapshot.layout.tensors]
    assert sum(heads) <= room
    if room >= 30_000:
        assert heads[1] == 20_000
        assert heads[0] == 40_000 if room > 60_000 else 0 < heads[0] < 10_000
    layout = replace(snapshot.layout, fds=tuple(map(os.dup, snapshot.shared_fds)))
    arguments = Arguments(layout, os.dup(snapshot.fd))
    for tensor, copy in zip((x, out), arguments.tensors, strict=True):
        assert torch.equal(tensor, copy)
        copy.zero_()
    for _ in range(2):
        assert arguments.find_written() == [0, 1]
        arguments.restore()
        for tensor, copy in zip((x, out), arguments.tensors, strict=True):
            assert torch.equal(tensor, copy)
            copy.zero_()
    for block in arguments.blocks:
        pristine = block.pristine()
        bits = ctypes.string_at(*pristine.run)
        assert bits in (x.numpy().tobytes(), out.numpy().tobytes())
    snapshot.close()


@pytest.mark.parametrize("room", [True, False])
def test_a_drawn_block_without_room_for_a_second_copy_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """It is not kept in memory of the host, which is slower to copy from."""
    snapshot = Snapshot([torch.randn(5000)], ["x"], limit=0)
    assert snapshot.layout.blocks[0].noise is not None
    monkeypatch.setattr(DeviceBytes, "has_room", lambda where, size: room)
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    (block,), (tensor,) = arguments.blocks, arguments.tensors
    bits, before = tensor.clone(), used()
    for _ in range(2):
        tensor.zero_()
        assert arguments.find_written() == [0]
        assert (used() > before) == room
        arguments.restore()
        assert torch.equal(tensor, bits)
    assert ctypes.string_at(*block.pristine().run) == bits.numpy().tobytes()
    snapshot.close()


def child(snapshot: Snapshot, what: int) -> subprocess.Popen[bytes]:
    (fd,), ((_, size),) = snapshot.shared_fds, snapshot.layout.shared
    offset = snapshot.layout.blocks[0].place.offset
    root = str(Path(memory.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, (fd, size, offset, what))],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "LD_LIBRARY_PATH": str(stub.folder()), "PYTHONPATH": root},
    )


def test_another_child_gets_the_same_bits_after_one_was_killed() -> None:
    """That one tried to write to them, which ended it."""
    given = torch.frombuffer(bytearray(b"bits of the caller"), dtype=torch.uint8)
    snapshot = Snapshot([given], rooms={"cuda:0": 1 << 30})
    with child(snapshot, 1) as writing:
        assert writing.wait(60) == -signal.SIGSEGV
    with child(snapshot, 0) as first, child(snapshot, 0) as second:
        for each in (first, second):
            assert each.stdout is not None
            assert each.stdout.readline() == b"bits\n"
        first.kill()
        snapshot.close()
        assert shared_files() == []
        second.kill()
    assert bytes(given.tolist()) == b"bits of the caller"


def test_a_fork_of_the_program_does_not_keep_it() -> None:
    snapshot = Snapshot(tensors(), rooms={"cuda:0": 1 << 30})
    if (pid := os.fork()) == 0:
        os._exit(len(shared_files()))
    # The handle of the stub is one more descriptor; that of a driver belongs to the process.
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(shared_files()) - 1 == 1
    snapshot.close()
    assert shared_files() == []


def test_a_block_of_the_child_is_restored_from_it() -> None:
    given = tensors()
    snapshot = Snapshot(given, rooms={"cuda:0": 1 << 30})
    layout = replace(snapshot.layout, fds=tuple(map(os.dup, snapshot.shared_fds)))
    arguments = Arguments(layout, os.dup(snapshot.fd))
    snapshot.close()
    ctypes.memset(arguments.tensors[0].data_ptr(), 0, 100)
    block = layout.tensors[0].block
    assert arguments.find_written() == [block]
    arguments.restore()
    assert arguments.find_written() == [block], "it is known as written"
    assert torch.equal(arguments.tensors[0], given[0])


def test_what_a_short_card_cannot_keep_twice_is_partly_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("safetune.child.arguments._PIECE", 1000)
    monkeypatch.setattr("safetune.both.device_bytes._MARGIN", 0)
    given = [torch.arange(5000, dtype=torch.float32)]
    snapshot = Snapshot(given)
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    snapshot.close()
    monkeypatch.setenv("LIBCUDA_MEMORY", str(used() + 5500))
    for value in (0, 1):
        ctypes.memset(arguments.tensors[0].data_ptr(), value, 4 * 5000)
        assert arguments.find_written() == [0]
        arguments.restore()
        assert torch.equal(arguments.tensors[0], given[0])
    kept = [piece.memory.pinned for piece in arguments.blocks[0]._pieces]
    assert kept == [False] * 5 + [True] * 15


def span_of_host(tensor: torch.Tensor) -> Span:
    return replace(stub.span_on_a_device(tensor), device="cpu")


def test_pinned_memory_of_the_caller_is_pinned_in_the_child() -> None:
    """And plain memory of the host is not, nor is any for the interpreter."""
    given, plain = stub.pin(torch.arange(5000).float()), torch.arange(100)
    with stub.holding_tensors(span_of_host):
        snapshot = Snapshot([given, plain], index=0)
        interpreted = Snapshot([given, plain])
    assert {block.device for block in snapshot.layout.blocks} == {"pinned:0", "cpu"}
    assert {block.device for block in interpreted.layout.blocks} == {"cpu"}
    interpreted.close()
    before = used()
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    snapshot.close()
    block = arguments.blocks[arguments.views[0].block]
    assert block.live.memory.pinned
    assert used() - before < given.nbytes, "none of it is on the device"
    for _ in range(2):
        assert torch.equal(arguments.tensors[0], given)
        ctypes.memset(arguments.tensors[0].data_ptr(), 0, 100)
        assert arguments.find_written() == [arguments.views[0].block]
        arguments.restore()
    assert torch.equal(arguments.tensors[0], given)


@pytest.mark.parametrize(("limit", "free", "refused"), [(8, 1, 0), (7, 1, 1), (1 << 40, 0, 1)])
def test_a_child_pins_no_more_than_the_limit_and_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, limit: int, free: int, refused: int
) -> None:
    tensor = stub.pin(torch.zeros(2))
    monkeypatch.setattr(memory_budget, "host_free", lambda: 16 if free else 15)
    with stub.holding_tensors(span_of_host):
        pinned = pinned_spans([tensor], 0)
        assert [span.size for span in pinned] == [8]
        refusing = pytest.raises(TooMuchPinned, match=r"^w: a copy of 8 bytes of pinned")
        with refusing if refused else contextlib.nullcontext():
            check_pinned(pinned, [tensor], ["w"], limit)
