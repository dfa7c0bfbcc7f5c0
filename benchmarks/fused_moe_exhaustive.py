"""How long `safetune tune` takes for all configs and batch sizes of a fused mixture of experts.

`fused_moe_sweep.py --exhaustive` runs it in parts that go on where the last one ended. A part is a
process of `safetune tune`, which is stopped when its time is up, or dies with the script. What it
has measured is in a store that the next part opens, so a sweep can be killed at any moment; a part
that was killed counts until its last beat and `BEAT_S` more. The store and the compiled kernels are
in `<caches>/<space>`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import recording
from recording import Figures, Row

if TYPE_CHECKING:
    from safetune.store.records import ChoiceRecord, TrialRecord

SPACES = {"bfloat16": "fused_moe_bf16", "float8_e4m3fn": "fused_moe_fp8"}
#: How often the time of a part is noted, and how long one may take to end when it is stopped.
BEAT_S, STOP_S = 1.0, 10.0
#: The whole sweep of a dtype: 18 batch sizes, 1,920 configs each.
WHOLE = 18 * 1920
#: Of Linux: the process gets a signal when the one that has started it ends.
_PR_SET_PDEATHSIG = 1

#: Of each batch size the trial of each config, by its digest, and the choice.
Keys = dict[int, "tuple[dict[str, TrialRecord], ChoiceRecord | None]"]


def figures(rows: Sequence[Row]) -> Figures:
    """Return what the finished sweep of each dtype took in all its parts.

    The time of a sweep over fewer batch sizes or configs is not a figure.
    """
    found: Figures = {}
    for dtype, space in SPACES.items():
        parts = [row for row in rows if row["dtype"] == dtype and row["kind"] == "part"]
        keys = [row for row in rows if row["dtype"] == dtype and row["kind"] == "key"]
        if not keys:
            continue
        name, measured = f"{space}_exhaustive", sum(row["measured"] for row in keys)
        if measured == WHOLE:
            found[f"{name}_wall_s"] = round(sum(row["wall_s"] for row in parts), 1)
        found[f"{name}_parts"] = len(parts)
        found[f"{name}_keys"] = len(keys)
        found[f"{name}_configs"] = measured
        found[f"{name}_ok"] = sum(row["ok"] for row in keys)
        found[f"{name}_disputed"] = sum(row["disputed"] for row in keys)
    return found


class Sweep:
    """The sweep of one dtype.

    Args:
        folder: of its caches.
        most: the configs of a trial run; 0 for all.
    """

    def __init__(self, dtype: str, folder: Path, tokens: Sequence[str], most: int) -> None:
        self._space, self._dtype = SPACES[dtype], dtype
        self._folder = folder / self._space
        self._tokens = tokens
        self._own = {"FUSED_MOE_CONFIGS": str(most)} if most else {}

    def prepare(self, rows: list[Row]) -> None:
        """Begin anew unless rows and store are of one sweep: its time would not be that of all."""
        own = [row for row in rows if row["dtype"] == self._dtype]
        if not own or not (self._folder / "store").exists():
            for row in own:
                rows.remove(row)
            for name in ("store", "triton"):
                shutil.rmtree(self._folder / name, ignore_errors=True)
            (self._folder / "store").mkdir(parents=True)

    def run(self, end: float, note: Callable[[float], None]) -> bool:
        """Tune until all is done or the time is up; return whether all is.

        Args:
            end: of this part, by `time.monotonic`.
            note: gets the seconds of this part, at each beat those until the next one.
        """
        start = time.monotonic()
        process = subprocess.Popen(self._command(), env=self._environment(), preexec_fn=_die_too)
        try:
            while process.poll() is None and time.monotonic() < end:
                note(time.monotonic() - start + BEAT_S)
                _wait(process, min(BEAT_S, max(0.0, end - time.monotonic())))
            if stopped := process.poll() is None:
                process.send_signal(signal.SIGINT)
                _wait(process, STOP_S)
        finally:
            process.kill()
            process.wait()
            note(time.monotonic() - start)
        if process.returncode and not stopped:
            raise SystemExit(f"safetune tune ended with {process.returncode}")
        return process.returncode == 0

    def _command(self) -> list[str]:
        target = Path(__file__).with_name("fused_moe.py")
        command = [sys.executable, "-m", "safetune", "tune", str(target), "--dtype", self._dtype]
        command += [word for tokens in self._tokens for word in ("--shape", tokens)]
        return [*command, "--allow-disputed"]  # it is told, and the sweep goes on

    def _environment(self) -> dict[str, str]:
        env = {name: v for name, v in os.environ.items() if not name.startswith("SAFETUNE_")}
        paths = [str(Path(__file__).parent), env.get("PYTHONPATH", "")]
        return {
            **env,
            **self._own,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TRITON_CACHE_DIR": str(self._folder / "triton"),
            "SAFETUNE_CACHE_DIR": str(self._folder / "store"),
        }

    def stored(self) -> Keys:
        """Return the trials of each batch size so far, and its choice."""
        from safetune.settings import Mode, Settings
        from safetune.store.lookup import open_lookup

        folder = {"cache_dir": self._folder / "store", "shared": "", "packs": ()}
        settings = replace(Settings.current(), mode=Mode.FROZEN, **folder)
        store, found = open_lookup(settings).store, {}
        for key, trials in store.trials_of("fused_moe_kernel"):
            newest = {trial.config_digest: trial for trial in sorted(trials, key=_created)}
            found[dict(key.call["values"])["tokens"]] = (newest, store.choice(key.digest))
        return dict(sorted(found.items()))

    def rows(self) -> list[Row]:
        """Return a row for each batch size of a sweep that is done."""
        return [
            {
                "part": self._dtype,
                "kind": "key",
                "dtype": self._dtype,
                "tokens": tokens,
                "measured": len(trials),
                "ok": sum(trial.outcome.ok for trial in trials.values()),
                "choice": choice.config,
                "median_ms": choice.median_ms,
                "disputed": int(bool(choice.dispute)),
            }
            for tokens, (trials, choice) in self.stored().items()
            if choice is not None
        ]


def run(dtypes: Sequence[str], options: argparse.Namespace, folder: Path, end: float) -> None:
    """Tune all configs of the dtypes that are still missing, until the time is up."""
    result = recording.begin("fused_moe_exhaustive")
    if not options.fresh:
        recording.resume(result, [folder])
    for dtype in dtypes:
        if any(row["dtype"] == dtype and row["kind"] == "key" for row in result.rows):
            continue
        caches = options.caches or folder / "caches"
        sweep = Sweep(dtype, caches, options.tokens or (), options.configs)
        if not run_part(sweep, dtype, result, end, lambda: result.save(folder, figures)):
            break
    print(recording.table(result.rows, ["part", "wall_s", "tokens", "measured", "ok", "median_ms"]))
    print(recording.figures_table(result, result.save(folder, figures)))


def run_part(
    sweep: Sweep, dtype: str, result: recording.Result, end: float, save: Callable[[], object]
) -> bool:
    """Run one part of a sweep, and note it in a result; return whether the sweep is done."""
    sweep.prepare(result.rows)
    number = sum(row["dtype"] == dtype for row in result.rows)
    row: Row = {"part": f"{dtype} {number}", "kind": "part", "dtype": dtype, "wall_s": 0.0}
    result.rows.append(row)

    def note(seconds: float) -> None:
        row["wall_s"] = round(seconds, 1)
        save()

    done = sweep.run(end, note)
    found = sweep.stored()
    row["keys"] = sum(choice is not None for _, choice in found.values())
    row["trials"] = sum(len(trials) for trials, _ in found.values())
    if done:
        result.rows += sweep.rows()
    save()
    told = f"{dtype}: {row['keys']} batch sizes, {row['trials']} configs after {row['wall_s']:g} s"
    print(f"{told} more{'' if done else ': run again for the rest'}", flush=True)
    return done


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _die_too() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _created(trial: TrialRecord) -> float:
    return trial.created
