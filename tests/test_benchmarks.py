"""The benchmarks' figures follow from their rows, here and in every result that is committed."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import triton
import triton.language as tl

import safetune
from tests.ready import is_ready

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ["tuning_time", "launch_overhead", "choice_quality", "startup", "store", "unmodified"]
SCRIPTS += ["argument_size", "first_tuning", "install_time", "sweep", "search_replay"]
FOLDER = BENCHMARKS / "results"
RESULTS = sorted(FOLDER.rglob("*.json"))

#: Results whose command was written down in words, by hand, and is not known any more.
IN_WORDS = {
    "NVIDIA_H100_80GB_HBM3/fused_moe_sweep.json",
    "NVIDIA_H100_80GB_HBM3/triton_3.9.0/first_tuning.json",
}


def name_of(path: Path) -> str:
    """A committed result's path in the folder of results: device, newer Triton if any, file."""
    return path.relative_to(FOLDER).as_posix()


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and _is_ours(sys.modules[name]):
            del sys.modules[name]


def _is_ours(module: ModuleType) -> bool:
    return Path(str(module.__file__)).parent == BENCHMARKS


def first_call(part: int, state: str, tuner: str, seconds: float, whole: float) -> dict[str, Any]:
    row = {"kind": "first_call", "part": part, "state": state, "tuner": tuner}
    return {**row, "first_call_s": seconds, "process_s": whole, "config": "BM: 64", "failed": 2}


def choice(part: int, tuner: str, median_ms: float) -> dict[str, Any]:
    return {"kind": "choice", "part": part, "tuner": tuner, "median_ms": median_ms}


def further(key: str, tuner: str, seconds: float) -> dict[str, Any]:
    return {"kind": "further_key", "part": 0, "key": key, "tuner": tuner, "seconds": seconds}


TUNING_ROWS = [
    further("further_key", "safetune", 2.0),
    further("further_key", "triton", 8.0),
    further("further_key_128MiB", "safetune", 4.5),
    further("further_key_128MiB", "triton", 9.0),
    first_call(0, "cold", "safetune", 8.0, 14.0),
    first_call(0, "cold", "triton", 64.0, 70.0),
    first_call(0, "warm", "safetune", 6.0, 12.0),
    first_call(0, "warm", "triton", 8.0, 14.0),
    first_call(1, "cold", "triton", 66.0, 73.0),
    first_call(1, "cold", "safetune", 10.0, 16.0),
    first_call(1, "warm", "triton", 10.0, 17.0),
    first_call(1, "warm", "safetune", 9.0, 15.0),
    choice(0, "safetune", 0.20),
    choice(0, "triton", 0.21),
    choice(1, "safetune", 0.22),
    choice(1, "triton", 0.20),
]


def test_tuning_time_figures() -> None:
    figures = importlib.import_module("tuning_time").figures(TUNING_ROWS)
    assert figures["wall_ratio_cold"] == pytest.approx(9.0 / 65.0)
    assert figures["wall_ratio_warm"] == pytest.approx(7.5 / 9.0)
    assert figures["process_ratio_cold"] == pytest.approx(15.0 / 71.5)
    assert figures["first_call_s_cold_safetune"] == 9.0
    assert figures["first_call_s_warm_triton"] == 9.0
    assert figures["regret_worst_safetune"] == pytest.approx(0.1)
    assert figures["regret_median_safetune"] == pytest.approx(0.05)
    assert figures["regret_worst_triton"] == pytest.approx(0.05)
    assert figures["alternations"] == 2.0
    assert figures["further_key_ratio"] == 0.25
    assert figures["further_key_128MiB_ratio"] == 0.5


def swept(part: int, key: str, seconds: float, regret: float) -> dict[str, Any]:
    row = {"part": part, "key": key, "seconds": seconds, "regret": regret}
    return {**row, "phase_s_measure": seconds / 2}


SWEEP_ROWS = [
    swept(0, "first", 100.0, 0.0),
    swept(0, "further", 14.0, 0.02),
    swept(1, "first", 90.0, 0.001),
    swept(1, "further", 15.0, 0.0),
]


def test_sweep_figures() -> None:
    assert importlib.import_module("sweep").figures(SWEEP_ROWS) == {
        "first_key_s": 95.0,
        "first_key_regret_worst": 0.001,
        "phase_s_measure_first": 47.5,
        "further_key_s": 14.5,
        "further_key_regret_worst": 0.02,
        "phase_s_measure_further": 7.25,
        "sweeps": 2.0,
    }
    assert importlib.import_module("sweep").figures([]) == {"sweeps": 0.0}


def searched(strategy: str, budget: int, *regrets: int) -> dict[str, Any]:
    row = {"part": "matmul.json.gz M=64", "space": "matmul", "strategy": strategy}
    return {**row, "budget": budget, "regrets": list(regrets)}


SEARCH_ROWS = [
    searched("random", 100, *range(1000)),
    searched("search", 100, 0, 0, 200, 930),
    searched("search", 100, 0, 0, 0, 0, 0, 450),
    searched("search_neighbours", 32, 0, 39),
]


def test_search_replay_figures() -> None:
    """Over all keys and seeds together, in fractions of the best time."""
    assert importlib.import_module("search_replay").figures(SEARCH_ROWS) == {
        "matmul_random_100_median": 0.04995,
        "matmul_random_100_p90": 0.09,
        "matmul_search_100_median": 0.0,
        "matmul_search_100_p90": 0.093,
        "matmul_search_neighbours_32_median": 0.00195,
        "matmul_search_neighbours_32_p90": 0.0039,
    }


def test_a_replayed_search_sees_the_stored_times_and_its_regret_is_to_the_best(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn")
    replay = importlib.import_module("search_replay")
    configs = [{"BM": 16 << i, "BN": 16 << j, "num_warps": 4} for i in range(6) for j in range(6)]
    valley = [1.0 + abs(i - 3) + abs(j - 2) for i in range(6) for j in range(6)]
    keys = [
        {
            "name": f"M={m}",
            "median_ms": [None if i == 5 else m * ms for i, ms in enumerate(valley)],
            "verdicts": ["out_of_resources" if i == 5 else "ok" for i in range(36)],
        }
        for m in (64, 128, 1024)
    ]
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"configs": configs, "keys": keys}).encode()))
    _, found = replay.space(path)
    assert found["M=64"].best == 3 * 6 + 2
    assert found["M=64"].regret([0, 5]) == 5.0
    assert found["M=64"].regret([5]) == float("inf")
    for strategy, budget in (("random", 36), ("search", 20), ("search_neighbours", 3)):
        tried = replay.search(path, "M=64", strategy, 0, budget)
        assert len(tried) == budget or found["M=64"].best in tried, "no search ends before that"
        assert replay.regret(path, "M=64", strategy, budget, 0) == 0, strategy
    assert replay.sweep(path, 0) == [0, 0, 0]
    nearest = replay.start(path, "M=64", 2).neighbours
    assert [round(each.distance) for each in nearest] == [1, 4]


def test_the_sweep_has_1920_configs() -> None:
    configs = importlib.import_module("grouped_matmul").configs
    assert len({str(config) for config in configs()}) == len(configs()) == 1920
    assert len(configs(most=5)) == 5


LIBRARY = """
import triton
from sglang.srt.environ import envs
from sglang.srt.utils import is_cuda, is_hip
assert not is_cuda() and not envs.SGLANG_USE_AITER.get()

@triton.jit
def fused_moe_kernel(a_pointer):
    pass
"""


