"""Whether stock jax-triton corrupts an aliased array while it tries configs.

    python tests/gpu/scripts/stock_jax_aliases.py [--out FILE]

`acc` is an input that shares memory with the output, and the kernel adds `x` to it: each trial that
is not undone adds once more. One line of JSON for each case, printed or in FILE, after one with the
versions and the device. Run on a GPU with jax and jax-triton; neither torch nor safetune.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

N = 1 << 16


def configs() -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}) for block in (128, 256, 512, 1024)]


@triton.autotune(configs=configs(), key=[])
@triton.jit
def first_kernel(acc, x, out, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(acc + offset) + tl.load(x + offset))


@triton.autotune(configs=configs(), key=[])
@triton.jit
def second_kernel(x, acc, out, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(acc + offset) + tl.load(x + offset))


def case(kernel: Any, aliased: int, donate: bool) -> dict[str, Any]:
    acc, x = jnp.full(N, 100.0), jnp.full(N, 1.0)
    args = (acc, x) if aliased == 0 else (x, acc)

    def add(a: Any, b: Any) -> Any:
        return jax_triton.triton_call(
            a,
            b,
            kernel=kernel,
            out_shape=jax.ShapeDtypeStruct((N,), jnp.float32),
            grid=lambda meta: (N // meta["BLOCK"],),
            input_output_aliases={aliased: 0},
        )

    row: dict[str, Any] = {"aliases": {aliased: 0}, "donated": donate}
    try:
        result = jax.jit(add, donate_argnums=(aliased,) if donate else ())(*args)
        row["result"] = sorted({float(value) for value in result[:4096].tolist()})
        row["right"] = row["result"] == [101.0]
        if not donate:
            row["input_unchanged"] = bool((args[aliased] == 100.0).all())
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the lines there")
    out = parser.parse_args().out
    versions = {
        module.__name__: getattr(module, "__version__", "unknown")
        for module in (jax, jax_triton, triton)
    }
    rows = [
        {"versions": versions, "device": jax.devices()[0].device_kind},
        *(
            case(kernel, aliased, donate)
            for kernel, aliased in ((first_kernel, 0), (second_kernel, 1))
            for donate in (False, True)
        ),
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)


if __name__ == "__main__":
    main()
