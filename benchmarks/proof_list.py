"""Which tests of which libraries `proofs.py` runs, and their versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEPS = Path(__file__).resolve().parent / "proof_tutorials.py"


@dataclass(frozen=True)
class Proof:
    """Tests of a library.

    Attributes:
        folder: of the sources; the tests run in it.
        package: what the shim is put into: an installed package, or a folder of the sources.
        first: the test that is the first step.
        tests: the arguments for pytest that select all tests.
        options: for pytest, without which none of the tests runs.
    """

    name: str
    folder: str
    package: str
    first: str
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()

    def arguments(self, state: str) -> tuple[str, ...]:
        """Return pytest's arguments for all tests, or for the first step alone."""
        return (*(self.tests if state == "all" else (self.first,)), *self.options)


#: FLA refuses the gated delta rule's backward pass on an H100 with Triton 3.4 to 3.7.0, which gets
#: it wrong: its tests here are those of the forward pass.
#:
#: Where the sources are from; the commit of FLA's tests is of 22 August 2026, the last that a copy
#: of its repository had. What their names say in 0.6.0 is the same.
VERSIONS = {
    "fla": "fla-core 0.6.0, flash-linear-attention 0.6.0; tests of commit bc3b101",
    "liger": "liger-kernel 0.8.5, tests of its sdist",
    "tutorials": "Triton 3.6's, commit 004d7f5",
    "finegrained-fp8": "kernels 0.17.2; huggingface/kernels-community at 40d4194",
}
GLA, DELTA = "tests/ops/test_gla.py", "tests/ops/test_delta.py"
GATED, KDA = "tests/ops/test_gdn.py", "tests/ops/test_kda.py"
NORM, MOE = "tests/modules/test_layernorm.py", "test/transformers/test_fused_moe.py"
DYT, MLP = "test/transformers/test_dyt.py", "test/transformers/test_mlp.py"
FP8 = "tests/test_matmul.py"
TUTORIALS = {
    "03": "matrix multiplication",
    "06": "attention",
    "08": "grouped GEMM",
    "09": "persistent matmul",
}
PROOFS = (
    Proof(
        "FLA: layer norm",
        "fla",
        "fla",
        f"{NORM}::test_layernorm[True-True-128-512-2-2]",
        (NORM, "-k", "test_layernorm[ and 128-512-2-2 or small_t[128"),
    ),
    Proof(
        "FLA: GLA",
        "fla",
        "fla",
        f"{GLA}::test_chunk[B2-T1024-H8-D128-gate_logit_normalizer1-torch.float16]",
        (GLA, "-k", "test_chunk and B2-T1024-H8-D128"),
    ),
    Proof(
        "FLA: delta rule",
        "fla",
        "fla",
        f"{DELTA}::test_chunk[B3-T2000-H4-D128-scale0.1-False]",
        (DELTA, "-k", "test_chunk[B and H4-D128"),
    ),
    Proof(
        "FLA: gated delta rule",
        "fla",
        "fla",
        f"{GATED}::test_chunk_varlen_prefill[H4-D64-mask_p0-cu_seqlens[0, 256, 500, 1000]"
        "-torch.float16]",
        (GATED, "-k", "prefill[H4-D64 or test_gate or test_fused_recurrent[B4-T1024"),
    ),
    Proof(
        "FLA: KDA",
        "fla",
        "fla",
        f"{KDA}::test_chunk[B4-T1024-H4-HV4-D128-scale0.1-gate_logit_normalizer1-mask_p0"
        "-use_qk_l2normTrue-use_gateFalse-torch.float16-safe_gateTrue-disable_recomputeFalse"
        "-chunk_size64]",
        (KDA, "-k", "test_chunk[B4-T1024 or test_gate[B1-T2"),
    ),
    Proof(
        "Liger: DyT",
        "liger",
        "liger_kernel",
        f"{DYT}::test_liger_dyt_correctness[dtype0-1e-05-1e-05-1e-05-0.001-2-8-4096-0.5-True]",
        (DYT, "-k", "4096"),
    ),
    Proof(
        "Liger: fused MoE",
        "liger",
        "liger_kernel",
        f"{MOE}::test_correctness[dtype0-0.001-0.0001-512-8-256-128-2]",
        (MOE, "-k", "dtype0 and 512-8-256-128-2 or one_expert"),
    ),
    Proof(
        "Liger: MLP",
        "liger",
        "liger_kernel",
        f"{MLP}::test_correctness_llamamlp[dtype1-2-256-256-512]",
        (MLP, "-k", "2-256-256-512 or hidden_act or misaligned"),
    ),
    *(
        Proof(
            f"Triton's tutorial {number}: {words}",
            "tutorials",
            "tutorials",
            f"{STEPS}::test_{number}",
            (f"{STEPS}::test_{number}",),
        )
        for number, words in TUTORIALS.items()
    ),
    Proof(
        "Hugging Face kernels: finegrained-fp8",
        "finegrained-fp8",
        "finegrained-fp8",
        f"{FP8}::test_matmul[fp8_M16_N1024_K2048_b128x128_bf16]",
        (
            FP8,
            "-k",
            "fp8_M16 and not compile and not mxfp8 or mxfp8_M32_N256_K512_bf16 and not compile",
        ),
        options=("-p", "proof_hub"),
    ),
)
