"""torch.compile over safetuned kernels: Inductor times nothing, and launches the stored choice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import safetune
from safetune import TracingError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()


class Adds:
    """x + y in a new tensor, tuned over three BLOCKs."""

    def __init__(self, kernels: Any, **options: Any) -> None:
        configs = [triton.Config({"BLOCK": block}, num_warps=8) for block in (256, 512, 1024)]
        self.tuner = safetune.safetune(configs=configs, key=["n"], **options)(kernels.add_kernel)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        self.tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
        return out


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, device="cuda"), torch.randn(n, device="cuda")


def code_of(function: Any, *args: Any) -> tuple[Any, str]:
    """The result of a compiled function, and the code that Inductor wrote for it."""
    from torch._inductor.utils import run_and_get_code

    result, codes = run_and_get_code(function, *args)
    return result, "\n".join(codes)


def blocks_in(code: str) -> list[int]:
    """The BLOCKs among the configs in Inductor's code, one entry for each config."""
    configs = "".join(re.findall(r"configs=\[(.*?)\],?\n", code))
    return [int(block) for block in re.findall(r"'BLOCK': (\d+)", configs)]


def test_the_choice_made_by_prepare_is_what_is_launched(kernels: Any) -> None:
    add = Adds(kernels)
    x, y = inputs(100_000)
    assert not safetune.prepare(add, x, y).unsettled
    chosen = add.tuner.best_config.kwargs["BLOCK"]

    result, code = code_of(torch.compile(add, fullgraph=True), x, y)

    assert torch.equal(result, x + y)
    assert blocks_in(code) == [chosen], code


def test_without_a_choice_the_fallback_and_no_timing(kernels: Any) -> None:
    add = Adds(kernels)
    x, y = inputs(5000)

    with pytest.warns(UserWarning, match="add_kernel has no choice"):
        result, code = code_of(torch.compile(add, fullgraph=True), x, y)

    assert torch.equal(result, x + y)
    assert blocks_in(code) == [256], code


def test_dynamic_shapes_compile_once_for_each_choice(kernels: Any) -> None:
    add = Adds(kernels)
    for n in (1000, 100_000):
        safetune.prepare(add, *inputs(n))
    compiled = torch.compile(add, fullgraph=True, dynamic=True)
    counters = torch._dynamo.utils.counters
    counters.clear()

    for n in (900, 1500, 2222, 5000, 40_000, 90_001, 99_999, 200_000, 300_000, 1 << 20):
        x, y = inputs(n)
        assert torch.equal(compiled(x, y), x + y), n

    assert counters["stats"]["unique_graphs"] <= 2, dict(counters)


