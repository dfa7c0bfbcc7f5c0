"""Faults planted in the results of configs, and what the judge makes of them.

A case is a call of one kind of kernel with 1 to 12 configs, some of them wrong in one way. Each
config is a function on the arguments that stands for its launch; what it leaves goes through the
check of a measuring child and through the judge, without a process. Wrong configs are the fastest,
so that one is chosen wherever the judge lets it.

    python -m tests.tuning.planted FILE     write the table of `docs/contracts/judge.md`
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from safetune.child import compare
from safetune.child.arguments import Arguments
from safetune.child.output_check import OutputCheck
from safetune.inputs.snapshot import Snapshot
from safetune.outcome import Effects
from safetune.tuning.judge import Judgement, Votes, judge

ROWS, COLUMNS = 24, 64
SIZE = ROWS * COLUMNS
TILES = (16, 32, 64, 128, 256, 512)

ONLY_STORED = Effects(only_stored=("out",), repeats=True)
ADDED = Effects(atomics=True)

Tensors = dict[str, torch.Tensor]


@dataclass
class Config:
    """A config: its tile, its fault if it has one, and random numbers of its own."""

    tile: int
    fault: str = ""
    rng: random.Random = field(default_factory=random.Random)

    @property
    def programs(self) -> int:
        return -(-SIZE // self.tile)

    def draws(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.randrange(1 << 30))


@dataclass(frozen=True)
class Kind:
    """A kind of kernel.

    Attributes:
        arguments: makes the tensors of a call; those in `outputs` are written.
        values: what a right config writes, from what the arguments hold.
        adds: whether it adds to what an output holds, which a hook has zeroed before.
    """

    arguments: Callable[[torch.Generator], Tensors]
    values: Callable[[Tensors, Config], Tensors]
    outputs: tuple[str, ...] = ("out",)
    effects: Effects = ONLY_STORED
    adds: bool = False


def _in_chunks(x: torch.Tensor, config: Config) -> torch.Tensor:
    """Add up columns in an order that depends on the tile."""
    rows = max(1, config.tile // 64)
    return torch.stack([part.sum(0) for part in x.split(rows)]).sum(0)


def _cancelling(rng: torch.Generator) -> Tensors:
    half = torch.randn(ROWS // 2, COLUMNS, generator=rng)
    x = torch.cat([half, -half])[torch.randperm(ROWS, generator=rng)]
    return {"x": x, "out": torch.zeros(COLUMNS)}


def _normal(dtype: torch.dtype, *shape: int) -> Callable[[torch.Generator], Tensors]:
    def make(rng: torch.Generator) -> Tensors:
        x = torch.randn(ROWS, COLUMNS, generator=rng)
        return {"x": x, "out": torch.zeros(*(shape or (ROWS, COLUMNS)), dtype=dtype)}

    return make


def _huge(rng: torch.Generator) -> Tensors:
    made = _normal(torch.float32)(rng)
    made["x"][0, 0] = -1e9
    return made


KINDS = {
    "pointwise": Kind(_normal(torch.float32), lambda t, c: {"out": 2 * t["x"] + 1}),
    "pointwise, bf16": Kind(
        _normal(torch.bfloat16), lambda t, c: {"out": (2 * t["x"] + 1).to(torch.bfloat16)}
    ),
    "one huge element": Kind(_huge, lambda t, c: {"out": 2 * t["x"]}),
    "reduction": Kind(
        _normal(torch.float32, COLUMNS), lambda t, c: {"out": _in_chunks(t["x"].abs(), c)}
    ),
    "sum that cancels": Kind(_cancelling, lambda t, c: {"out": _in_chunks(t["x"], c)}),
    "scan": Kind(_normal(torch.float32), lambda t, c: {"out": t["x"].cumsum(-1)}),
    "in place": Kind(
        lambda rng: {"out": torch.randn(ROWS, COLUMNS, generator=rng)},
        lambda t, c: {"out": t["out"] * 3 + 1},
        effects=Effects(repeats=True),
    ),
    "atomic sum": Kind(
        _normal(torch.float32, COLUMNS),
        lambda t, c: {"out": _in_chunks(t["x"].abs(), c)},
        effects=ADDED,
        adds=True,
    ),
    "partials": Kind(
        lambda rng: {**_normal(torch.float32)(rng), "part": torch.zeros(SIZE // TILES[0])},
        lambda t, c: {
            "out": t["x"] + 1,
            "part": torch.stack([p.sum() for p in t["x"].flatten().split(c.tile)]),
        },
        ("out", "part"),
        Effects(only_stored=("out", "part"), repeats=True),
    ),
    "mask of 0 and 1": Kind(
        _normal(torch.uint8), lambda t, c: {"out": (t["x"] > 0.3).to(torch.uint8)}
    ),
    "integers": Kind(_normal(torch.int32), lambda t, c: {"out": (t["x"] * 1000).to(torch.int32)}),
    "several outputs": Kind(
        lambda rng: {**_normal(torch.float32)(rng), "arg": torch.zeros(ROWS, dtype=torch.int64)},
        lambda t, c: {"arg": t["x"].argmax(-1), "out": t["x"].exp()},
        ("out", "arg"),
        Effects(only_stored=("out", "arg"), repeats=True),
    ),
}


def _changed(value: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return values that differ from these at some places, by what can be seen."""
    other = 1 - value if value.dtype is torch.uint8 else value + 5 * (1 + value.abs().clamp(max=9))
    return torch.where(where, other.to(value.dtype), value)


