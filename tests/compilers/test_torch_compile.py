"""What Dynamo and AOT autograd see of safetuned kernels; traced for a GPU that is not there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from safetune import TracingError
from safetune.compilers import dynamic_shapes
from safetune.config import config_digest, config_record
from safetune.errors import TuningWarning
from safetune.keys.tuning_key import Bucket
from safetune.miss import record, resolve
from safetune.offline.replay import LeftOut, sketches, with_kernels
from safetune.settings import Settings
from safetune.store.lookup import Lookup, open_lookup
from safetune.store.records import KeyRecord
from tests.compilers import traced

pytestmark = [
    pytest.mark.internals,
    pytest.mark.filterwarnings("ignore:.*torch.compile traces"),
]


NOT_TRACED_BY_2_8 = pytest.mark.skipif(
    torch.__version__.startswith("2.8."),
    reason="torch 2.8 cannot trace this under a stock tuner with a prune function, either",
)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    torch._dynamo.reset()
    with traced.a_gpu_to_trace_for():
        yield
    torch._dynamo.reset()


@pytest.fixture
def module(tmp_path: Path) -> Any:
    return traced.load(tmp_path / "scale.py", traced.SOURCE)


def lookup_now() -> Lookup:
    return open_lookup(Settings.current())


def scaling(tuner: Any, **kwargs: Any) -> Any:
    def scale(src: torch.Tensor) -> torch.Tensor:
        n = src.shape[0]
        dst = torch.empty_like(src)
        tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n, **kwargs)
        return dst

    return scale


def store(tuner: Any, choices: dict[int, int], **kwargs: Any) -> None:
    """Have `choices` map n to the place of its config."""
    for n, place in choices.items():
        x = torch.zeros(n)
        traced.choose(tuner, tuner.configs[place], x, x, n, **kwargs)


def compiled(tuner: Any, *sizes: int, function: Any = None, **options: Any) -> Any:
    graphs = traced.Graphs()
    options.setdefault("fullgraph", True)
    step = torch.compile(function or scaling(tuner), backend=graphs, **options)
    for n in sizes:
        step(torch.zeros(n))
    return graphs


def test_the_stored_choice_is_the_only_config_in_the_graph(module: Any) -> None:
    tuner = traced.kernel(module, restore_value=["dst"])
    store(tuner, {1000: 1, 2000: 2})

    assert compiled(tuner, 1000).blocks() == [[128]]
    assert compiled(tuner, 2000, dynamic=False).blocks() == [[256]]


def test_a_copy_is_traced_as_itself(module: Any) -> None:
    """It asked the tuner that it is a copy of, which has other configs."""
    tuner = traced.kernel(module)
    copied = copy.copy(tuner)
    copied.configs = tuner.configs[1:]
    store(tuner, {1000: 0})
    store(copied, {1000: 1})

    assert compiled(tuner, 1000).blocks() == [[64]]
    torch._dynamo.reset()
    assert compiled(copied, 1000).blocks() == [[256]]


@pytest.mark.parametrize("mode", ["tune", "frozen", "off"])
@pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")
def test_a_config_that_the_program_has_written_is_compiled(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored choice was compiled, and in the mode `off` the first config."""
    text = traced.SOURCE.replace("FACTOR: tl.constexpr = 2", "UNREAD").replace("FACTOR * ", "")
    tuner = traced.kernel(traced.load(tmp_path / "unread.py", text), key=["UNREAD", "n"])
    assert [*tuner.key_names] == ["n"]
    store(tuner, {1000: 1}, UNREAD=3)
    monkeypatch.setenv("SAFETUNE_MODE", mode)
    key = (1000, "torch.float32", "torch.float32")
    for written in (0, 2):
        tuner.cache[(3, *key)] = triton.Config(dict(tuner.configs[written].kwargs))
        torch._dynamo.reset()
        scale = scaling(tuner, UNREAD=3)
        other = scaling(tuner, UNREAD=5)
        seen = [compiled(tuner, 1000, function=each).blocks() for each in (scale, other)]
        assert seen == [[[64 << written]]] * 2
        (otherwise,) = compiled(tuner, 64, function=scale).blocks()
        assert otherwise == ([64] if mode == "off" else [128])


def test_a_written_config_that_is_not_declared_is_warned_of(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {1000: 1})
    tuner.cache[(1000, "torch.float32", "torch.float32")] = triton.Config({"BLOCK": 32})
    with pytest.warns(TuningWarning, match="BLOCK=32.* not in its configs"):
        assert compiled(tuner, 1000).blocks() == [[128]]