@pytest.fixture
def fused_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, beside an SGLang of which only the kernel's file is there."""
    folder = tmp_path / "sglang" / "kernels" / "ops" / "moe"
    folder.mkdir(parents=True)
    (folder / "fused_moe_triton_kernels.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("fused_moe")


def test_the_kernel_of_sglang_is_run_without_the_rest_of_it(fused_moe: ModuleType) -> None:
    assert fused_moe.library_kernel.fn.__module__ == "sglang_fused_moe"
    assert not [name for name in sys.modules if name.startswith("sglang.")]
    assert len(fused_moe.CONFIGS) == 1920
    spaces = importlib.import_module("search_spaces").spaces()
    assert {"fused_moe_bf16", "fused_moe_fp8"} <= set(spaces)
    assert len(spaces["fused_moe_bf16"]) == 18


def test_without_sglang_its_spaces_are_left_out() -> None:
    assert not any("moe" in name for name in importlib.import_module("search_spaces").spaces())
    with pytest.raises(ModuleNotFoundError, match="no sglang: pip install"):
        importlib.import_module("fused_moe")


def test_tokens_are_sorted_by_expert_in_whole_blocks_for_each_size_of_block(
    fused_moe: ModuleType,
) -> None:
    import torch

    experts, tokens = 16, 40
    chosen = torch.rand(tokens, experts).topk(fused_moe.TOP_K).indices
    table, owners, padded = fused_moe._sorted(chosen, experts)
    assert table.stride(0) % 16 == owners.stride(0) % 16 == 0, "one binary for all batch sizes"
    for block in fused_moe.TILES:
        count = int(padded[block // 16])
        assert count % block == 0
        rows = table[block // 16, :count].view(-1, block)
        real = rows < chosen.numel()
        assert sorted(rows[real].tolist()) == list(range(chosen.numel()))
        owner = owners[block // 16, : len(rows), None].expand_as(rows)
        assert torch.equal(chosen.flatten()[rows[real].long()], owner[real].long())


def fused_moe_row(dtype: str, tokens: int, regret: float | None) -> dict[str, Any]:
    row = {"part": dtype, "dtype": dtype, "wall_s": 150.5, "tokens": tokens}
    return {**row, "measured": 40, "regret": regret}


FUSED_MOE_ROWS = [
    *(fused_moe_row("bfloat16", 1, None), fused_moe_row("bfloat16", 64, 0.01)),
    *(fused_moe_row("bfloat16", 96, 0.03), fused_moe_row("float8_e4m3fn", 1, None)),
]


def test_fused_moe_sweep_figures() -> None:
    """The command's time is of all batch sizes; a regret only where all configs were measured."""
    module = importlib.import_module("fused_moe_sweep")
    assert module.figures(FUSED_MOE_ROWS) == {
        "fused_moe_bf16_wall_s": 150.5,
        "fused_moe_bf16_keys": 3,
        "fused_moe_bf16_configs": 120,
        "fused_moe_bf16_regret_keys": 2,
        "fused_moe_bf16_regret_median": 0.02,
        "fused_moe_bf16_regret_worst": 0.03,
        "fused_moe_fp8_wall_s": 150.5,
        "fused_moe_fp8_keys": 1,
        "fused_moe_fp8_configs": 40,
    }
    times = [({"BM": 16}, None), ({"BM": 32}, 2.0), ({"BM": 64}, 3.0)]
    assert module.regret({"BM": 64}, times) == 0.5
    assert module.regret({"BM": 16}, times) is None


def exhausted(tokens: int, measured: int) -> dict[str, Any]:
    row = {"part": "bfloat16", "kind": "key", "dtype": "bfloat16", "tokens": tokens}
    return {**row, "measured": measured, "ok": measured - 20, "disputed": 0}


EXHAUSTED_ROWS = [
    *({"part": "", "kind": "part", "dtype": "bfloat16", "wall_s": s} for s in (470.5, 12.25)),
    *(exhausted(tokens, 1920) for tokens in range(18)),
    {"part": "", "kind": "part", "dtype": "float8_e4m3fn", "wall_s": 300.0},
]


def test_the_time_of_an_exhaustive_sweep_is_that_of_all_parts_once_all_is_measured() -> None:
    figures = importlib.import_module("fused_moe_exhaustive").figures
    assert figures(EXHAUSTED_ROWS) == {
        "fused_moe_bf16_exhaustive_wall_s": 482.8,
        "fused_moe_bf16_exhaustive_parts": 2,
        "fused_moe_bf16_exhaustive_keys": 18,
        "fused_moe_bf16_exhaustive_configs": 34560,
        "fused_moe_bf16_exhaustive_ok": 34560 - 18 * 20,
        "fused_moe_bf16_exhaustive_disputed": 0,
    }
    assert figures(EXHAUSTED_ROWS[:2]) == {}
    few = figures([*EXHAUSTED_ROWS[:2], exhausted(1, 8)])
    assert few["fused_moe_bf16_exhaustive_configs"] == 8
    assert not any("wall" in name for name in few), "a trial run is not mistaken for all of it"


def test_an_exhaustive_sweep_begins_anew_unless_rows_and_store_are_of_one(tmp_path: Path) -> None:
    """After a change of the code, or on another machine: its time would not be that of all."""
    sweep = importlib.import_module("fused_moe_exhaustive").Sweep("bfloat16", tmp_path, (), 0)
    folder = tmp_path / "fused_moe_bf16"
    of_another = EXHAUSTED_ROWS[-1]
    rows = [of_another]
    (folder / "store").mkdir(parents=True)
    for name in ("store", "triton"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "of_other_code").touch()
    sweep.prepare(rows)
    assert sorted(path.name for path in folder.rglob("*")) == ["store"]
    rows += EXHAUSTED_ROWS[:1]
    (folder / "store" / "of_this_code").touch()
    sweep.prepare(rows)
    assert (folder / "store" / "of_this_code").exists()
    assert rows == [of_another, EXHAUSTED_ROWS[0]]
    (folder / "store" / "of_this_code").unlink()
    (folder / "store").rmdir()
    sweep.prepare(rows)
    assert rows == [of_another]


#: In the place of SGLang's kernel: a process that measures a config with a tile of 128 says so in
#: a pipe, where there is one, and waits to be killed.
WAITING_LIBRARY = """
import os, signal
import triton, triton.language as tl
from triton.language import constexpr

def wait(tile):
    if int(tile) == 128 and os.path.exists("PIPE"):
        with open("PIPE", "w") as pipe:
            pipe.write(f"{os.getpid()}\\n")
        signal.pause()

@triton.jit
def fused_moe_kernel(
    POSITIONAL, group_n, group_k, BLOCK_SIZE_M: constexpr, BLOCK_SIZE_N: constexpr,
    BLOCK_SIZE_K: constexpr, GROUP_SIZE_M: constexpr, MUL_ROUTED_WEIGHT: constexpr,
    top_k: constexpr, compute_type: constexpr, use_fp8_w8a8: constexpr,
    use_int8_w8a8: constexpr, use_int8_w8a16: constexpr, per_channel_quant: constexpr,
    even_Ks: constexpr, c_sorted: constexpr, swap_ab: constexpr,
    FUSE_ADD_TO_OUTPUT: constexpr, MASK_OUTPUT: constexpr, FUSE_SUM_ALL_REDUCE: constexpr,
    ROUTER_TOPK: constexpr,
):
    if tl.program_id(0) == 0:
        wait(BLOCK_SIZE_M)
        tl.store(p5 + tl.arange(0, 16), 1.0)
"""


@pytest.mark.full
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU gets the real thing, by hand"
)
def test_an_exhaustive_sweep_that_is_stopped_and_killed_goes_on(tmp_path: Path) -> None:
    """Its parts are added up, and a kill leaves no process."""
    folder = tmp_path / "sglang" / "kernels" / "ops" / "moe"
    folder.mkdir(parents=True)
    pipe = tmp_path / "pipe"
    text = WAITING_LIBRARY.replace("POSITIONAL", ", ".join(f"p{n}" for n in range(31)))
    (folder / "fused_moe_triton_kernels.py").write_text(text.replace("PIPE", str(pipe)))
    command = [sys.executable, str(BENCHMARKS / "fused_moe_sweep.py"), "--exhaustive", "bfloat16"]
    command += ["--configs", "8", "--tokens", "1", "2", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*more: str) -> tuple[str, dict[str, Any]]:
        done = subprocess.run(
            [*command, *more], env=env, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout, json.loads(path.read_text())

    path = tmp_path / "interpreter" / "fused_moe_exhaustive.json"
    told, stopped = run("--budget", "0")
    assert "run again for the rest" in told
    os.mkfifo(pipe)
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert is_ready(reader, 120.0), "no config was measured"
    child = int(os.read(reader, 100))
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(child)
        process.kill()
        assert is_ready(handle, 60.0), "a process outlives the script"
        os.close(handle)
    process.wait(60.0)
    pipe.unlink()
    killed = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in [*stopped["rows"], *killed]] == ["part"] * 3

    _, found = run()

    parts = [row for row in found["rows"] if row["kind"] == "part"]
    assert parts[:2] == killed
    assert (parts[2]["keys"], parts[2]["trials"]) == (2, 16)
    keys = [row for row in found["rows"] if row["kind"] == "key"]
    assert [(row["tokens"], row["measured"], row["ok"]) for row in keys] == [(1, 8, 8), (2, 8, 8)]
    assert found["figures"]["fused_moe_bf16_exhaustive_parts"] == 3
    space = tmp_path / "interpreter" / "search_trials" / "fused_moe_bf16.json.gz"
    configs, replayed = importlib.import_module("search_replay").space(space)
    assert (len(configs), [*replayed]) == (8, ["tokens=1", "tokens=2"])
    told, again = run()
    assert again["rows"] == found["rows"], "nothing is left to do"
    assert space.exists()


def test_tuning_time_figures_of_half_a_part() -> None:
    """No ratio of something to nothing, and no figure that was not measured."""
    module = importlib.import_module("tuning_time")
    assert module.figures([]) == {"alternations": 0.0}
    assert "further_key_ratio" not in module.figures(TUNING_ROWS[:1])
    figures = module.figures([row for row in TUNING_ROWS if row["kind"] == "first_call"][:1])
    assert "wall_ratio_cold" not in figures
    assert figures["first_call_s_cold_safetune"] == 8.0


ARGUMENT_ROWS = [
    {"part": f"{part} {kernel}", "kernel": kernel, "size": size, "tuner": tuner, "seconds": seconds}
    for part in range(3)
    for kernel, ours in (("add", 1.0), ("softmax", 3.0), ("in_place", 2.0))
    for size in ("12MiB", "192MiB", "768MiB", "3GiB", "6GiB", "6GiB_short")
    for tuner, seconds in (("safetune", ours), ("triton", 2.0))
]


def test_argument_size_figures_are_those_of_the_worst_kernel() -> None:
    figures = importlib.import_module("argument_size").figures
    found = figures(ARGUMENT_ROWS)
    assert found["ratio_6GiB"] == 1.5
    assert found["seconds_3GiB_add_safetune"] == 1.0
    assert found["alternations"] == 3.0
    without = figures([row for row in ARGUMENT_ROWS if row["kernel"] != "softmax"])
    assert not any(name.startswith("ratio") for name in without), "the worst is not known"


#: Four keys of a kernel with six configs: `a` is the fastest, but for the last key, where it fails.
PRUNE_ROWS = [
    {
        "kernel": "kernel",
        "key": str(key),
        "call": {},
        "declared": 6,
        "times": {"a": 1.0, "b": 1.02, "c": 3.0} if key < 3 else {"b": 1.25, "c": 1.0},
    }
    for key in range(4)
]


def test_prune_figures() -> None:
    """The last key is judged by lists made from the others: of `a`, and of `a` and `b`."""
    found = importlib.import_module("prune").figures(PRUNE_ROWS)
    assert found["kernel_keys"] == 4
    assert (found["kernel_shortest_kept"], found["kernel_third_kept"]) == (2, 2)
    assert (found["kernel_shortest_failed"], found["kernel_third_failed"]) == (1, 0)
    assert found["kernel_shortest_slower_worst"] == 0
    assert found["prune_third_slower_worst"] == pytest.approx(0.25)
    assert found["prune_third_slower_mean"] == pytest.approx(1.25 ** (1 / 4) - 1)


def test_fleet_figures() -> None:
    """The waits are those of the ranks that finished; what was stored is the whole fleet's."""
    whole = {"part": "postgres", "finished": False, "keys": 4, "keys_with_one_choice": 4}
    whole |= {"tunings": 4, "seconds": 3.0, "ideal_seconds": 2.0, "stored_bytes": 10}
    whole |= {"connections_at_once": 2, "refused": 3}
    nodes = [
        {"part": "postgres", "finished": True, "waits_s": waits, "warnings": 0}
        | {"requests": 4, "bytes": 6000}
        for waits in ([1.0, 2.0], [3.0, 6.0])
    ]
    found = importlib.import_module("fleet").figures([*nodes, whole])
    assert found["postgres_wait_s_median"] == 2.5
    assert found["postgres_wait_s_max"] == 6.0
    assert found["postgres_requests_per_tuning"] == 2.0
    assert found["postgres_kilobytes_per_tuning"] == 3.0
    assert found["postgres_connections_at_once"] == 2
    assert found["postgres_connections_refused"] == 3


ONE_DEVICE = {"devices": 1, "killed": False, "rate": 40.0, "wall_s": 30.0, "keys": 4, "tuned": 4}
DEVICES_ROWS = [ONE_DEVICE, *({**ONE_DEVICE, "devices": count, "rate": 76.0} for count in (2, 4))]


def test_devices_figures() -> None:
    one, two, _ = DEVICES_ROWS
    found = importlib.import_module("devices").figures([one, two, {**two, "killed": True}])
    assert found["2_devices_rate_ratio"] == 1.9
    assert found["2_devices_killed_keys_tuned"] == found["2_devices_killed_keys"] == 4
    assert "1_devices_rate_ratio" not in found


def test_dependency_figures() -> None:
    """Safetune itself is not among the packages that come with it."""
    package = {"what": "package", "version": "1", "licence": "MIT"}
    rows = [
        {**package, "name": "click", "bytes": 3e6},
        {**package, "name": "safetune", "bytes": 2e6},
        *(
            {"what": "process", "import_ms": ms, "decorate_ms": 9.0, "modules": 50}
            for ms in (4, 5, 90)
        ),
    ]
    assert importlib.import_module("dependency").figures(rows) == {
        "megabytes": 5.0,
        "megabytes_safetune": 2.0,
        "packages": 1.0,
        "import_ms": 5.0,
        "decorate_ms": 9.0,
        "modules": 50.0,
    }


def test_store_shared_figures() -> None:
    herd = {"what": "herd", "nodes": 300}
    rows = [{**herd, "served": 1.0, "ms": 100.0}, {**herd, "served": 0.0, "ms": 2000.0}]
    rows += [{"what": "directory", "case": "get", "ms": ms} for ms in (1.0, 2.0, 9.0)]
    assert importlib.import_module("store_shared").figures(rows) == {
        "herd_served_share_300_nodes": 0.5,
        "herd_ms_p50_300_nodes": 1050.0,
        "herd_ms_max_300_nodes": 2000.0,
        "directory_get_ms": 2.0,
    }
    assert importlib.import_module("store_shared").figures([]) == {}


def test_the_matrix_product_has_72_configs_and_no_two_alike() -> None:
    matmul = importlib.import_module("matmul")
    texts = [str(config) for config in matmul.configs()]
    assert len(texts) == len(set(texts)) == 72
    assert len(matmul.configs(most=5)) == 5
    block = {name: {c.kwargs[name] for c in matmul.configs()} for name in ("BM", "BN", "BK")}
    assert block == {"BM": {64, 128, 256}, "BN": {64, 128, 256}, "BK": {32, 64}}
    assert {(c.num_warps, c.num_stages) for c in matmul.configs()} == {
        (4, 3),
        (4, 4),
        (8, 3),
        (8, 4),
    }


def test_tuning_time_phases_and_isolation_cost() -> None:
    """Both are told, and neither is in a ratio or among the alternations."""
    phased = [
        {**row, "phase_s_compile": row["first_call_s"] / 2}
        if row["kind"] == "first_call" and row["tuner"] == "safetune"
        else row
        for row in TUNING_ROWS
    ]
    isolated = {**first_call(0, "cold", "safetune-isolated", 70.0, 75.0), "part": "isolation"}
    module = importlib.import_module("tuning_time")
    figures = module.figures([*phased, {**isolated, "kind": "isolation"}])
    assert figures.pop("phase_s_compile_cold") == 4.5
    assert figures.pop("phase_s_compile_warm") == 3.75
    assert figures.pop("first_call_s_cold_isolated") == 70.0
    assert figures == pytest.approx(module.figures(TUNING_ROWS))


def truth(part: str, **medians_ms: float) -> list[dict[str, Any]]:
    rows = [
        {"part": part, "kind": "truth", "config": config, "median_ms": median_ms}
        for config, median_ms in medians_ms.items()
    ]
    return [*rows, {"part": part, "kind": "truth", "config": "big", "failed": "out of resource"}]


def choices(part: str, tuner: str, *configs: str) -> list[dict[str, Any]]:
    row = {"part": part, "kind": "choice", "tuner": tuner, "seconds": 2.0, "failed": 1}
    return [{**row, "order": number, "config": config} for number, config in enumerate(configs)]


SLOW = {f"slow{number}": 2.0 for number in range(24)}
CHOICE_ROWS = [
    *truth("square", best=1.0, near=1.015, **SLOW),
    *choices("square", "safetune", "best", "near", "best", "best"),
    *choices("square", "triton", "near", "near", "slow1", "best"),
    *truth("odd", best=4.0, close=4.1, near=4.4),
    *choices("odd", "safetune", "near", "near", "near", "near"),
    *choices("odd", "triton", "best", "best", "best", "close"),
    {"part": "odd", "kind": "cost", "part_s": 60.0},
]


def test_choice_quality_figures() -> None:
    figures = importlib.import_module("choice_quality").figures(CHOICE_ROWS)
    assert figures["share_within_2pct"] == 4 / 8
    assert figures["share_within_1pct"] == 3 / 8
    assert figures["share_within_2pct_triton"] == 6 / 8
    assert figures["share_within_1pct_triton"] == 4 / 8
    assert figures["worst_regret"] == pytest.approx(0.1)
    assert figures["mean_regret"] == pytest.approx((0.015 + 4 * 0.1) / 8)
    assert figures["mean_regret_triton"] == pytest.approx((2 * 0.015 + 1.0 + 0.025) / 8)
    assert figures["mean_regret_ratio"] == pytest.approx(0.415 / 1.055)
    assert figures["most_common_share"] == pytest.approx((3 / 4 + 1) / 2)
    assert figures["most_common_share_triton"] == pytest.approx((2 / 4 + 3 / 4) / 2)
    assert figures["problems"] == 2.0
    assert figures["narrow_spaces"] == 1.0  # three configs


def test_choice_quality_without_a_regret_has_finite_figures() -> None:
    """A ratio to nothing is not infinite, and no figure is made of a tuner that did not run."""
    figures = importlib.import_module("choice_quality").figures
    best = [*truth("square", best=1.0, near=1.015), *choices("square", "safetune", "best")]
    assert "mean_regret_ratio" not in figures(best)
    both = [*best, *choices("square", "triton", "best")]
    assert figures(both)["mean_regret_ratio"] == 1.0
    assert figures([*both, *choices("square", "safetune", "near")])["mean_regret_ratio"] > 50
    assert figures([]) == {"problems": 0.0, "narrow_spaces": 0.0}


def test_a_space_is_wide_by_its_size_and_its_spread() -> None:
    figures = importlib.import_module("choice_quality").figures
    few = {f"slow{number}": 2.0 for number in range(22)}
    alike = {f"like{number}": 1.29 for number in range(24)}
    assert figures(truth("p", best=1.0, **SLOW))["narrow_spaces"] == 0.0
    assert figures(truth("p", best=1.0, **few))["narrow_spaces"] == 1.0
    assert figures(truth("p", best=1.0, **alike))["narrow_spaces"] == 1.0


def test_a_config_is_measured_until_it_is_sure() -> None:
    """200 ms each, and 40 ms for what takes over three times as long as the best."""
    wanting = importlib.import_module("choice_quality")._wanting
    assert list(wanting({"a": [], "b": []}, 200.0)) == ["a", "b"]
    assert list(wanting({"a": [1.0] * 150, "b": [2.9] * 60, "c": [3.1] * 13}, 200.0)) == ["a", "b"]
    assert list(wanting({"a": [1.0] * 200, "b": [2.9] * 69, "c": [3.1] * 12}, 200.0)) == ["c"]


def test_the_spaces_of_configs() -> None:
    problems = importlib.import_module("choice_problems").PROBLEMS
    assert len({problem.name for problem in problems}) == len(problems) == 7
    for problem in problems:
        texts = [str(config) for config in problem.configs]
        assert 24 <= len(set(texts)) == len(texts) <= 40, problem.name
        assert set(problem.key) | set(problem.scratch) <= set(problem.kernel.arg_names)


def test_the_kernels_of_choice_quality_compute_the_right_result(device: str) -> None:
    """The judge's own check must not be one that anything passes: it fails before the launch."""
    module = importlib.import_module("choice_quality")
    for problem in importlib.import_module("choice_problems").PROBLEMS:
        work = problem.prepare(device)
        assert not work.error() < module.ERROR_LIMIT
        work.launch(problem.kernel, **problem.configs[0].all_kwargs())
        assert work.error() < module.ERROR_LIMIT, problem.name


#: In the place of compute-sanitizer: runs the program, and says of it what a tool would.
TOOL = """#!/bin/sh
shift 4
"$@" || exit 1
case $* in
*--launch-fault) [ "$BLIND" ] || { echo "========= ERROR SUMMARY: 1 error"; exit 9; } ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.parametrize(
    ("blind", "tools"), [(False, ["racecheck"]), (True, [])], ids=["finds it", "blind"]
)
def test_the_sanitizer_must_find_what_is_planted(
    tmp_path: Path, blind: bool, tools: list[str]
) -> None:
    """All kernels are launched under it; one that finds nothing at all proves nothing."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TRITON_INTERPRET": "1",
    }
    environment |= {"BLIND": "1"} if blind else {}
    command = [sys.executable, str(BENCHMARKS / "sanitize.py"), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--tools", *tools],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == int(blind), done.stdout + done.stderr
    written = (tmp_path / "interpreter" / "sanitizer.md").read_text()
    assert "compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks" in written
    assert ("launches of 6 of 6 problems" in written) == bool(tools)
    assert ("ERROR SUMMARY: 1 error" in written) != blind


def startup(part: int, state: str, tuner: str, seconds: float) -> dict[str, Any]:
    row = {"part": part, "state": state, "tuner": tuner, "seconds": seconds}
    return {**row, "tunings": 60, "process_s": seconds + 5}


STARTUP_ROWS = [
    startup(0, "cold", "safetune", 40.0),
    startup(0, "cold", "triton", 60.0),
    startup(1, "cold", "triton", 70.0),
    startup(1, "cold", "safetune", 48.0),
    startup(1, "warm", "triton", 30.0),
    startup(1, "warm", "safetune", 33.0),
]


def test_startup_figures() -> None:
    figures = importlib.import_module("startup").figures
    assert figures(STARTUP_ROWS) == pytest.approx(
        {
            "startup_60_ratio": 44.0 / 65.0,
            "startup_60_ratio_warm": 1.1,
            "startup_60_s_safetune": 44.0,
            "startup_60_s_triton": 65.0,
            "startup_60_s_safetune_warm": 33.0,
            "startup_60_s_triton_warm": 30.0,
            "alternations": 2.0,
        }
    )
    # A trial run with fewer tunings is not mistaken for one with 60.
    few = [{**row, "tunings": 12} for row in STARTUP_ROWS]
    assert "startup_60_ratio" not in figures(few)
    assert figures([]) == {"alternations": 0.0}


UNMODIFIED_ROWS = [
    {"part": tuner, "tuner": tuner, "state": state, "first_s": seconds, "both_s": seconds + 0.1}
    for tuner, state, seconds in (
        ("triton", "cold", 200.0),
        ("triton", "warm", 4.0),
        ("safetune", "cold", 50.0),
        ("safetune", "warm", 2.0),
    )
]


def test_unmodified_figures() -> None:
    figures = importlib.import_module("unmodified").figures
    assert figures(UNMODIFIED_ROWS) == {
        "unmodified_first_step_s_triton_cold": 200.0,
        "unmodified_first_step_s_triton_warm": 4.0,
        "unmodified_first_step_s_safetune_cold": 50.0,
        "unmodified_first_step_s_safetune_warm": 2.0,
        "unmodified_first_step_ratio_cold": 0.25,
        "unmodified_first_step_ratio_warm": 0.5,
        "stored_step_ratio": 0.5,
    }
    assert not any("ratio" in name for name in figures(UNMODIFIED_ROWS[2:]))
    filled = [
        {**row, "part": "fill" if row["state"] == "cold" else "warm"} for row in UNMODIFIED_ROWS
    ]
    assert not any("cold" in name for name in figures(filled)), "the first ones only store"
    assert figures(filled)["stored_step_ratio"] == 0.5


def test_every_tuner_of_a_stored_step_has_the_first_configs_of_its_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "__init__", Autotuner.__init__)
    importlib.import_module("unmodified").shorten(2)

    class OfALibrary(Autotuner):
        pass

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr, n + BLOCK)

    configs = [triton.Config({"BLOCK": block}) for block in (8, 16, 32)]
    tuners = [
        triton.autotune(configs, key=["n"])(kernel),
        safetune.autotune(configs, key=["n"])(kernel),
        OfALibrary(kernel, kernel.arg_names, configs, ["n"], None, None),
    ]
    assert [tuner.configs for tuner in tuners] == [configs[:2]] * 3


INSTALL_ROWS = [
    {"part": part, "kind": kind, "seconds": seconds, "tuners": 193}
    for part, kind, seconds in (
        *((0, "safetune", 4.5), (0, "stock", 4.0), (1, "stock", 4.2), (1, "safetune", 4.4)),
        *((2, "safetune", 9.0), (2, "stock", 4.1)),
    )
]


def test_what_install_adds_is_a_difference_of_medians() -> None:
    figures = importlib.import_module("install_time").figures
    found = figures(INSTALL_ROWS)
    assert found["added_s_fla"] == pytest.approx(0.4)
    assert (found["tuners"], found["alternations"]) == (193, 3)
    assert "added_s_fla" not in figures(INSTALL_ROWS[:1])


def first_tuning(kernel: str, configs: int, tuner: str, state: str, *seconds: float) -> list[Any]:
    row = {"kernel": kernel, "configs": configs, "tuner": tuner, "state": state, "failed": 0}
    return [
        {**row, "part": f"{kernel}-{configs}-{number}", "seconds": each}
        for number, each in enumerate(seconds)
    ]


FIRST_TUNING_ROWS = [
    *first_tuning("add", 4, "triton", "cold", 2.0, 2.0),
    *first_tuning("add", 4, "safetune", "cold", 1.0, 3.0),
    *first_tuning("norm", 4, "triton", "cold", 2.0),
    *first_tuning("norm", 4, "safetune", "cold", 3.0),
    *first_tuning("add", 16, "safetune", "cold", 3.0),
]


def test_the_first_tunings_ratio_is_that_of_the_worst_kernel() -> None:
    figures = importlib.import_module("first_tuning").figures
    found = figures(FIRST_TUNING_ROWS)
    assert (found["ratio_cold_4_add"], found["ratio_cold_4_norm"]) == (1.0, 1.5)
    assert found["ratio_cold_4"] == 1.5
    assert found["alternations"] == 1, "of the kernel with the fewest"
    assert not any(name.startswith(("ratio_cold_16", "ratio_warm")) for name in found)


@pytest.mark.parametrize("count", [4, 16])
def test_the_kernels_of_first_tuning_are_right(device: str, count: int) -> None:
    for name, make in importlib.import_module("first_tuning_kernels").CALLS.items():
        call = make(count, device)
        assert len(call.configs) == len(set(map(str, call.configs))) == count
        assert not call.right(), name
        config, arguments = (
            call.configs[-1],
            dict(zip(call.kernel.arg_names, call.arguments, strict=False)),
        )
        if config.pre_hook is not None:
            config.pre_hook({**arguments, **config.kwargs})
        call.kernel[call.grid](*call.arguments, **config.kwargs)
        assert call.right(), name


def test_a_model_starts_with_60_tunings_of_at_most_eight_configs() -> None:
    kernels = importlib.import_module("startup_kernels")
    assert len(kernels.LAYERS) * len(kernels.COLUMNS) == 60
    assert len(kernels.COLUMNS) == len(kernels.TINY_COLUMNS)
    for layer in kernels.LAYERS:
        assert 4 <= len(layer.configs) <= 8
        assert len(set(map(str, layer.configs))) == len(layer.configs)
        calls = list(layer.calls("cpu", kernels.TINY_COLUMNS))
        named = [dict(zip(layer.kernel.arg_names, c.args, strict=False)) for c in calls]
        keys = {
            tuple({**arguments, **call.constants}[name] for name in layer.key)
            for arguments, call in zip(named, calls, strict=True)
        }
        assert len(keys) == len(kernels.COLUMNS), "each call needs a tuning of its own"


FIRST_LAUNCH = {"part": "a", "what": "first_launch"}


def test_store_figures() -> None:
    figures = importlib.import_module("store").figures
    launches = [("safetune", 30.0), ("jit", 6.0), ("jit", 8.0), ("safetune", 50.0)]
    launches += [("frozen", 20.0)]
    rows = [{**FIRST_LAUNCH, "kind": kind, "ms": ms} for kind, ms in launches]
    for us in (1.0, 2.0, 9.0):
        rows.append({"part": "b", "what": "local", "case": "find", "choices": 100, "us": us})
    rows.append({"part": "c", "what": "writers", "rows_per_s": 900.0, "lost": 0})
    assert figures(rows) == {
        "first_launch_added_ms": 33.0,
        "first_launch_frozen_ratio": 0.5,
        "first_launch_ms_frozen": 20.0,
        "first_launch_ms_jit": 7.0,
        "first_launch_ms_safetune": 40.0,
        "find_us_100": 2.0,
        "writer_rows_per_s": 900.0,
        "writer_rows_lost": 0.0,
    }
    assert figures([]) == {}


def test_the_startup_kernels_are_right(device: str) -> None:
    kernels = importlib.import_module("startup_kernels")
    torch = importlib.import_module("torch")
    for layer in kernels.LAYERS:
        call = next(layer.calls(device, kernels.TINY_COLUMNS[1:]))
        call.output.fill_(float("nan"))
        call.launch(layer.kernel, **layer.configs[0].all_kwargs())
        torch.testing.assert_close(call.output, call.expected(), rtol=1e-3, atol=1e-3)


TRIALS = {
    "norm_choices": "--replays 1",
    "choice_quality": "--parts 1 --configs 3 --repetitions 1 --truth-ms 5",
    "startup": "--alternations 1 --tunings 2",
    "store": "--launches 1 --repetitions 2 --rounds 1 --most 200 --most-processes 8",
}
SLOW_TRIALS = {"first_tuning": "--short", "sweep": "--sweeps 1 --size 256 --configs 2"}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU gets the real thing, by hand"
)
@pytest.mark.parametrize(
    "name", [*TRIALS, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW_TRIALS)]
)
def test_a_trial_run(name: str, fresh_process: FreshProcess, tmp_path: Path) -> None:
    """Real tunings by both tuners, in the interpreter; a second run has nothing left to do."""
    command = [BENCHMARKS / f"{name}.py", "--out", tmp_path, *(TRIALS | SLOW_TRIALS)[name].split()]
    done = fresh_process(*command)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "interpreter" / f"{name}.json"
    stored = json.loads(path.read_text())
    figures = importlib.import_module(name).figures(stored["rows"])
    assert stored["figures"] == pytest.approx(figures)
    if name not in ("norm_choices", "store", "sweep"):  # which have no other tuner beside them
        assert {"safetune", "triton"} <= {row["tuner"] for row in stored["rows"] if "tuner" in row}
    if name != "choice_quality":  # the next part would begin
        again = fresh_process(*command)
        assert f"with its {len(stored['rows'])} rows" in again.stdout
        assert json.loads(path.read_text())["rows"] == stored["rows"]