def _places(value: torch.Tensor, chosen: slice | int) -> torch.Tensor:
    where = torch.zeros(value.numel(), dtype=torch.bool)
    where[chosen] = True
    return where.view(value.shape)


def _row(value: torch.Tensor, config: Config) -> torch.Tensor:
    width = value.shape[-1] if value.dim() > 1 else 8
    begin = width * config.rng.randrange(value.numel() // width)
    return _changed(value, _places(value, slice(begin, begin + width)))


def _of_another_type(value: torch.Tensor, config: Config) -> torch.Tensor:
    if value.dtype is torch.uint8:
        return value * 255
    if not value.is_floating_point():
        return value.to(torch.int8).to(value.dtype)
    return value.to(torch.int32).to(value.dtype)


def _noise(value: torch.Tensor, config: Config) -> torch.Tensor:
    drawn = torch.rand(value.shape, generator=config.draws()) * 100
    return (drawn > 50).to(value.dtype) if value.dtype is torch.uint8 else drawn.to(value.dtype)


#: What is stored in place of the right values.
WRONG: dict[str, Callable[[torch.Tensor, Config], torch.Tensor]] = {
    "element": lambda v, c: _changed(v, _places(v, c.rng.randrange(v.numel()))),
    "row": _row,
    "permutation": lambda v, c: v.flatten().flip(0).view(v.shape),
    "scale": lambda v, c: v * 2,
    "type": _of_another_type,
    "random": _noise,
    "zero": lambda v, c: torch.zeros_like(v),
    "sign": lambda v, c: 1 - v if v.dtype is torch.uint8 else -v,
    "program": lambda v, c: v.flatten().roll(max(1, v.numel() // c.programs)).view(v.shape),
}
#: What is not stored at all, where the outputs held zeros, and where they held the result.
LEFT_OUT = ("tail", "stale", "stale tail")
FAULTS = (*WRONG, *LEFT_OUT)


def possible(kind: str, fault: str) -> bool:
    """Whether a kind can have this fault: a sum that starts at zero is never stale."""
    return not (fault.startswith("stale") and (KINDS[kind].adds or kind == "in place"))


def launch(kind: Kind, config: Config, tensors: Tensors) -> None:
    """Do what a launch of a config does, its hooks included."""
    for name, value in kind.values(tensors, config).items():
        out = tensors[name].view(-1)[: value.numel()].view(value.shape)
        if kind.adds:
            out.zero_()
        if name != "out":
            out.copy_(value)
        elif config.fault in WRONG:
            out.copy_(WRONG[config.fault](value, config))
        elif config.fault in ("tail", "stale tail"):
            kept = value.numel() - 7
            out.view(-1)[:kept] = value.flatten()[:kept]
        elif config.fault != "stale":
            out.copy_(value)


@dataclass(frozen=True)
class Case:
    """A call with its configs."""

    kind: str
    tensors: Tensors
    configs: list[Config]

    @classmethod
    def drawn(cls, kind: str, fault: str, seed: int) -> Case:
        """Return a case whose wrong configs have this fault, alike or each in its own way."""
        rng = random.Random(f"{kind} {fault} {seed}")
        count = rng.randint(1, 12)
        wrong = rng.randint(1, count - 1) if count > 1 else 0
        alike = rng.choice([True, False])
        tile, own = rng.choice(TILES), rng.randrange(1 << 30)
        configs = [Config(rng.choice(TILES)) for _ in range(count - wrong)]
        for number in range(wrong):
            seeds = own if alike else own + number
            tiled = tile if alike else rng.choice(TILES)
            configs.append(Config(tiled, fault, random.Random(seeds)))
        rng.shuffle(configs)
        tensors = KINDS[kind].arguments(torch.Generator().manual_seed(own))
        if fault.startswith("stale"):
            launch(KINDS[kind], Config(TILES[-1]), tensors)
        return cls(kind, tensors, configs)

    def left(self, config: Config) -> torch.Tensor:
        """Return what one launch of a config leaves in `out`, its random numbers as they are."""
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        state = config.rng.getstate()
        launch(KINDS[self.kind], config, copies)
        if config.fault != "random":  # a random one differs from run to run
            config.rng.setstate(state)
        return copies["out"]

    def groups(self) -> list[set[int]]:
        """Return the configs that are planted alike; the right ones first."""
        right = {i for i, config in enumerate(self.configs) if not config.fault}
        stale = {i for i, config in enumerate(self.configs) if config.fault.startswith("stale")}
        found: list[tuple[torch.Tensor, set[int]]] = []
        for index in sorted(set(range(len(self.configs))) - right - stale):
            mine = self.left(self.configs[index])
            own = (members for other, members in found if torch.allclose(mine, other, 1e-2, 1e-4))
            members = next(own, None)
            if members is None:
                found.append((mine, members := set()))
            members.add(index)
        return [right, *([stale] if stale else []), *(members for _, members in found)]

    def visible(self) -> bool:
        """Whether each fault changes something by much more than rounding does."""
        right = self.left(Config(TILES[-1])).double()
        if any(config.fault.startswith("stale") for config in self.configs):
            return True
        size = compare.typical_size(right)
        limit = 1e-3 if self.kind == "sum that cancels" else 0.5 * size + 0.5 * right.abs()
        wrong = [self.left(c).double() for c in self.configs if c.fault]
        return all(bool(((one - right).abs() > limit).any()) for one in wrong)

    def judged(self) -> Judgement:
        """Return what the judge makes of it."""
        kind = KINDS[self.kind]
        launches = [functools.partial(launch, kind, config) for config in self.configs]
        grids = [config.programs for config in self.configs]
        return judged(self.tensors, launches, grids, kind.effects)


def judged(
    tensors: Tensors,
    launches: Sequence[Callable[[Tensors], object]],
    grids: Sequence[int] | None = None,
    effects: Effects = ONLY_STORED,
    scratch: Sequence[str] = (),
    options: Sequence[dict[str, str]] = (),
    repeats: Callable[[Judgement, Callable[[int], bool]], object] | None = None,
) -> Judgement:
    """Return what the judge makes of configs that do this to the tensors.

    `repeats` is called with that, and with whether further launches of a config leave the same.
    """
    snapshot = Snapshot(list(tensors.values()))
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    snapshot.close()
    live = dict(zip(tensors, arguments.tensors, strict=True))

    def launch_of(config: int) -> Callable[[Callable[[], object]], None]:
        def run(ready: Callable[[], object]) -> None:
            ready()
            launches[config](live)

        return run

    check = OutputCheck(arguments, list(tensors), scratch, effects, launch_of)
    votes = Votes()
    for index in range(len(launches)):
        votes.add(index, check.examine(votes.groups(), index))
    sizes = [(size,) for size in grids or [8] * len(launches)]
    found = judge(votes.reports, sizes, options, effects.draws)

    def repeated(config: int) -> bool:
        check.repeat(config, LAUNCHES, 0.0, lambda: None)
        return all(changed != config for changed, _, _ in check.varied)

    if repeats is not None:
        repeats(found, repeated)
    return found


@dataclass
class Tally:
    """What became of the cases of one kind and fault.

    Attributes:
        cases: those in which the right configs are strictly the largest group.
        caught: of these, those in which no wrong config may be chosen.
        condemned: of all right configs in these and in ties, how many were rejected.
        ties: cases in which a wrong group is as large as the right one, and of these those in
            which a right one is chosen.
    """

    cases: int = 0
    caught: int = 0
    right: int = 0
    condemned: int = 0
    ties: int = 0
    ties_right: int = 0

    def add(self, case: Case) -> None:
        """Count a case; one with a larger wrong group counts nowhere."""
        right, *wrong = case.groups()
        largest = max(map(len, wrong), default=0)
        if largest > len(right) or not case.visible():
            return
        found = case.judged()
        self.right += len(right)
        self.condemned += len(right & found.rejected.keys())
        good = found.candidates <= right
        if largest == len(right):
            self.ties += 1
            self.ties_right += good
        else:
            self.cases += 1
            self.caught += good


def tallies(
    seeds: Iterable[int], kinds: Iterable[str] = KINDS, faults: Iterable[str] = FAULTS
) -> Iterator[tuple[str, str, Tally]]:
    """Yield the tally of each kind and fault over some seeds."""
    numbers = list(seeds)
    for kind in kinds:
        for fault in faults:
            if possible(kind, fault):
                tally = Tally()
                for seed in numbers:
                    tally.add(Case.drawn(kind, fault, seed))
                yield kind, fault, tally


#: How often a winner is launched again: a small kernel is 16 to 32 times.
LAUNCHES = 16


@dataclass(frozen=True)
class Small:
    """1 to 12 right configs, and 1 to 12 with a fault that is below the tolerance or near it.

    Attributes:
        off: by how much wrong elements are off, as a share of them.
        races: whether they are a few of all elements, and each is wrong at every second launch;
            else those of one tile are wrong at each launch.
    """

    dtype: torch.dtype
    off: float
    races: bool

    def add_to(self, tally: Tally, seed: int) -> None:
        """Count one case. One without races counts if more configs are right than wrong."""
        rng = random.Random(f"{self} {seed}")
        right, wrong = rng.randint(1, 12), rng.randint(1, 12)
        if not self.races and right <= wrong:
            right, wrong = wrong + 1, right
        draws = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, COLUMNS, generator=draws)
        tensors = {"x": x, "out": torch.zeros(ROWS, COLUMNS, dtype=self.dtype)}
        faulty = [True] * wrong + [False] * right
        rng.shuffle(faulty)
        tiles = [rng.choice(TILES) for _ in faulty]
        options = [{"BLOCK": str(tile), "num_warps": rng.choice("48")} for tile in tiles]
        launches = [
            self._launch(tile, rng, draws) if is_faulty else _doubled
            for tile, is_faulty in zip(tiles, faulty, strict=True)
        ]
        chosen: list[int] = []

        def choose(found: Judgement, repeats: Callable[[int], bool]) -> None:
            fastest = sorted(found.candidates, key=lambda config: not faulty[config])
            chosen.extend([config for config in fastest if repeats(config)][:1])

        found = judged(
            tensors, launches, [SIZE // tile for tile in tiles], options=options, repeats=choose
        )
        tally.cases += 1
        tally.caught += not any(faulty[config] for config in chosen)
        tally.right += right
        tally.condemned += sum(not faulty[config] for config in found.rejected)

    def _launch(
        self, tile: int, rng: random.Random, draws: torch.Generator
    ) -> Callable[[Tensors], object]:
        where = torch.zeros(SIZE, dtype=torch.bool)
        if self.races:
            where[rng.sample(range(SIZE), max(1, int(SIZE * 10 ** rng.uniform(-4, -2))))] = True
        else:
            begin = tile * rng.randrange(SIZE // tile)
            where[begin : begin + tile] = True

        def launch(tensors: Tensors) -> None:
            wrong = where
            if self.races:
                wrong = where & (torch.rand(SIZE, generator=draws) < 0.5)
            factor = 1 + self.off * wrong.view(ROWS, COLUMNS)
            tensors["out"].copy_((2 * tensors["x"] + 1) * factor)

        return launch


def _doubled(tensors: Tensors) -> None:
    tensors["out"].copy_(2 * tensors["x"] + 1)


_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BELOW = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 4e-2}
SMALL = {f"race, {name}": Small(dtype, _BELOW[name], True) for name, dtype in _TYPES.items()} | {
    f"{100 * off:g} % off, {name}": Small(dtype, off, False)
    for off in (0.005, 0.01, 0.05)
    for name, dtype in _TYPES.items()
}


@dataclass(frozen=True)
class Right:
    """A kernel of which every config is right, though their results differ.

    Attributes:
        arguments: makes the tensors of a call.
        launch: what a launch of a config with a tile does.
        programs: how many a config with a tile has.
    """

    arguments: Callable[[torch.Generator], Tensors]
    launch: Callable[[Tensors, int], object]
    programs: Callable[[int], int] = lambda tile: SIZE // tile
    effects: Effects = ONLY_STORED

    def judged(self, seed: int) -> tuple[int, Judgement]:
        """Return the number of configs of a case, and what the judge makes of them."""
        rng = random.Random(seed)
        tiles = [rng.choice(TILES) for _ in range(rng.randint(1, 12))]
        options = [{"BLOCK": str(tile), "num_warps": rng.choice("48")} for tile in tiles]
        return len(tiles), judged(
            self.arguments(torch.Generator().manual_seed(seed)),
            [functools.partial(self.launch, tile=tile) for tile in tiles],
            [self.programs(tile) for tile in tiles],
            self.effects,
            options=options,
        )


def _half_sum(tensors: Tensors, tile: int) -> None:
    total = torch.zeros_like(tensors["out"])
    for part in tensors["x"].split(tile):
        total += part.float().sum(0).half()
    tensors["out"].copy_(total)


def _attention(tensors: Tensors, tile: int) -> None:
    scores, kept = tensors["x"], torch.arange(SIZE).view(ROWS, COLUMNS) % 5 > 0
    total, most, size = torch.zeros(ROWS), torch.full((ROWS,), -torch.inf), torch.zeros(ROWS)
    columns = max(1, tile // 16)
    for part, mask in zip(scores.split(columns, 1), kept.split(columns, 1), strict=True):
        largest = torch.maximum(most, part.amax(1))
        weights = (part - largest[:, None]).exp()
        scale, most = (most - largest).exp(), largest
        size = size * scale + weights.sum(1)
        total = total * scale + (weights.bfloat16() * mask * part).float().sum(1)
    tensors["out"].copy_(total / size)


def _argmax(tensors: Tensors, tile: int) -> None:
    """The last tile with the largest value wins, and the first such element in it."""
    parts = tensors["x"].split(tile, 1)
    values = torch.stack([part.amax(1) for part in parts])
    last = len(parts) - 1 - values.flip(0).argmax(0)
    firsts = torch.stack([part.argmax(1) for part in parts])
    tensors["out"].copy_(last * tile + firsts.gather(0, last[None])[0])


def _counted(tensors: Tensors, tile: int) -> None:
    _doubled(tensors)
    tensors["done"].add_(SIZE // tile)


def _named(tensors: Tensors, tile: int) -> None:
    _doubled(tensors)
    tensors["who"].copy_(torch.arange(SIZE) // tile)


def _quantised(tensors: Tensors, tile: int) -> None:
    parts = tensors["x"].view(-1, tile)
    scales = parts.abs().amax(1, keepdim=True) / 127
    tensors["out"].copy_((parts / scales).to(torch.int8).view(ROWS, COLUMNS))
    tensors["scale"][: SIZE // tile] = scales[:, 0]


def _padded(tensors: Tensors, tile: int) -> None:
    x, size = tensors["x"], tile * -(-tensors["x"].numel() // tile)
    tensors["out"][:size] = 2 * torch.nn.functional.pad(x, (0, size - x.numel())) + 1


def _drawn(tensors: Tensors, tile: int) -> None:
    tensors["out"].copy_(torch.rand(SIZE, generator=torch.Generator().manual_seed(tile)))


def _with(rng: torch.Generator, **others: torch.Tensor) -> Tensors:
    return {**_normal(torch.float32)(rng), **others}


RIGHT = {
    "another BLOCK_K": Right(
        lambda rng: {
            "x": torch.randn(512, 32, generator=rng).half(),
            "out": torch.zeros(32, dtype=torch.float16),
        },
        _half_sum,
        lambda tile: 1,
    ),
    "split-K": Right(
        lambda rng: {
            "x": torch.randn(512, 32, generator=rng).half(),
            "out": torch.zeros(32, dtype=torch.float16),
        },
        _half_sum,
        lambda tile: 512 // tile,
        ADDED,
    ),
    "attention with dropout": Right(
        lambda rng: {
            "x": torch.randn(ROWS, COLUMNS, generator=rng),
            "out": torch.zeros(ROWS, dtype=torch.bfloat16),
        },
        _attention,
        effects=Effects(only_stored=("out",), draws=True, repeats=True),
    ),
    "random numbers": Right(
        lambda rng: {"out": torch.zeros(SIZE)},
        _drawn,
        effects=Effects(only_stored=("out",), draws=True, repeats=True),
    ),
    "argmax with ties": Right(
        lambda rng: {
            "x": torch.randint(0, 4, (ROWS, 1024), generator=rng).float(),
            "out": torch.zeros(ROWS, dtype=torch.int32),
        },
        _argmax,
        lambda tile: ROWS,
    ),
    "done counter": Right(
        lambda rng: _with(rng, done=torch.zeros(1, dtype=torch.int32)),
        _counted,
        effects=Effects(atomics=True, only_stored=("out",)),
    ),
    "program ids": Right(
        lambda rng: _with(rng, who=torch.zeros(SIZE, dtype=torch.int32)),
        _named,
        effects=Effects(only_stored=("out", "who"), repeats=True),
    ),
    "scales of blocks": Right(
        lambda rng: {
            "x": torch.randn(ROWS, COLUMNS, generator=rng),
            "out": torch.zeros(ROWS, COLUMNS, dtype=torch.int8),
            "scale": torch.zeros(SIZE // TILES[0]),
        },
        _quantised,
        effects=Effects(only_stored=("out", "scale"), repeats=True),
    ),
    "written padding": Right(
        lambda rng: {"x": torch.randn(260, generator=rng), "out": torch.zeros(512)},
        _padded,
        lambda tile: -(-260 // tile),
    ),
}

#: What the judge cannot see. Each has a test in `test_planted.py` of the same name.
BLIND = {
    "below_the_tolerance": "A difference that is the same at each launch and below the tolerance: "
    "0.2 % in float32, 2 % in float16, 8 % in bfloat16, of an element plus its typical size; a few "
    "elements of 8 bits that are off by 1. Where three configs agree to the last bit, and their "
    "values show that what another one sets does not matter, 0.02 %, 0.4 % and 3 %.",
    "races_in_what_not_all_write": "A race in a tensor of which configs write different numbers of "
    "elements; one in a kernel with atomics or assembly, below that tolerance; one that no launch "
    "of the tuning shows.",
    "below_the_rounding_of_a_sum": "A difference below what the order of a sum over the inputs "
    "may change: in a mean of values that cancel, for example.",
    "any_order_of_slots": "The order of values, where the result of an atomic operation is used.",
    "partials_of_one_grid_each": "A wrong partial result where each config has a grid of its own, "
    "and so a layout of its own.",
    "scratch": "Whatever is in an argument that is named in `scratch=`.",
    "stale_where_it_is_read": "Elements left out that held the result before, where the kernel "
    "reads its output too, as atomics do.",
    "wrong_alike": "A fault that the largest group has in common. `reference=` sees it.",
    "faults_of_other_inputs": "A fault that the arguments of the tuned call do not show.",
}

#: How many cases of each kind and fault `make judge` runs, and of each small fault.
SEEDS = range(30)
MANY = 75


def table(found: Iterable[tuple[str, str, Tally]]) -> str:
    """Return the table of what is caught, by kind, and the sums."""
    rows: dict[str, Counter[str]] = {}
    for kind, fault, tally in found:
        row = rows.setdefault(kind, Counter())
        row.update(vars(tally))
        row[fault] = tally.cases - tally.caught
        row[f"{fault} cases"] = tally.cases
    lines = [
        "| kernel | cases | caught | missed | right configs | condemned | ties | right in ties |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, row in rows.items():
        missed = ", ".join(fault for fault in FAULTS if row[fault]) or "none"
        counts = (row["cases"], row["caught"], missed, row["right"], row["condemned"])
        shown = [kind, *counts, row["ties"], row["ties_right"]]
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    return "\n".join(lines) + "\n"


def small_row(name: str) -> str:
    """Return a row of the table of small faults and races."""
    tally = Tally()
    for seed in range(MANY):
        SMALL[name].add_to(tally, seed)
    return _row(name, tally.cases, tally.caught, tally.right, tally.condemned)


def right_row(name: str) -> str:
    """Return a row of the table of kernels of which every config is right."""
    counts = Counter[str]()
    for seed in range(MANY):
        count, found = RIGHT[name].judged(seed)
        outvoted = count - len(found.rejected) - len(found.candidates)
        counts.update(configs=count, condemned=len(found.rejected), outvoted=outvoted)
        counts.update(disputes=bool(found.disputed))
    shown = (counts[key] for key in ("configs", "condemned", "outvoted", "disputes"))
    return _row(name, MANY, *shown)


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def of_kind(kind: str) -> list[tuple[str, str, Tally]]:
    """Return the tallies of a kind."""
    return list(tallies(SEEDS, [kind]))


def document(run: Callable[..., Iterable[Any]] = map) -> str:
    """Return the page of the documentation; `run` maps a function over names."""
    lines = [
        "# What the judge sees\n",
        "`make judge` writes this page from planted faults. Some of 1 to 12 configs have a fault,",
        "alike or each in its own way, and they are the fastest. A case counts if the others are",
        "the largest group; it is caught if no wrong one is chosen. A right config is condemned",
        "if it is rejected. In a tie the group with the config declared first is chosen, and the",
        "choice is marked as disputed. Each kernel has all of these faults that it can have:",
        ", ".join(FAULTS) + ".\n",
        table(itertools.chain(*run(of_kind, KINDS))),
        "## Races and small errors\n",
        "1 to 12 right configs, 1 to 12 wrong ones, which are the fastest, and random tiles.",
        "Races change 0.01 % to 1 % of the elements by less than the tolerance, each at every",
        f"second launch; the winner is launched {LAUNCHES} times more. Errors are in one tile of",
        "each wrong config, and more configs are right than wrong.\n",
        "| fault | cases | caught | right configs | condemned |",
        "| --- | --- | --- | --- | --- |",
        *run(small_row, SMALL),
        "\n## Right, but other\n",
        "1 to 12 configs with random tiles, all right. None may be rejected. In a dispute the",
        "choice comes from the largest group, or differs from it in very few elements, and is",
        "marked. Here no two tiles settle a tie alike; where three or more do, and they are most,",
        "one that settles it otherwise is rejected.\n",
        "| kernel | cases | configs | condemned | outvoted | cases in dispute |",
        "| --- | --- | --- | --- | --- | --- |",
        *run(right_row, RIGHT),
        "\n## What the judge cannot see\n",
        *(f"- {text}" for text in BLIND.values()),
        "\n[Internals](../internals.md#checks) says how results are compared.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with multiprocessing.Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        each = functools.partial(pool.map, chunksize=1)
        Path(sys.argv[1]).write_text(document(each), encoding="utf-8")
