"""From a program's own calls to a pack that covers all of them: record, tune, pack, run frozen.

    python docs/examples/record_to_frozen.py                    # on a GPU, or in the interpreter
    python docs/examples/record_to_frozen.py --fla --devices all  # two layers of FLA, on all GPUs
    python docs/examples/record_to_frozen.py --fla --tokens 512 --devices all  # 13 keys, minutes

The tuning is killed in the middle, and goes on. Everything is written to a temporary directory, in
which the programs run, too: no folder of this one hides a library that the recorded program has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from safetune import safetune

#: Both are of the process, before it changes its directory.
BEGIN, HERE = time.monotonic(), str(Path(__file__).resolve())

BLOCKS = [triton.Config({"BLOCK": size}) for size in (16, 32, 64, 128)]


@safetune(configs=BLOCKS, key=["columns"])
@triton.jit
def scale_rows(x, weight, columns, BLOCK: tl.constexpr):
    """Divide each row by its root mean square."""
    row = x + tl.program_id(0) * columns
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(row + offsets, mask=offsets < columns, other=0.0)
        total += tl.sum(value * value)
    factor = 1.0 / tl.sqrt(total / columns + 1e-5)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < columns
        value = tl.load(row + offsets, mask=mask) * factor
        tl.store(row + offsets, value * tl.load(weight + offsets, mask=mask), mask=mask)


@safetune(configs=BLOCKS, key=["columns"])
@triton.jit
def sum_sequences(x, offsets, sums, columns, BLOCK: tl.constexpr):
    """Add up the rows of each sequence: sequence i is the rows offsets[i] to offsets[i + 1]."""
    sequence = tl.program_id(0)
    columns_here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns_here < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.load(offsets + sequence), tl.load(offsets + sequence + 1)):
        total += tl.load(x + row * columns + columns_here, mask=mask)
    tl.store(sums + sequence * columns + columns_here, total, mask=mask)


def two_layers() -> None:
    """Run a model of two layers, of 48 and 80 columns, three times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    offsets = torch.tensor([0, 3, 3, 10, 12], dtype=torch.int32, device=device)
    for _ in range(3):
        for columns in (48, 80):
            x = torch.randn(12, columns, device=device)
            sums = torch.empty(4, columns, device=device)
            scale_rows[(12,)](x, torch.ones(columns, device=device), columns)
            grid = lambda meta, n=columns: (4, triton.cdiv(n, meta["BLOCK"]))  # noqa: E731
            sum_sequences[grid](x, offsets, sums, columns)
            assert torch.allclose(sums[2], x[3:10].sum(0), atol=1e-4)


def two_layers_of_fla(tokens: int) -> None:
    """Run two layers of gated linear attention, forward and backward, three times."""
    from safetune import install

    install()  # before the library is imported
    import fla.layers

    layer = {"hidden_size": 512, "num_heads": 4}
    layers = [fla.layers.GatedLinearAttention(**layer, layer_idx=index) for index in range(2)]
    model = torch.nn.ModuleList(layers).to("cuda", torch.bfloat16)
    for _ in range(3):
        x = torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for each in model:
            x, *_ = each(x)
        x.float().sum().backward()


def step(name: str) -> None:
    """Say what begins now, and when."""
    print(f"\n{time.monotonic() - BEGIN:.0f} s: {name}", flush=True)


def safetune_command(*words: str, env: dict[str, str]) -> str:
    """Run `safetune ...` and return what it printed; its messages go on to standard error."""
    command = [sys.executable, "-m", "safetune", *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"safetune {' '.join(words)}: {done.returncode}\n{done.stdout}"
    return done.stdout


def stored(database: Path, table: str) -> int:
    """Return the number of rows, 0 where there is no table yet."""
    try:
        with sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True) as connection:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def tune_with_a_kill(words: list[str], database: Path, env: dict[str, str]) -> None:
    """Tune, be killed after half of the keys, and tune again what is missing."""
    keys = stored(database, "call")
    process = subprocess.Popen(
        [sys.executable, "-m", "safetune", "tune", *words], env=env, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and stored(database, "choice") < max(1, keys // 2):
        time.sleep(0.02)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept, choices = stored(database, "trial"), stored(database, "choice")
    step(f"killed with {choices} of {keys} keys tuned, and {kept} trials stored; tune again")
    done = json.loads(safetune_command("tune", *words, "--json", env=env))
    already = sum(not tuning["measured"] for tuning in done["tunings"])
    print(f"again: {already} keys were tuned already, {done['measured']} configs measured")
    assert already >= choices
    assert not done["left_out"], json.dumps(done["left_out"], indent=1)


def whole_way(folder: Path, options: argparse.Namespace) -> None:
    """Record, say what is covered, tune, pack, run frozen, and say again what is covered."""
    database, packs = folder / "recording" / "safetune.db", folder / "packs"
    flags = ["--fla", "--tokens", str(options.tokens)] if options.fla else []
    program = [sys.executable, HERE, "--run", *flags]
    env = {**os.environ, "SAFETUNE_CACHE_DIR": str(database.parent)}
    step("record")
    subprocess.run(program, env={**env, "SAFETUNE_MODE": "record"}, check=True)
    target = [] if options.fla else [HERE]
    print(safetune_command("coverage", *target, env=env))
    devices = ["--devices", options.devices] if options.devices else []
    step("tune")
    tune_with_a_kill([*target, "--recorded", *devices], database, env)
    safetune_command("export", str(packs), env=env)
    serving = {**env, "SAFETUNE_CACHE_DIR": str(folder / "serving"), "SAFETUNE_PACKS": str(packs)}
    step("run frozen, with the packs alone")
    frozen_env = {**serving, "SAFETUNE_MODE": "frozen"}
    frozen = subprocess.run(program, env=frozen_env, stderr=subprocess.PIPE, text=True, check=False)
    assert frozen.returncode == 0, frozen.stderr
    assert "has no choice" not in frozen.stderr, frozen.stderr
    words = ["coverage", *target, "--calls", str(database)]
    print(safetune_command(*words, "--fail-under", "100", env=serving))
    text = safetune_command(*words, "--json", env=serving)
    assert json.loads(text)["by_calls"]["pack"] == 1.0, text
    step("all calls have a choice in the packs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--fla", action="store_true", help="two layers of flash-linear-attention")
    parser.add_argument("--tokens", type=int, default=64, help="FLA: more than 64 are in chunks")
    parser.add_argument("--devices", help="the GPUs to tune on: all, or e.g. 0,1")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        two_layers_of_fla(given.tokens) if given.fla else two_layers()
    else:
        with tempfile.TemporaryDirectory() as name:
            os.chdir(name)
            whole_way(Path(name), given)
