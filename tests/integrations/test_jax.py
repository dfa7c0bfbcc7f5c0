"""What JAX lowers for a safetuned kernel, for a GPU that is not there.

Needs jax, jax-triton and the jax-cuda plugin (`pip install safetune[jax]` on a machine with CUDA
wheels; no GPU). They are 150 MB, so the default environment is without, and this file is skipped;
tests/compilers/test_resolve.py shows the same choices without JAX.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

jax = pytest.importorskip("jax", reason="needs jax: pip install 'safetune[jax]'")
pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402
import jax_triton  # noqa: E402

from safetune import InvalidSetting, MissingChoice, TracingError  # noqa: E402
from safetune.compilers.resolve import Resolved  # noqa: E402
from safetune.integrations.jax import triton_call  # noqa: E402
from tests.compilers import traced  # noqa: E402

N = 1000
#: Since jax-triton 0.4.
BY_REFERENCE = "out_type" in inspect.signature(jax_triton.triton_call).parameters
OUT = "out_type" if BY_REFERENCE else "out_shape"


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`scale_kernel` with its output last, as JAX has it; BLOCK=256 and 2 warps are stored."""
    path = tmp_path / "scale_jax.py"
    path.write_text(traced.SOURCE.replace("dst, src, n", "src, n, dst"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(Resolved, "scratch_bytes", 0)
    with traced.a_gpu_to_trace_for():
        tuner = traced.kernel(module, configs=traced.configs(64, 128, 256, num_warps=2))
        x = torch.zeros(N)
        traced.choose(tuner, tuner.configs[2], x, N, x)
        yield tuner


def scaling(tuner: Any, **options: Any) -> Any:
    def scale(x: Any) -> Any:
        return triton_call(
            x,
            N,
            kernel=tuner,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),),
            compute_capability=90,
            **options,
        )

    return scale


