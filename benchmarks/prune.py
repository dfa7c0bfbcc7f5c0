"""How much shorter FLA's lists of configs can be, and what that costs on keys that were not used.

Each key of a few of FLA's kernels is tuned under `safetune.install()`, for as long as `--budget`
allows; a row has the time of every config that works. The figures are those of `safetune prune`,
with the default `--within`: how short a list becomes, and how much slower than with all configs a
key is by the list that is made from all others: the shortest one, and one with a third of the
configs (`--keep`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import recording
from recording import Figures, Row

from safetune.offline import shortlist
from safetune.offline.shortlist import Measured
from safetune.store.records import KeyRecord

WITHIN = 0.01
BATCH, HEADS = 4, 8


def figures(rows: Sequence[Row]) -> Figures:
    """Return what shortening the lists gives, and costs on keys that they were not made from."""
    found: Figures = {}
    for name in dict.fromkeys(row["kernel"] for row in rows):
        keys = [measured(row) for row in rows if row["kernel"] == name]
        if len(keys) < 2:
            continue
        declared = max(row["declared"] for row in rows if row["kernel"] == name)
        found |= {f"{name}_keys": len(keys), f"{name}_configs": declared}
        least = len(shortlist.shortest(keys, WITHIN))
        for words, keep in (("shortest", 0), ("third", max(least, declared // 3))):
            kept = shortlist.shortest(keys, WITHIN, keep)
            held_out = shortlist.held_out(keys, WITHIN, keep)
            assert held_out is not None
            found |= {
                f"{name}_{words}_kept": len(kept),
                f"{name}_{words}_slower_mean": held_out.mean - 1,
                f"{name}_{words}_slower_worst": held_out.worst - 1,
                f"{name}_{words}_failed": held_out.failed,
            }
    for words in ("shortest", "third") if found else ():
        means = [1 + v for n, v in found.items() if n.endswith(f"{words}_slower_mean")]
        worst = [value for n, value in found.items() if n.endswith(f"{words}_slower_worst")]
        found |= {
            f"prune_{words}_slower_mean": statistics.geometric_mean(means) - 1,
            f"prune_{words}_slower_worst": max(worst),
        }
    return found


def measured(row: Row) -> Measured:
    """Return a row as `shortlist` takes it."""
    key = KeyRecord(row["key"], row["kernel"], "", "", 0, "", {}, {}, row["call"])
    return Measured(key, row["times"])


def states(width: tuple[int, int], kind: str, tokens: int, device: str) -> None:
    """The state of each chunk: of GLA (`gk`), of simple GLA and gated DeltaNet (`g`), or bare."""
    import torch
    from fla.ops.common.chunk_h import chunk_fwd_h

    k, v = (
        torch.randn(BATCH, tokens, HEADS, n, device=device, dtype=torch.bfloat16) for n in width
    )
    gates = {"gk": k.shape, "g": k.shape[:-1]}
    decay = {n: -torch.rand(s, device=device).cumsum(1) / 64 for n, s in gates.items() if n == kind}
    chunk_fwd_h(k=k, v=v, **decay)


def outputs(width: tuple[int, int], kind: str, tokens: int, device: str) -> None:
    """GLA's output, with as many heads as `kind` says."""
    import torch
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

    keys, values = width
    heads, chunks = int(kind), tokens // 64
    shapes = [(BATCH, tokens, heads, n) for n in (keys, values, 64)]
    q, v, a = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
    g = -torch.rand(shapes[0], device=device)
    h = torch.randn(BATCH, chunks, heads, keys, values, device=device, dtype=torch.bfloat16)
    chunk_gla_fwd_o_gk(q=q, v=v, g=g, A=a, h=h, scale=keys**-0.5)


def norms(width: tuple[int, int], kind: str, tokens: int, device: str) -> None:
    """The L2 norm of queries and keys in the delta rules."""
    import torch
    from fla.modules.l2norm import l2norm_fwd

    l2norm_fwd(torch.randn(width[1] * tokens, width[0], device=device, dtype=getattr(torch, kind)))


Task = tuple[Callable[..., None], tuple[int, int], str]

#: Head dimensions of keys and values.
_WIDTHS = (
    *((64, 64), (128, 128), (128, 256), (64, 128), (256, 256), (256, 512)),
    *((96, 192), (192, 384)),
)

KERNELS: dict[str, list[Task]] = {
    "chunk_fwd_kernel_h": [(states, width, kind) for width in _WIDTHS for kind in ("gk", "g")],
    "chunk_gla_fwd_kernel_o": [
        (outputs, width, heads) for width in _WIDTHS for heads in ("4", "16")
    ],
    "l2norm_fwd_kernel": [
        (norms, (width, 64), kind)
        for width in (128, 64, 256, 96, 192, 512, 80, 160)
        for kind in ("bfloat16", "float32")
    ],
}


def interleaved(names: Sequence[str]) -> Iterator[Task]:
    """Yield the tasks of the kernels in turn, so that all have about as many when time is up."""
    rounds = itertools.zip_longest(*(KERNELS[name] for name in names))
    return (task for each in rounds for task in each if task is not None)


def run(options: argparse.Namespace) -> list[Row]:
    """Tune for as long as there is time; return a row for each key."""
    import torch

    import safetune

    safetune.install()
    begin = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for function, width, kind in interleaved(options.kernels):
        if time.monotonic() - begin > options.budget:
            break
        try:
            function(width, kind, options.tokens, device)
        except Exception as error:  # another FLA: the others count
            print(
                f"{function.__name__} {width} {kind}: {type(error).__name__}: {error}", flush=True
            )
    return stored(options.kernels)


def stored(names: Sequence[str]) -> list[Row]:
    """Return a row for each key of these kernels in the store."""
    from safetune.cli.stored import open_store
    from safetune.show.words import call_words, config_words

    rows = []
    store = open_store()
    for name in names:
        known = store.trials_of(name)
        configs = {t.config_digest: config_words(t.config) for _, trials in known for t in trials}
        tried = {key.digest: len({t.config_digest for t in trials}) for key, trials in known}
        for found in shortlist.measured_keys(known, configs):
            times = {configs[c]: round(ms, 6) for c, ms in sorted(found.times.items())}
            row = {"kernel": name, "key": found.key.digest[:8], "call": found.key.call}
            words = call_words(found.key.call)
            rows.append(
                {**row, "words": words, "declared": tried[found.key.digest], "times": times}
            )
    return rows


def main() -> None:
    """Tune, and save the rows and the figures."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--budget", type=float, default=140.0, metavar="SECONDS")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--store", help="keep the store here, and go on with what it has")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prune-") as scratch:
        os.environ["SAFETUNE_CACHE_DIR"] = options.store or scratch
        result = recording.begin("prune")
        result.rows = run(options)
        recording.report(result, result.save(recording.output_folder(options), figures))


if __name__ == "__main__":
    main()
