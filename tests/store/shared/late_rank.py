"""A rank that calls `safetune.sync` with a timeout, and one that never does: late_rank.py DIRECTORY

Prints what the first is told, and what it launches before and after.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ranks
import torch.distributed

import safetune
from safetune.errors import SafetuneError


def said(timeout_s: float) -> str:
    try:
        safetune.sync(timeout_s=timeout_s)
    except SafetuneError as error:
        return str(error)
    return "all ranks agreed"


def main(directory: Path) -> None:
    reader, writer = os.pipe()
    rank = 1 if os.fork() else 0
    os.environ.update(
        SAFETUNE_CACHE_DIR=str(directory / f"rank{rank}"), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2
    )
    if rank:
        os.close(writer)
        os.read(reader, 1)  # until the other rank has ended
    else:
        ranks.prepare(100, 16, 1)
        before = ranks.launch(100)
        print(json.dumps([said(0), said(0.5), before, ranks.launch(100)]), flush=True)
    os._exit(0)  # the group waits for a rank that never comes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
