"""Ranks of one job that begin with different choices: ranks.py DIRECTORY WORLD_SIZE

Prints, for each rank, what it launches for each key before and after `safetune.sync()`, and what a
later run would find in its store.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import triton
import triton.language as tl
from triton.runtime import driver

import safetune
from safetune.both import backend
from safetune.config import config_digest, config_record
from safetune.miss import failures
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.local.locks import try_lock
from safetune.store.lookup import open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord

BLOCKS = (16, 32, 64, 128)

#: When each rank made its choices, in seconds since the epoch: rank 2 was the first.
MADE = (1700000002.0, 1700000001.0, 1700000000.0, 1700000003.0)

#: What a rank's store holds: for each n, the BLOCK and generation, or None for no choice.
#: 100: all differ. 200: one has a later generation. 300: one has a fallback. 400+: its own key.
#: 500: one captures a fallback. 600: all do, of the key that is the nearest in their own stores.
STORED = {
    100: lambda rank: (BLOCKS[rank], 1),
    200: lambda rank: (BLOCKS[rank], 2 if rank == 3 else 1),
    300: lambda rank: None if rank == 0 else (BLOCKS[rank], 1),
}
CAPTURED = {500: STORED[300], 600: lambda rank: None}

#: The key that no rank can tune before the first `safetune.sync()`, but each after it.
LATE = 700


@safetune.safetune(configs=[triton.Config({"BLOCK": block}) for block in BLOCKS], key=["n"])
@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def launch(n: int) -> int:
    src, dst = torch.arange(n, dtype=torch.float32), torch.zeros(n)
    copy_kernel[grid](dst, src, n)
    assert torch.equal(dst, src)
    return int(copy_kernel.best_config.kwargs["BLOCK"])


class CapturingBackend:
    """Every stream is part of a capture."""

    def launch_stream(self) -> int:
        return 0

    def capture_id(self, stream: int) -> int:
        return 7


def launch_captured(n: int) -> int:
    """As `launch`, in what this process takes for a CUDA graph capture."""
    target = SimpleNamespace(backend="fake")
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    backend.register("fake", CapturingBackend())
    try:
        return launch(n)
    finally:
        driver._active = None
        backend.unregister("fake")


def note(arguments: dict[str, Any]) -> None:
    os.environ["NOTED"] = str(arguments["BLOCK"])  # a global would be part of the source


def bench(launch: Any, quantiles: Any) -> list[float]:
    launch()
    return [1.0 if os.environ["NOTED"] == os.environ["WANTED"] else 2.0] * 3


inline_kernel, second_inline_kernel = (
    safetune.safetune(
        configs=[triton.Config({"BLOCK": block}, pre_hook=note) for block in BLOCKS],
        key=["n"],
        do_bench=bench,
        isolation="inline",
    )(copy_kernel.fn)
    for _ in range(2)
)


def launch_inline(kernel: Any, wanted: int) -> int:
    os.environ["WANTED"] = str(wanted)
    src, dst = torch.arange(100, dtype=torch.float32), torch.zeros(100)
    kernel[grid](dst, src, 100)
    return int(kernel.best_config.kwargs["BLOCK"])


def of_the_rank(arguments: dict[str, Any]) -> int:
    return 16 if RANK else 32


#: Read by a heuristic, so it is part of the kernel's source.
RANK = 0


def launch_of_the_rank(rank: int) -> None:
    """Launch a kernel whose source is another one on odd ranks."""
    global RANK
    RANK = rank % 2
    kernel = safetune.safetune(configs=[triton.Config({}, num_warps=n) for n in (1, 2)], key=["n"])(
        triton.heuristics({"BLOCK": of_the_rank})(copy_kernel.fn)
    )
    src, dst = torch.arange(100, dtype=torch.float32), torch.zeros(100)
    kernel[grid](dst, src, 100)


def request(n: int) -> Any:
    return Miss(copy_kernel, (torch.zeros(n), torch.zeros(n), n), {"grid": grid}).request()


def prepare(n: int, block: int, generation: int) -> None:
    wanted, store = request(n), open_lookup(Settings.current()).store
    config = next(each for each in wanted.configs if each.kwargs["BLOCK"] == block)
    store.put_key(KeyRecord.of(wanted.key))
    store.put_choice(
        ChoiceRecord(
            key=wanted.key.digest,
            generation=generation,
            config_digest=config_digest(config),
            config=config_record(config),
            declared=wanted.declared,
            median_ms=1.0,
            measured=4,
            created=MADE[BLOCKS.index(block)],
        )
    )


def rank_main(directory: Path, rank: int, world: int, answers: Any) -> None:
    os.environ.update(
        SAFETUNE_CACHE_DIR=str(directory / f"rank{rank}"),
        SAFETUNE_WAIT="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE="1",
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world
    )
    numbers = [*STORED, 400 + rank]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store = open_lookup(Settings.current()).store
        for n, at in {**STORED, **CAPTURED}.items():
            if (found := at(rank)) is not None:
                prepare(n, *found)
        prepare(400 + rank, BLOCKS[rank], 1)
        # Another is tuning this key: with no time left to wait, the rank launches a fallback.
        lock = try_lock(store.path, request(300).key.digest)
        late_lock = try_lock(store.path, request(LATE).key.digest)
        before = {n: launch(n) for n in numbers}
        own = BLOCKS[rank], BLOCKS[-1 - rank]
        inline = list(map(launch_inline, (inline_kernel, second_inline_kernel), own))
        untuned = [*map(launch_captured, CAPTURED)]
        launch_of_the_rank(rank)
        late = [launch(LATE)]
        differing = safetune.sync()
        after = {n: launch(n) for n in numbers}
        inline += map(launch_inline, (inline_kernel, second_inline_kernel), own)
        agreed = [*map(launch_captured, CAPTURED)]
        late_lock.release()
        failures.clock = lambda: time.monotonic() + 2 * failures.RETRY_S
        late += [launch(LATE), launch(LATE)]
        tuned = store.choice(request(LATE).key.digest).config["BLOCK"]
        safetune.sync()
        late += [launch(LATE)]
    stored = store.choice(request(100).key.digest).config["BLOCK"]
    warned = [str(each.message) for each in said]
    facts = {"before": before, "after": after, "stored": stored, "said": warned}
    facts |= {"late": late, "tuned": tuned, "inline": inline, "differing": differing}
    answers.send({**facts, "untuned": untuned, "agreed": agreed})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    lock.release()


def main() -> None:
    directory, world = Path(sys.argv[1]), int(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(world):
        answers, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=rank_main, args=(directory, rank, world, theirs))
        child.start()
        theirs.close()
        ranks.append((child, answers))
    print(json.dumps([answers.recv() for _, answers in ranks]))
    for child, _ in ranks:
        child.join()


if __name__ == "__main__":
    main()
