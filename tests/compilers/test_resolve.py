"""Resolving a kernel that another program launches: from the store, never from a guess."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner as TritonAutotuner
from triton.runtime.jit import JITFunction

from safetune import InvalidSetting, MissingChoice, TracingError, safetune
from safetune.compilers.resolve import resolve
from safetune.miss import reporting
from safetune.miss import resolve as miss_resolve
from safetune.offline.replay import LeftOut, sketches, with_kernels
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from tests.compilers import traced

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


@pytest.fixture
def gpu() -> Iterator[None]:
    with traced.a_gpu_to_trace_for():
        yield


@pytest.fixture
def module(tmp_path: Path) -> Any:
    return traced.load(tmp_path / "scale_resolved.py", traced.SOURCE)


def three(meta: Any) -> int:
    """What jax-triton takes, too: one number."""
    return 3


def abstract(n: int, dtype: Any = "float32") -> Any:
    """What `jax.ShapeDtypeStruct` is: a shape and a numpy dtype."""
    return SimpleNamespace(shape=(n,), dtype=np.dtype(dtype))


def grid(meta: Any) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.mark.usefixtures("gpu")
class TestResolve:
    def test_resolving_returns_a_plain_kernel_and_launches_nothing(self, module: Any) -> None:
        tuner = traced.kernel(module)
        x = torch.zeros(1000)
        traced.choose(tuner, tuner.configs[2], x, x, 1000)

        found = tuner.resolve(abstract(1000), abstract(1000), 1000, grid=grid)

        assert type(found.fn) is JITFunction
        assert not isinstance(found.fn, TritonAutotuner)
        assert (found.metaparams, found.grid, found.provenance) == ({"BLOCK": 256}, (4,), "stored")
        assert (found.num_warps, found.num_stages, found.num_ctas, found.maxnreg) == (4, 3, 1, None)
        assert found.config is tuner.configs[2]
        assert found.device == "NVIDIA H100 80GB HBM3"
        assert not tuner.cache

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8", "bool"])
    def test_arrays_of_every_library_have_the_same_key(self, module: Any, dtype: str) -> None:
        tuner = traced.kernel(module)
        tensor = torch.zeros(100, dtype=getattr(torch, dtype))
        traced.choose(tuner, tuner.configs[1], tensor, tensor, 100)
        array = np.zeros(100, dtype=dtype)

        digests = {
            tuner.resolve(*pair, 100).key_digest
            for pair in (
                (tensor, tensor),
                (array, array),
                (abstract(100, dtype), abstract(100, dtype)),
                (tensor.to("meta"), array),
            )
        }
        digests.add(tuner.resolve(array, array, np.int64(100)).key_digest)

        assert len(digests) == 1

    @pytest.mark.parametrize("kind", [np.float32, np.dtype("float32"), torch.float32, tl.float32])
    def test_a_dtype_as_a_key_value_is_the_same_from_every_library(
        self, module: Any, kind: Any
    ) -> None:
        """np.float32 is a class, and so is jnp.float32 nearly: both stand for a dtype."""
        text = traced.SOURCE.replace("FACTOR: tl.constexpr = 2", "KIND: tl.constexpr").replace(
            "FACTOR * tl.load(src + offset, mask=offset < n)",
            "tl.load(src + offset, mask=offset < n).to(KIND)",
        )
        tuner = traced.kernel(
            traced.load(Path(module.__file__).with_name("kinds.py"), text), key=["KIND"]
        )
        x = torch.zeros(8)
        traced.choose(tuner, tuner.configs[1], x, x, 8, KIND=torch.float32)

        assert tuner.resolve(x, x, 8, KIND=kind).provenance == "stored"

    @pytest.mark.parametrize("given", [3, (3,), [3], np.int64(3), torch.Size([3]), three])
    def test_a_grid_is_up_to_three_integers_or_a_function(self, module: Any, given: Any) -> None:
        tuner, x = traced.kernel(module), torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        assert tuner.resolve(x, x, 100, grid=given).grid == (3,)

    @pytest.mark.parametrize("given", [(1, 2, 3, 4), (), (2.5,), (-1,), "3", lambda meta: 2.5])
    def test_a_malformed_grid_is_an_error(self, module: Any, given: Any) -> None:
        tuner, x = traced.kernel(module), torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        with pytest.raises(InvalidSetting, match="one to three integers of 0 or more"):
            tuner.resolve(x, x, 100, grid=given)

    def test_the_error_shows_the_grid_as_it_was_given(self, module: Any) -> None:
        tuner, x = traced.kernel(module), torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        with pytest.raises(InvalidSetting, match=r"grid=2\.5 is not a launch grid"):
            tuner.resolve(x, x, 100, grid=2.5)

    @pytest.mark.parametrize("given", ["cuda:0", torch.device("cuda"), -1, 0.0, True], ids=repr)
    def test_a_malformed_device_index_is_an_error(self, module: Any, given: Any) -> None:
        tuner, x = traced.kernel(module), torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        with pytest.raises(InvalidSetting, match=r"device=.* is not the index of a GPU"):
            tuner.resolve(x, x, 100, device=given)

    def test_an_argument_passed_twice_is_an_error(self, module: Any) -> None:
        """As an output by position and the scalar meant for its place by name, from JAX."""
        tuner, x = traced.kernel(module), torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        with pytest.raises(InvalidSetting, match="scale_kernel got n by position and by name"):
            tuner.resolve(x, x, 100, n=100)

    def test_a_struct_with_a_numpy_dtype_has_the_key_of_a_tensor(self, module: Any) -> None:
        tuner, x = traced.kernel(module), torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        struct = SimpleNamespace(shape=(100,), dtype=np.float32)
        assert tuner.resolve(struct, struct, 100).provenance == "stored"

    def test_grid_and_heuristics_see_the_chosen_config(self, module: Any) -> None:
        seen = []

        def factor(named: Any) -> int:
            seen.append(named["BLOCK"])
            return named["BLOCK"] // 64

        inner = triton.heuristics({"FACTOR": factor})(JITFunction(module.scale_kernel))
        tuner = safetune(configs=traced.configs(), key=["n"])(inner)
        x = torch.zeros(1000)
        traced.choose(tuner, tuner.configs[1], x, x, 1000)
        seen.clear()

        found = tuner.resolve(x, x, 1000, grid=grid)

        assert found.metaparams == {"BLOCK": 128, "FACTOR": 2}
        assert found.grid == (8,)
        assert set(seen) == {128}

    def test_heuristics_above_the_tuner_set_values_of_the_key(self, module: Any) -> None:
        """Their values are key values like any other."""
        tuner = traced.kernel(module, key=["FACTOR"])
        outer = triton.heuristics({"FACTOR": lambda named: named["n"] % 7})(tuner)
        x = torch.zeros(10)
        traced.choose(tuner, tuner.configs[2], x, x, 10, FACTOR=3)

        found = resolve(outer, (x, x, 10), {}, (1,))

        assert found.metaparams["BLOCK"] == 256

    def test_a_miss_without_data_names_the_offline_command(self, module: Any) -> None:
        tuner = traced.kernel(module)
        with pytest.raises(
            MissingChoice, match=r"n=100.*float32.*H100.*`safetune tune --recorded`"
        ):
            tuner.resolve(abstract(100), abstract(100), 100, grid=grid)

    def test_a_miss_without_data_is_recorded(self, module: Any) -> None:
        """As a call whose tensors are new memory: what `safetune tune --recorded` needs of it."""
        tuner = module.tuner = traced.kernel(module)
        for given in ({}, {"grid": grid}):
            with pytest.raises(MissingChoice, match="safetune tune --recorded"):
                tuner.resolve(abstract(100, "float16"), abstract(100, "float16"), 100, **given)
            (call,) = open_lookup(Settings.current()).store.calls()
            left_out: list[LeftOut] = []
            found = [*sketches(with_kernels([call], [], left_out), False, left_out)]
            said = [each.reason for each in left_out]
            assert said == ([] if given else ["it was resolved without a grid"])
        (sketch,) = found
        task = sketch.make()
        dst, src, n = task.workload.args
        assert (dst.dtype, dst.shape, src.shape, n) == (torch.float16, (100,), (100,), 100)
        assert dst.data_ptr() != src.data_ptr()
        assert task.workload.grid(tuner.configs[0].all_kwargs()) == (2,)
        again = miss_resolve.Miss(tuner, task.workload.args, {"grid": task.workload.grid}).key()
        assert again.digest == call.key

    def test_dropped_names_have_one_value(self, module: Any) -> None:
        text = traced.SOURCE.replace("n, BLOCK", "n, NB: tl.constexpr, BLOCK")
        text += "\n\ndef scale(dst, src, n, NB):\n    scale_kernel[(1,)](dst, src, n, NB, 1024)\n"
        tuner = traced.kernel(
            traced.load(Path(module.__file__).with_name("dropped.py"), text), key=["n", "NB"]
        )
        with pytest.warns(UserWarning, match="NB"):
            tuner.explain_key()
        x = torch.zeros(100)
        traced.choose(tuner, tuner.configs[0], x, x, 100, 5)

        assert tuner.resolve(x, x, 100, NB=17).metaparams == {"BLOCK": 64, "NB": 1}

    def test_a_kernel_without_safetune_is_an_error(self, module: Any) -> None:
        with pytest.raises(InvalidSetting, match="@safetune"):
            resolve(JITFunction(module.scale_kernel), (), {})

    def test_another_body_is_another_kernel(self, module: Any) -> None:
        """B7: a choice for one `scale_kernel` does not count for a second one of that name."""
        other = traced.load(
            Path(module.__file__).with_name("other.py"), traced.SOURCE.replace("FACTOR *", "3 +")
        )
        tuner, second = traced.kernel(module), traced.kernel(other)
        x = torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)

        assert tuner.resolve(x.to("meta"), x.to("meta"), 100).provenance == "stored"
        with pytest.raises(MissingChoice):
            second.resolve(x.to("meta"), x.to("meta"), 100)


@pytest.mark.usefixtures("gpu")
class TestForTransformerEngine:
    """Its `triton_call_lowering` takes `.configs` from a tuner and launches a plain kernel with
    warps and stages of its own."""

    def resolved(self, module: Any, **options: Any) -> Any:
        tuner = traced.kernel(module, configs=traced.configs(64, 128, **options))
        x = torch.zeros(100)
        traced.choose(tuner, tuner.configs[1], x, x, 100)
        return tuner.resolve(x, x, 100, grid=grid)

    def test_transformer_engine_launches_a_single_config_autotuner(
        self, fresh_process: FreshProcess
    ) -> None:
        """Compiled for an H100 as it would be there: the choice, and its warps and stages."""
        (compiled,) = compiled_by_transformer_engine(fresh_process, "resolved")

        assert compiled.pop("type") == "triton.runtime.autotuner.Autotuner"
        assert compiled == {
            "name": "scale_kernel",
            "constants": {"n": 100, "FACTOR": 3, "BLOCK": 128},
            "num_warps": 8,
            "num_stages": 2,
            "threads": 256,
        }

    def test_transformer_engine_compiles_every_config_of_an_unresolved_tuner(
        self, fresh_process: FreshProcess
    ) -> None:
        """Why to resolve it: each config is compiled, and tried on the program's own buffers."""
        every = compiled_by_transformer_engine(fresh_process, "tuner")

        assert [each["constants"]["BLOCK"] for each in every] == [64, 128]

    def test_a_plain_kernel_keeps_its_warps_or_is_refused(self, module: Any) -> None:
        assert type(self.resolved(module).as_plain_kernel()) is JITFunction
        eight = self.resolved(module, num_warps=8)
        with pytest.raises(TracingError, match=r"\{'num_warps': 8\}.*as_single_config_autotuner"):
            eight.as_plain_kernel()
        assert type(eight.as_plain_kernel(num_warps=8)) is JITFunction
        with pytest.raises(TracingError, match="pre_hook"):
            self.resolved(module, pre_hook=print).as_plain_kernel()

    def test_a_config_with_maxnreg_is_refused_where_it_would_be_lost(self, module: Any) -> None:
        with pytest.raises(TracingError, match="maxnreg"):
            self.resolved(module, maxnreg=64).as_single_config_autotuner()


