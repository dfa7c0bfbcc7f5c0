"""A notebook without the notebook: its cells through IPython's shell. Prints a report in JSON."""

import json
import sys

from IPython.core.interactiveshell import InteractiveShell

IMPORTS = """
import torch, triton
import triton.language as tl
from safetune import safetune
"""
KERNEL = """
@safetune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"])
@triton.jit
def cell_kernel(x, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(out + offset, tl.load(x + offset, mask=mask) OPERATION, mask=mask)
"""
LAUNCH = """
n = 2000
x = torch.randn(n, device="cuda" if torch.cuda.is_available() else "cpu")
out = torch.zeros_like(x)
cell_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
"""

shell = InteractiveShell.instance()


def run(cell):
    result = shell.run_cell(cell, store_history=True)
    if not result.success:
        sys.exit("a cell failed")


def is_right(expected):
    return bool(shell.user_ns["torch"].equal(shell.user_ns["out"], expected(shell.user_ns["x"])))


report = {}
run(IMPORTS)
run(KERNEL.replace("OPERATION", "* 2.0"))
run(LAUNCH)
report["first"] = is_right(lambda x: x * 2)
run(LAUNCH)
report["again"] = is_right(lambda x: x * 2)
run(KERNEL.replace("OPERATION", "- 1.0"))
run(LAUNCH)
report["edited"] = is_right(lambda x: x - 1)
print(json.dumps(report))
