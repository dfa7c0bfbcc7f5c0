"""Every trial of a matrix product with 1,920 configs, for 18 batch sizes, for `search_replay`.

For each key all configs are tuned, from an empty store; the times are those that a search would
have seen, and those of the best are of the final rounds. The file,
`<out>/<device>/search_trials/matmul.json.gz`, grows key by key; the script goes on where it ended,
and begins no key that does not fit the budget. The first key compiles (61 s on an H100 with 16
cores), a further one takes 13 to 29 s.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fresh_process
import matmul
import recording
import tuners
from choice_problems import Problem, Work

SPACE, SIZE = "matmul", 4096
ERROR_LIMIT = 2e-2
#: What the first key is expected to take, with the time of each config; a further one
#: takes as long as the one before it took for all but compiling, and a share more.
FIRST_KEY_S, CONFIG_S, MORE = 10.0, 0.045, 1.1


def load(path: Path) -> dict[str, Any]:
    """Return the trials of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return dict(json.load(file))


def save(data: dict[str, Any], *folders: Path) -> None:
    """Write the trials as a whole, with the same bytes for the same trials."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    for folder in folders:
        path = folder / data["device"] / "search_trials" / f"{SPACE}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        partial.write_bytes(gzip.compress(text, mtime=0))
        partial.replace(path)


def begun(configs: Sequence[Any], folders: Sequence[Path], fresh: bool) -> Any:
    """Return the trials so far: those of the folder that has the most keys."""
    device = recording.device_slug(recording.device_name())
    data = {
        "space": SPACE,
        "device": device,
        "versions": recording.versions(),
        "commit": recording.commit(),
        "configs": [config.all_kwargs() for config in configs],
        "keys": [],
    }
    for folder in () if fresh else folders:
        path = folder / device / "search_trials" / f"{SPACE}.json.gz"
        if path.exists():
            earlier = load(path)
            same = earlier["configs"] == data["configs"]
            if same and len(earlier["keys"]) > len(data["keys"]):
                data = earlier
    return data


def measure(problem: Problem, configs: Sequence[Any]) -> dict[str, Any]:
    """Tune one key, and return every config's verdict and times."""
    from safetune.config import config_digest
    from safetune.settings import Settings
    from safetune.store.lookup import open_lookup

    work = problem.prepare(recording.torch_device())
    limits = {"compile_timeout_s": 60.0}
    tuner = tuners.tuned("safetune", problem.kernel, configs, problem.key, **limits)
    tuned = tuners.tune(tuner, lambda: work.launch(tuner))
    if not work.error() < ERROR_LIMIT:
        raise SystemExit(f"{problem.name}: a wrong result: relative error {work.error()}")
    found = open_lookup(Settings.current()).store.trials_of(tuner.base_fn.__name__)
    # Of one key: the store has those of earlier ones, and the newest is this one's.
    _, trials = max(found, key=lambda of_key: max((t.created for t in of_key[1]), default=0.0))
    outcomes = {trial.config_digest: trial.outcome for trial in trials}
    digests = [config_digest(config) for config in configs]
    ordered = [outcomes[digest] for digest in digests]
    times = [None if each.timing is None else each.timing.median_ms for each in ordered]
    phases = {name: value for name, value in tuned.items() if name.startswith("phase_s_")}
    return {
        "name": problem.name,
        "values": [*problem.shape],
        "seconds": round(tuned["seconds"], 2),
        "phases": {name: round(value, 3) for name, value in phases.items()},
        "choice": digests.index(config_digest(tuner.best_config)),
        "verdicts": [each.verdict.value for each in ordered],
        "median_ms": [short(time_ms) for time_ms in times],
    }


def short(time_ms: float | None) -> float | None:
    """Return a time with the digits that are stored."""
    return None if time_ms is None else float(f"{time_ms:.5g}")


def product(m: int) -> Problem:
    """Return the matrix product of a key."""
    return Problem(
        f"M={m}",
        *(matmul.grouped_matmul_kernel, tuple(matmul.KEY), tuple(matmul.grouped_configs())),
        *((m, SIZE), (32, 256), _work),
    )


def _work(shape: Sequence[int], device: str) -> Work:
    m, size = shape
    a, b, c = matmul.grouped_operands(m, size, device)
    args = (a, b, c, m, size, size, *a.stride(), *b.stride(), *c.stride())
    return Work(matmul.grid, args, {}, c, a.float() @ b.float())


def main() -> None:
    """Tune the keys that are still missing, while one more fits the budget."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/safetune-search"),
        help="compile caches, store and finished trials, for the next part",
    )
    parser.add_argument("--configs", type=int, help="at most, for a trial run")
    options, start = parser.parse_args(), time.monotonic()
    recording.require_device()
    folder = recording.output_folder(options)
    if options.fresh:
        shutil.rmtree(options.work, ignore_errors=True)
    os.environ |= fresh_process.caches(options.work / "triton", options.work / "store")
    keys = {problem.name: problem for problem in map(product, matmul.BATCHES)}
    configs = matmul.grouped_configs(options.configs)
    data = begun(configs, [folder, options.work], options.fresh)
    done = {key["name"] for key in data["keys"]}
    missing = [name for name in keys if name not in done]
    expected_s = FIRST_KEY_S + CONFIG_S * len(configs)
    for name in missing[: options.parts]:
        if time.monotonic() - start + expected_s > options.budget:
            print(f"{name} does not fit {options.budget:g} s: run again for the rest")
            break
        found = measure(keys[name], configs)
        expected_s = MORE * (found["seconds"] - found["phases"].get("phase_s_compile", 0.0))
        data["keys"].append(found)
        save(data, folder, options.work)
        verdicts = found["verdicts"]
        print(f"{name}: {found['seconds']} s, {verdicts.count('ok')} ok", flush=True)
    print(f"{len(data['keys'])} of {len(keys)} keys", flush=True)


if __name__ == "__main__":
    main()