def test_a_measuring_process_that_fails_or_hangs_is_reported_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    run = importlib.import_module("fresh_process").run
    script = tmp_path / "task.py"
    script.write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit, match="ended with 3"):
        run(str(script), [], {}, tmp_path, 60.0)
    pid = tmp_path / "pid"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    with pytest.raises(SystemExit, match="more than 3 s"):
        run(str(script), [], {}, tmp_path, 3.0)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid.read_text()))
        assert is_ready(handle, 10.0), "what it has started is still there"
        os.close(handle)


def launch(count: int, variant: str, *times: float, style: str = "positional") -> list[Any]:
    row = {"arguments": count, "style": style, "variant": variant}
    return [{**row, "round": i, "microseconds": time} for i, time in enumerate(times)]


LAUNCH_ROWS = [
    *launch(3, "jit", 16.0, 17.0, 99.0),
    *launch(3, "safetune", 8.0, 8.5, 9.0),
    *launch(3, "autotune", 34.0, 34.0, 34.0),
    *launch(13, "jit", 20.0),
    *launch(13, "safetune", 10.0),
    *launch(13, "jit", 50.0, style="keyword"),
    *launch(13, "run", 7.0),
]


def test_launch_overhead_figures() -> None:
    figures = importlib.import_module("launch_overhead").figures(LAUNCH_ROWS)
    assert figures["ratio_to_jit_3"] == pytest.approx(0.5)
    assert figures["autotune_ratio_to_jit_3"] == pytest.approx(2.0)
    assert figures["ratio_to_jit_13"] == pytest.approx(0.5)
    assert figures["us_run_13"] == 7.0
    assert not any(name.endswith("_24") for name in figures)