def compiled_by_transformer_engine(fresh_process: FreshProcess, what: str) -> list[dict[str, Any]]:
    """What its helper compiles; without the interpreter, as the kernel is for a GPU."""
    script = Path(__file__).with_name("transformer_engine.py")
    done = fresh_process(script, what, env={"TRITON_INTERPRET": None}, warm=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@triton.jit
def double_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, 2 * tl.load(src + offset, mask=offset < n), mask=offset < n)


class TestTuning:
    """In the interpreter: with data, a miss is tuned, through the same store as a launch."""

    def tuner(self, **options: Any) -> Any:
        configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
        return safetune(configs=configs, key=["n"], **options)(double_kernel)

    def test_arrays_are_tuned_on_and_left_alone(self) -> None:
        tuner, src, dst = self.tuner(), np.ones(100, np.float32), np.zeros(100, np.float32)
        begun = reporting.tunings.begun

        found = tuner.resolve(dst, src, 100, grid=grid)

        assert found.provenance == "tuned"
        assert reporting.tunings.begun == begun + 1
        assert not dst.any()
        again = self.tuner().resolve(abstract(100), abstract(100), 100, grid=grid)
        assert (again.provenance, again.metaparams) == ("stored", found.metaparams)

    def test_without_a_grid_nothing_is_tried_or_stored(self) -> None:
        """It would fail for every config, and be what is known of the key."""
        tuner, src, dst = self.tuner(), np.ones(90, np.float32), np.zeros(90, np.float32)
        with pytest.raises(MissingChoice, match="resolve it with grid="):
            tuner.resolve(dst, src, 90)
        assert not open_lookup(Settings.current()).store.trials_of("double_kernel")

    def test_a_launch_through_torch_uses_what_was_resolved(self) -> None:
        found = self.tuner().resolve(abstract(100), np.ones(100, np.float32), 100, grid=grid)
        tuner, x, out = self.tuner(), torch.ones(100), torch.zeros(100)
        begun = reporting.tunings.begun

        tuner[grid](out, x, 100)

        assert reporting.tunings.begun == begun
        assert tuner.best_config.kwargs["BLOCK"] == found.metaparams["BLOCK"]
        assert (out == 2).all()

    def test_shapes_alone_are_tuned_on_with_a_factory_only(self) -> None:
        def draw(named: Any) -> Any:
            return {
                name: torch.ones(named[name].shape, dtype=named[name].dtype)
                for name in ("dst", "src")
            }

        with pytest.raises(MissingChoice):
            self.tuner().resolve(abstract(50), abstract(50), 50, grid=grid)
        found = self.tuner(inputs=draw).resolve(abstract(50), abstract(50), 50, grid=grid)
        assert found.provenance == "tuned"


