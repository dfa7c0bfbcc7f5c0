"""The kernels that safetune ships have one writer for each element; FLA's historic grid has not.

The matrix is that of statement C6. By default a part of it runs, each case with one of the configs
in turn; SAFETUNE_TEST_FULL=1 and `make ownership` run all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune.kernels import launches, layer_norm_bwd, layer_norm_fwd
from safetune.kernels.configs import WIDEST_TILE, backward_configs, slice_count
from safetune.kernels.layer_norm import layer_norm_backward_kernel
from safetune.offline.tasks import find_kernels
from safetune.verify.overlap import check_overlap, configs_for

TOKENS = (0, 1, 3, 65, 129, 189, 191, 257, 450, 5000, 10000, 24000, 24100)
GROUPS = (1, 2, 4, 16, None)  # None: one more than there are SMs
SMS = (1, 108, 132, 148, 188)
#: Rows have this number of columns up to this number of rows: programs share out the rows here.
WIDTHS = ((5000, 64), (100_000, 8), (10_000_000, 1))

Tensor = torch.Tensor


@dataclass(frozen=True)
class Launch:
    """A launch that a function asked for, and what it must write."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str, ...]

    def configs(self) -> list[triton.Config]:
        """What any card may launch."""
        if self.kernel is layer_norm_backward_kernel:
            return backward_configs(self.kernel.configs, fast_memory=True, **self.kwargs)
        return configs_for(self.kernel, self.args, self.kwargs)

    def check(self, config: triton.Config) -> Any:
        outputs = self.outputs
        launch = (self.kernel, self.grid, *self.args)
        return check_overlap(*launch, config=config, outputs=outputs, **self.kwargs)

    def over(self, old: Tensor, new: Tensor) -> Launch:
        """The same with another tensor in an argument's place."""
        args = tuple(new if _same(argument, old) else argument for argument in self.args)
        return Launch(self.kernel, self.grid, args, self.kwargs, self.outputs)


