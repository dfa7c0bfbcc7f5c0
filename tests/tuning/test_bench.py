"""Which configs of a tuning are compiled, which are launched, and which only take a result over."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import _runtime as _imported_interpreted  # noqa: F401
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from safetune.errors import KernelNotTransferable
from safetune.inputs import compile_spec
from safetune.inputs.call import Call, Hooks
from safetune.isolation import child_handle
from safetune.isolation.compile_pool import CompilePool
from safetune.keys.identity import kernel_identity
from safetune.keys.tuning_key import Device, Toolchain, TuningKey
from safetune.outcome import Outcome, Verdict
from safetune.tuning.bench import LaunchBench
from safetune.tuning.requests import TuningRequest
from tests import backends

pytestmark = pytest.mark.internals

h100 = backends.h100  # an autouse fixture


def matmul(x, y, out, BLOCK: tl.constexpr):
    a = tl.arange(0, BLOCK)
    square = a[:, None] * BLOCK + a[None, :]
    tl.store(out + square, tl.dot(tl.load(x + square), tl.load(y + square)))


SMALL_AND_LARGE = (triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 128}))


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., LaunchBench]]:
    """A function that starts a bench for a kernel that is compiled, for an H100."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))

    def start(
        kernel: Any = matmul,
        configs: Sequence[triton.Config] = SMALL_AND_LARGE,
        shared: int = 20_000,
        hooks: Hooks | None = None,
        grid: Any = (1,),
    ) -> LaunchBench:
        jit = JITFunction(kernel)
        args = tuple(torch.zeros(128, 128, dtype=torch.float16) for _ in range(3))
        call = Call(
            kernel=jit,
            arg_names=tuple(jit.arg_names),
            args=args,
            kwargs={},
            grid=grid,
            pins={},
            hooks=hooks or Hooks(),
            index=0,
        )
        device = Device("a card", "90", 132, shared)
        toolchain = Toolchain(triton.__version__, "backend", "cuda-90-32")
        key = TuningKey(kernel_identity(jit), (), (), (), device, toolchain)
        return LaunchBench(TuningRequest(key, call, tuple(configs), "declared"))

    yield start
    child_handle.idle.drop()


def failures(made: LaunchBench) -> dict[int, Outcome | None]:
    found = made.compiled([0, 1], 60.0)
    return {config: failure for config, failure, _ in found}


def test_a_config_that_cannot_fit_is_not_launched(bench: Callable[..., Any]) -> None:
    """By the compiler's figure alone: there is no device here on which it could be."""
    with bench() as made:
        results = failures(made)
        assert results[0] is None
        refused = results[1]
        assert refused is not None
        (needed,) = map(int, re.findall(r"Required: (\d+)", refused.message))
        assert needed > 20_000
        message = str(OutOfResources(needed, 20_000, "shared memory"))
        assert refused == Outcome(
            Verdict.OUT_OF_RESOURCES, detail="OutOfResources", message=message
        )
        phases = made.phases.seconds()
        assert phases.keys() == {"wait", "transfer", "resolve", "compile"}, "no start of a child"
        assert all(seconds > 0 for seconds in phases.values())
        with pytest.raises(KernelNotTransferable, match="could not rebuild the call"):
            made.wait()  # for the child that had begun meanwhile: there is no device for it


def test_a_config_that_cannot_fit_is_launched_for_a_post_hook(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As triton.autotune does: the hook gets what the launch raises."""
    monkeypatch.setattr(compile_spec, "_plain", lambda call, jit: True)  # no child to resolve in
    hooks = Hooks(post_hook=lambda arguments, exception: None)
    with bench(hooks=hooks) as made:
        assert failures(made) == {0: None, 1: None}
    with bench() as made:
        refused = failures(made)[1]
        assert refused is not None, "without the hook"
        assert refused.verdict is Verdict.OUT_OF_RESOURCES


class Given:
    """The configs that compile children were given, in the disk cache's own directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[int] = []
        self.packed = 0
        add, pack = CompilePool.add, compile_spec.pack_for_compiler

        def packed(jit: JITFunction) -> bytes:
            self.packed += 1
            return pack(jit)

        def given(pool: CompilePool, config: int, spec: bytes) -> None:
            self.configs.append(config)
            add(pool, config, spec)

        monkeypatch.setattr(CompilePool, "add", given)
        monkeypatch.setattr(compile_spec, "pack_for_compiler", packed)

    def files(self, suffix: str) -> list[Path]:
        return list(Path(os.environ["TRITON_CACHE_DIR"]).rglob(f"*{suffix}"))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return Given(monkeypatch)


def test_what_is_in_the_disk_cache_is_given_to_no_compile_child(
    bench: Callable[..., Any], given: Given
) -> None:
    """What cannot fit is known from there, too, though it has not been compiled to the end."""
    with bench() as made:
        first = failures(made)
    assert given.configs == [1, 0]
    assert len(given.files(".cubin")) == 1, "LLVM and the assembler have seen the small one alone"
    with bench() as made:
        assert failures(made) == first
    assert given.configs == [1, 0]
    assert given.packed == 1, "nor is the kernel packed for one"
    with bench(shared=200_000) as made:
        assert failures(made) == {0: None, 1: None}
    assert given.configs == [1, 0, 1], "on a device with more it is compiled"
    assert len(given.files(".cubin")) == 2


def test_the_shared_memory_that_is_known_early_is_that_of_the_binary(
    bench: Callable[..., Any],
) -> None:
    """Else a config that fits would be refused, or one that does not be compiled for nothing."""
    needs = []
    for shared in (20_000, 0):
        with bench(configs=SMALL_AND_LARGE[1:], shared=shared) as made:
            (found,) = made._results([0], 60.0, lambda config: False)
            needs.append(found.binary.shared_bytes)
    assert needs[0] == needs[1] > 20_000


def unread(x, y, out, BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE=16):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset) + tl.load(y + offset) + SIZE)


