"""Tune a kernel on one device and report, in JSON, on which card its configs were run.

argv: what CUDA_VISIBLE_DEVICES becomes once CUDA is initialised, or `keep`; `current` or `other`,
for whether the tensors' device is the current one at the launch; the devices' indices, one call
each.
"""

import json
import os
import sqlite3
import sys
import warnings

import torch
import triton
import triton.language as tl

from safetune import safetune

variable, where, *indices = sys.argv[1:]
N = 1 << 16


@safetune(configs=[triton.Config({"BLOCK": block}) for block in (256, 1024)], key=["n"])
@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(out + offset, tl.load(x + offset, mask=mask) * 2, mask=mask)


def trials():
    """Return the card of every trial so far."""
    path = os.path.join(os.environ["SAFETUNE_CACHE_DIR"], "safetune.db")
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        query = "SELECT json_extract(record, '$.outcome.gpu_uuid') FROM trial ORDER BY rowid"
        return [uuid for (uuid,) in connection.execute(query)]


def call(index):
    x = torch.randn(N, device=f"cuda:{index}")
    out = torch.zeros_like(x)
    torch.cuda.synchronize(index)
    with torch.cuda.device(index if where == "current" else 0):
        double_kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, out, N)
        torch.cuda.synchronize()
    return torch.equal(out.cpu(), (x * 2).cpu())


indices = [int(index) for index in indices]
cards = [torch.cuda.get_device_properties(index) for index in indices]
for index in indices:  # a kernel on one card may reach another only once torch has said so
    torch.ones(1, device=f"cuda:{index}").to("cuda:0").to(f"cuda:{index}")
if variable != "keep":
    os.environ["CUDA_VISIBLE_DEVICES"] = variable
report = {
    "names": [card.name for card in cards],
    "uuids": [str(card.uuid) for card in cards],
    "right": [],
    "trials": [],
}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in indices:
        report["right"].append(call(number))
        report["trials"].append(trials())
texts = [str(warning.message) for warning in caught]
report["warnings"] = [text for text in texts if "is not tuned" in text]
print(json.dumps(report))