def lowered(function: Any, *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_one_plain_kernel_reaches_xla(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_triton import triton_lib

    made: list[Any] = []
    library = triton_lib.triton_kernel_call_lib
    plain = library.TritonKernelCall

    def noting(kernel: Any, *grid_and_parameters: Any) -> Any:
        made.append(grid_and_parameters[:3])
        return plain(kernel, *grid_and_parameters)

    monkeypatch.setattr(library, "TritonKernelCall", noting)
    monkeypatch.setattr(library, "TritonAutotunedKernelCall", None)  # calling it would raise

    text = lowered(scaling(tuner), jnp.zeros(N))

    assert text.count("triton_kernel_call") == 1
    assert made == [(4, 1, 1)]


def test_stock_jax_triton_on_the_tuner_is_refused(tuner: Any) -> None:
    def stock(x: Any) -> Any:
        return jax_triton.triton_call(
            x, N, kernel=tuner, **{OUT: x}, grid=(1,), compute_capability=90
        )

    with pytest.raises(TracingError, match=r"integrations\.jax\.triton_call"):
        lowered(stock, jnp.zeros(N))


def test_aliases(tuner: Any) -> None:
    text = lowered(scaling(tuner, input_output_aliases={0: 0}), jnp.zeros(N))
    assert "output_operand_alias" in text
    with pytest.raises(InvalidSetting, match=r"\{0: 1\}.*1 input array and 1 output,"):
        lowered(scaling(tuner, input_output_aliases={0: 1}), jnp.zeros(N))


def test_the_outputs_have_one_of_two_names(tuner: Any) -> None:
    x = jnp.zeros(N)
    options: dict[str, Any] = {"kernel": tuner, "grid": (1,), "compute_capability": 90}
    by_type = lowered(lambda x: triton_call(x, N, out_type={"y": x}, **options)["y"], x)
    assert by_type == lowered(lambda x: triton_call(x, N, out_shape=[x], **options)[0], x)
    for outputs in ({}, {"out_type": x, "out_shape": x}):
        with pytest.raises(InvalidSetting, match="needs out_type="):
            triton_call(x, N, **outputs, **options)


@pytest.mark.skipif(not BY_REFERENCE, reason="this jax-triton has no references")
def test_a_kernel_with_one_pointer_for_an_input_and_its_output(tuner: Any, tmp_path: Path) -> None:
    """By an alias, as jax-triton 0.4 has it, and by a reference: the same program."""
    text = traced.SOURCE.replace("dst, src, n", "src, n").replace("(dst", "(src")
    module = traced.load(tmp_path / "in_place_jax.py", text)
    in_place = traced.kernel(module, configs=traced.configs(64, 128))
    x = torch.zeros(N)
    traced.choose(in_place, in_place.configs[1], x, N)
    options: dict[str, Any] = {"kernel": in_place, "grid": (1,), "compute_capability": 90}

    def by_alias(x: Any) -> Any:
        return triton_call(x, N, out_type=x, input_output_aliases={0: 0}, **options)

    def by_reference(x: Any) -> Any:
        reference = jax.new_ref(x)
        assert triton_call(reference, N, out_type=(), **options) == ()
        return reference[...]

    named = [lowered(each, jnp.zeros(N)) for each in (by_alias, by_reference)]
    assert named[0].replace("by_alias", "by_reference") == named[1]
    assert "output_operand_alias" in named[0]


def test_scalars_are_no_arrays_and_names_no_places(tuner: Any) -> None:
    """jax-triton takes a numpy integer for an array, and counts as inputs what is left."""

    def call(x: Any, n: Any, **options: Any) -> Any:
        return triton_call(
            x, n, kernel=tuner, out_shape=x, grid=(1,), compute_capability=90, **options
        )

    x = jnp.zeros(N)
    assert lowered(lambda x: call(x, np.int64(N)), x) == lowered(lambda x: call(x, N), x)
    for aliases in ({1: 0}, {"src": 0}):
        with pytest.raises(InvalidSetting, match="1 input array and 1 output"):
            lowered(lambda x: call(x, np.int64(N), input_output_aliases=aliases), x)  # noqa: B023


def test_kernels_and_grids_that_cannot_be_called_are_errors(tuner: Any) -> None:
    x = jnp.zeros(N)
    with pytest.raises(InvalidSetting, match="gets num_warps from its config"):
        triton_call(x, N, kernel=tuner, out_shape=x, grid=(1,), num_warps=8)
    with pytest.raises(
        InvalidSetting, match="grid=None is not a launch"
    ):  # for jax-triton, one program
        triton_call(x, N, kernel=tuner, out_shape=x, grid=None)
    with pytest.raises(InvalidSetting, match="put @safetune"):
        triton_call(x, N, kernel=print, out_shape=x, grid=(1,))


def test_scratch_memory_is_refused(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax-triton would pass none."""
    monkeypatch.setattr(Resolved, "scratch_bytes", 128)
    with pytest.raises(TracingError, match=r"scale_kernel needs 128 bytes of scratch memory"):
        lowered(scaling(tuner), jnp.zeros(N))


def test_a_miss_while_tracing(tuner: Any) -> None:
    with pytest.raises(MissingChoice, match=r"bfloat16.*`safetune tune --recorded`"):
        lowered(scaling(tuner), jnp.zeros(N, jnp.bfloat16))


def test_a_tracer_among_real_arrays(tuner: Any) -> None:
    """Nothing is tuned on one half of the data."""
    known = jnp.zeros(N, jnp.float16)

    def resolving(x: Any) -> Any:
        tuner.resolve(known, N, x, grid=(1,))
        return x

    with pytest.raises(MissingChoice):
        jax.jit(resolving).trace(known)


def test_vmap(tuner: Any) -> None:
    with pytest.raises(TracingError, match=r"jax\.vmap"):
        jax.vmap(scaling(tuner))(jnp.zeros((2, N)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "float8_e4m3fn"])
def test_the_key_is_torch_s(tuner: Any, dtype: str) -> None:
    x = torch.zeros(N, dtype=getattr(torch, dtype))
    struct = jax.ShapeDtypeStruct((N,), getattr(jnp, dtype))
    traced.choose(tuner, tuner.configs[0], x, N, x)

    assert tuner.resolve(struct, N, struct).provenance == "stored"


def test_the_lowered_call_names_the_choice_and_no_other_config(tuner: Any) -> None:
    """The serialised call is compressed in the module: it names one kernel, of 2 warps."""
    compiled = jax.jit(scaling(tuner)).trace(jnp.zeros(N)).lower(lowering_platforms=("cuda",))
    module = compiled.compiler_ir("stablehlo")
    (call,) = (
        op.attributes
        for function in module.body.operations
        for block in function.regions[0].blocks
        for op in block.operations
        if op.operation.name == "stablehlo.custom_call"
    )
    if BY_REFERENCE:
        proto = zlib.decompress(call["mhlo.backend_config"]["opaque"].value_bytes)
    else:
        proto = zlib.decompress(call["backend_config"].value_bytes)
    assert proto.count(b"scale_kernel") >= 1
    assert b"BLOCK" not in proto  # an autotuned call carries each config's text
