"""Every config of every kernel gives the same, right results, and programs keep to their rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from safetune.config import config_text
from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    FINALIZE_CONFIGS,
    FORWARD_CONFIGS,
    HALVED_ROW,
    LONG_SLICE,
    MOST_IN_A_TURN,
    MOST_IN_A_TURN_OF_FAST_MEMORY,
    TALL_TILE,
    WIDEST_TILE,
    backward_configs,
    forward_configs,
    programs_per_sm,
    prune_backward_configs,
    prune_configs,
    slice_columns,
    slice_count,
    tile_rows,
)
from safetune.kernels.grid_policy import GridPlan, plan_grid
from safetune.kernels.launches import (
    Launch,
    backward_launch,
    finalize_launch,
    forward_launch,
)
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)
from safetune.kernels.tiles import owned_tiles, tile_start
from tests.kernels.owned import owned_tiles as owned_on_host

pytestmark = pytest.mark.usefixtures("loops")

kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])


def launch_with(kernel: Any, config: triton.Config, launch: Launch) -> None:
    kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())


def poison(outputs: Any) -> None:
    """So that what a kernel leaves unwritten cannot look right."""
    for output in outputs:
        if output is not None:
            output.fill_(torch.nan)


@kinds
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("config", FORWARD_CONFIGS, ids=config_text)
def test_forward(
    reference: Any, close: Any, random: Any, config: Any, groups: int, is_rms_norm: bool
) -> None:
    x, residual = random(34, groups * 50, grad=False), random(34, groups * 50, grad=False)
    weight, bias = random(groups * 50, grad=False), random(groups * 50, grad=False)
    rows = (x.view(-1, 50), weight, bias, 1e-5, residual.view(-1, 50), None, None)
    outputs, launch = forward_launch(*rows, is_rms_norm, groups)
    poison(outputs)
    launch_with(layer_norm_forward_kernel, config, launch)
    exact = reference(
        *(t.double() for t in (x, weight, bias, residual)),
        is_rms_norm=is_rms_norm,
        num_groups=groups,
    )
    close(outputs.y.view_as(x), exact)
    assert torch.equal(outputs.residual.view_as(x), x + residual)


class Backward:
    """One backward problem with its exact gradients."""

    def __init__(self, random: Any, tokens: int, columns: int, groups: int, is_rms_norm: bool):
        shape = (tokens * groups, columns)
        self.x, self.dy, self.dres = (random(*shape, grad=False) for _ in range(3))
        self.weight, self.bias = (random(groups * columns, grad=False) for _ in range(2))
        centred = self.x if is_rms_norm else self.x - self.x.mean(1, keepdim=True)
        self.rstd = (centred.square().mean(1) + 1e-5).rsqrt()
        self.mean = None if is_rms_norm else self.x.mean(1)
        self.groups, self.is_rms_norm = groups, is_rms_norm

    def run(self, plan: GridPlan, config: Any, *, in_place: str = "") -> Any:
        """Return dx, dw and db; dx is stored over dy or dres if `in_place` names it."""
        dy, dres = self.dy.clone(), self.dres.clone()
        outputs, launch = backward_launch(
            plan,
            dy,
            self.x,
            self.weight,
            self.bias,
            self.mean,
            self.rstd,
            dres,
            has_residual=True,
            is_rms_norm=self.is_rms_norm,
            x_dtype=None,
            recompute_output=False,
        )
        poison(outputs)
        dx = {"": outputs.x, "dy": dy, "dres": dres}[in_place]
        if in_place:
            args = tuple(dx if argument is outputs.x else argument for argument in launch.args)
            launch = launch._replace(args=args, kwargs={**launch.kwargs, "IN_PLACE": True})
        launch_with(layer_norm_backward_kernel, config, launch)
        partials = (outputs.weight_partials, outputs.bias_partials)
        gradients, finalize = finalize_launch(plan, *partials, self.weight, self.bias)
        poison(gradients)
        launch_with(layer_norm_finalize_kernel, FINALIZE_CONFIGS[0], finalize)
        return (dx, *gradients)

    def exact(self, reference: Any) -> Any:
        tokens = len(self.x) // self.groups
        leaves = [t.double().requires_grad_() for t in (self.x, self.weight, self.bias)]
        x = leaves[0].view(tokens, -1)
        y = reference(x, *leaves[1:], is_rms_norm=self.is_rms_norm, num_groups=self.groups)
        return torch.autograd.grad(
            (y, leaves[0]), leaves, (self.dy.double().view_as(y), self.dres.double())
        )


PROBLEMS = [(1, 1, 4), (33, 1, 2), (21, 1, 16), (7, 3, 3), (2, 5, 1)]


def backward_cases() -> Iterator[Any]:
    """Each config with every third problem, and that with one kind; marked `full`: the others."""
    for place, config in enumerate(BACKWARD_CONFIGS):
        for number, problem in enumerate(PROBLEMS):
            for is_rms_norm in (False, True):
                quick = place % 3 == number % 3 and is_rms_norm == bool((place + number) % 2)
                name = f"{config_text(config)}-{problem}-{is_rms_norm}"
                marks = [] if quick else [pytest.mark.full]
                yield pytest.param(config, *problem, is_rms_norm, id=name, marks=marks)


@pytest.mark.parametrize(
    ("config", "tokens", "groups", "sm_count", "is_rms_norm"), list(backward_cases())
)
def test_backward(
    reference: Any,
    close: Any,
    random: Any,
    config: Any,
    tokens: int,
    groups: int,
    sm_count: int,
    is_rms_norm: bool,
) -> None:
    """Tiles taller and lower than a program's run of rows, more programs than rows, groups.

    Stored over dy or dres, a row with two writers would be computed from the first one's result.
    """
    problem = Backward(random, tokens, 50, groups, is_rms_norm)
    plan = plan_grid(tokens, groups, sm_count)
    gradients = problem.run(plan, config)
    for mine, right in zip(gradients, problem.exact(reference), strict=True):
        close(mine, right)
    for name in ("dy", "dres"):
        in_place = problem.run(plan, config, in_place=name)
        assert all(map(torch.equal, in_place, gradients)), name


SLICED = [
    triton.Config(
        {
            "TILE_ELEMENTS": 128,
            "PIPELINE_STAGES": stages,
            "LOAD_AGAIN": again,
            "IN_TURNS": stages == 2,
            "JOINED_SUMS": joined,
        }
    )
    for stages, again, joined in (
        (1, False, True),
        (1, False, False),
        (1, True, True),
        (2, True, False),
    )
]


@kinds
@pytest.mark.parametrize(("columns", "slices"), [(100, 1), (128, 1), (200, 2), (300, 3)])
@pytest.mark.parametrize("config", SLICED, ids=config_text)
def test_backward_in_slices(
    reference: Any,
    close: Any,
    random: Any,
    config: Any,
    columns: int,
    slices: int,
    is_rms_norm: bool,
) -> None:
    assert slice_count(128, columns) == slices
    problem = Backward(random, 5, columns, 2, is_rms_norm)
    gradients = problem.run(plan_grid(5, 2, 3), config)
    for mine, right in zip(gradients, problem.exact(reference), strict=True):
        close(mine, right)


@kinds
@pytest.mark.parametrize(
    ("tokens", "groups", "rounds"), [(48, 1, 3), (61, 1, 3), (49, 3, 3), (17, 1, 1), (15, 1, 0)]
)
def test_backward_in_turns(
    reference: Any,
    close: Any,
    random: Any,
    tokens: int,
    groups: int,
    rounds: int,
    is_rms_norm: bool,
) -> None:
    """Rounds of four rows for each of four programs, with and without rows left over."""
    options = {"TILE_ELEMENTS": 128, "PIPELINE_STAGES": 2, "LOAD_AGAIN": False}
    problem = Backward(random, tokens, 20, groups, is_rms_norm)
    plan = plan_grid(tokens, groups, 4 * groups, programs_per_sm=1)
    assert tokens // (plan.programs_per_group * 4) == rounds
    exact = problem.exact(reference)
    for in_place in ("", "dy", "dres"):
        config = triton.Config({**options, "IN_TURNS": True, "JOINED_SUMS": groups == 1})
        for mine, right in zip(problem.run(plan, config, in_place=in_place), exact, strict=True):
            close(mine, right)


@kinds
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_forward_in_slices(
    reference: Any, close: Any, random: Any, groups: int, offset: float, is_rms_norm: bool
) -> None:
    """Statistics of slices are united, far from zero too: the mean of a slice is not the row's."""
    x, residual = random(7, groups * 300, grad=False), random(7, groups * 300, grad=False)
    x += offset * (torch.arange(groups * 300, device=x.device) > 150)
    weight, bias = random(groups * 300, grad=False), random(groups * 300, grad=False)
    rows = (x.view(-1, 300), weight, bias, 1e-5, residual.view(-1, 300), None, None)
    outputs, launch = forward_launch(*rows, is_rms_norm, groups)
    poison(outputs)
    launch_with(layer_norm_forward_kernel, triton.Config({"TILE_ELEMENTS": 128}), launch)
    exact = reference(
        *(t.double() for t in (x, weight, bias, residual)),
        is_rms_norm=is_rms_norm,
        num_groups=groups,
    )
    close(outputs.y.view_as(x), exact, slack=1.0 + offset / 10)
    assert torch.equal(outputs.residual.view_as(x), x + residual)


