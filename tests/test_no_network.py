"""safetune talks to no network: neither the process that tunes nor the child that measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: argv: a file. Tunes a kernel of two configs; their hook, which the child runs, watches it, too.
TUNE = """
import os, sys
SEEN = sys.argv[1]

def watch():
    import os, sys
    def note(event, args=()):
        with open(SEEN, "a") as file:
            file.write(f"{os.getpid()} {event} {args}\\n")
    def hook(event, args):
        local = event in ("socket.connect", "socket.bind") and isinstance(args[1], (str, bytes))
        named = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo")
        if (event in (*named, "socket.gethostbyname", "urllib.Request")) and not local:
            note(event, args)
    if not getattr(sys, "watched", False):
        sys.watched = True
        note("watched")
        sys.addaudithook(hook)

watch()
import torch, triton
import triton.language as tl
import safetune

configs = [triton.Config({"BLOCK": b}, pre_hook=lambda _: watch()) for b in (64, 128)]

@safetune.autotune(configs, key=["n"])
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, offset, mask=offset < n)

x = torch.zeros(300, dtype=torch.int32)
kernel[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](x, 300)
assert x.tolist() == list(range(300))
"""


def test_a_tuning_talks_to_no_network(fresh_process: FreshProcess, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    fresh_process(TUNE, str(seen), warm=True)
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert [line[1] for line in lines] == ["watched"] * len(lines)
    assert len({line[0] for line in lines}) >= 2, "the child was not watched"