def _same(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr()


class Launches(list[Launch]):
    """What is launched. Nothing runs: results are not looked at here."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Any] = []

    def add(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add a launch; the tensors that are new with it are its outputs."""
        known = [value for launch in self for value in launch.args] + self.inputs
        outputs = [
            name
            for name, value in zip(kernel.arg_names, args, strict=False)
            if isinstance(value, Tensor)
            if not any(_same(other, value) for other in known)
        ]
        self.append(Launch(kernel, grid, args, kwargs, tuple(outputs)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(launches, "FEW_ROWS", 0)  # those kernels: tests/kernels/test_few_rows.py

    def watch(kernel: Any) -> None:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            found.add(kernel, grid, args, kwargs)

        kernel.forget_launches()  # and not by setattr, which would leave a `run` there
        monkeypatch.setitem(vars(kernel), "run", run)

    # The function `layer_norm` hides the module of its name.
    for kernel in find_kernels(vars(import_module("safetune.kernels.layer_norm"))):
        watch(kernel.tuner)
    return found


@dataclass(frozen=True)
class Problem:
    """The operands of one norm."""

    x: Tensor
    dy: Tensor
    dres: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    rstd: Tensor
    groups: int

    @classmethod
    def of(cls, tokens: int, columns: int, groups: int, device: str = "cpu") -> Problem:
        rows = tokens * groups
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(rows, columns, generator=generator) for _ in range(3)]
        tensors += [torch.randn(groups * columns, generator=generator) for _ in range(2)]
        tensors += [torch.zeros(rows), torch.ones(rows)]
        return cls(*(tensor.to(device) for tensor in tensors), groups)

    def backward(self, launched: Launches, is_rms_norm: bool = False, **options: Any) -> Tensor:
        """Launch the backward pass; return dx."""
        launched.inputs = list(vars(self).values())
        mean = None if is_rms_norm else self.mean
        options = {"dres": self.dres, "has_residual": True, **options}
        operands = (self.dy, self.x, self.weight, self.bias, mean, self.rstd)
        return layer_norm_bwd(
            *operands, is_rms_norm=is_rms_norm, num_groups=self.groups, **options
        )[0]

    def forward(self, launched: Launches, is_rms_norm: bool) -> None:
        launched.inputs = list(vars(self).values())
        operands = (self.x, self.weight, self.bias, 1e-5, self.dres)
        layer_norm_fwd(*operands, is_rms_norm=is_rms_norm, num_groups=self.groups)


#: Tokens, groups, SMs. Programs are what takes time here.
QUICK = (
    (0, 2, 188),
    (1, 1, 1),
    (3, 109, 108),
    (65, 16, 1),
    (129, 1, 188),
    (191, 4, 108),
    (257, 2, 132),
    (450, 1, 188),
    (24100, 1, 132),
)


def cases() -> Iterator[Any]:
    """Yield (tokens, groups, SMs, number): the quick cases, and marked `full` the whole matrix."""
    for number, case in enumerate(QUICK):
        yield pytest.param(*case, number, id="-".join(map(str, case)))
    for number, (tokens, groups, sms) in enumerate(itertools.product(TOKENS, GROUPS, SMS)):
        name = f"matrix-{tokens}-{groups or 'more'}-{sms}"
        yield pytest.param(tokens, groups or sms + 1, sms, number, id=name, marks=pytest.mark.full)


def is_owned(report: Any) -> None:
    assert report.ok, str(report)
    assert report.idle_programs == (), str(report)


@pytest.mark.internals
@pytest.mark.parametrize(("tokens", "groups", "sms", "number"), list(cases()))
def test_one_program_writes_each_element(
    launched: Launches,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    groups: int,
    sms: int,
    number: int,
) -> None:
    """Backward and finalize; in turn dx is its own, or lies over dy or the residual's gradient.

    Of 15 configs, two norms and three places for dx each meets each in any 90 cases, and in the
    few of the default run each norm and each place is there.
    """
    turn = 13 * number
    monkeypatch.setattr(launches, "INTERPRETER_SM_COUNT", sms)
    columns = next(columns for most, columns in WIDTHS if tokens * groups <= most)
    problem = Problem.of(tokens, columns, groups)
    dx = problem.backward(launched, is_rms_norm=bool(turn // 15 % 2))

    assert len(launched) == (2 if tokens else 0)
    for launch in launched:
        configs = launch.configs()
        config = configs[turn % len(configs)]
        assert launch.outputs
        if launch is launched[0]:
            assert len(configs) == 15
            over = (dx, problem.dy, problem.dres)[turn // 30 % 3]
            launch = launch.over(dx, over)
        is_owned(launch.check(config))


@pytest.mark.internals
@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({}, 3),
        ({"dres": None, "has_residual": False}, 3),
        ({"x_dtype": torch.float16}, 4),
        ({"recompute_output": True}, 4),
    ],
    ids=["residual", "plain", "two dtypes", "recompute"],
)
def test_every_config_of_backward(
    launched: Launches, options: dict[str, Any], outputs: int
) -> None:
    Problem.of(23, 50, 3).backward(launched, **options)

    for launch in launched:
        for config in launch.configs():
            is_owned(launch.check(config))
    assert len(launched[0].outputs) == outputs


@pytest.mark.internals
@pytest.mark.parametrize("tokens", [32, 33, 39, 61])
def test_rounds_of_low_tiles(launched: Launches, tokens: int) -> None:
    """Tiles of four rows in turns, dx over dy: as many rounds as no declared config has here."""
    problem = Problem.of(tokens, 20, 2)
    dx = problem.backward(launched)
    launch = launched[0].over(dx, problem.dy)
    rounds = tokens // (4 * launch.args[-1])
    assert rounds >= 4
    for in_turns in (False, True):
        options = {"TILE_ELEMENTS": 128, "PIPELINE_STAGES": 1, "LOAD_AGAIN": False}
        config = triton.Config({**options, "IN_TURNS": in_turns, "JOINED_SUMS": in_turns})
        is_owned(launch.check(config))


TILE = {"TILE_ELEMENTS": 128}
SLICED = [
    triton.Config(
        {
            "PIPELINE_STAGES": 1,
            "LOAD_AGAIN": again,
            "IN_TURNS": in_turns,
            "JOINED_SUMS": again != in_turns,
            **TILE,
        }
    )
    for again, in_turns in itertools.product((False, True), repeat=2)
]


@pytest.mark.internals
@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize(
    "columns", [pytest.param(200, marks=pytest.mark.full), 300, WIDEST_TILE + 100]
)
def test_rows_in_slices(
    launched: Launches, monkeypatch: pytest.MonkeyPatch, columns: int, is_rms_norm: bool
) -> None:
    """Programs that share a row, at a width that needs it and at others; dx over dy is seen."""
    monkeypatch.setattr(launches, "INTERPRETER_SM_COUNT", 3)
    wide = columns > WIDEST_TILE
    problem = Problem.of(1 if wide else 5, columns, 2)
    dx = problem.backward(launched, is_rms_norm, x_dtype=torch.float16, recompute_output=True)
    problem.forward(launched, is_rms_norm)
    backward, _, forward = launched

    for config in backward.configs() if wide else SLICED:
        assert slice_count(config.kwargs["TILE_ELEMENTS"], columns) > 1
        is_owned(backward.check(config))
    assert backward.over(dx, problem.dy).check(config).find("read_write")
    assert len(backward.outputs) == 5
    for config in forward.configs() if wide else [triton.Config(TILE)]:
        is_owned(forward.check(config))


@pytest.mark.internals
@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
def test_every_config_of_forward(launched: Launches, is_rms_norm: bool) -> None:
    Problem.of(67, 50, 3).forward(launched, is_rms_norm)

    (launch,) = launched
    for config in launch.configs():
        is_owned(launch.check(config))
    assert len(launch.outputs) == (3 if is_rms_norm else 4)


@pytest.mark.parametrize(
    ("over", "is_rms_norm"),
    [
        pytest.param(over, norm == "rms", id=f"{over}-{norm}", marks=marks)
        for over, norm, marks in (
            *(("dy", "layer", ()), ("dres", "rms", ())),
            *(("dy", "rms", pytest.mark.full), ("dres", "layer", pytest.mark.full)),
        )
    ],
)
def test_in_place_is_bit_for_bit_the_same(
    launched: Launches, device: str, over: str, is_rms_norm: bool
) -> None:
    problem = Problem.of(33, 50, 2, device)
    dx = problem.backward(launched, is_rms_norm)
    kernel, configs = launched[0].kernel.fn, launched[0].configs()
    for config in configs:
        plain = launched[0].over(dx, torch.empty_like(dx))
        target = getattr(problem, over).clone()
        # Of the two arguments that are one tensor now, one is read and the other one written.
        in_place = launched[0].over(getattr(problem, over), target).over(dx, target)
        for launch in (plain, in_place):
            kernel[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
        position = next(i for i, value in enumerate(launched[0].args) if _same(value, dx))
        assert torch.equal(plain.args[position], target)


@triton.jit
def historic_backward(
    dy, dx, rows, rows_per_program, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """What FLA's kernel stored before #1249: whole tiles, masked by the end of all rows only."""
    columns = tl.arange(0, COLUMNS)
    first = tl.program_id(0) * rows_per_program
    for start in range(first, first + rows_per_program, TILE_ROWS):
        row = start + tl.arange(0, TILE_ROWS)
        offsets = row[:, None] * COLUMNS + columns[None, :]
        mask = (row < rows)[:, None]
        tl.store(dx + offsets, 2 * tl.load(dy + offsets, mask=mask), mask=mask)


@pytest.mark.internals
@pytest.mark.parametrize(
    ("rows", "height", "shared", "writers", "idle"),
    [
        (129, 32, 128, 32, 0),
        (450, 64, 447, 22, 38),
        (24000, 64, 0, None, 0),
        pytest.param(129, 64, 128, 64, 0, marks=pytest.mark.full),
        pytest.param(257, 32, 255, None, 59, marks=pytest.mark.full),
        pytest.param(450, 32, 447, 11, 38, marks=pytest.mark.full),
    ],
)
def test_the_historic_grid_overlaps(
    rows: int, height: int, shared: int, writers: int | None, idle: int
) -> None:
    """fla-org/flash-linear-attention#796 on 188 SMs, with the numbers of seeds.md, section 3."""
    programs = min(188, rows)
    per_program = -(-rows // programs)
    dy, dx = torch.randn(rows, 4), torch.empty(rows, 4)

    report = check_overlap(
        historic_backward, (programs,), dy, dx, rows, per_program, 4, height, outputs=["dx"]
    )

    found = report.find("overlap", "dx")
    assert report.ok == (shared == 0)
    assert len(report.idle_programs) == idle
    if shared:
        assert (found.rows, found.elements) == (shared, 4 * shared)
        assert writers in (None, found.most_programs)
        in_place = (historic_backward, (programs,), dy, dy, rows, per_program, 4, height)
        assert check_overlap(*in_place).find("read_write").rows == shared