@pytest.mark.parametrize("columns", [7, 50, 200])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("config", FINALIZE_CONFIGS, ids=config_text)
def test_finalize(close: Any, random: Any, config: Any, groups: int, columns: int) -> None:
    plan = plan_grid(1000, groups, 50, programs_per_sm=4)
    partials = [random(plan.programs, columns, grad=False) for _ in range(2)]
    weight, bias = random(groups * columns), random(groups * columns, dtype=torch.float16)
    gradients, launch = finalize_launch(plan, *partials, weight, bias)
    poison(gradients)
    launch_with(layer_norm_finalize_kernel, config, launch)
    for gradient, partial in zip(gradients, partials, strict=True):
        close(gradient, partial.double().view(groups, -1, columns).sum(1).flatten())


@triton.jit
def _store_owned_tiles(
    output_pointer, rows, programs, most, TILE_ROWS: tl.constexpr, IN_TURNS: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    turns, first, end = owned_tiles(index, rows, programs, TILE_ROWS, IN_TURNS)
    output_pointer += index * most * 2
    for turn in range(turns):
        tile = tile_start(turn, index, programs, first, TILE_ROWS, IN_TURNS)
        tl.store(output_pointer + 2 * turn, tile)
        tl.store(output_pointer + 2 * turn + 1, tl.minimum(tile + TILE_ROWS, end))


@pytest.mark.parametrize("in_turns", [False, True], ids=["runs", "turns"])
@pytest.mark.parametrize(
    ("rows", "height"),
    [(1, 4), (7, 1), (12, 1), (129, 8), (450, 4), (24100, 128), (2**31 - 1, 2**24), (2**31, 2**25)],
)
def test_device_and_host_agree_on_the_rows(
    device: str, rows: int, height: int, in_turns: bool
) -> None:
    """`owned_tiles` on the device is `owned.owned_tiles` on the host, up to the ends of 32 bits."""
    plan = plan_grid(rows, 1, 6)
    owned = [
        [(tile.start, tile.stop) for tile in owned_on_host(plan, program, height, in_turns)]
        for program in range(plan.programs)
    ]
    most = max(map(len, owned)) + 1
    found = torch.full((plan.programs, most, 2), -1, dtype=torch.int64, device=device)
    _store_owned_tiles[(plan.programs,)](
        found, rows, plan.programs_per_group, most, height, in_turns
    )
    stored = [[tuple(tile) for tile in tiles if tile[1] >= 0] for tiles in found.tolist()]
    assert stored == owned


COLUMNS = [1, 50, 256, 512, 1024, 2048, 4096, 8192, 16384, 20000, 32768, 65536, 2**18]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("columns", [*COLUMNS, 4097, 5120])
def test_pruning_leaves_whole_rows_or_long_slices(columns: int, has_bias: bool) -> None:
    forward = prune_configs(FORWARD_CONFIGS, {}, COLUMNS=columns, GROUPS=1)
    backward = prune_backward_configs(
        BACKWARD_CONFIGS,
        {},
        COLUMNS=columns,
        GROUPS=1,
        IN_PLACE=False,
        HAS_WEIGHT=True,
        HAS_BIAS=has_bias,
        HAS_RESIDUAL_GRADIENT=False,
    )
    most = max(1, -(-columns // LONG_SLICE))
    halves = 2 if columns == HALVED_ROW else most
    for left, slices in ((forward, most), (backward, halves)):
        assert len(left) >= 2
        for config in left:
            elements = config.kwargs["TILE_ELEMENTS"]
            assert slice_count(elements, columns) <= slices
            assert elements <= TALL_TILE or tile_rows(elements, columns) == 1


@pytest.mark.parametrize(
    ("fast_memory", "columns", "has_bias", "elements"),
    [
        (False, 256, True, {1024, 2048}),
        (False, 512, True, {1024}),
        (False, 2048, False, {2048}),
        (False, 2048, True, {2048, 4096}),
        (True, 256, True, {1024, 2048, 4096}),
        (True, 512, True, {1024, 2048}),
        (True, 2048, False, {2048, 4096}),
    ],
)
def test_whole_rows_in_turns_take_8_kib_at_most(
    fast_memory: bool, columns: int, has_bias: bool, elements: set[int]
) -> None:
    """Of all programs of a multiprocessor; 16 KiB where memory is fast."""
    left = backward_configs(BACKWARD_CONFIGS, fast_memory, **keys_of(columns, has_bias))
    in_turns = {c.kwargs["TILE_ELEMENTS"] for c in left if c.kwargs["IN_TURNS"]}
    assert in_turns == elements
    most = max(in_turns) * programs_per_sm(columns, 1 + has_bias)
    assert most <= (MOST_IN_A_TURN_OF_FAST_MEMORY if fast_memory else MOST_IN_A_TURN)


def keys_of(columns: int, has_bias: bool) -> dict[str, Any]:
    keys = {"COLUMNS": columns, "HAS_WEIGHT": True, "HAS_BIAS": has_bias}
    return {**keys, "IN_PLACE": False, "HAS_RESIDUAL_GRADIENT": False}


@pytest.mark.parametrize("columns", [64, *COLUMNS])
def test_the_first_config_is_the_same_on_every_card(columns: int) -> None:
    """It runs where a call is pinned, whose bits do not depend on the card."""
    first = {
        str(backward_configs(BACKWARD_CONFIGS, fast, **keys_of(columns, has_bias=True))[0])
        for fast in (False, True)
    }
    assert len(first) == 1


@pytest.mark.parametrize(
    ("clock_khz", "bus_bits", "is_fast"),
    [(2619000, 5120, False), (3201000, 6144, True), (1593000, 5120, False)],
    ids=["H100", "H200", "A100"],
)
def test_configs_are_those_for_the_current_device(
    monkeypatch: pytest.MonkeyPatch, clock_khz: int, bus_bits: int, is_fast: bool
) -> None:
    keys = keys_of(256, has_bias=True)
    slow, fast = (backward_configs(BACKWARD_CONFIGS, memory, **keys) for memory in (False, True))
    assert prune_backward_configs(BACKWARD_CONFIGS, {}, **keys) == slow != fast
    facts = {"mem_clock_rate": clock_khz, "mem_bus_width": bus_bits, "multiprocessor_count": 132}
    utils = SimpleNamespace(get_device_properties=lambda device: facts)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: clock_khz)  # a device of its own
    assert prune_backward_configs(BACKWARD_CONFIGS, {}, **keys) == (fast if is_fast else slow)
    narrow, wide = (forward_configs(FORWARD_CONFIGS, 512, memory) for memory in (False, True))
    assert prune_configs(FORWARD_CONFIGS, {}, COLUMNS=512) == (wide if is_fast else narrow)
    assert len(narrow) < len(wide)


@pytest.mark.parametrize(
    ("columns", "has_bias", "has_residual_gradient", "slices"),
    [
        (HALVED_ROW, False, False, {2}),
        (HALVED_ROW, False, True, {2}),
        (HALVED_ROW, True, False, {2}),
        (HALVED_ROW, True, True, {1}),
        (HALVED_ROW - 1, False, False, {1}),
    ],
)
def test_rows_of_one_length_are_cut_in_two(
    columns: int, has_bias: bool, has_residual_gradient: bool, slices: set[int]
) -> None:
    left = prune_backward_configs(
        BACKWARD_CONFIGS,
        {},
        COLUMNS=columns,
        IN_PLACE=False,
        HAS_WEIGHT=True,
        HAS_BIAS=has_bias,
        HAS_RESIDUAL_GRADIENT=has_residual_gradient,
    )
    assert {slice_count(config.kwargs["TILE_ELEMENTS"], columns) for config in left} == slices


@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_written_in_place_are_not_cut(columns: int) -> None:
    """dx may be stored over dy up to 16384 columns; longer rows are refused, not spoilt."""

    def prune() -> list[triton.Config]:
        keys = {
            "COLUMNS": columns,
            "IN_PLACE": True,
            "HAS_WEIGHT": True,
            "HAS_BIAS": False,
            "HAS_RESIDUAL_GRADIENT": False,
        }
        return prune_backward_configs(BACKWARD_CONFIGS, {}, **keys)

    if columns > WIDEST_TILE:
        with pytest.raises(ValueError, match=f"IN_PLACE=True with COLUMNS={columns}"):
            prune()
    else:
        assert {slice_count(c.kwargs["TILE_ELEMENTS"], columns) for c in prune()} == {1}


def test_a_config_that_cuts_rows_does_not_compile_in_place(random: Any) -> None:
    """Where nothing prunes, as in mode "off", the kernel does not compile."""
    problem = Backward(random, 5, 300, 1, is_rms_norm=False)
    with pytest.raises(Exception, match="a row in slices has several readers"):
        problem.run(plan_grid(5, 1, 3), SLICED[0], in_place="dy")


def test_tiles_are_whole_rows() -> None:
    assert [tile_rows(4096, columns) for columns in (1, 50, 64, 4096, 5000)] == [4096, 64, 64, 1, 1]


@given(tile_elements=st.sampled_from([2**k for k in range(7, 16)]), columns=st.integers(1, 2**18))
def test_slices_make_the_row_and_fit_the_tile(tile_elements: int, columns: int) -> None:
    width, slices = slice_columns(tile_elements, columns), slice_count(tile_elements, columns)
    assert width <= tile_elements
    assert (slices - 1) * width < columns <= slices * width
    assert slices == 1 or width % 128 == 0
