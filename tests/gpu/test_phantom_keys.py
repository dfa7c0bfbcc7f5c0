"""A name in `key` that nothing reads costs neither a tuning nor a compilation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import triton

from safetune import safetune

pytestmark = pytest.mark.gpu

#: (T, NB): six sizes, one a multiple of 16 and the next not, and four buckets.
SIZES = [(64, 1), (1000, 1), (2049, 2), (4096, 2), (5003, 3), (8192, 4)]

Tunings = Callable[[], list[str]]


def test_six_sizes_and_four_buckets_are_one_tuning_and_one_compilation(
    kernels: Any, device: str, parent: Any, tunings: Tunings, trials: Callable[[], list[Any]]
) -> None:
    configs = [triton.Config({"BT": rows}, num_warps=w) for rows in (8, 32) for w in (2, 4)]
    kernel = safetune(configs=configs, key=["D", "NB"])(kernels.row_norm_kernel)
    width = 64

    def call(tokens: int, bucket: int) -> None:
        x = torch.randn(tokens, width, device=device)
        out = torch.full_like(x, float("nan"))
        kernel[lambda meta: (triton.cdiv(meta["T"], meta["BT"]),)](
            x, out, tokens, D=width, NB=bucket
        )
        torch.testing.assert_close(out, F.rms_norm(x, (width,), eps=1e-6))

    with pytest.warns(
        UserWarning, match="'NB' in key= of .* is never read, so safetune ignores it"
    ):
        call(*SIZES[0])
    for size in SIZES[1:]:
        call(*size)
    assert tunings() == ["row_norm_kernel"]
    assert len(trials()) == len(configs)
    if device == "cuda":
        assert len(parent.compiled) == len(parent.loaded) == 1
        assert len(parent.binaries()) == len(configs)
        assert parent.binaries_before == [parent.binaries()]


@pytest.fixture
def fla_norms(import_file: Any, tmp_path: Path) -> Any:
    """`fla/modules/norm/layernorm.py` of fla-core 0.6.0 with `triton.autotune` made `safetune`."""
    fla = pytest.importorskip("fla", reason="needs the wheel fla-core 0.6.0")
    pytest.importorskip("einops", reason="fla-core needs einops")
    source = (Path(next(iter(fla.__path__))) / "modules/norm/layernorm.py").read_text()
    assert source.count("@triton.autotune(") == 4
    replaced = source.replace("@triton.autotune(", "@safetune(").replace(
        "import triton\n", "import triton\nfrom safetune import safetune\n", 1
    )
    path = tmp_path / "fla_norms_under_safetune.py"
    path.write_text(replaced)
    return import_file("fla_norms_under_safetune", path)


@pytest.fixture
def sizes(device: str) -> list[int]:
    """Six values of T: four of FLA's buckets of 2048 on a GPU, small ones in the interpreter."""
    return [tokens if device == "cuda" else tokens // 64 + 1 for tokens, _ in SIZES]


@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
def test_fla_forward(
    fla_norms: Any,
    device: str,
    parent: Any,
    tunings: Tunings,
    sizes: list[int],
    is_rms_norm: bool,
) -> None:
    width = 256
    weight, bias = (torch.randn(width, device=device) for _ in range(2))
    for tokens in sizes:
        x = torch.randn(tokens, width, device=device)
        y, *_ = fla_norms.layer_norm_fwd(x, weight, bias, is_rms_norm=is_rms_norm)
        right = _definition(x.double(), weight.double(), bias.double(), is_rms_norm)
        torch.testing.assert_close(y.double(), right, rtol=1e-4, atol=1e-4)
    assert tunings() == ["layer_norm_fwd_kernel"]
    if device == "cuda":
        assert len(parent.compiled) == len(parent.loaded) == 1
        assert parent.binaries_before == [parent.binaries()]


@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
def test_fla_backward_with_and_without_a_residual_gradient(
    fla_norms: Any,
    device: str,
    parent: Any,
    tunings: Tunings,
    sizes: list[int],
    is_rms_norm: bool,
) -> None:
    """HAS_DRESIDUAL is read, so it makes a second tuning; T and NB make none.

    BS, a program's share of the rows, is a constexpr that the body reads and that follows T: each
    of its values is compiled, as without a tuner, and none is tuned.
    """
    width = 256
    weight, bias = (torch.randn(width, device=device) for _ in range(2))
    shares = set()
    for has_residual_gradient in (False, True):
        for tokens in sizes:
            x, dy, dres = (torch.randn(tokens, width, device=device) for _ in range(3))
            _, mean, rstd, _ = fla_norms.layer_norm_fwd(x, weight, bias, is_rms_norm=is_rms_norm)
            dx, dw, db, dres_in = fla_norms.layer_norm_bwd(
                dy,
                x,
                weight,
                bias,
                mean,
                rstd,
                dres=dres if has_residual_gradient else None,
                has_residual=has_residual_gradient,
                is_rms_norm=is_rms_norm,
            )
            leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
            _definition(*leaves, is_rms_norm).backward(dy.double())
            right = [leaf.grad for leaf in leaves]
            if has_residual_gradient:
                right[0] = right[0] + dres.double()
                assert dres_in.data_ptr() == dx.data_ptr()
            for mine, exact in zip((dx, dw, db), right, strict=True):
                error = (mine.double() - exact).norm() / exact.norm()
                assert error < 1e-5, (tokens, has_residual_gradient, float(error))
            shares.add((has_residual_gradient, _rows_per_program(fla_norms, tokens)))
    tuned = tunings()
    assert sorted(tuned) == ["layer_norm_bwd_kernel"] * 2 + ["layer_norm_fwd_kernel"]
    if device == "cuda":
        backward = [line for line in parent.compiled if line.startswith("layer_norm_bwd")]
        assert len(backward) == len(shares)


def _rows_per_program(fla_norms: Any, tokens: int) -> int:
    programs = min(fla_norms.get_multiprocessor_count(0), tokens)
    return -(-tokens // programs)


def _definition(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, is_rms_norm: bool
) -> torch.Tensor:
    centred = x if is_rms_norm else x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return centred * rstd * weight + bias
