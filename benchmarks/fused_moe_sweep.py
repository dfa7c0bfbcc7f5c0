"""How long `safetune tune --budget` takes for all batch sizes of a fused mixture of experts.

A part is one dtype: the command begins with an empty store and an empty compile cache.

`--exhaustive` measures all configs, in parts: `safetune tune` is stopped `--budget` seconds after
the start, and the same command goes on from the store in `--caches`. The result is
`fused_moe_exhaustive`, whose time is that of all parts; one that was killed counts as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import fresh_process
import recording
from recording import Figures, Row

SPACES = {"bfloat16": "fused_moe_bf16", "float8_e4m3fn": "fused_moe_fp8"}
#: How long a part may take to end when it is stopped.
STOP_S = 10.0
#: The whole sweep of a dtype: 18 batch sizes, 1,920 configs each.
WHOLE = 18 * 1920


def figures(rows: Sequence[Row]) -> Figures:
    """Return for each dtype the seconds of the whole command, its configs, and its regrets."""
    found: Figures = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        name = SPACES[dtype]
        if "kind" in of_dtype[0]:
            found |= _exhaustive_figures(f"{name}_exhaustive", of_dtype)
            continue
        found[f"{name}_wall_s"] = of_dtype[0]["wall_s"]
        found[f"{name}_keys"] = len(of_dtype)
        found[f"{name}_configs"] = sum(row["measured"] for row in of_dtype)
        if regrets := [row["regret"] for row in of_dtype if row.get("regret") is not None]:
            found[f"{name}_regret_keys"] = len(regrets)
            found[f"{name}_regret_median"] = statistics.median(regrets)
            found[f"{name}_regret_worst"] = max(regrets)
    return found


def _exhaustive_figures(name: str, rows: Sequence[Row]) -> Figures:
    """Return what a finished sweep took; the time of fewer batch sizes or configs is no figure."""
    parts, keys = ([row for row in rows if row["kind"] == kind] for kind in ("part", "key"))
    if not keys:
        return {}
    found: Figures = {f"{name}_parts": len(parts), f"{name}_keys": len(keys)}
    for figure, column in (("configs", "measured"), ("ok", "ok"), ("disputed", "disputed")):
        found[f"{name}_{figure}"] = sum(row[column] for row in keys)
    if found[f"{name}_configs"] == WHOLE:
        found[f"{name}_wall_s"] = round(sum(row["wall_s"] for row in parts), 1)
    return found


def run_part(dtype: str, options: argparse.Namespace) -> Iterator[Row]:
    """Tune all batch sizes of a dtype within the time."""
    with tempfile.TemporaryDirectory(prefix="fused-moe-") as name:
        command = [*_command(dtype, options), "--json", "--budget", options.time]
        env, start = _environment(Path(name), options), time.monotonic()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        wall_s = round(time.monotonic() - start, 1)
    for tuning in json.loads(done.stdout)["tunings"]:
        row = {"part": dtype, "dtype": dtype, "time": options.time, "wall_s": wall_s}
        row |= {"tokens": int(tuning["shape"]), "choice": tuning["choice"]}
        row |= {name: tuning[name] for name in ("measured", "median_ms")}
        phases = {name: round(s, 2) for name, s in tuning["phases"].items() if s >= 0.01}
        yield {**row, "phases": phases}


def _command(dtype: str, options: argparse.Namespace) -> list[str]:
    target = Path(__file__).with_name("fused_moe.py")
    shapes = [word for tokens in options.tokens or () for word in ("--shape", tokens)]
    return [sys.executable, "-m", "safetune", "tune", str(target), "--dtype", dtype, *shapes]


def _environment(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    most = {"FUSED_MOE_CONFIGS": str(options.configs)} if options.configs else {}
    caches = fresh_process.caches(folder / "triton", folder / "store")
    return fresh_process.environment({**caches, **most, "PYTHONPATH": os.pathsep.join(paths)})


def run_exhaustive(dtypes: Sequence[str], options: argparse.Namespace) -> None:
    """Tune all configs of the dtypes that are still missing, until the time is up."""
    end = time.monotonic() + options.budget
    folder, result = recording.output_folder(options), recording.begin("fused_moe_exhaustive")
    if not options.fresh:
        recording.resume(result, [folder])
    for dtype in dtypes:
        rows = [row for row in result.rows if row["dtype"] == dtype]
        if any(row["kind"] == "key" for row in rows):
            continue
        caches = (options.caches or folder / "caches") / SPACES[dtype]
        if not rows or not caches.exists():  # else the time would not be that of all
            result.rows = [row for row in result.rows if row["dtype"] != dtype]
            shutil.rmtree(caches, ignore_errors=True)
        start, number = time.monotonic(), sum(row["dtype"] == dtype for row in result.rows)
        part: Row = {"part": f"{dtype} {number}", "kind": "part", "dtype": dtype}
        result.rows.append(part | {"wall_s": round(end - start, 1)})
        result.save(folder, figures)
        done = _tune_until(end, [*_command(dtype, options), "--allow-disputed"], caches, options)
        result.rows[-1] = part | {"wall_s": round(time.monotonic() - start, 1)}
        if not done:
            print(f"{part['part']} is not done: run again for the rest", flush=True)
            break
        result.rows += _keys(dtype, caches / "store")
        result.save(folder, figures)
    columns = ["part", "wall_s", "tokens", "measured", "ok", "median_ms"]
    recording.report(result, result.save(folder, figures), columns)


def _tune_until(
    end: float, command: Sequence[str], caches: Path, options: argparse.Namespace
) -> bool:
    """Tune, at most until then; return whether all is tuned."""
    process = subprocess.Popen(command, env=_environment(caches, options))
    try:
        status = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        return False
    finally:
        process.kill()
    if status:
        raise SystemExit(f"safetune tune ended with {status}")
    return True


def _keys(dtype: str, folder: Path) -> Iterator[Row]:
    """Yield a row for each batch size that has a choice."""
    from safetune.store.local.store import Store

    store = Store.open(folder)
    for key, trials in store.trials_of("fused_moe_kernel"):
        newest = {t.config_digest: t for t in sorted(trials, key=lambda trial: trial.created)}
        if (choice := store.choice(key.digest)) is None:
            continue
        row = {"part": dtype, "kind": "key", "dtype": dtype}
        row |= {"tokens": dict(key.call["values"])["tokens"], "measured": len(newest)}
        row["ok"] = sum(trial.outcome.ok for trial in newest.values())
        row |= {"choice": choice.config, "median_ms": choice.median_ms}
        yield {**row, "disputed": int(bool(choice.dispute))}
    store.close()


def main() -> None:
    """Tune the dtypes that are still missing."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", help="default: both")
    parser.add_argument("--time", default="170s", help="of all batch sizes of a dtype")
    parser.add_argument("--tokens", nargs="+", metavar="N", help="some batch sizes only")
    parser.add_argument("--exhaustive", action="store_true", help="measure all configs, in parts")
    parser.add_argument(
        "--caches",
        type=Path,
        help="what --exhaustive goes on from, 1 GB a dtype; default: `caches` in --out",
    )
    parser.add_argument("--configs", type=int, default=0, help="fewer, for a trial run")
    options = parser.parse_args()
    every = options.dtypes or [*SPACES]
    if options.exhaustive:
        run_exhaustive(every, options)
        return
    recording.run_parts(
        recording.begin("fused_moe_sweep"),
        every,
        lambda dtype: run_part(dtype, options),
        figures,
        options,
        200.0,
        ["dtype", "tokens", "measured", "median_ms", "regret"],
    )


if __name__ == "__main__":
    main()
