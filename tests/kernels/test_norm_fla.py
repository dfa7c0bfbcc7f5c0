"""Names, arguments, defaults and state are those of the wheel fla-core 0.6.0.

`pip install fla-core==0.6.0` is enough; another version has another interface, so it is skipped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from safetune import kernels

VERSION = "0.6.0"


def _installed() -> str:
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "none"


pytestmark = pytest.mark.skipif(_installed() != VERSION, reason=f"needs fla-core=={VERSION}")

MODULES = (
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "LayerNormLinear",
    "RMSNormLinear",
    "GroupNormLinear",
)
FUNCTIONS = (
    "layer_norm",
    "rms_norm",
    "group_norm",
    "layer_norm_linear",
    "rms_norm_linear",
    "group_norm_linear",
    "layer_norm_fwd",
    "layer_norm_bwd",
)


@pytest.fixture(scope="module")
def fla() -> ModuleType:
    return importlib.import_module("fla.modules.layernorm")


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(inspect.unwrap(function))
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def assert_replaces(ours: Any, theirs: Any) -> None:
    """FLA's parameters come first; what is added is by keyword, and has a default."""
    mine, wanted = parameters(ours), parameters(theirs)
    assert mine[: len(wanted)] == wanted
    for name, kind, default in mine[len(wanted) :]:
        assert kind is inspect.Parameter.KEYWORD_ONLY, name
        assert default is not inspect.Parameter.empty, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(fla: ModuleType, name: str) -> None:
    assert_replaces(getattr(kernels, name), getattr(fla, name))


@pytest.mark.parametrize("name", MODULES)
def test_modules(fla: ModuleType, name: str) -> None:
    ours, theirs = getattr(kernels, name), getattr(fla, name)
    assert_replaces(ours.__init__, theirs.__init__)
    assert_replaces(ours.forward, theirs.forward)


def test_nothing_that_normalizes_is_missing(fla: ModuleType) -> None:
    """Left out on purpose: the references in plain PyTorch, and the style for DTensors."""
    left_out = {"NormParallel", "GroupNormRef", "layer_norm_ref", "rms_norm_ref", "group_norm_ref"}
    assert set(fla.__all__) - left_out <= set(kernels.__all__)


ARGUMENTS = [
    {},
    {"bias": True},
    {"elementwise_affine": False, "bias": True},
    {"eps": 0.5, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_state(fla: ModuleType, name: str, arguments: dict[str, Any]) -> None:
    sizes: tuple[int, ...] = (8,)
    if name.startswith("GroupNorm"):
        sizes, arguments = (2, 8), {**arguments, "is_rms_norm": "eps" in arguments}
    ours, theirs = (getattr(module, name)(*sizes, **arguments) for module in (kernels, fla))
    assert repr(ours) == repr(theirs)
    state, right = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(right)
    for key, value in right.items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key], value)
    ours.load_state_dict(right)
    public = {key for key in vars(theirs) if not key.startswith("_")} - {"training"}
    assert {key: getattr(ours, key) for key in public} == {
        key: getattr(theirs, key) for key in public
    }


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_the_low_level_functions_work_under_flas_modules(
    monkeypatch: pytest.MonkeyPatch, fla: ModuleType, random: Any, name: str, prenorm: bool
) -> None:
    """FLA's modules run on ours, and give what our modules do, gradients too, to the bit."""
    monkeypatch.setattr(fla, "layer_norm_fwd", kernels.layer_norm_fwd)
    monkeypatch.setattr(fla, "layer_norm_bwd", kernels.layer_norm_bwd)
    sizes = (3, 24) if name.startswith("GroupNorm") else (24,)
    x, residual = random(2, 5, 24, dtype=torch.bfloat16), random(2, 5, 24)
    linear = (random(7, 24), random(7)) if name.endswith("Linear") else ()
    results = []
    for module in (kernels, fla):
        norm = getattr(module, name)(*sizes, bias=True, device=x.device)
        outputs = norm(x, *linear, residual=residual, prenorm=prenorm)
        outputs = outputs if prenorm else (outputs,)
        leaves = (x, residual, *linear, *norm.parameters())
        incoming = [torch.ones_like(output) for output in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, incoming)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
