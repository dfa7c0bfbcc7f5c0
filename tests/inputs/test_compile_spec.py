"""What the caller resolves is what the measuring child would, and nothing of its own changes."""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune.child.arguments import Arguments
from safetune.child.session import ConfigLaunch
from safetune.inputs import kernel_pickle
from safetune.inputs.call import Call, Hooks
from safetune.inputs.compile_spec import CallerSpecs, capture_spec
from safetune.inputs.snapshot import Snapshot
from safetune.keys.identity import base_function
from tests import backends

pytestmark = pytest.mark.internals

h100 = backends.h100  # an autouse fixture


@pytest.fixture(autouse=True)
def _sources_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rebuilt here leaves its lines in this process, and not in a child."""
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))


def add(x, y, out, n, FLAG: tl.constexpr = True, BLOCK: tl.constexpr = 64):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(out + offset, tl.load(x + offset, mask=mask), mask=mask)


def optional(x, maybe, pair, scale, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x + tl.program_id(0), scale)


def described(desc, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.sum(desc.load([0, 0]), 1), 0))


def double(x):
    return x * 2


def applies(x, function: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x, function(tl.load(x)))


def made(function: Callable[..., Any], kind: type = JITFunction, **options: Any) -> Any:
    return kind(function, **options)


def heuristic(kernel: Any, **values: Callable[[Mapping[str, Any]], Any]) -> Any:
    return triton.heuristics(values)(kernel)


@dataclass(frozen=True)
class Case:
    """A kernel and the ways in which it is called."""

    kernel: Callable[[], Any]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=lambda: {"BLOCK": 64})
    pins: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def three(dtype: torch.dtype = torch.float32, size: int = 64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(size, dtype=dtype) for _ in range(3))


def views_of_one() -> tuple[Any, ...]:
    buffer = torch.zeros(256, dtype=torch.float16)
    return buffer[:64], buffer[1:65], buffer[128:], 63


def wide() -> tuple[Any, ...]:
    return torch.zeros(1).expand(64), torch.zeros(64)[::2], torch.zeros(()), 1 << 33


CASES = {
    "positional": Case(lambda: made(add), lambda: (*three(), 64)),
    "one": Case(lambda: made(add), lambda: (*three(), 1)),
    "odd": Case(lambda: made(add), lambda: (*three(), 63)),
    "by keyword": Case(lambda: made(add), lambda: three()[:2], {"n": 5, "out": torch.zeros(9)}),
    "a default overridden": Case(lambda: made(add), lambda: (*three(), 64, False)),
    "bf16": Case(lambda: made(add), lambda: (*three(torch.bfloat16), 64)),
    "fp8": Case(lambda: made(add), lambda: (*three(torch.float8_e4m3fn), 64)),
    "bool": Case(lambda: made(add), lambda: (*three(torch.bool), 64)),
    "misaligned views of one buffer": Case(lambda: made(add), views_of_one),
    "stride 0, strided, 0-dim": Case(lambda: made(add), wide),
    "empty": Case(lambda: made(add), lambda: (*three(size=0), 0)),
    "options": Case(
        lambda: made(add),
        lambda: (*three(), 64),
        config={"num_warps": 8, "num_stages": 5, "maxnreg": 64},
    ),
    "an option of the call": Case(lambda: made(add), lambda: (*three(), 64), {"num_ctas": 2}),
    "pinned": Case(lambda: made(add), lambda: (*three(), 12345), pins={"n": 16}),
    "pinned keyword": Case(lambda: made(add), three, {"n": 12345}, pins={"n": 16}),
    "not specialized": Case(
        lambda: made(
            add, do_not_specialize=["n"], do_not_specialize_on_alignment=["x"], debug=True
        ),
        lambda: (*three(), 64),
    ),
    "None, tuple, float, dtype": Case(
        lambda: made(optional),
        lambda: (torch.zeros(4), None, (1, 2.5, torch.zeros(2)), 0.5, -7),
        {"KIND": tl.float16},
    ),
    "big and negative integers": Case(
        lambda: made(optional),
        lambda: (torch.zeros(4, dtype=torch.int64), torch.zeros(4), (True, 3), 1 << 63, -(1 << 40)),
        {"KIND": "text"},
    ),
    "tensor descriptor": Case(
        lambda: made(described),
        lambda: (
            TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.float16), [16, 32]),
            torch.zeros(1),
        ),
    ),
    "a jit function": Case(
        lambda: made(applies), lambda: (torch.zeros(4),), {"function": JITFunction(double)}
    ),
    "heuristics": Case(
        lambda: heuristic(
            heuristic(made(add), FLAG=lambda a: a["n"] % a["BLOCK"] == 0),
            BLOCK=lambda a: 32 if a["x"].numel() > 32 else 16,
        ),
        lambda: (*three(), 64),
        options={},
    ),
    "a heuristic that sets an option": Case(
        lambda: heuristic(made(add), num_warps=lambda a: 2), lambda: (*three(), 64)
    ),
    "gluon": Case(lambda: made(add, GluonJITFunction), lambda: (*three(), 64)),
}


def call_of(case: Case) -> Call:
    kernel = case.kernel()
    args = case.args()
    return Call(
        kernel=kernel,
        arg_names=tuple(kernel.arg_names),
        args=args,
        kwargs=dict(case.kwargs),
        grid=(1,),
        pins=dict(case.pins),
        hooks=Hooks(),
        index=0,
    )


def of_child(call: Call, config: triton.Config) -> bytes:
    """Return the spec that the measuring child captures: the call is rebuilt first."""
    tensors = kernel_pickle.TensorTable()
    blob = kernel_pickle.pack((replace(call, grid=None), config), "a call", tensors)
    with contextlib.closing(Snapshot(tensors.tensors)) as snapshot:
        arguments = Arguments(snapshot.layout, os.dup(snapshot.fd))
    rebuilt, config = kernel_pickle.unpack(blob, arguments.tensors)
    jit, _ = base_function(rebuilt.kernel)
    return capture_spec(jit, ConfigLaunch(rebuilt, config, (1,)), 0)


def compiled_from(call: Call, spec: bytes) -> tuple[str, Any, Any]:
    """Return all that a compilation depends on: the source's hash, the options, the target."""
    signature, constexprs, attrs, options, target = kernel_pickle.unpack(spec)
    source = ASTSource(base_function(call.kernel)[0], signature, constexprs, attrs)
    return source.hash(), options, target


