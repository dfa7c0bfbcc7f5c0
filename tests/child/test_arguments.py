"""The child's tensors are the caller's: bits, shapes, strides, alignment and aliasing."""

from __future__ import annotations

import os

import pytest
import torch

from safetune.child.arguments import Arguments
from safetune.errors import KernelNotTransferable
from safetune.inputs.snapshot import Snapshot


def rebuilt(*tensors: torch.Tensor) -> tuple[Arguments, list[torch.Tensor]]:
    snapshot = Snapshot(tensors)
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    snapshot.close()
    return arguments, arguments.tensors


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(96, dtype=torch.float32).reshape(8, 12)
    return {
        "plain": base,
        "transposed": base.t(),
        "offset": base[2:5, 3:],
        "strided": base[:, ::3],
        "expanded": torch.ones(1).expand(4, 5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bool": torch.tensor([True, False]),
        "int8": torch.arange(5, dtype=torch.int8),
        "int64": torch.arange(5),
        "bfloat16": base.bfloat16(),
        "float8": torch.ones(16).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.randn(4)),
    }


@pytest.mark.parametrize("name", views())
def test_a_tensor_is_rebuilt_with_its_bits_shape_and_strides(name):
    tensor = views()[name]
    _, (copy,) = rebuilt(tensor)
    assert copy.shape == tensor.shape
    assert copy.stride() == tensor.stride()
    assert copy.dtype == tensor.dtype
    assert copy.data_ptr() % 16 == tensor.data_ptr() % 16
    plain = tensor.detach()
    if tensor.dtype is torch.float8_e4m3fn:
        plain, copy = plain.view(torch.uint8), copy.view(torch.uint8)
    assert torch.equal(copy, plain)
    assert copy.numel() == 0 or copy.untyped_storage().data_ptr() != (
        plain.untyped_storage().data_ptr()
    )


def test_views_of_one_buffer_still_alias():
    packed = torch.randn(4, 3, 8)
    _, (query, key, everything) = rebuilt(packed[:, 0], packed[:, 1], packed)
    query.fill_(7.0)
    assert (everything[:, 0] == 7.0).all()
    assert torch.equal(everything[:, 1], packed[:, 1])
    assert torch.equal(key, packed[:, 1])


def test_one_tensor_passed_twice_is_one_tensor_in_the_child():
    tensor = torch.zeros(4)
    _, (first, second) = rebuilt(tensor, tensor)
    first += 1
    assert torch.equal(second, torch.ones(4))
    assert torch.equal(tensor, torch.zeros(4))


def test_storages_that_overlap_in_memory_still_do():
    memory = bytearray(range(64))
    left = torch.frombuffer(memory, dtype=torch.uint8, count=40)
    right = torch.frombuffer(memory, dtype=torch.uint8, count=40, offset=24)
    _, (one, other) = rebuilt(left, right)
    one[24:] = 255
    assert (other[:16] == 255).all()
    assert torch.equal(other[16:], right[16:])


def test_a_misaligned_storage_stays_misaligned():
    memory = bytearray(64)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=3)
    _, (copy,) = rebuilt(tensor)
    assert copy.data_ptr() % 16 == tensor.data_ptr() % 16


def test_restore_puts_every_byte_back():
    tensor = torch.randn(5, 5)
    arguments, (copy,) = rebuilt(tensor[1:3])
    copy.zero_()
    arguments.restore()
    assert torch.equal(copy, tensor[1:3])


def test_writes_never_reach_the_caller():
    tensor = torch.randn(1000)
    before = tensor.clone()
    _, (copy,) = rebuilt(tensor)
    copy.fill_(float("nan"))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(2, device="meta")])
def test_a_tensor_without_plain_storage_is_named(tensor):
    with pytest.raises(KernelNotTransferable, match="has no plain storage"):
        Snapshot([tensor])
