"""How much faster `safetune tune --devices all` is than one GPU, and what a worker's death costs.

All configs are compiled first, so that measuring dominates. Then the same list is tuned from an
empty store on one GPU, on all of this machine, and on all with one worker killed when half of the
keys have a choice. The rate is that of the configs between the first and the last stored trial: a
process takes some seconds to start, which a sweep of hours does not notice; `wall_s` has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recording
from recording import Figures, Row

TARGET = Path(__file__).with_name("devices_kernel.py")
TIMEOUT_S = 300.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the rates to that of one GPU, and how the keys of a killed worker fared."""
    found: Figures = {}
    one = [row["rate"] for row in rows if row["devices"] == 1]
    for row in rows:
        name = f"{row['devices']}_devices" + "_killed" * row["killed"]
        found[f"{name}_wall_s"] = row["wall_s"]
        if row["devices"] > 1:
            found[f"{name}_rate_ratio"] = row["rate"] / (sum(one) / len(one))
        if row["killed"]:
            found[f"{name}_keys_tuned"] = row["tuned"]
            found[f"{name}_keys"] = row["keys"]
    return found


def tune(store: Path, devices: Sequence[int], kill: bool, keys: int) -> Row:
    """Run the command on an empty store; return how fast it was."""
    environment = {**os.environ, "SAFETUNE_CACHE_DIR": str(store)}
    shapes = [f"--shape={height}" for height in _heights()]
    words = ["tune", str(TARGET), "--json", f"--devices={','.join(map(str, devices))}", *shapes]
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "safetune", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if kill:
        _kill_a_worker(process, store, keys // 2)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    wall_s = time.monotonic() - begin
    if process.returncode:
        sys.exit(f"safetune tune exited with {process.returncode}:\n{errors}")
    tunings = json.loads(output)["tunings"]
    with contextlib.closing(sqlite3.connect(store / "safetune.db")) as database:
        query = "SELECT count(*), max(created) - min(created) FROM trial"
        trials, seconds = database.execute(query).fetchone()
    return {
        "devices": len(devices),
        "killed": kill,
        "keys": keys,
        "tuned": sum(tuning["choice"] is not None for tuning in tunings),
        "measured": sum(tuning["measured"] for tuning in tunings),
        "trials": trials,
        "wall_s": wall_s,
        "seconds": seconds,
        "rate": trials / seconds,
        "choices": {tuning["shape"]: tuning["choice"] for tuning in tunings},
        "messages": [line for line in errors.splitlines() if line.startswith("Warning")],
    }


def _heights() -> list[int]:
    import devices_kernel

    return list(devices_kernel.TIMED)


def _kill_a_worker(process: subprocess.Popen[str], store: Path, choices: int) -> None:
    """Kill the last worker when this number of keys has a choice."""
    while process.poll() is None and _choices(store) < choices:
        time.sleep(0.05)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if len(workers) > 1:
        os.kill(int(workers[-1]), signal.SIGKILL)


def _choices(store: Path) -> int:
    with contextlib.suppress(sqlite3.Error):
        uri = f"file:{store / 'safetune.db'}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            return int(database.execute("SELECT count(*) FROM choice").fetchone()[0])
    return 0


def compile_all(folder: Path) -> None:
    """Tune one height, so that each config is compiled."""
    import devices_kernel

    words = ["tune", str(TARGET), f"--shape={devices_kernel.COMPILED}", "--json"]
    environment = {**os.environ, "SAFETUNE_CACHE_DIR": str(folder / "compiled")}
    command = [sys.executable, "-m", "safetune", *words]
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True
    )


def main() -> None:
    """Tune the list on one GPU, on all, and on all with a kill."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--devices", type=int, default=0, help="of this machine; 0: all")
    parser.add_argument("--skip-kill", action="store_true", help="do not kill a worker")
    options = parser.parse_args()
    import torch

    count = options.devices or torch.cuda.device_count()
    folder, result = recording.output_folder(options), recording.begin("devices")
    keys = len(_heights())
    runs: list[tuple[int, bool]] = [(1, False), (count, False), (count, True)]
    with tempfile.TemporaryDirectory(prefix="devices-") as name:
        os.environ.setdefault("TRITON_CACHE_DIR", f"{name}/triton")
        compile_all(Path(name))
        for number, (devices, kill) in enumerate(runs[: 2 if options.skip_kill else 3]):
            row: dict[str, Any] = tune(Path(name) / str(number), range(devices), kill, keys)
            print({n: row[n] for n in row if n != "choices"}, flush=True)
            result.rows.append(row)
            result.save(folder, figures)
    recording.report(result, result.save(folder, figures))


if __name__ == "__main__":
    main()