@pytest.mark.parametrize("name", CASES)
def test_the_caller_resolves_as_the_child_does(name: str) -> None:
    case = CASES[name]
    call = call_of(case)
    jit, _ = base_function(call.kernel)
    assert jit.cache_key  # it is computed once, whichever code asks
    before = {key: (id(value), repr(value)) for key, value in vars(jit).items()}
    config = triton.Config(dict(case.options), **dict(case.config))

    spec = CallerSpecs(call).spec_of(config)

    assert isinstance(spec, bytes)
    assert {key: (id(value), repr(value)) for key, value in vars(jit).items()} == before
    assert compiled_from(call, spec) == compiled_from(call, of_child(call, config))


def test_each_config_gets_its_own_spec() -> None:
    call = call_of(CASES["heuristics"])
    in_caller = CallerSpecs(call)
    specs = [in_caller.spec_of(triton.Config({}, num_warps=warps)) for warps in (1, 2, 4)]
    options = [
        kernel_pickle.unpack(spec)[3]["num_warps"] for spec in specs if isinstance(spec, bytes)
    ]
    assert options == [1, 2, 4]


def raises(arguments: Mapping[str, Any]) -> int:
    raise ZeroDivisionError("a heuristic that fails")


HOOK: Any = print  # never called
LEFT_TO_THE_CHILD: dict[str, Callable[[Call], Call]] = {
    "a pre-hook": lambda call: replace(call, hooks=Hooks(pre_hook=HOOK)),
    "a post-hook": lambda call: replace(call, hooks=Hooks(post_hook=HOOK)),
    "inputs of its own": lambda call: replace(call, hooks=Hooks(inputs=HOOK)),
    "another device": lambda call: replace(call, index=1),
    "a heuristic that raises": lambda call: replace(call, kernel=heuristic(made(add), FLAG=raises)),
    "an unknown wrapper": lambda call: replace(
        call, kernel=SimpleNamespace(fn=call.kernel, values={}, run=HOOK)
    ),
    "an unknown argument": lambda call: replace(call, kwargs={"no_such": 1}),
}


@pytest.mark.parametrize("why", LEFT_TO_THE_CHILD)
def test_calls_with_hooks_are_resolved_in_the_child(why: str) -> None:
    call = call_of(CASES["positional"])
    config = triton.Config({"BLOCK": 64})
    assert CallerSpecs(call).spec_of(config) is not None
    assert CallerSpecs(LEFT_TO_THE_CHILD[why](call)).spec_of(config) is None


def test_configs_and_kernels_with_hooks_are_left_to_the_child() -> None:
    call = call_of(CASES["positional"])
    in_caller = CallerSpecs(call)
    assert in_caller.spec_of(triton.Config({"BLOCK": 64}, pre_hook=HOOK)) is None
    assert in_caller.spec_of(triton.Config({"BLOCK": 64})) is not None
    call.kernel.add_pre_run_hook(HOOK)
    assert CallerSpecs(call).spec_of(triton.Config({"BLOCK": 64})) is None


def test_interrupts_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: Mapping[str, Any]) -> int:
        raise KeyboardInterrupt

    call = call_of(CASES["positional"])
    call = replace(call, kernel=heuristic(call.kernel, FLAG=interrupted))
    with pytest.raises(KeyboardInterrupt):
        CallerSpecs(call).spec_of(triton.Config({"BLOCK": 64}))