def test_in_place_arguments_are_written_once(kernels: Any) -> None:
    """Inductor's own timing of several configs would add several times."""
    configs = [triton.Config({"BLOCK": block}) for block in (128, 256, 512)]
    tuner = safetune.safetune(configs=configs, key=["n"], restore_value=["out"])(
        kernels.strided_kernel
    )
    x, y = inputs(10_000)

    def accumulate(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        grid = lambda meta: (triton.cdiv(10_000, meta["BLOCK"]),)  # noqa: E731
        tuner[grid](x, y, out, 10_000, 1, 1, 1)
        return out * 2

    out = torch.zeros_like(x)
    safetune.prepare(accumulate, x, y, out.clone())
    result = torch.compile(accumulate, fullgraph=True)(x, y, out)

    torch.testing.assert_close(out, x + y)
    torch.testing.assert_close(result, 2 * (x + y))


SCRIPT = """
import json, sys
import torch, triton
sys.path.insert(0, sys.argv[1])
import kernels, safetune
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from torch._dynamo.utils import counters

block, as_op = int(sys.argv[2]), sys.argv[3] == "op"
configs = [triton.Config({"BLOCK": b}) for b in (256, 512)]
tuner = safetune.safetune(configs=configs, key=["n"])(kernels.add_kernel)
x = torch.ones(5000, device="cuda"); y = x * 2

def launch(kernel, x, y):
    out = torch.empty_like(x)
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
    return out

def direct(x, y):
    return launch(tuner, x, y)

@torch.library.triton_op("safetune_gpu::add", mutates_args={})
def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return launch(torch.library.wrap_triton(tuner), x, y)

from types import SimpleNamespace
from safetune.miss import resolve
chosen = next(place for place, c in enumerate(configs) if c.kwargs["BLOCK"] == block)
plan = SimpleNamespace(config=tuner.configs[chosen])
resolve.stored = lambda *rest: plan  # a choice of this process
from torch._inductor.utils import run_and_get_code
function = torch.compile(op if as_op else direct, fullgraph=True)
result, codes = run_and_get_code(function, x, y)
assert torch.equal(result, x + y)
from torch.profiler import profile
grids = []
with profile() as events:
    function(x, y)
    torch.cuda.synchronize()
import tempfile, os
path = os.path.join(tempfile.mkdtemp(), "trace.json")
events.export_chrome_trace(path)
for event in json.load(open(path))["traceEvents"]:
    if event.get("cat") == "kernel":
        grids.append(event["args"]["grid"][0])
print(json.dumps({"grids": grids, "hits": counters["inductor"].get("fxgraph_cache_hit", 0),
                  "aot": counters["aot_autograd"].get("autograd_cache_hit", 0)}))
"""


@pytest.mark.parametrize("how", ["direct", "op"])
def test_no_cache_of_torch_s_serves_a_stale_choice(
    how: str, fresh_process: Any, tmp_path: Path
) -> None:
    """Three processes with one Inductor cache: the second has the first's choice, the third not."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    seen = []
    for block in (256, 256, 512):
        done = fresh_process(SCRIPT, Path(__file__).parent, block, how, env=env)
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    assert [each["grids"] for each in seen] == [[20], [20], [10]], seen
    assert seen[1]["hits"] + seen[1]["aot"] > 0, seen  # the cache was in use


def test_triton_op(kernels: Any) -> None:
    add = Adds(kernels)

    @torch.library.triton_op("safetune_gpu::add_three", mutates_args={})
    def three(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        kernel = torch.library.wrap_triton(add.tuner)
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
        return out

    x, y = inputs(50_000)
    assert torch.equal(three(x, y), x + y)  # eager: safetune's own launch, and tuning
    chosen = add.tuner.best_config.kwargs["BLOCK"]

    result, code = code_of(torch.compile(three, fullgraph=True), x, y)

    assert torch.equal(result, x + y)
    assert blocks_in(code) == [chosen], code


def test_ahead_of_time(fresh_process: Any, scripts: Path, tmp_path: Path) -> None:
    """AOTInductor: exported with the choice, packaged, loaded and run.

    In a child, as loading any package at all ends the process with some installations of torch;
    where it does, this test ends as skipped, once all that goes before has been asserted.
    """

    def steps(name: str, *kernels: object) -> tuple[dict[str, Any], Any]:
        folder = tmp_path / name
        folder.mkdir()
        env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        done = fresh_process(scripts / "ahead_of_time.py", folder, *kernels, env=env, ends=None)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {line["step"]: line for line in lines}, done

    ours, done = steps("ours", Path(__file__).parent)
    how = f"ended with {done.returncode} after {list(ours)}:\n{done.stderr}"
    assert "packaged" in ours, how
    packaged = ours["packaged"]
    assert packaged["bytes"] > 0
    assert packaged["compiled"], "Inductor compiled the kernel where this test does not look"
    assert all(blocks == [packaged["chosen"]] for blocks in packaged["compiled"]), packaged
    assert not [name for name in packaged["timed"] if "add_kernel" in name], packaged
    if done.returncode < 0:
        control, plain = steps("control")
        if plain.returncode < 0 and list(ours) == list(control) == ["packaged"]:
            pytest.skip(
                f"packaged with the one choice, but not loaded: torch {torch.__version__}'s "
                f"aoti_load_package dies by signal {-plain.returncode} here, also for a package of "
                "torch's own operations, without safetune"
            )
    assert done.returncode == 0, how
    assert ours["run"]["off"] == 0.0, ours


def test_inference_mode_and_autocast(kernels: Any) -> None:
    add = Adds(kernels)
    x, y = inputs(20_000)
    safetune.prepare(add, x, y)
    compiled = torch.compile(add, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(x, y), x + y)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(compiled(x, y), x + y)


def test_vmap(kernels: Any) -> None:
    add = Adds(kernels)
    x, y = inputs(512)
    with pytest.raises(TracingError, match=r"torch\.vmap"):
        torch.vmap(add)(x.view(2, 256), y.view(2, 256))
    assert torch.equal(add(x, y), x + y)
    safetune.prepare(add, x[:256].clone(), y[:256].clone())
    with pytest.raises(TracingError, match=r"torch\.vmap"):  # where the key has a choice, too
        torch.vmap(add)(x.view(2, 256), y.view(2, 256))
