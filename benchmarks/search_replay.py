"""How good a choice is after a search of some configs, replayed on stored trials without a GPU.

`search_trials` has measured every config of a space for several keys, and the searches see those
times: random subsets of the list, a search, and a search with the trials of the two nearest keys.
The regret of a search is how much slower its best config is than the best of all; the final rounds
of a tuning are not replayed. The settings of the search were made on these keys.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import recording
import search_trials
from recording import Figures, Row

MATMUL = "matmul.json.gz"
SEEDS = 200
SEARCHES = (
    *(("random", 32), ("random", 100)),
    *(("search", 32), ("search", 100)),
    ("search_neighbours", 32),
)
NEIGHBOURS = 2
#: Regrets are stored as whole numbers of this, and none above the second.
UNIT, MOST = 1e-4, 10_000_000
#: What the searches for one key are expected to take, on one core.
KEY_S = 300.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the median and the 90th percentile over all keys and seeds of a space."""
    regrets: dict[str, list[int]] = {}
    for row in rows:
        name = f"{row['space']}_{row['strategy']}_{row['budget']}"
        regrets.setdefault(name, []).extend(row["regrets"])
    found: Figures = {}
    for name, values in regrets.items():
        found[f"{name}_median"] = round(statistics.median(values) * UNIT, 6)
        found[f"{name}_p90"] = round(sorted(values)[int(0.9 * len(values))] * UNIT, 6)
    return found


@dataclass(frozen=True)
class Key:
    """The stored trials of one key."""

    name: str  # `M=64`
    times: tuple[float | None, ...]  # of each config; None where it failed

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Key:
        """Return the key of an entry in a space's file."""
        pairs = zip(stored["median_ms"], stored["verdicts"], strict=True)
        times = tuple(time_ms if verdict == "ok" else None for time_ms, verdict in pairs)
        return cls(stored["name"], times)

    @functools.cached_property
    def best(self) -> int:
        """The fastest config."""
        works = {index: ms for index, ms in enumerate(self.times) if ms is not None}
        return min(works, key=works.__getitem__)

    @property
    def value(self) -> int:
        """The value of the one name in which keys differ."""
        return int(self.name.partition("=")[2])

    def regret(self, tried: Sequence[int]) -> float:
        """Return how much slower the best of these configs is than the best of all."""
        best, found = self.times[self.best], [self.times[index] for index in tried]
        works = [time_ms for time_ms in found if time_ms is not None]
        return min(works) / best - 1.0 if works and best else math.inf

    def distance(self, other: Key) -> float:
        """Return how far two keys are apart, as `safetune` says it of their values."""
        return abs(math.log2(1 + self.value) - math.log2(1 + other.value))


@functools.cache
def space(path: Path) -> tuple[tuple[Any, ...], dict[str, Key]]:
    """Return the configs of a space and its keys."""
    import triton

    stored = search_trials.load(path)
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    configs = tuple(
        triton.Config(
            {name: value for name, value in values.items() if name not in options},
            **{name: values[name] for name in options if name in values},
        )
        for values in stored["configs"]
    )
    return configs, {key["name"]: Key.of(key) for key in stored["keys"]}


Times = Mapping[int, float | None]


@functools.cache
def start(path: Path, name: str, neighbours: int) -> Any:
    """Return what a search for a key knows at its start, where other keys are measured whole."""
    others = {other: dict(enumerate(key.times)) for other, key in space(path)[1].items()}
    return history(path, name, others, neighbours)


def history(path: Path, name: str, measured: Mapping[str, Times], most: int) -> Any:
    """Return what a search for a key knows at its start: the nearest of the measured keys."""
    from safetune.tuning.search import History, Neighbour, Trial

    configs, keys = space(path)
    key = keys[name]
    known = []
    others = [other for other in measured if other != name]
    for other in sorted(others, key=lambda other: key.distance(keys[other]))[:most]:
        works = {index: ms for index, ms in measured[other].items() if ms is not None}
        known.append(
            Neighbour(
                values={"value": keys[other].value},
                distance=key.distance(keys[other]),
                choice=configs[min(works, key=works.__getitem__)],
                trials=tuple(Trial(configs[i], ms) for i, ms in measured[other].items()),
            )
        )
    return History(path.stem, {"value": key.value}, {}, {}, configs, (), tuple(known))


@functools.cache
def _proposer() -> Any:
    """The one whose cached features serve every search; its seed is set for each."""
    from safetune.tuning.gaussian import GaussianProcess

    return GaussianProcess()


def search(path: Path, name: str, strategy: str, seed: int, budget: int) -> list[int]:
    """Return the configs that a search measures, until it has found the best of all."""
    if strategy == "random":
        count = len(space(path)[0])
        return random.Random(seed).sample(range(count), min(budget, count))
    known = start(path, name, NEIGHBOURS if strategy == "search_neighbours" else 0)
    best = space(path)[1][name].best
    return list(_measured(path, name, known, 1000 * seed, budget, until=best))


def _measured(
    path: Path, name: str, known: Any, seed: int, budget: int, until: int | None = None
) -> dict[int, float | None]:
    """Return the times of the configs that a search asks for."""
    from safetune.tuning.search import Search

    proposer = _proposer()
    proposer._seed = seed
    asked, times = Search(known, proposer), dict[int, float | None]()
    vars(asked)["_near"] = _near(path)
    while len(times) < budget and until not in times:
        batch = asked.ask(times, budget - len(times))
        if not batch:
            break
        times |= {index: space(path)[1][name].times[index] for index in batch}
    return times


@functools.cache
def _near(path: Path) -> Any:
    from safetune.tuning.search import one_step

    return one_step(space(path)[0])


def regret(path: Path, name: str, strategy: str, budget: int, seed: int) -> int:
    """Return the regret of one search, in units."""
    found = space(path)[1][name].regret(search(path, name, strategy, seed, budget))
    return round(min(found / UNIT, MOST))


def run_part(path: Path, name: str, seeds: int, pool: ProcessPoolExecutor) -> list[Row]:
    """Return the regrets of all searches for one key."""
    rows = []
    for strategy, budget in SEARCHES:
        one = functools.partial(regret, path, name, strategy, budget)
        count = SEEDS if strategy == "random" else seeds
        found = list(pool.map(one, range(count), chunksize=max(1, count // 16)))
        row = {"part": f"{path.name} {name}", "space": path.name.partition(".")[0]}
        rows.append({**row, "strategy": strategy, "budget": budget, "regrets": found})
    return rows


def main() -> None:
    """Search every key of matmul."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--trials", type=Path, default=recording.RESULTS, metavar="DIR")
    parser.add_argument("--device", default="NVIDIA_H100_80GB_HBM3", help="a folder in it")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each key; random: always 200")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    path = options.trials / options.device / "search_trials" / MATMUL
    parts = {f"{path.name} {name}": name for name in space(path)[1]}
    versions = {**recording.versions(), "scikit-learn": metadata.version("scikit-learn")}
    result = recording.Result(
        "search_replay", options.device, versions, recording.commit(), recording.command()
    )
    with ProcessPoolExecutor(options.workers) as pool:
        recording.run_parts(
            result,
            parts,
            lambda part: run_part(path, parts[part], options.seeds, pool),
            figures,
            options,
            KEY_S / options.workers,
        )


if __name__ == "__main__":
    main()