MISSING = """
import os, sys
import numpy as np
import torch, triton
import triton.language as tl
from types import SimpleNamespace
from safetune import Workload, safetune

@safetune(configs=[triton.Config({"BLOCK": block}) for block in (64, 128)], key=["n"])
@triton.jit
def double_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, 2 * tl.load(src + offset, mask=offset < n), mask=offset < n)

def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)

@double_kernel.workload
def sizes(device, dtype):
    yield Workload("70", grid, (torch.empty(70), torch.ones(70), 70))

def look(n):
    x = SimpleNamespace(shape=(n,), dtype=np.dtype("float32"))
    print(double_kernel.resolve(x, x, n, grid=grid).provenance)

if __name__ == "__main__":
    for n in sys.argv[1:]:
        look(int(n))
"""

COMMAND_LINE = "import sys; from safetune.cli import main; sys.argv[0] = 'safetune'; main()"


@pytest.mark.parametrize("how", ["script", pytest.param("-m", marks=pytest.mark.full)])
def test_the_commands_that_a_miss_names_do_what_it_says(
    tmp_path: Path, fresh_process: FreshProcess, how: str
) -> None:
    """Pasted as they stand: one for the very call, one for the workloads; then both are stored."""
    (tmp_path / "my kernels").mkdir()
    script = tmp_path / "my kernels" / "missing.py"
    script.write_text(MISSING)
    cwd = tmp_path if how == "script" else script.parent
    module = "import runpy; runpy.run_module('missing', run_name='__main__', alter_sys=True)"
    program = script if how == "script" else module

    missed = fresh_process(program, 60, cwd=cwd, warm=True, ends=1)
    commands = re.findall("`safetune (.*?)`", missed.stderr.replace("\n", " "))
    assert len(commands) == 2, missed.stderr
    for command in commands:
        done = fresh_process(COMMAND_LINE, *shlex.split(command), cwd=cwd, warm=True)
        assert "1 tuning, 2 configs measured" in done.stdout, (command, done.stderr)

    assert fresh_process(program, 60, 70, cwd=cwd, warm=True).stdout.split() == ["stored", "stored"]


