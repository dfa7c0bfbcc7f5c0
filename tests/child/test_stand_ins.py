"""Stand-ins say what tensors would, and note what only torch can answer."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import triton_internals
from safetune.child import stand_ins
from safetune.child.stand_ins import StandIn, TorchNeeded
from safetune.inputs import spans

DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)


class Memory:
    """Notes what is done with bytes of the device."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def allocate(self, size: int) -> SimpleNamespace:
        return SimpleNamespace(address=1 << 40, size=size)

    def copy(self, *arguments: int) -> None:
        self.done.append(("copy", *arguments))

    def set_bytes(self, *arguments: Any) -> None:
        self.done.append(("set", *arguments))


@pytest.fixture(autouse=True)
def asked() -> Iterator[list[str]]:
    stand_ins.asked.clear()
    yield stand_ins.asked
    stand_ins.asked.clear()


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", made)


def stand_in(tensor: torch.Tensor, memory: Any = None) -> StandIn:
    spec = spans.tensor_spec(tensor, spans.merged_spans([tensor]))
    return StandIn(spec, tensor.data_ptr(), stand_ins.device_of("cuda", 0), memory)


@triton.jit
def kernel(x, n, B: tl.constexpr):
    pass


def specialized(*arguments: Any) -> Any:
    """What Triton would compile a kernel for, with the text that it looks up."""
    jit = JITFunction(kernel.fn)
    return triton_internals.compile_arguments(
        jit, lambda: jit.run(*arguments, 64, B=16, grid=(1,), warmup=False), 0
    )


@pytest.mark.internals
@pytest.mark.parametrize("name", DTYPES)
def test_triton_specializes_them_as_it_does_tensors(name: str, h100: None) -> None:
    whole = torch.zeros(40, dtype=torch.uint8).view(getattr(torch, name))
    for tensor in (whole, whole[1:], whole[:0], whole.view(1, -1)):
        assert specialized(stand_in(tensor))[:3] == specialized(tensor)[:3]


@pytest.mark.internals
def test_triton_specializes_descriptors_and_tuples_of_them_as_it_does_those_of_tensors(
    h100: None,
) -> None:
    tensor = torch.zeros(64, 64, dtype=torch.float16)

    def described(base: Any) -> TensorDescriptor:
        return TensorDescriptor(base, [64, 64], [64, 1], [16, 32])

    real, ours = described(tensor), described(stand_in(tensor))
    assert specialized(ours)[:3] == specialized(real)[:3]
    assert specialized((stand_in(tensor), 3))[:3] == specialized((tensor, 3))[:3]


PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda x: (str(x.dtype), x.dtype.itemsize, x.dtype.is_floating_point),
    "shape": lambda x: (tuple(x.shape), x.shape[0], len(x.shape), x.shape.numel(), list(x.shape)),
    "size": lambda x: (tuple(x.size()), x.size(0), x.size(-1)),
    "stride": lambda x: (x.stride(), x.stride(0), x.stride(-1)),
    "numel": lambda x: (x.numel(), x.nbytes),
    "dim": lambda x: (x.dim(), x.ndim),
    "bytes": lambda x: (x.element_size(), x.itemsize),
    "address": lambda x: (x.data_ptr(), x.data_ptr() % 16),
    "contiguous": lambda x: x.is_contiguous(),
    "rows": lambda x: (x.shape[:-1].numel(), x.shape[1:].numel(), x.shape[:1][0]),
    "texts": lambda x: (str(x.shape), f"{x.shape}", repr(x.shape[1:]), repr(x.dtype)),
    "kinds' names": lambda x: [type(y).__name__ for y in (x, x.shape, x.shape[1:], x.dtype)],
    "modules": lambda x: [type(y).__module__ for y in (x, x.shape, x.dtype)],
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_they_have_the_properties_of_their_tensors(name: str) -> None:
    whole = torch.zeros(6, 8, dtype=torch.bfloat16)
    for tensor in (whole, whole.t(), whole[:, ::2], whole[2:3], whole[:0], whole.long()):
        assert PROPERTIES[name](stand_in(tensor)) == PROPERTIES[name](tensor)


@pytest.mark.parametrize("name", [*DTYPES, "float8_e8m0fnu"])
def test_dtypes_say_of_themselves_what_torch_s_do(name: str) -> None:
    tensor = torch.zeros(40, dtype=torch.uint8).view(getattr(torch, name))
    assert PROPERTIES["dtype"](stand_in(tensor)) == PROPERTIES["dtype"](tensor)


