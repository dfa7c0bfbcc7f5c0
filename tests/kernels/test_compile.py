"""Every config compiles, and keeps its tile in registers, on each generation; no GPU needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

SCRIPT = Path(__file__).with_name("compile_kernels.py")

#: What one program may have on each generation.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

#: A register or two of the tallest tiles go to memory. What spilling looks like is 260 to 500
#: bytes: FLA's kernels, or 16384 columns here.
FEW_BYTES = 64

#: What the kernel for long rows keeps in memory at 16385 columns, with Triton 3.9: where no address
#: is good for a vector, each element has one of its own.
UNALIGNED_BYTES = 640


def compiled(fresh_process: FreshProcess, *arguments: object) -> list[dict[str, Any]]:
    done = fresh_process(
        SCRIPT, *arguments, env={"TRITON_INTERPRET": None}, timeout_s=400, warm=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(results: list[dict[str, Any]]) -> None:
    assert results
    for result in results:
        assert result["local_bytes"] <= FEW_BYTES, result
        # Long rows in stages are for the larger machines; elsewhere the tuner drops those configs.
        if result["columns"] <= 8192 or result["config"].get("PIPELINE_STAGES", 1) == 1:
            assert result["shared_bytes"] <= SHARED_BYTES[result["capability"]], result
        if result["kernel"] != "finalize":
            assert result["vector_stores"], result
        if result["config"].get("PIPELINE_STAGES", 1) > 1:
            assert result["asynchronous_copies"], result
        if result["columns"] <= result["config"].get("TILE_ELEMENTS", 0):
            # A program's first rows are on their way before its warps wait for each other.
            assert result["waits_before_copies"] == 0, result
    spills = [result["local_bytes"] > 16 for result in results]
    assert sum(spills) <= len(spills) // 8


@pytest.mark.internals
@pytest.mark.parametrize("capability", [80, pytest.param(100, marks=pytest.mark.full), 90, 120])
def test_the_first_config_compiles(fresh_process: FreshProcess, capability: int) -> None:
    results = compiled(fresh_process, capability, 1024, "--first")
    assert {result["kernel"] for result in results} == {"forward", "backward", "finalize"}
    check(results)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "columns"),
    [
        *((80, 1024), (120, 1024), (120, 16384), (100, 1024), (100, 16384)),
        *((90, 256), (90, 1024), (90, 8192), (90, 16384), (90, 32768)),
    ],
)
def test_every_config_compiles(fresh_process: FreshProcess, capability: int, columns: int) -> None:
    check(compiled(fresh_process, capability, columns))


@pytest.mark.internals
@pytest.mark.parametrize(
    ("capability", "columns", "which"),
    [
        (80, (50,), ["--first", "--dtype", "fp64"]),
        pytest.param(90, (256, 4096, 8192), [], marks=[pytest.mark.full, pytest.mark.slow]),
    ],
)
def test_the_kernels_for_few_rows_compile(
    fresh_process: FreshProcess, capability: int, columns: tuple[int, ...], which: list[str]
) -> None:
    kernels = [text for name in ("few_forward", "few_backward") for text in ("--kernel", name)]
    results = compiled(fresh_process, capability, *columns, *kernels, *which)
    assert {result["kernel"] for result in results} == {"few_forward", "few_backward"}
    for result in results:
        assert result["local_bytes"] == 0, result
        # Columns of no power of two have no addresses for vectors.
        assert result["vector_stores"] or columns == (50,), result
        assert result["shared_bytes"] <= min(SHARED_BYTES.values()), result


@pytest.mark.internals
@pytest.mark.parametrize("columns", [pytest.param(16385, marks=pytest.mark.full), 32768])
def test_the_kernel_for_long_rows_compiles(fresh_process: FreshProcess, columns: int) -> None:
    """For bf16, it keeps what it has read in registers, and most of it where rows are unaligned."""
    results = compiled(fresh_process, 90, columns, "--kernel", "long_backward")
    most = FEW_BYTES if columns % 8 == 0 else UNALIGNED_BYTES
    assert [result["local_bytes"] <= most for result in results] == [True, True]


#: Columns on both sides of each change of the first config, and the most.
WIDTHS = (1, 4096, 4097, 5120, 8192, 9216, 16384, 16385, 2**18)


@pytest.mark.parametrize(
    ("capability", "dtype", "columns"),
    [
        (120, "fp64", (5120, 9216)),
        *(
            pytest.param(capability, dtype, WIDTHS, marks=[pytest.mark.full, pytest.mark.slow])
            for capability in SHARED_BYTES
            for dtype in ("bf16", "fp16", "fp32", "fp64")
        ),
    ],
)
def test_what_a_pinned_call_launches_fits_every_card(
    fresh_process: FreshProcess, capability: int, dtype: str, columns: tuple[int, ...]
) -> None:
    """Nothing stands in for a pinned config that needs too much shared memory."""
    results = compiled(fresh_process, capability, *columns, "--pinned", "--dtype", dtype)
    assert len(results) == 5 * len(columns)
    for result in results:
        assert result["shared_bytes"] <= SHARED_BYTES[capability], result
        assert result["fp32"] == (dtype != "fp64"), "fp64 is computed in fp64 throughout"


@pytest.mark.slow
def test_fp32_and_columns_of_no_power_of_two_compile(fresh_process: FreshProcess) -> None:
    for result in compiled(fresh_process, 90, 50, "--first", "--dtype", "fp32"):
        assert result["local_bytes"] == 0, result
