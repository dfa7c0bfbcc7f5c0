"""A row softmax with a config that crashes: `benchmarks/session.py` draws what it shows."""

import ctypes

import torch
import triton
import triton.language as tl

from safetune import safetune


def crash(arguments):
    """Read address 0: a real SIGSEGV, in whatever process runs this."""
    ctypes.string_at(0)


CONFIGS = [triton.Config({"ROWS": rows}) for rows in (1, 2, 4, 8, 16)]
CONFIGS.insert(3, triton.Config({"ROWS": 3}, pre_hook=crash))


@safetune(configs=CONFIGS, key=["rows", "columns"])
@triton.jit
def softmax_kernel(result, x, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first = tl.program_id(0) * ROWS
    column = tl.arange(0, COLUMNS)
    for row in range(first, tl.minimum(first + ROWS, rows)):
        values = tl.load(x + row * columns + column, mask=column < columns, other=-float("inf"))
        values = tl.exp(values - tl.max(values, 0))
        values /= tl.sum(values, 0)
        tl.store(result + row * columns + column, values, mask=column < columns)


def softmax(x):
    """Return the softmax of each row."""
    result, (rows, columns) = torch.empty_like(x), x.shape

    def grid(meta):
        return (triton.cdiv(rows, meta["ROWS"]),)

    softmax_kernel[grid](result, x, rows, columns, COLUMNS=triton.next_power_of_2(columns))
    return result


if __name__ == "__main__":
    device, rows = ("cuda", 65536) if torch.cuda.is_available() else ("cpu", 16)
    x = torch.randn(rows, 1000, device=device)
    torch.testing.assert_close(softmax(x), torch.softmax(x, 1))
    print("right:", softmax_kernel.best_config)