def test_the_kernels_have_as_many_arguments_as_they_say() -> None:
    module = importlib.import_module("launch_overhead")
    cases = module.cases("cpu")
    assert [case.count for case in cases] == [3, 13, 24]
    for case in cases:
        assert len(case.values) + len(case.constants) + 1 == case.count
        names = case.kernel.arg_names
        assert tuple(case.constants) == tuple(names[len(case.values) : -1])
        assert names[-1] == "BLOCK"
        assert set(case.key) <= set(names)


def test_heuristics_above_and_below_a_tuner() -> None:
    module = importlib.import_module("launch_overhead")
    few, some, _ = module.cases("cpu")
    names = {name for name in module.VARIANTS if "heuristics" in name}
    assert set(module.variants_of(some, "positional")) >= names
    assert not names & set(module.variants_of(few, "positional")), "no constant to set"


def test_no_key_of_the_launch_kernels_is_phantom() -> None:
    """Else safetune would look at fewer arguments than triton.autotune does."""
    from safetune import safetune

    triton = pytest.importorskip("triton")
    for case in importlib.import_module("launch_overhead").cases("cpu"):
        configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
        report = safetune(configs=configs, key=list(case.key))(case.kernel).explain_key()
        assert tuple(report.kept) == case.key


NORM_ROWS = [
    {"part": "copy", "gib": 1, "tb_per_s": 3.0},
    *(
        {
            "part": f"{norm}-{shape}",
            "norm": norm,
            "shape": shape,
            "op": op,
            "system": system,
            "microseconds": microseconds,
        }
        for norm in ("ln", "rms")
        for shape in (
            *("262144x256", "131072x512", "32768x1024", "32768x2048", "32768x4096"),
            *("16384x8192", "8192x16384", "4096x32768", "450x256"),
        )
        for op in ("forward", "backward")
        for system, microseconds in (("ours", 100.0), ("fla", 400.0), ("torch", 150.0))
    ),
    {"part": "ln-450x256", "norm": "ln", "shape": "450x256", "op": "forward", "system": "liger",
     "error": "ImportError"},
]  # fmt: skip

