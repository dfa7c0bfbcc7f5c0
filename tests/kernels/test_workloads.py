"""What `safetune tune safetune.kernels.layer_norm` finds, and what bad calls are told."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from safetune import Workload
from safetune.kernels import layer_norm, layer_norm_bwd, layer_norm_fwd

KERNELS = {
    "layer_norm_forward_kernel": 6,
    "layer_norm_backward_kernel": 6,
    "layer_norm_finalize_kernel": 2,
}

#: What depends on the number of rows: no value of these may compile or tune anything again.
ROW_COUNTS = {"rows", "programs_per_group"}


def kernel_of(name: str) -> Any:
    # By name, as the command line does: `safetune.kernels.layer_norm` is the function as well.
    return getattr(importlib.import_module("safetune.kernels.layer_norm"), name)


def workloads_of(kernel: Any) -> list[Workload]:
    (declared,) = kernel.workloads
    return list(declared.function(torch.device("cpu"), torch.float32))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(("name", "count"), KERNELS.items())
def test_workloads_run_and_have_keys_of_their_own(device: str, name: str, count: int) -> None:
    if device != "cpu":
        pytest.skip("the small workloads are for the interpreter")
    kernel = kernel_of(name)
    workloads = workloads_of(kernel)
    keys = {tuple(workload.kwargs[key] for key in kernel.key_names) for workload in workloads}
    assert len(keys) == len(workloads) == len({workload.name for workload in workloads}) == count
    for workload in workloads:
        kernel[workload.grid](*workload.args, **workload.kwargs)


def test_workloads_have_what_training_uses() -> None:
    """Each with and without a residual, over groups, and what only one of the norms has."""
    kernel = kernel_of("layer_norm_backward_kernel")
    found = {w.name: w.kwargs for w in workloads_of(kernel)}
    assert found["layer-33x50"]["HAS_BIAS"]
    assert not found["rms-33x50"]["HAS_BIAS"]
    assert found["rms-residual-33x50"]["HAS_RESIDUAL_GRADIENT"]
    assert not found["rms-33x50"]["HAS_RESIDUAL_GRADIENT"]
    assert (found["layer-5x3x20"]["GROUPS"], found["layer-5x3x20"]["COLUMNS"]) == (3, 20)
    forward = {w.name: w.kwargs for w in workloads_of(kernel_of("layer_norm_forward_kernel"))}
    assert forward["layer-residual-33x50"]["STORE_RESIDUAL"]


def test_workloads_say_what_must_be_written() -> None:
    """`safetune verify` then finds what is not."""
    found = {w.name: w.outputs for w in workloads_of(kernel_of("layer_norm_backward_kernel"))}
    names = ["input_gradient_pointer", "weight_partials_pointer", "bias_partials_pointer"]
    assert found["layer-33x50"] == names
    assert found["rms-33x50"] == names[:2]


@pytest.mark.parametrize("name", KERNELS)
def test_the_key_is_what_the_code_depends_on(name: str) -> None:
    """No name that nothing reads, no constexpr left out, and nothing that counts rows."""
    kernel = kernel_of(name)
    report = kernel.explain_key()
    assert report.dropped == report.missing == ()
    tuned = set(kernel.configs[0].kwargs)
    constexprs = {argument for argument in kernel.arg_names if argument.isupper()}
    assert set(kernel.key_names) == constexprs - tuned
    assert not ROW_COUNTS & set(kernel.key_names)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm(ones(4, 6), ones(5), None), r"weight has shape \(5,\), not \(6,\)"),
        (lambda: layer_norm(ones(4, 6), None, ones(4, 6)), r"bias has shape \(4, 6\), not \(6,\)"),
        (lambda: layer_norm(ones(4, 6), None, None, ones(6)), r"residual has shape \(6,\), but x"),
        (lambda: layer_norm(ones(1, 2**18 + 1), None, None), "x has rows of 262145 elements"),
        (lambda: layer_norm(ones(3, 0), None, None), "x has rows of 0 elements"),
        (lambda: layer_norm_fwd(ones(3, 6), None, None, num_groups=2), "num_groups=2"),
        (lambda: layer_norm_bwd(ones(3, 6), ones(6, 3), None, None), r"dy has shape \(3, 6\)"),
    ],
)
def test_bad_shapes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_orders_of_rows_do_not_disagree(
    device: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Which rows are in which partial sum is each config's own affair: no result of the kernel."""
    kernel = kernel_of("layer_norm_backward_kernel")
    in_turns = [config for config in kernel.configs if config.kwargs["IN_TURNS"]]
    monkeypatch.setattr(kernel, "configs", [kernel.configs[0], in_turns[0]])
    kernel.cache.clear()  # another test may have had this key, untuned
    x = torch.randn(60, 256, device=device, requires_grad=True)
    weight, bias = (torch.randn(256, device=device, requires_grad=True) for _ in range(2))
    y = layer_norm(x, weight, bias)
    monkeypatch.setenv("SAFETUNE_MODE", "tune")

    y.sum().backward()

    assert len(kernel.configs_timings) == 2, "both are tuned"
    said = [str(each.message) for each in recwarn]
    assert not [text for text in said if "give different results" in text]