def test_mode_off_and_a_single_config_need_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    only = safetune(configs=[triton.Config({"BLOCK": 64})], key=["n"])(double_kernel)
    assert only.resolve(abstract(9), abstract(9), 9).provenance == "only"
    monkeypatch.setenv("SAFETUNE_MODE", "off")
    two = safetune(configs=traced.configs(64, 128), key=["n"])(double_kernel)
    assert two.resolve(abstract(9), abstract(9), 9).provenance == "off"


def test_scratch_bytes_without_a_gpu_to_compile_for_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never from a capability; where nothing can be compiled for, the error says so."""
    from safetune import NoDevice

    only = safetune(configs=[triton.Config({"BLOCK": 64})], key=["n"])(double_kernel)
    found = only.resolve(abstract(9), abstract(9), 9)
    with pytest.raises(NoDevice):
        _ = found.scratch_bytes


def test_without_jax_the_extra_is_named(fresh_process: FreshProcess) -> None:
    code = """
import os, sys
sys.modules["jax"] = None
from safetune import TracingError
from safetune.integrations.jax import triton_call
try:
    triton_call(kernel=None, out_shape=(), grid=(1,))
except TracingError as error:
    print(error)
"""
    done = fresh_process(code)
    assert "pip install 'safetune[jax]'" in done.stdout, done.stderr
