"""Pinned: the same bits whatever was tuned and however many multiprocessors there are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from safetune.kernels import LayerNorm, group_norm_linear, launches, layer_norm
from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    FINALIZE_CONFIGS,
    FORWARD_CONFIGS,
    programs_per_sm,
)
from safetune.kernels.launches import Launch
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)

pytestmark = pytest.mark.usefixtures("loops")

KERNELS = {
    layer_norm_forward_kernel: FORWARD_CONFIGS,
    layer_norm_backward_kernel: BACKWARD_CONFIGS,
    layer_norm_finalize_kernel: FINALIZE_CONFIGS,
}


@pytest.fixture
def tuned_to(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that has every kernel launch the config at an index of its list, as if tuned."""

    def tune(index: int) -> list[triton.Config]:
        launched: list[triton.Config] = []
        for kernel, configs in KERNELS.items():

            def run(*args: Any, _kernel: Any = kernel, _config: Any = configs[index], **kw: Any):
                launched.append(_config)
                return _kernel.fn.run(*args, **kw, **_config.all_kwargs())

            kernel.forget_launches()  # and not by setattr, which would leave a `run` there
            monkeypatch.setitem(vars(kernel), "run", run)
        return launched

    return tune


@pytest.fixture
def torch_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def results(random: Any, gradients: Any) -> Any:
    """A function that returns y and all gradients of one problem of 1000 rows."""
    leaves = (random(1000, 50), random(50), random(50))
    dy = random(1000, 50, grad=False)

    def compute(**options: Any) -> list[torch.Tensor]:
        y = layer_norm(*leaves, **options)
        return [y, *gradients(y, dy, *leaves)]

    return compute


def test_no_tuning_reaches_a_pinned_call(results: Any, tuned_to: Any) -> None:
    right = results(deterministic=True)
    launched = tuned_to(-1)
    assert all(map(torch.equal, results(deterministic=True), right))
    assert not launched
    free = results()
    assert len(launched) == 3
    assert not all(map(torch.equal, free, right))  # or this test would show nothing


def test_torch_is_asked(results: Any, tuned_to: Any, torch_deterministic: None) -> None:
    launched = tuned_to(-1)
    right = results(deterministic=True)
    assert all(map(torch.equal, results(), right))
    assert not launched
    results(deterministic=False)
    assert len(launched) == 3


def test_the_grid_is_the_same_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(
        shape=(100_000, 256), device=torch.device("cuda"), is_cuda=True, element_size=lambda: 2
    )
    x.dtype = torch.bfloat16
    plans = []
    for count in (108, 132, 188):
        monkeypatch.setattr(launches, "sm_count", lambda device, count=count: count)
        plans.append([launches.backward_plan(x, x, None, 1, pinned) for pinned in (False, True)])
    free, fixed = zip(*plans, strict=True)
    assert len(set(free)) == 3
    assert set(fixed) == {free[1]}  # the H100's


@pytest.mark.parametrize(
    ("columns", "sums", "free", "pinned"), [(2048, 2, 1, 2), (8192, 1, 0.5, 1), (1024, 2, 4, 4)]
)
def test_a_pinned_config_has_enough_programs(
    columns: int, sums: int, free: float, pinned: float
) -> None:
    """The first config has no stages: with fewer programs it waits for memory."""
    assert programs_per_sm(columns, sums) == free
    assert programs_per_sm(columns, sums, pinned=True) == pinned


class Recorder:
    """In place of the forward kernel: what it is launched with."""

    arg_names = layer_norm_forward_kernel.arg_names
    pruned_for = layer_norm_forward_kernel.pruned_for

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []

    @property
    def fn(self) -> Any:
        return {(1,): lambda *args, **options: self.launched.append(options)}

    def launch(self, columns: int) -> dict[str, Any]:
        """Launch it pinned; return what it should be launched with."""
        constexprs = {"COLUMNS": columns}
        launches.run_launch(Launch(self, (1,), (), constexprs), True)
        return {**constexprs, **self.pruned_for({}, constexprs)[0].all_kwargs()}


@pytest.mark.parametrize("columns", [64, 16384])
def test_the_pinned_config_is_the_first_that_is_not_pruned(columns: int) -> None:
    recorder = Recorder()
    first = recorder.launch(columns)
    assert recorder.launched == [first]


def test_the_pinned_config_does_not_depend_on_the_calls_before() -> None:
    """It is remembered for its constexprs alone: rows of another length have another one."""
    recorder = Recorder()
    firsts = [recorder.launch(columns) for columns in (64, 16384, 64)]
    assert recorder.launched == firsts
    assert firsts[0]["TILE_ELEMENTS"] != firsts[1]["TILE_ELEMENTS"]


def test_modules_and_the_operator_pass_it_on(
    random: Any, gradients: Any, tuned_to: Any, device: str
) -> None:
    launched = tuned_to(-1)
    x, weight = random(9, 24), random(7, 24)
    LayerNorm(24, deterministic=True).to(device)(x).sum().backward()
    group_norm_linear(x, None, None, weight, None, deterministic=True).sum().backward()
    torch.ops.safetune.layer_norm(x, None, None, None, 1e-5, None, False, False, 1, True)
    assert not launched


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_a_batch_of_losses_are_pinned(
    random: Any, tuned_to: Any, torch_deterministic: None
) -> None:
    launched = tuned_to(-1)
    x, losses = random(4, 24), random(2, 4, 24, grad=False)
    for deterministic, launches_of_tuned in ((None, 0), (True, 0), (False, 1 + len(losses))):
        y = layer_norm(x, None, None, deterministic=deterministic)
        torch.autograd.grad(y, x, losses, is_grads_batched=True)
        assert len(launched) == launches_of_tuned


def test_same_bits_every_time(results: Any) -> None:
    first = results(deterministic=True)
    for _ in range(3):
        assert all(map(torch.equal, results(deterministic=True), first))