@pytest.mark.parametrize("declared", [None, traced.configs(64)], ids=["none", "one"])
def test_configs_set_after_decoration_have_their_stored_choice(module: Any, declared: Any) -> None:
    """As a program does that reads them from a file of its own, after the import."""
    tuner = traced.kernel(module, configs=declared)
    tuner.configs = traced.configs()
    store(tuner, {1000: 1})

    assert compiled(tuner, 1000).blocks() == [[128]]


def test_keyword_arguments_and_another_dtype_have_the_key_of_a_launch(module: Any) -> None:
    """The key is that of an eager launch: dtypes and launch options are in it."""
    tuner = traced.kernel(module)
    x = torch.zeros(64, dtype=torch.float16)
    traced.choose(tuner, tuner.configs[2], dst=x, src=x, n=64, FACTOR=3)
    graphs = traced.Graphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def scale(src: torch.Tensor) -> torch.Tensor:
        dst = torch.empty_like(src)
        tuner[(1,)](dst=dst, src=src, n=64, FACTOR=3)
        return dst

    scale(x)
    scale(x.float())

    assert graphs.blocks() == [[256], [64]]


def test_the_order_of_keywords_does_not_change_the_key(module: Any) -> None:
    tuner = traced.kernel(module)
    x = torch.zeros(64)
    calls = ({"dst": x, "src": x, "n": 64}, {"n": 64, "src": x, "dst": x})
    first, second = (resolve.Miss(tuner, (), {"grid": (1,), **call}).key() for call in calls)
    assert first.digest == second.digest

    traced.choose(tuner, tuner.configs[2], **calls[1])
    launch = compiled(tuner, 64, function=lambda src: tuner[(1,)](dst=src, src=src, n=64))
    assert launch.blocks() == [[256]]


