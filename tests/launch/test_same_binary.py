"""What is launched is what triton.jit would have launched with the dropped names pinned."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
from triton import knobs

from safetune.launch.call_shape import PIN

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

if TYPE_CHECKING:
    from tests.launch.conftest import Machine, Tuned

pytestmark = pytest.mark.internals

EXAMPLES = int(os.environ.get("SAFETUNE_TEST_EXAMPLES", "150"))
CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32) for warps in (1, 2)
]

MEMORY = {dtype: torch.zeros(80, dtype=dtype) for dtype in (torch.float32, torch.float16)}
ADDRESSES = [MEMORY[dtype][start:] for dtype in MEMORY for start in (0, 1, 2, 8, 16)]
ADDRESSES.append(torch.nn.Parameter(torch.zeros(80)))

INTEGERS = (
    0,
    1,
    2,
    15,
    16,
    -1,
    -16,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31) - 1,
    1 << 33,
    (1 << 33) + 1,
)
INTEGERS = (*INTEGERS, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, 1 << 64)

tensors = st.sampled_from(ADDRESSES)
#: As many kinds of value as an argument has, but mostly what it is meant to have.
scalars = st.sampled_from([*INTEGERS, True, False, 0.0, -0.0, 1.0, 0.5, None])
constants = st.sampled_from([0, 1, 2, 16, True, False, 1.0, 0.0, -0.0, "a", None, torch.float16])


@dataclass(frozen=True)
class Call:
    """One launch, or what happens before it.

    Attributes:
        values: by parameter; those with a default may be missing.
        positional: how many are passed by position, at most.
        event: what changes first.
    """

    values: dict[str, Any]
    positional: int
    order: int
    grid: Any
    device: int
    stream: int
    event: str


VALUES: dict[str, Any] = {
    "x": tensors,
    "y": tensors,
    "n": st.sampled_from(INTEGERS),
    "eps": scalars,
    "T": scalars | tensors,
    "U": constants,
    "D": constants,
    "m": scalars,
    "bias": st.none() | tensors,
}
OPTIONAL = ("m", "bias")
AROUND: dict[str, Any] = {
    "positional": st.integers(0, 7),
    "order": st.integers(0, 3),
    "grid": st.sampled_from([(1,), [2, 3], (4, 5, 6), "lambda"]),
    "device": st.sampled_from([0, 0, 0, 1]),
    "stream": st.sampled_from([100, 200]),
    "event": st.sampled_from([*[""] * 8, "choose", "debug", "hook", "clear"]),
}


@st.composite
def sequences(draw: Any) -> list[Call]:
    """Calls that differ in one or two respects from one before: near misses, and hits."""
    values = st.fixed_dictionaries(
        {name: value for name, value in VALUES.items() if name not in OPTIONAL},
        optional={name: VALUES[name] for name in OPTIONAL},
    )
    found = [draw(st.builds(Call, values=values, **AROUND))]
    for _ in range(draw(st.integers(0, 12))):
        call = draw(st.sampled_from(found))
        changed = dict(call.values)
        for name in draw(st.lists(st.sampled_from(list(VALUES)), max_size=2)):
            changed[name] = draw(VALUES[name])
        around = {
            name: draw(AROUND[name])
            for name in draw(st.sets(st.sampled_from(list(AROUND)), max_size=1))
        }
        found.append(replace(call, values=changed, **{"event": "", **around}))
    return found


@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(sequence=sequences())
def test_the_same_binary(
    sequence: list[Call], machine: Machine, tuned: type[Tuned], kernels: Any
) -> None:
    """Each call twice: the second time it is known, unless something is in the way."""
    kernel = _tuned(machine, tuned, kernels)
    assert kernel.tuner.key_report.pinned == ("T", "U")
    reference = machine.kernel_of(kernels.mixed)
    hook = knobs.runtime.launch_enter_hook
    before = knobs.runtime.debug, list(hook.calls)
    try:
        for call in sequence:
            _happen(call.event, kernel)
            for _ in range(2):
                machine.device, machine.stream = call.device, call.stream
                _compare(call, kernel, reference, machine)
    finally:
        knobs.runtime.debug, hook.calls = before


@pytest.mark.parametrize("name", ["n", "m", "eps"])
def test_every_integer(name: str, machine: Machine, tuned: type[Tuned], kernels: Any) -> None:
    """After every other one; `n` is a key, and the others are not."""
    kernel = _tuned(machine, tuned, kernels)
    reference = machine.kernel_of(kernels.mixed)
    x, y = ADDRESSES[:2]
    values = {"x": x, "y": y, "n": 7, "eps": 0.5, "T": 7, "U": 7, "D": 1, "m": 3}
    for _ in range(2):
        for value in INTEGERS:
            call = Call({**values, name: value}, 7, 0, (1,), 0, 100, "")
            _compare(call, kernel, reference, machine)


def _tuned(machine: Machine, tuned: type[Tuned], kernels: Any) -> Tuned:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuned(machine.kernel_of(kernels.mixed), CONFIGS, key=["n", "D", "T", "U"])


def _happen(event: str, kernel: Tuned) -> None:
    tuner, hooks = kernel.tuner, knobs.runtime.launch_enter_hook
    if event == "choose":
        for number, key in enumerate(list(tuner.cache)):
            tuner.states.of(key).set_choice(CONFIGS[number % len(CONFIGS)])
    elif event == "clear":
        tuner.cache.clear()
    elif event == "debug":
        knobs.runtime.debug = not knobs.runtime.debug
    elif event == "hook":
        hooks.calls = [] if hooks.calls else [lambda metadata: None]


def _compare(call: Call, kernel: Tuned, reference: Any, machine: Machine) -> None:
    args, kwargs = _arguments(call)
    machine.launches.clear()
    try:
        kernel.tuner[_grid(call)](*args, **kwargs)
        ours = machine.launches[:]
    except Exception as error:
        ours = [(type(error), str(error))]
    machine.launches.clear()
    config = kernel.tuner.best_config
    key = kernel.tuner.shapes.of(args, kwargs).key(args, kwargs)
    assert config is kernel.tuner.cache[key]
    values = {**call.values}
    for name in ("T", "U"):
        if name == "U" or isinstance(values[name], int):
            values[name] = PIN
    try:
        reference[_grid(call, values, call.values)](**values, **config.all_kwargs())
        theirs = machine.launches[:]
    except Exception as error:
        theirs = [(type(error), str(error))]
    assert ours == theirs


def _arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = list(call.values)
    names = [name for name in ("x", "y", "n", "eps", "T", "U", "D") if name in names]
    args = tuple(call.values[name] for name in names[: call.positional])
    left = [name for name in call.values if name not in names[: call.positional]]
    left = left[call.order :] + left[: call.order]
    return args, {name: call.values[name] for name in left}


def _grid(call: Call, *pinned: Any) -> Any:
    """The caller's values are what a grid sees, whatever the compiled kernel does."""
    if call.grid != "lambda":
        return call.grid
    given = pinned[1] if pinned else {}
    return lambda meta: _size({**meta, **{name: given[name] for name in ("T", "U") if given}})


def _size(meta: dict[str, Any]) -> tuple[int, int]:
    assert set(meta) >= {"x", "y", "n", "eps", "T", "U", "D", "BLOCK", "m", "bias"}
    return meta["BLOCK"], len(str(meta["U"])) + len(str(meta["m"])) + (meta["T"] is None)
