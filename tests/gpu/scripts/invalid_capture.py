"""Make a capture invalid, then raise, in `safetune.graph`; report what came out and works on."""

import contextlib
import json

import torch
import triton
import triton.language as tl

import safetune

N = 10_000


@safetune.safetune(configs=[triton.Config({"BLOCK": block}) for block in (256, 512)], key=["n"])
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


def launch():
    add_kernel[lambda m: (triton.cdiv(N, m["BLOCK"]),)](x, y, out, N)


x, y = (torch.randn(N, device="cuda") for _ in range(2))
out = torch.zeros_like(x)
safetune.prepare(launch)
stream = torch.cuda.current_stream()
error = None
try:
    with safetune.graph(torch.cuda.CUDAGraph()):
        launch()
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        raise KeyError("the body's")
except Exception as raised:
    error = repr(raised)
restored = torch.cuda.current_stream() == stream
out.zero_()
launch()
torch.cuda.synchronize()
report = {
    "error": error,
    "stream_restored": restored,
    "next_launch_right": torch.equal(out, x + y),
}
print(json.dumps(report))