NORM_HOST_ROWS = [
    {"part": norm, "norm": norm, "op": op, "system": system, "microseconds": us}
    for norm in ("ln", "rms")
    for op in ("forward", "backward")
    for system, us in (("ours", 9.0), ("fla", 18.0), ("torch", 3.0))
]


NORM_SMALL_ROWS = [
    {"part": f"{norm}-{shape}", "op": op, "system": system, "microseconds": us}
    for norm in ("ln", "rms")
    for shape in ("450x256", "1x4096", "8x4096", "64x4096")
    for op, ours in (("forward", 3.0), ("backward", 6.0))
    for system, us in (("ours", ours), ("compile_max", 4.0))
]


def test_figures_of_the_norms() -> None:
    """32768 x 1024 in bf16 is 64 MiB: in 100 us, 1.34 TB/s forward and 2.01 backward."""
    found = importlib.import_module("norms").figures(NORM_ROWS)
    assert found["forward_share_D1024_ln"] == pytest.approx(2**27 / 1e8 / 3.0)
    assert found["backward_share_D1024_rms"] == pytest.approx(1.5 * 2**27 / 1e8 / 3.0)
    assert (
        found["backward_vs_best_peer_D1024_rms"] == found["forward_vs_best_peer_450x256_ln"] == 1.5
    )
    assert "forward_share_D256_ln" in found
    assert "forward_share_450x256_ln" not in found


