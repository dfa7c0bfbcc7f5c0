"""Faults planted in the results of configs, and what the judge makes of them.

A case is a call of one kind of kernel with 1 to 12 configs, some of them wrong in one way. Each
config is a function on the arguments that stands for its launch; what it leaves goes through the
check of a measuring child and through the judge, without a process. Wrong configs are the fastest,
so that one is chosen wherever the judge lets it.

    python -m tests.tuning.planted FILE     write the table of `docs/contracts/judge.md`
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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

ONLY_STORED = Effects(only_stored=("out",))

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
        effects=Effects(),
    ),
    "atomic sum": Kind(
        _normal(torch.float32, COLUMNS),
        lambda t, c: {"out": _in_chunks(t["x"].abs(), c)},
        effects=Effects(atomics=True),
        adds=True,
    ),
    "partials": Kind(
        lambda rng: {**_normal(torch.float32)(rng), "part": torch.zeros(SIZE // TILES[0])},
        lambda t, c: {
            "out": t["x"] + 1,
            "part": torch.stack([p.sum() for p in t["x"].flatten().split(c.tile)]),
        },
        ("out", "part"),
        Effects(only_stored=("out", "part")),
    ),
    "mask of 0 and 1": Kind(
        _normal(torch.uint8), lambda t, c: {"out": (t["x"] > 0.3).to(torch.uint8)}
    ),
    "integers": Kind(_normal(torch.int32), lambda t, c: {"out": (t["x"] * 1000).to(torch.int32)}),
    "several outputs": Kind(
        lambda rng: {**_normal(torch.float32)(rng), "arg": torch.zeros(ROWS, dtype=torch.int64)},
        lambda t, c: {"arg": t["x"].argmax(-1), "out": t["x"].exp()},
        ("out", "arg"),
        Effects(only_stored=("out", "arg")),
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
) -> Judgement:
    """Return what the judge makes of configs that do this to the tensors."""
    snapshot = Snapshot(list(tensors.values()))
    arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    snapshot.close()
    live = dict(zip(tensors, arguments.tensors, strict=True))
    file = os.memfd_create("results")

    def again(config: int) -> None:
        launches[config](live)

    check = OutputCheck(arguments, list(tensors), scratch, effects, file, again)
    votes = Votes()
    for index, each in enumerate(launches):
        votes.add(index, check.examine(functools.partial(each, live), votes.groups(), index))
    os.close(file)
    return judge(votes.reports, {i: (size,) for i, size in enumerate(grids or [8] * len(launches))})


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


#: What the judge cannot see. Each has a test in `test_planted.py` of the same name.
BLIND = {
    "below_the_tolerance": "A difference below the tolerance: 0.2 % in float32, 2 % in float16, "
    "8 % in bfloat16, of an element plus its typical size; a few elements of 8 bits that are off "
    "by 1.",
    "below_the_rounding_of_a_sum": "A difference below what the order of a sum over the inputs "
    "may change: in a mean of values that cancel, for example.",
    "any_order_of_slots": "The order of values, where the result of an atomic operation is used.",
    "partials_of_one_grid_each": "A wrong partial result where each config has a grid of its own, "
    "and so a layout of its own.",
    "scratch": "Whatever is in an argument that is named in `scratch=`.",
    "stale_where_it_is_read": "Elements left out that held the result before, in integers that "
    "the kernel reads too, and in sums that atomics add to.",
    "wrong_alike": "A fault that the largest group has in common. `reference=` sees it.",
    "faults_of_other_inputs": "A fault that the arguments of the tuned call do not show.",
}

#: How many cases of each kind and fault `make judge` runs.
SEEDS = range(30)


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


def document(found: Iterable[tuple[str, str, Tally]]) -> str:
    """Return the page of the documentation."""
    lines = [
        "# What the judge sees\n",
        "`make judge` writes this page from planted faults. Some of 1 to 12 configs have a fault,",
        "alike or each in its own way, and they are the fastest. A case counts if the others are",
        "the largest group; it is caught if no wrong one is chosen. A right config is condemned",
        "if it is rejected. In a tie the group with the config declared first is chosen, and the",
        "choice is marked as disputed. Each kernel has all of these faults that it can have:",
        ", ".join(FAULTS) + ".\n",
        table(found),
        "The judge cannot see:\n",
        *(f"- {text}" for text in BLIND.values()),
        "\n[Verdicts](verdicts.md#checks) says how results are compared.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(tallies(SEEDS)), encoding="utf-8")
