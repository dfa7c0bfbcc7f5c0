"""Safetuned kernels in JAX: right results, one kernel in XLA, aliased buffers written once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

pytestmark = pytest.mark.gpu

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

jax = pytest.importorskip("jax")
jax_triton = pytest.importorskip("jax_triton", exc_type=ImportError)
if not any(device.platform in ("gpu", "cuda") for device in jax.devices()):
    pytest.skip("jax sees no GPU", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402

import safetune  # noqa: E402
from safetune import MissingChoice  # noqa: E402
from safetune.integrations.jax import triton_call  # noqa: E402
from safetune.miss import reporting  # noqa: E402

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def add_jax(x, y, n, out, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)
"""


@pytest.fixture
def tuner(import_file: Any, tmp_path: Path) -> Any:
    path = tmp_path / "add_jax_module.py"
    path.write_text(SOURCE)
    kernel = import_file("add_jax_module", path).add_jax
    configs = [triton.Config({"BLOCK": b}, num_warps=w) for b in (256, 1024) for w in (2, 8)]
    return safetune.safetune(configs=configs, key=["n"])(kernel)


def grid(meta: Any) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def adding(tuner: Any, **options: Any) -> Any:
    def add(x: Any, y: Any) -> Any:
        n = x.shape[0]
        return triton_call(
            x,
            y,
            n,
            kernel=tuner,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=lambda meta: (triton.cdiv(n, meta["BLOCK"]),),
            **options,
        )

    return add


def arrays(n: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.PRNGKey(n))
    return tuple(jax.random.normal(key, (n,), dtype) for key in keys)  # type: ignore[return-value]


def test_tuned_outside_jit_and_traced_inside(tuner: Any) -> None:
    x, y = arrays(10_000)
    add, begun = adding(tuner), reporting.tunings.begun

    eager = add(x, y)
    traced = jax.jit(add)(x, y)

    assert (eager == x + y).all()
    assert (traced == x + y).all()
    assert reporting.tunings.begun == begun + 1


def test_a_choice_made_through_torch_serves_jax(tuner: Any) -> None:
    a, b, out = (torch.randn(5000, device="cuda") for _ in range(3))
    tuner[lambda meta: (triton.cdiv(5000, meta["BLOCK"]),)](a, b, 5000, out)
    begun = reporting.tunings.begun
    x, y = arrays(5000)

    assert (jax.jit(adding(tuner))(x, y) == x + y).all()
    assert reporting.tunings.begun == begun
    found = tuner.resolve(x, y, 5000, x, grid=(1,))
    assert found.config is tuner.best_config
    assert found.scratch_bytes == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes(tuner: Any, dtype: Any) -> None:
    x, y = arrays(4096, dtype)
    assert (adding(tuner)(x, y) == x + y).all()


def test_one_kernel_call_in_the_lowering(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_triton import triton_lib

    x, y = arrays(3000)
    add = adding(tuner)
    add(x, y)
    monkeypatch.setattr(triton_lib.triton_kernel_call_lib, "TritonAutotunedKernelCall", None)

    text = jax.jit(add).lower(x, y).as_text()

    assert text.count("stablehlo.custom_call") == 1, text
    assert "triton_kernel_call" in text, text


@pytest.mark.parametrize("source", [0, 1], ids=["first input", "second input"])
def test_an_aliased_input_is_added_once(tuner: Any, source: int) -> None:
    """Tuning writes copies; the caller's arrays stay as they are, bit for bit, without donation."""
    n = 20_000
    x, y = arrays(n)
    before = [jnp.array(value, copy=True) for value in (x, y)]
    add = adding(tuner, input_output_aliases={source: 0})

    eager = add(x, y)
    traced = jax.jit(add)(x, y)

    for result, how in ((eager, "eager"), (traced, "jit")):
        assert (result == before[0] + before[1]).all(), how
    assert (x == before[0]).all()
    assert (y == before[1]).all()


@pytest.mark.skipif(not hasattr(jax_triton, "TensorDescriptor"), reason="needs jax-triton 0.4")
def test_a_kernel_with_one_pointer_for_an_input_and_its_output(
    import_file: Any, tmp_path: Path
) -> None:
    """By an alias and by a reference; in both cases tuned on copies, and written once."""
    path = tmp_path / "in_place_module.py"
    path.write_text(SOURCE.replace("n, out,", "n,").replace("tl.store(out", "tl.store(x"))
    kernel = import_file("in_place_module", path).add_jax
    configs = [triton.Config({"BLOCK": b}) for b in (256, 1024)]
    in_place = safetune.safetune(configs=configs, key=["n"])(kernel)
    x, y = arrays(20_000)
    before, options = jnp.array(x, copy=True), {"kernel": in_place, "grid": grid}

    def by_alias(x: Any, y: Any) -> Any:
        return triton_call(x, y, x.size, out_type=x, input_output_aliases={0: 0}, **options)

    def by_reference(x: Any, y: Any) -> Any:
        reference = jax.new_ref(x)
        triton_call(reference, y, x.size, out_type=(), **options)
        return reference[...]

    for call in (by_reference, by_alias, jax.jit(by_alias), jax.jit(by_reference)):
        assert (call(x, y) == before + y).all()
        assert (x == before).all()
    assert reporting.tunings.begun > 0


def test_a_miss_while_tracing(tuner: Any) -> None:
    x, y = arrays(7777)
    with pytest.raises(MissingChoice, match=r"n=7777.*`safetune tune --recorded`"):
        jax.jit(adding(tuner))(x, y)


def test_vmap(tuner: Any) -> None:
    x, y = arrays(64)
    with pytest.raises(safetune.TracingError, match=r"jax\.vmap"):
        jax.vmap(adding(tuner))(x.reshape(4, 16), y.reshape(4, 16))


@pytest.mark.two_gpus
def test_two_gpus(tuner: Any) -> None:
    x, y = arrays(9000)
    add = adding(tuner)
    for device in jax.devices()[:2]:
        a, b = jax.device_put(x, device), jax.device_put(y, device)
        result = jax.jit(add)(a, b) if device.id else add(a, b)
        assert result.devices() == {device}
        assert (result == a + b).all()


def test_aliases_of_stock_jax_triton_are_recorded(
    fresh_process: Any, record_property: Any, tmp_path: Path
) -> None:
    """No claim, but a record: in pytest's summary, whatever it is."""
    script, rows = Path(__file__).parent / "scripts" / "stock_jax_aliases.py", tmp_path / "rows"
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    fresh_process(script, "--out", rows, env=env)
    lines = rows.read_text().splitlines()
    for line in lines:
        record_property("seen", line)
    cases = [json.loads(line) for line in lines][1:]
    assert len(cases) == 4
    assert all("right" in case or "error" in case for case in cases), cases