def test_their_device_is_a_gpu() -> None:
    x, y = stand_in(torch.zeros(1)), stand_in(torch.ones(2))
    assert (x.device.type, x.device.index, str(x.device)) == ("cuda", 0, "cuda:0")
    assert repr(x.device) == repr(torch.device("cuda", 0))
    assert x.is_cuda
    assert x.device == y.device
    assert x.dtype is y.dtype


BEYOND: dict[str, Callable[[StandIn], Any]] = {
    "a method": lambda x: x.sum(),
    "a property": lambda x: x.T,
    "a gradient": lambda x: x.requires_grad,
    "the type's name": lambda x: getattr(x.dtype, "name", None),
    "a test for tensors": lambda x: hasattr(x, "__torch_function__"),
    "a clone's format": lambda x: x.clone(memory_format=1),
    "hasattr": lambda x: hasattr(x, "_version"),
    "a sum": lambda x: x + 1,
    "a comparison": lambda x: x == x,
    "an element": lambda x: x[0],
    "a truth": bool,
    "a length": len,
    "a loop": list,
    "an attribute set": lambda x: setattr(x, "grad", None),
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "a pickled dtype": lambda x: pickle.dumps(x.dtype),
    "of the shape": lambda x: x.shape.storage(),
    "of the device": lambda x: x.device.stream(),
    "of the dtype": lambda x: x.dtype.to_real(),
    "an array": lambda x: x.__cuda_array_interface__,
    "a format": lambda x: x.is_contiguous(memory_format=1),
    "zeros with gaps": lambda x: stand_in(torch.zeros(4, 4)[:, ::2]).zero_(),
    "another shape": lambda x: x.copy_(stand_in(torch.zeros(3))),
    "a number": lambda x: x.copy_(3),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_they_lack_is_noted_also_where_it_is_caught(name: str, asked: list[str]) -> None:
    x = stand_in(torch.zeros(2))
    with pytest.raises(TorchNeeded):
        try:
            BEYOND[name](x)
        except Exception:
            pytest.fail("code of the user's may catch this")
    assert asked


def test_what_no_tensor_has_is_missing(asked: list[str]) -> None:
    assert not hasattr(stand_in(torch.zeros(2)), "__wrapped__")
    assert not asked


def test_an_import_of_torch_is_noted(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_ins.noting_torch():
        pass
    assert not asked, "torch was imported before"
    monkeypatch.delitem(sys.modules, "torch")
    with stand_ins.noting_torch():
        monkeypatch.setitem(sys.modules, "torch", torch)
    assert asked


def spoiled(how: str) -> None:
    {"attribute": lambda: None.size, "type": lambda: len(3), "index": lambda: ()[1]}[how]()  # type: ignore


@pytest.mark.parametrize("how", ["attribute", "type", "index"])
def test_an_error_of_the_user_s_code_is_noted(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """On a tensor of torch's it may not be one."""
    with pytest.raises((AttributeError, TypeError, IndexError)), stand_ins.noting_torch():
        spoiled(how)
    assert not asked, "torch was imported before"
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises((AttributeError, TypeError, IndexError)), stand_ins.noting_torch():
        spoiled(how)
    assert asked


def test_an_error_of_triton_s_is_not(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(globals(), "__name__", "safetune.test")
    with pytest.raises(AttributeError), stand_ins.noting_torch():
        spoiled("attribute")
    assert not asked


def test_zeros_copies_and_clones_are_made_on_the_device() -> None:
    memory = Memory()
    x = stand_in(torch.zeros(3, 5, dtype=torch.int64).t(), memory)
    address, size = x.data_ptr(), 120
    kept = x.clone()
    assert x.zero_() is x
    assert x.copy_(kept) is x
    for copied in (x.copy_(kept, True), x.copy_(src=kept, non_blocking=True)):
        assert copied is x
        assert memory.done.pop()[0] == "copy"
    assert memory.done == [
        ("copy", 1 << 40, address, size),
        ("set", (address, size), 0),
        ("copy", address, 1 << 40, size),
    ]
    assert (kept.shape, kept.stride(), kept.dtype) == (x.shape, x.stride(), x.dtype)