def test_figures_of_the_norms_choices() -> None:
    def timed(part: str, microseconds: float, chosen: bool = False) -> dict[str, Any]:
        return {"part": part, "config": "", "chosen": chosen, "microseconds": microseconds}

    rows = [timed("a", 10.0), timed("a", 11.0, chosen=True), timed("b", 5.0, chosen=True)]
    rows += [{"part": "b", "config": "", "chosen": False, "error": "no"}, timed("c", 5.0)]
    assert importlib.import_module("norm_choices").figures(rows) == pytest.approx(
        {"regret_a": 0.1, "regret_b": 0.0, "regret_worst": 0.1, "choices": 2.0}
    )
    assert importlib.import_module("norm_choices").figures([]) == {
        "regret_worst": 0.0,
        "choices": 0.0,
    }


def test_figures_of_the_norms_host_time() -> None:
    found = importlib.import_module("norms_host").figures(NORM_HOST_ROWS)
    assert found["host_us_forward_ours_ln"] == 9.0
    assert found["host_backward_vs_fla_rms"] == 2.0
    assert "host_forward_vs_torch_ln" not in found


def test_figures_of_norms_on_few_rows() -> None:
    found = importlib.import_module("norms_small").figures(NORM_SMALL_ROWS)
    assert found["forward_vs_max_autotune_1x4096_rms"] == 0.75
    assert found["backward_vs_max_autotune_1x4096_rms"] == 1.5
    assert found["vs_max_autotune_1x4096_rms"] == 1.5


def test_a_later_command_measures_the_missing_systems() -> None:
    """By system, so that all are in one file in the end."""
    norms = importlib.import_module("norms")
    part = "ln-32768x1024"
    rows = [{"part": part, "op": "forward", "system": "ours"}, {"part": "copy"}]
    assert norms.unmeasured(part, ["ours", "torch"], rows) == ["torch"]
    assert norms.unmeasured("ln-4096x32768", ["ours", "fla"], rows) == ["ours"]
    assert norms.unmeasured("copy", ["ours", "torch"], rows) == []
    assert norms.unmeasured("copy", ["ours", "torch"], []) == [""]