def test_the_largest_tiles_are_compiled_first(bench: Callable[..., Any], given: Given) -> None:
    """By the product of the integers among a config's names; in declared order if that is equal."""
    names = [
        *({"BLOCK": 16, "GROUP": 8}, {"BLOCK": 64, "GROUP": 0}, {"BLOCK": 128, "GROUP": 1}),
        *({"BLOCK": 32, "GROUP": True}, {"BLOCK": 32, "GROUP": 8}, {"BLOCK": 32, "GROUP": "a"}),
    ]
    configs = [triton.Config(kwargs, num_warps=8 >> i) for i, kwargs in enumerate(names[:4])]
    configs += [triton.Config(kwargs, num_warps=1) for kwargs in names[4:]]
    with bench(unread, configs) as made:
        assert sorted(ready.config for ready in made.compiled(range(6), 60.0)) == [*range(6)]
    assert given.configs == [4, 0, 2, 1, 3, 5]


@triton.constexpr_function
def never(block):
    while block == 16:
        pass
    return block


def endless(x, y, out, BLOCK: tl.constexpr):
    SIZE: tl.constexpr = never(BLOCK)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset) + tl.load(y + offset) + SIZE)


def test_a_config_that_compiles_for_too_long_is_left_out(bench: Callable[..., Any]) -> None:
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    with bench(endless, configs) as made:
        found = list(made.compiled(range(3), 60.0, lambda config: config == 0))
    assert sorted(each.config for each in found) == [1, 2]
    assert [each.failure for each in found] == [None, None]


@pytest.mark.parametrize(
    ("names", "same"),
    [
        ({"num_stages": (2, 3)}, 0),  # there is no loop to pipeline
        ({"GROUP": (1, 8)}, 0),
        ({"num_warps": (2, 4)}, None),
        ({"SIZE": (16, 32)}, None),  # passed to the same code
        ({"BLOCK": (32, 64)}, None),
    ],
    ids=str,
)
def test_configs_that_compile_to_the_same_code_are_told(
    bench: Callable[..., Any], names: Mapping[str, Sequence[int]], same: int | None
) -> None:
    ((name, values),) = names.items()
    configs = []
    for value in values:
        options = {
            "BLOCK": 64,
            "GROUP": 1,
            "num_warps": 2,
            "num_stages": 2,
            name: value,
        }
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        configs.append(triton.Config(options, num_warps=warps, num_stages=stages))
    with bench(unread, configs) as made:
        found = list(made.compiled([0, 1], 60.0))
    assert [each.failure for each in found] == [None, None]
    assert [each.same for each in found] == [None, None if same is None else found[0].config]


def strided(x, y, out, PROGRAMS: tl.constexpr):
    """Its grid alone depends on PROGRAMS."""
    for first in tl.range(tl.program_id(0) * 64, 128, tl.num_programs(0) * 64):
        offset = first + tl.arange(0, 64)
        tl.store(out + offset, tl.load(x + offset) + tl.load(y + offset))


@pytest.mark.parametrize(
    ("grid", "is_same"),
    [((2,), True), (lambda meta: (meta["PROGRAMS"],), False)],
    ids=["sizes", "function"],
)
def test_configs_of_one_code_are_one_launch_on_one_grid_alone(
    bench: Callable[..., Any], grid: Any, is_same: bool
) -> None:
    """One program and two take other times; of a grid that is too small one leaves a part out."""
    configs = [triton.Config({"PROGRAMS": programs}) for programs in (1, 2)]
    with bench(strided, configs, grid=grid) as made:
        found = list(made.compiled([0, 1], 60.0))
    assert [each.failure for each in found] == [None, None]
    assert [each.same for each in found] == [None, found[0].config if is_same else None]