@pytest.mark.parametrize("options", [{}, {"FACTOR": 3}, {"maxnreg": 64}])
def test_a_miss_a_resolved_and_a_compiled_call_have_one_digest(
    module: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """With a key builder of its own, torch.compile would find no choice that a launch stored."""
    monkeypatch.setenv("SAFETUNE_MODE", "record")
    tuner = traced.kernel(module)
    x = torch.zeros(64, dtype=torch.bfloat16)

    def launch(src: torch.Tensor) -> None:
        tuner[(1,)](src, src, 64, **options)

    missed = resolve.Miss(tuner, (x, x, 64), {"grid": (1,), **options}).key()
    resolved = tuner.resolve(x, x, 64, **options)
    torch.compile(launch, backend=traced.Graphs(), fullgraph=True)(x)

    recorded = [call.key for call in lookup_now().store.calls()]
    assert {missed.digest, resolved.key_digest, *recorded} == {missed.digest}
    assert recorded


def test_dynamic_shapes_make_one_graph_for_each_choice(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {100: 1, 1000: 1, 4096: 0, 100_000: 2, 200_000: 2})
    sizes = [7, 50, 100, 777, 1500, 3000, 5000, 9999, 19_000, 21_000, 90_000, 10**6, 10**6 + 1]

    graphs = compiled(tuner, *sizes, dynamic=True)

    assert graphs.blocks() == [[128], [64], [256]]


def test_dynamic_shapes_follow_buckets(module: Any) -> None:
    """The stored keys have buckets, and the compiled code compares sizes."""
    tuner = traced.kernel(module, key={"n": triton.next_power_of_2})
    store(tuner, {100: 1, 1000: 0, 5000: 2})
    sizes = [7, 100, 128, 129, 600, 1024, 2000, 4096, 5000, 8192, 10**6]

    graphs = compiled(tuner, *sizes, dynamic=True)

    assert graphs.blocks() == [[128], [64], [256]]


def test_choices_of_another_toolchain_make_no_regions(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {100: 1, 1000: 0})
    x = torch.zeros(10_000)
    request = resolve.Miss(tuner, (x, x, 10_000), {"grid": (1,)}).request()
    other = replace(request.key, toolchain=replace(request.key.toolchain, triton="2.0"))
    stored, config = lookup_now().store, tuner.configs[2]
    choice = replace(
        stored.choices()[0].choice,
        key=other.digest,
        config_digest=config_digest(config),
        config=config_record(config),
    )
    stored.put_key(KeyRecord.of(other))
    stored.put_choice(choice)

    assert compiled(tuner, 50, 1000, 9000, dynamic=True).blocks() == [[128], [64]]


@pytest.mark.parametrize(
    "bucket",
    [lambda n: -n, lambda n: str(n), lambda n: 1 // (n - n)],
    ids=["falls", "str", "fails"],
)
def test_buckets_that_do_not_rise_have_no_regions(bucket: Any) -> None:
    found = ((48, 32), (None, 64))
    assert dynamic_shapes._values_of(found, Bucket("kernel", "n", bucket)) == ()


@pytest.mark.parametrize(("how", "block"), [("nonzero", 128), ("item", 256)])
def test_a_size_that_depends_on_data_has_one_choice(module: Any, how: str, block: int) -> None:
    """As that of a batch for one of several experts: one that has no limit is a large one."""
    tuner = traced.kernel(module)
    store(tuner, {100: 1, 100_000: 2})

    def scale(src: torch.Tensor) -> torch.Tensor:
        n = src.nonzero().shape[0] if how == "nonzero" else int(src.sum().item())
        dst = torch.empty_like(src)
        tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
        return dst

    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        graphs = compiled(tuner, 100, function=scale)

    assert graphs.blocks() == [[block]]


def test_two_dynamic_names_take_the_nearest_choice(module: Any) -> None:
    """Two values are unknown: each combination of regions has the nearest stored choice."""
    text = traced.SOURCE.replace("n, BLOCK", "n, m, BLOCK").replace("offset < n", "offset < n + m")
    tuner = traced.kernel(
        traced.load(Path(module.__file__).with_name("two.py"), text), key=["n", "m"]
    )
    for n, m, place in ((16, 16, 0), (16, 4096, 1), (4096, 16, 1), (4096, 4096, 2)):
        x = torch.zeros(n, m)
        traced.choose(tuner, tuner.configs[place], x, x, n, m)
    graphs = traced.Graphs()

    @torch.compile(backend=graphs, fullgraph=True, dynamic=True)
    def scale(src: torch.Tensor) -> torch.Tensor:
        dst = torch.empty_like(src)
        tuner[(1,)](dst, src, src.shape[0], src.shape[1])
        return dst

    for shape in ((16, 17), (18, 5000), (5000, 18), (6000, 7000), (20, 30), (9000, 9001)):
        scale(torch.zeros(shape))

    assert graphs.blocks() == [[64], [128], [128], [256]]


def test_more_choices_than_dynamo_compiles_are_merged(module: Any) -> None:
    """Past `recompile_limit`, fullgraph=True would raise: neighbours share a graph instead."""
    tuner = traced.kernel(module)
    store(tuner, {2**power: power % 3 for power in range(4, 20)})

    graphs = compiled(tuner, *(2**power + 1 for power in range(4, 20)), dynamic=True)

    assert 1 < len(graphs.blocks()) <= 6


def test_a_key_without_a_choice_compiles_the_first_config_and_warns(module: Any) -> None:
    """The fallback, one warning that says what to do, one graph for all sizes."""
    tuner = traced.kernel(module)
    with pytest.warns(UserWarning, match=r"scale_kernel has no choice.*safetune.prepare") as told:
        graphs = compiled(tuner, 100, 200, 300, dynamic=True)

    assert graphs.blocks() == [[64]]
    assert len([each for each in told if "no choice" in str(each.message)]) == 1


def test_a_key_without_a_choice_compiles_the_choice_of_the_nearest_key(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {1000: 2})

    assert compiled(tuner, 1200).blocks() == [[256]]


def test_a_miss_is_recorded(module: Any) -> None:
    """With its key, and why nothing else is known of it; a launch that is recorded says more."""
    tuner = module.tuner = traced.kernel(module)
    compiled(tuner, 100)
    compiled(tuner, 100)

    (call,) = lookup_now().store.calls()
    assert (call.name, call.place) == ("scale_kernel", "scale:scale_kernel")
    all_left_out: list[LeftOut] = []
    assert [*sketches(with_kernels([call], [], all_left_out), False, all_left_out)] == []
    (left_out,) = all_left_out
    assert left_out.words == "scale_kernel for n=100 (float32)"
    assert "safetune.prepare" in left_out.reason

    x = torch.zeros(100)
    missed = resolve.Miss(tuner, (x, x, 100), {"grid": (2,)})
    for _ in range(2):
        record.remember(missed.request(), lookup_now().store)
        left_out: list[LeftOut] = []
        found = with_kernels(lookup_now().store.calls(), [], left_out)
        (sketch,) = sketches(found, False, left_out)
        task = sketch.make()
        assert left_out == []
        assert task.workload.args[2] == 100
        torch._dynamo.reset()
        compiled(tuner, 100)  # takes nothing away


def test_frozen_records_nothing(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")
    assert compiled(traced.kernel(module), 100).blocks() == [[64]]
    assert lookup_now().store.calls() == []


def test_a_new_choice_is_seen_after_a_reset(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {1000: 1})
    assert compiled(tuner, 1000).blocks() == [[128]]
    store(tuner, {1000: 2})
    torch._dynamo.reset()

    assert compiled(tuner, 1000).blocks() == [[256]]


def test_a_pruned_config_is_never_the_fallback(module: Any) -> None:
    def only_large(configs: Any, named: Any, **kwargs: Any) -> Any:
        return [config for config in configs if config.kwargs["BLOCK"] >= named["least"]]

    text = traced.SOURCE.replace("n, BLOCK", "n, least, BLOCK")
    module = traced.load(Path(module.__file__).with_name("pruned.py"), text)
    tuner = traced.kernel(module, prune_configs_by={"early_config_prune": only_large})
    graphs = traced.Graphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def scale(src: torch.Tensor) -> torch.Tensor:
        dst = torch.empty_like(src)
        tuner[(1,)](dst, src, 100, 100)
        return dst

    scale(torch.zeros(100))

    assert graphs.blocks() == [[128]]


def test_a_performance_model_stays_out_of_the_trace(module: Any) -> None:
    """With `top_k` a fraction, torch would rank the one config left and keep none."""
    model = {"perf_model": lambda **named: named["BLOCK"], "top_k": 0.5}
    tuner = traced.kernel(module, prune_configs_by=model)
    store(tuner, {100: 0})

    assert compiled(tuner, 100).blocks() == [[64]]


@NOT_TRACED_BY_2_8
def test_heuristics_below_the_tuner_see_the_stored_choice(module: Any) -> None:
    from triton.runtime.jit import JITFunction

    from safetune import safetune

    def twice(named: Any) -> Any:
        return named["BLOCK"] // 32

    inner = triton.heuristics({"FACTOR": twice})(JITFunction(module.scale_kernel))
    tuner = safetune(configs=traced.configs(), key=["n"])(inner)
    store(tuner, {100: 1})

    (kernel,) = compiled(tuner, 100).kernels()

    assert [config.kwargs for config in kernel.configs] == [{"BLOCK": 128, "FACTOR": 4}]


@pytest.mark.parametrize("lost", [{"num_ctas": 2}, {"maxnreg": 128}], ids=str)
def test_a_choice_whose_options_inductor_drops_is_replaced_with_a_warning(
    module: Any, lost: dict[str, int]
) -> None:
    configs = [*traced.configs(64, 128), *traced.configs(256, **lost)]
    tuner = traced.kernel(module, configs=configs)
    store(tuner, {100: 2})
    name = next(iter(lost))

    with pytest.warns(UserWarning, match=f"torch.compile ignores .*{name}.*BLOCK=64.*instead"):
        graphs = compiled(tuner, 100)

    assert graphs.blocks() == [[64]]


def test_without_a_config_that_inductor_keeps_tracing_raises(module: Any) -> None:
    tuner = traced.kernel(module, configs=traced.configs(maxnreg=64))

    with pytest.raises(Exception, match=r"torch.compile ignores .*maxnreg.*custom_op"):
        compiled(tuner, 100)


def test_inference_mode_and_autocast_have_the_key_of_a_launch(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {100: 2})
    with torch.inference_mode():
        assert compiled(tuner, 100).blocks() == [[256]]
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(tuner, 100).blocks() == [[256]]


def test_vmap_is_refused(module: Any) -> None:
    tuner = traced.kernel(module)
    batched = torch.vmap(scaling(tuner))

    with pytest.raises(TracingError, match=r"torch\.vmap"):
        batched(torch.zeros(3, 100))
    with pytest.raises(Exception, match=r"TracingError: scale_kernel .*torch\.vmap"):
        compiled(tuner, 100, function=lambda x: batched(x.expand(3, 100)))


def test_jax_tracing_a_tuner_is_refused(module: Any) -> None:
    """jax-triton replaces the prune function, and would get every config."""
    tuner = traced.kernel(module)
    with pytest.raises(TracingError, match=r"jax\.triton_call"):
        tuner.early_config_prune(tuner.configs, {"n": 100})


def test_a_question_about_configs_is_answered_as_by_triton(module: Any) -> None:
    """Attention-gym's tests ask which configs a size leaves; it was the error for JAX."""
    from safetune import safetune

    tuner = traced.kernel(module)
    assert tuner.early_config_prune(tuner.configs, {}) == tuner.configs
    by = {"early_config_prune": lambda configs, named, *, D: configs[: D // 100]}
    pruned = safetune(configs=traced.configs(), key=["n"], prune_configs_by=by)(tuner.fn)
    assert pruned.early_config_prune(pruned.configs, {}, D=200) == pruned.configs[:2]


DESCRIBED = """
import triton.language as tl


def described_kernel(dst, src, n, BLOCK: tl.constexpr):
    dst.store([n], src.load([n]))
"""


@pytest.mark.parametrize("all_of_them", [True, False], ids=["all", "one"])
def test_tensor_descriptors_have_the_key_of_a_launch(
    module: Any, monkeypatch: pytest.MonkeyPatch, all_of_them: bool
) -> None:
    """Made on the host: Dynamo has no type for one, and there need be no tensor beside them."""
    from torch.utils import _triton
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    from safetune import safetune

    monkeypatch.setattr(_triton, "has_triton_tensor_descriptor_host_tma", lambda: True)
    module = traced.load(Path(module.__file__).with_name("described.py"), DESCRIBED)
    tuner = safetune(configs=traced.configs(), key=["n"])(JITFunction(module.described_kernel))
    dst, x = (TensorDescriptor.from_tensor(torch.zeros(64), [64]) for _ in range(2))
    traced.choose(tuner, tuner.configs[2], dst if all_of_them else torch.zeros(64), x, 64)

    def copy(src: torch.Tensor) -> torch.Tensor:
        dst = torch.empty_like(src)
        place = TensorDescriptor.from_tensor(dst, [64]) if all_of_them else dst
        tuner[(1,)](place, TensorDescriptor.from_tensor(src, [64]), 64)
        return dst

    assert compiled(tuner, 64, function=copy).blocks() == [[256]]
    if all_of_them:  # and as a triton_op is traced
        named = {"dst": dst, "src": x, "n": 64}
        assert tuner.early_config_prune(tuner.configs, named) == [tuner.configs[2]]


@NOT_TRACED_BY_2_8
def test_each_kind_of_tensor_descriptor_has_its_own_choice(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By dtype, also where two launches of a graph differ in it, and where sizes are unknown."""
    from torch.utils import _triton
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    from safetune import safetune

    monkeypatch.setattr(_triton, "has_triton_tensor_descriptor_host_tma", lambda: True)
    module = traced.load(Path(module.__file__).with_name("kinds.py"), DESCRIBED)
    tuner = safetune(configs=traced.configs(), key=["n"])(JITFunction(module.described_kernel))
    for dtype, config in ((torch.float32, 2), (torch.float16, 1)):
        x = torch.zeros(8, 64, dtype=dtype)
        described = TensorDescriptor.from_tensor(x, [8, 64])
        traced.choose(tuner, tuner.configs[config], x, described, 64)

    def copy(src: torch.Tensor) -> torch.Tensor:
        single, half = torch.empty_like(src), torch.empty_like(src, dtype=torch.float16)
        tuner[(1,)](single, TensorDescriptor.from_tensor(src, [8, 64]), 64)
        tuner[(1,)](half, TensorDescriptor.from_tensor(src.half(), [8, 64]), 64)
        return single + half

    graphs = traced.Graphs()
    torch.compile(copy, backend=graphs, fullgraph=True, dynamic=True)(torch.zeros(32, 64))
    assert graphs.blocks() == [[256], [128]]


def test_a_triton_op_marks_the_caches_with_its_choice(module: Any) -> None:
    """Neither Dynamo nor AOT autograd's cache look into one: the caches' tag has the choice."""
    from torch._dynamo.backends.common import aot_autograd

    tuner = traced.kernel(module)
    store(tuner, {100: 1})

    @torch.library.triton_op("safetune_tests::scale", mutates_args={})
    def scale(src: torch.Tensor) -> torch.Tensor:
        dst = torch.empty_like(src)
        n = src.shape[0]
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
        torch.library.wrap_triton(tuner)[grid](dst, src, n)
        return dst

    tags = []
    for place in (1, 2):
        store(tuner, {100: place})
        torch._dynamo.reset()
        graphs = traced.Graphs()
        torch.compile(scale, backend=aot_autograd(fw_compiler=graphs), fullgraph=True)(
            torch.zeros(100)
        )
        assert graphs.blocks() == [[64 << place]]
        tags.append(torch.compiler.config.cache_key_tag)
    assert len({*tags, ""}) == 3


def test_an_exported_program_has_the_stored_choice(module: Any) -> None:
    tuner = traced.kernel(module)
    store(tuner, {100: 2})

    class Scale(torch.nn.Module):
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return scaling(tuner)(src)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Scale(), (torch.zeros(100),), strict=True)
    graphs = traced.Graphs()
    graphs.seen.append(program.graph_module)

    assert graphs.blocks() == [[256]]