def with_a_residual(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the norms, as if their operations were those with a residual."""
    ops = {"forward": "prenorm", "backward": "dresidual"}
    return [{**row, "op": ops[row["op"]]} if "op" in row else row for row in rows]


#: Results of a benchmark's script that do not have its name.
SCRIPT_OF = {
    "norms_residual": "norms",
    "norms_max_autotune": "norms",
    "norms_residual_max_autotune": "norms",
    "judge_in_the_wild": "wild",
    "search_replay_others": "search_replay",
    "search_replay_sweeps": "search_replay",
    "unmodified_stored": "unmodified",
    "proof_steps": "proofs",
}

SAMPLE_ROWS = {
    "install_time": INSTALL_ROWS,
    "unmodified_stored": [row for row in UNMODIFIED_ROWS if row["state"] == "warm"],
    "store": [{**FIRST_LAUNCH, "kind": kind, "ms": 9.0} for kind in ("jit", "safetune", "frozen")],
    "norms": NORM_ROWS,
    "norms_residual": with_a_residual(NORM_ROWS),
    "norms_max_autotune": NORM_ROWS,
    "norms_residual_max_autotune": with_a_residual(NORM_ROWS),
    "norms_host": NORM_HOST_ROWS,
    "norms_small": NORM_SMALL_ROWS,
    "tuning_time": TUNING_ROWS,
    "argument_size": ARGUMENT_ROWS,
    "startup": STARTUP_ROWS,
    "first_tuning": [
        row
        for count in (4, 16)
        for state in ("cold", "warm")
        for tuner in ("triton", "safetune")
        for row in first_tuning("add", count, tuner, state, 2.0)
    ],
    "sweep": SWEEP_ROWS,
    "search_replay": SEARCH_ROWS,
    "fused_moe_sweep": FUSED_MOE_ROWS,
    "fused_moe_exhaustive": EXHAUSTED_ROWS,
    "devices": DEVICES_ROWS,
    "prune": PRUNE_ROWS,
    "choice_quality": CHOICE_ROWS,
    "launch_overhead": [*LAUNCH_ROWS, *launch(24, "jit", 30.0), *launch(24, "safetune", 20.0)],
}


@pytest.fixture
def bars() -> ModuleType:
    pytest.importorskip("tomllib")
    return importlib.import_module("bars")


def test_a_bar_is_of_a_figure_that_its_benchmark_computes(bars: ModuleType) -> None:
    benches = {bar.bench for bar in bars.load()}
    assert {Path(bench).name for bench in benches} == set(SAMPLE_ROWS)
    for bench in benches:
        name = Path(bench).name
        script = importlib.import_module(SCRIPT_OF.get(name, name))
        known = script.figures(SAMPLE_ROWS[name])
        asked = {bar.figure for bar in bars.load() if bar.bench == bench}
        assert asked <= set(known), bench


def test_a_bar_says_whether_small_or_great_is_good(bars: ModuleType) -> None:
    """A time or a ratio of times is good when it is small, a share or a speed when it is great."""
    for bar in bars.load():
        great = re.search(r"share|_vs_|_rate_|alternations|problems", bar.figure)
        assert bar.better == ("greater" if great else "smaller"), bar.figure
    found = {bar.figure: bar for bar in bars.load()}
    assert found["wall_ratio_cold"].verdict(0.18) == "met"
    assert found["wall_ratio_cold"].verdict(0.26) == "missed"
    assert found["wall_ratio_cold"].reached(0.125) == "yes"
    assert found["wall_ratio_cold"].reached(0.2) == "no"
    assert found["share_within_1pct"].verdict(1.0) == "met"
    assert found["share_within_1pct"].verdict(0.99) == "missed"
    assert found["share_within_1pct"].verdict(None) == "absent"
    assert replace(found["share_within_1pct"], bar=None).verdict(0.5) == "no bar"
    assert found["backward_share_D32768_rms"].bar == 0.80
    assert found["backward_vs_best_peer_D32768_ln"].bar == 0.85
    assert sum(bar.group == "norms" for bar in bars.load()) == 8 * 2 * (4 + 4 + 2 + 2) + 8 + 8


def write_figures(folder: Path, bench: str, **figures: float) -> None:
    path = folder / f"{bench}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": figures}))


def test_bars_say_what_is_met_missed_and_absent(
    bars: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdicts(*argv: str) -> tuple[int, dict[str, str]]:
        status = bars.main(["--results", str(tmp_path), "--device", "A_GPU", *argv])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        words = {"met", "missed", "absent", "bar"}
        return status, {
            line[2]: next(word for word in line[3:] if word in words)
            for line in lines
            if len(line) > 3 and line[:2] == ["launch", "launch_overhead"]
        }

    names = [f"ratio_to_jit_{count}" for count in (3, 13, 24)]
    assert verdicts("launch") == (1, dict.fromkeys(names, "absent"))
    folder = tmp_path / "A_GPU"
    write_figures(folder, "launch_overhead", **dict(zip(names, (0.5, 0.7, 0.6), strict=True)))
    assert verdicts("launch") == (1, dict(zip(names, ("met", "missed", "met"), strict=True)))
    write_figures(folder, "launch_overhead", ratio_to_jit_3=0.5, ratio_to_jit_13=0.4)
    assert verdicts("launch") == (1, dict(zip(names, ("met", "met", "absent"), strict=True)))
    write_figures(folder, "launch_overhead", **dict.fromkeys(names, 0.55))
    assert verdicts("launch") == (1, dict.fromkeys(names, "met"))  # nothing with Triton 3.9
    write_figures(folder, "triton_3.9.0/launch_overhead", **dict.fromkeys(names, 0.55))
    assert verdicts("launch") == (0, dict.fromkeys(names, "met"))
    assert verdicts()[0] == 1  # the other groups are absent
    with pytest.raises(SystemExit):
        bars.main(["lanch"])
    assert "tuning, choice, launch, store, norms" in capsys.readouterr().err


def test_a_card_without_a_figure_has_that_of_the_bar_s_device(
    bars: ModuleType, tmp_path: Path
) -> None:
    bar = bars.Bar("tuning", "sweep", "first_key_s", "smaller", 100.0, device="OTHER_GPU")
    write_figures(tmp_path / "OTHER_GPU", "sweep", first_key_s=70.0)
    (line,) = bars.report([bar], tmp_path / "A_GPU")
    assert (line["value"], line["verdict"]) == ("70", "met")
    write_figures(tmp_path / "A_GPU", "sweep", first_key_s=130.0)
    (line,) = bars.report([bar], tmp_path / "A_GPU")
    assert (line["value"], line["verdict"]) == ("130", "missed")
    (line,) = bars.report([replace(bar, device="")], tmp_path / "NO_GPU")
    assert line["verdict"] == "absent"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("{ bar = 1.0 }", "better"),
        ('{ better = "smaller" }', "needs a bar or an aim"),
        ('{ better = "smaller", bar = 1.0, aim = 1.3 }', "the aim must be further than the bar"),
    ],
)
def test_a_bar_that_makes_no_sense(
    bars: ModuleType, limits: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bars.toml"
    path.write_text(f"[group.bench]\nfigure = {limits}\n")
    with pytest.raises(ValueError, match=message):
        bars.load(path)


def test_a_figure_has_one_bar(bars: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "bars.toml"
    bar = '{ better = "smaller", bar = 1.0 }'
    path.write_text(f'[group.bench]\n"a_{{x,y}}" = {bar}\na_y = {bar}\n')
    with pytest.raises(ValueError, match="a_y"):
        bars.load(path)


def test_help(script: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "--out DIR" in done.stdout


def test_the_interpreter_writes_no_result(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recording = importlib.import_module("recording")
    parsed = importlib.import_module(script).parse([])
    with pytest.raises(SystemExit, match="--out"):
        recording.output_folder(parsed)
    parsed = importlib.import_module(script).parse(["--out", "elsewhere"])
    assert recording.output_folder(parsed) == Path("elsewhere")


def test_a_device_is_a_folder() -> None:
    slug = importlib.import_module("recording").device_slug
    assert slug("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3"
    assert slug("AMD Instinct MI300X / OAM") == "AMD_Instinct_MI300X_OAM"


def result(commit: str = "abc", versions: dict[str, str] | None = None) -> Any:
    recording = importlib.import_module("recording")
    return recording.Result("tuning_time", "A_GPU", versions or {"triton": "1"}, commit, "python x")


def test_a_saved_result_is_continued_by_the_same_code_only(tmp_path: Path) -> None:
    module = importlib.import_module("tuning_time")
    recording = importlib.import_module("recording")
    first = result()
    first.rows = TUNING_ROWS[:4]
    path = first.save(tmp_path / "a", module.figures)
    assert path == tmp_path / "a" / "A_GPU" / "tuning_time.json"
    again = recording.resume(result(), [tmp_path / "none", tmp_path / "a"])
    assert again.rows == TUNING_ROWS[:4]
    assert recording.resume(result("other"), [tmp_path / "a"]).rows == []
    assert recording.resume(result(versions={"triton": "2"}), [tmp_path / "a"]).rows == []
    check_file(path)


def test_rows_of_other_code_are_kept_with_their_origin(tmp_path: Path) -> None:
    module = importlib.import_module("tuning_time")
    recording = importlib.import_module("recording")
    versions = {"triton": "1", "torch": "1"}
    first = result(versions={**versions, "sources": "a"})
    first.rows = [TUNING_ROWS[0], {**TUNING_ROWS[1], "commit": "older", "date": "then"}]
    first.save(tmp_path, module.figures)
    later = recording.take_over(result("other", {**versions, "sources": "b"}), [tmp_path])
    assert [(row["commit"], row["date"]) for row in later.rows] == [
        ("abc", first.date),
        ("older", "then"),
    ]
    assert {name: later.rows[0][name] for name in TUNING_ROWS[0]} == TUNING_ROWS[0]
    assert recording.take_over(result("abc", {**versions, "torch": "2"}), [tmp_path]).rows == []


def test_a_result_with_nan_is_not_saved(tmp_path: Path) -> None:
    bad = result()
    bad.rows = [{**TUNING_ROWS[0], "first_call_s": float("nan")}]
    with pytest.raises(ValueError, match="JSON"):
        bad.save(tmp_path, importlib.import_module("tuning_time").figures)
    assert not list(tmp_path.glob("*/*.json"))


def parts(*argv: str, done: tuple[Any, ...] = (), expected_s: float = 0.0) -> list[Any]:
    recording = importlib.import_module("recording")
    options = recording.part_arguments("").parse_args(argv)
    rows = [{"part": part} for part in done]
    return list(recording.parts_to_run(["a", "b", "c", "d"], rows, options, expected_s))


def test_parts_that_are_done_are_not_run_again() -> None:
    assert parts() == ["a", "b", "c", "d"]
    assert parts(done=("a", "a", "c")) == ["b", "d"]
    assert parts("--parts", "2", done=("a",)) == ["b", "c"]


def test_no_part_is_begun_that_would_overrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert parts("--budget", "100", expected_s=99.0) == ["a", "b", "c", "d"]  # they took no time
    assert parts("--budget", "100", expected_s=101.0) == []
    assert "run again" in capsys.readouterr().out


def check_file(path: Path) -> None:
    """Fail unless a result has every field and its figures are those of its rows.

    Those of another Triton are in a folder of their own in that of the device.
    """
    recording = importlib.import_module("recording")
    folder, _, triton = path.parent.name.partition("triton_")
    device = folder or path.parents[1].name
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(stored) == recording.FIELDS
    assert stored["bench"] == path.stem
    assert stored["device"] == device
    assert stored["rows"]
    assert stored["commit"] not in ("", "unknown")
    assert stored["versions"]["triton"].startswith(triton)
    script = importlib.import_module(SCRIPT_OF.get(path.stem, path.stem))
    figures = script.figures(stored["rows"])
    assert stored["figures"] == pytest.approx(figures)


@pytest.mark.parametrize("path", RESULTS, ids=name_of)
def test_committed_results(path: Path) -> None:
    if not (BENCHMARKS / f"{SCRIPT_OF.get(path.stem, path.stem)}.py").exists():
        pytest.fail(f"{path} was written by no script in benchmarks/")
    check_file(path)


def test_a_committed_result_names_a_command_of_the_repository() -> None:
    """A path of the machine that measured it is of no use elsewhere, nor are words to be pasted."""
    commands = {name_of(path): json.loads(path.read_text("utf-8"))["command"] for path in RESULTS}
    named = {name: command for name, command in commands.items() if command}
    assert len(named) > 20
    for name, command in named.items():
        script = re.match(r"python (benchmarks/\w+\.py)", command)
        assert script, name
        assert (ROOT / script[1]).exists(), name
        assert not re.search(r"(^|[\s=])/|\.\./", command), name
        can_be_pasted = re.fullmatch(r"[\w./-]+( [\w./-]+)*", command)
        assert bool(can_be_pasted) is (name not in IN_WORDS), f"{name}: {command}"


def test_a_command_has_no_path_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = importlib.import_module("recording")
    script = str(recording.ROOT / "benchmarks" / "proofs.py")
    given = ["--sources", "/data/sources", "--out", "/data/out", "--only", "fp8"]
    monkeypatch.setattr(sys, "argv", [script, *given])
    assert recording.command() == "python benchmarks/proofs.py --sources DIR --only fp8"


def test_a_benchmark_without_a_result_has_no_line(tmp_path: Path) -> None:
    pages = importlib.import_module("pages")
    folder, results = tmp_path / "A_GPU", pages.Results("A_GPU", tmp_path)
    assert pages.headlines(results) == ""
    for name, write in pages.BLOCKS.items():
        if not name.startswith(("picture_", "headlines", "more", "missed")):
            assert write(results).startswith("There is no result of `benchmarks/"), name

    figures = importlib.import_module("startup").figures(STARTUP_ROWS)
    write_figures(folder, "startup", **figures)

    assert "| 60 small tunings in a row, empty caches | 65.0 s | 44.0 s |" in pages.more(results)
    assert "matmul" not in pages.more(results)


def test_what_takes_longer_with_safetune_says_so(tmp_path: Path) -> None:
    pages = importlib.import_module("pages")
    folder, results = tmp_path / "A_GPU", pages.Results("A_GPU", tmp_path)
    write_figures(folder, "startup", startup_60_s_triton=65.0, startup_60_s_safetune=65.5)
    times = {"s_warm_4_described_triton": 1.0, "s_warm_4_described_safetune": 1.0}
    write_figures(folder, "first_tuning", **times)
    shares = {"share_within_2pct_triton": 0.9, "share_within_2pct": 1.0}
    write_figures(folder, "choice_quality", **shares)
    slower, *others = pages.more(results).splitlines()[2:]
    assert slower == "| slower: 60 small tunings in a row, empty caches | 65.0 s | 65.5 s |"
    assert len(others) == 2
    assert not any("slower" in line for line in others)


@pytest.mark.parametrize("name", ["norms", "launches", "tuning_configs", "tuning_arguments"])
def test_a_figure_is_drawn_from_the_committed_rows(name: str) -> None:
    drawn = importlib.import_module("figures")
    results = drawn.stored_rows(name)
    for theme in drawn.THEMES:
        file = drawn.path(name, theme)
        assert file.exists() == bool(results), f"run `make figures`: {file}"
        if results:
            assert f"<dc:description>{drawn.digest(results)}</dc:description>" in file.read_text()


def test_the_figure_of_the_norms_has_the_shares_of_their_result() -> None:
    drawn = importlib.import_module("figures")
    results = drawn.stored_rows("norms")
    figures = importlib.import_module("norms").figures(results["norms"])
    shown = drawn.shares(results)
    for (op, norm), by_system in shown.items():
        assert set(by_system) == set(drawn.SYSTEMS)
        for columns, share in by_system["ours"].items():
            assert share / 100 == pytest.approx(figures[f"{op}_share_D{columns}_{norm}"])
    assert {op for op, _ in shown} == {"backward", "forward"}


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/for_maintainers.md"])
def test_a_page_shows_the_committed_figures(page: str) -> None:
    """`make figures` writes them."""
    pytest.importorskip("tomllib")
    pages, file = importlib.import_module("pages"), ROOT / page
    assert file in pages.PAGES
    assert pages.written(file, pages.Results()) == file.read_text(encoding="utf-8")


def test_the_page_names_each_bar_that_is_missed_or_has_no_figure(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    figures = {"host_us_forward_ours_ln": 50.5, "host_us_forward_ours_rms": 49.5}
    write_figures(tmp_path / "A_GPU", "norms_host", **figures)
    write_figures(tmp_path / "NVIDIA_H200", "norms_host", host_us_forward_ours_ln=19.5)
    shown = pages.missed(pages.Results("A_GPU", tmp_path)).splitlines()
    assert "| norms_host | host_us_forward_ours_ln | 50.5 | <= 50 | 19.5 |" in shown
    assert "| norms_host | host_us_backward_ours_ln | not measured | <= 160 |  |" in shown
    assert not any("host_us_forward_ours_rms" in line for line in shown)


def test_a_page_says_that_no_bar_is_missed(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    pages = importlib.import_module("pages")
    for bar in importlib.import_module("bars").load():
        folder = tmp_path / (bar.device or "A_GPU")
        known = importlib.import_module("recording").stored_figures(folder, bar.bench)
        write_figures(folder, bar.bench, **{**known, bar.figure: bar.bar})
    assert pages.missed(pages.Results("A_GPU", tmp_path)) == "None."


def test_every_table_of_figures_is_on_a_page() -> None:
    pages = importlib.import_module("pages")
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(pages.BLOCKS)


def test_the_figures_of_the_judge_in_the_wild() -> None:
    def kernel(name: str, verdicts: dict[str, int], disputed: int = 0) -> dict[str, Any]:
        row = {"kind": "kernel", "kernel": name, "tunings": 2, "verdicts": verdicts}
        return {**row, "disputed": disputed}

    rows = [
        {"kind": "process", "tuner": "stock"},
        kernel("planted_kernel", {"ok": 3, "wrong_result": 1}),
        kernel("chunk_fwd", {"ok": 10, "out_of_resources": 2}, disputed=1),
        kernel("dyt_bwd", {"ok": 5, "order_dependent": 1}),
        {"kind": "output", "output": "gla output", "off": 0.01},
    ]
    assert importlib.import_module("wild").figures(rows) == {
        "wild_kernels": 2.0,
        "wild_tunings": 4.0,
        "wild_configs": 18.0,
        "wild_disputed_choices": 1.0,
        "wild_rejected_configs": 1.0,
        "wild_off_largest": 0.01,
    }
