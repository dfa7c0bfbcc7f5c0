"""A bound launch launches what a call would, until what a launch depends on has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
from triton import knobs

from safetune.frontend import observers
from safetune.frontend.autotuner import Autotuner
from safetune.frontend.bound_launch import bound_launch
from safetune.launch import fast_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.launch.conftest import Machine, Tuned

pytestmark = pytest.mark.internals

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]
X, Y, OUT = torch.zeros(64), torch.ones(64), torch.zeros(64)
REST = (32, 0.5)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (meta["n"] // meta["BLOCK"],)


@pytest.fixture
def kernel(machine: Machine, tuned: type[Tuned], kernels: Any) -> Tuned:
    return tuned(machine.kernel_of(kernels.annotated), CONFIGS, key=["n"])


@pytest.fixture
def bound(kernel: Tuned) -> Callable[..., Any]:
    kernel.tuner[grid](X, OUT, *REST)
    found = bound_launch(kernel.tuner, grid, (X, OUT, *REST), {})
    assert found is not None
    return found


def test_it_launches_what_the_call_does(
    kernel: Tuned, machine: Machine, bound: Callable[..., Any]
) -> None:
    kernel.tuner[grid](Y, OUT, *REST)
    machine.stream = 7
    assert bound(Y, OUT) is not None
    by_call, by_bound = machine.launches[-2:]
    assert by_bound == (*by_call[:2], 7, *by_call[3:])


def test_a_parameter_may_be_a_part_of_a_tensor(kernel: Tuned, machine: Machine) -> None:
    kernel.tuner[grid](X, OUT[32:], *REST)
    parts = bound_launch(kernel.tuner, grid, (X, OUT[32:], *REST), {}, offsets={1: 128})
    whole = bound_launch(kernel.tuner, grid, (X, OUT[32:], *REST), {})
    assert parts is not None
    assert whole is not None
    assert parts(X, OUT) is not None
    assert whole(X, OUT) is not None
    assert [launch[4] for launch in machine.launches[-2:]] == [OUT.data_ptr() + 128, OUT.data_ptr()]


def test_another_offset_needs_no_other_code(kernel: Tuned, machine: Machine) -> None:
    """Compiling it takes milliseconds, and an offset may depend on the length of a batch."""
    kernel.tuner[grid](X, OUT[32:], *REST)
    before = fast_path._compiled.cache_info().misses
    for offset in (0, 64, 128):
        found = bound_launch(kernel.tuner, grid, (X, OUT[32:], *REST), {}, offsets={1: offset})
        assert found is not None
        assert found(X, OUT) is not None
        assert machine.launches[-1][4] == OUT.data_ptr() + offset
    assert fast_path._compiled.cache_info().misses <= before + 1


def test_nothing_is_bound_while_triton_has_to_launch(
    kernel: Tuned, machine: Machine, bound: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_hook(kernel, machine, monkeypatch)
    assert bound_launch(kernel.tuner, grid, (X, OUT, *REST), {}) is None


def test_a_launch_that_is_not_known_is_not_bound(kernel: Tuned) -> None:
    assert bound_launch(kernel.tuner, grid, (X, OUT, *REST), {}) is None
    kernel.tuner[grid](X, OUT, *REST)
    assert bound_launch(kernel.tuner, grid, (X, OUT, 48, 0.5), {}) is None
    assert bound_launch(kernel.tuner, grid, (X[1:], OUT, *REST), {}) is None
    changes = lambda meta: (meta["x"].zero_().numel() // 16,)  # noqa: E731
    assert bound_launch(kernel.tuner, changes, (X, OUT, *REST), {}) is None


def another_choice(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    cache = kernel.tuner.cache
    ((key, config),) = cache.items()
    cache[key] = next(each for each in CONFIGS if each is not config)


def a_setting_in_place(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setitem(kernel.tuner.best_config.kwargs, "BLOCK", 64)


def a_hook(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    hook = monkeypatch.context
    chain = knobs.runtime.launch_enter_hook
    monkeypatch.setattr(chain, "calls", [hook])


@pytest.fixture(autouse=True)
def _no_observers() -> Iterator[None]:
    yield
    for observer in observers.active:
        observers.remove(observer)


def an_observer(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    observers.add(observers.Observer())


def another_run(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr(Autotuner, "run", lambda *args, **kwargs: None)


def a_run_of_its_own(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    kernel.tuner.run = lambda *args, **kwargs: None  # type: ignore[method-assign]


def another_device(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    machine.device = 1


def a_binary_that_triton_forgot(kernel: Tuned, machine: Machine, monkeypatch: Any) -> None:
    kernel.jit.device_caches.clear()


@pytest.mark.parametrize(
    "change",
    [
        another_choice,
        a_setting_in_place,
        a_hook,
        an_observer,
        another_run,
        a_run_of_its_own,
        another_device,
        a_binary_that_triton_forgot,
    ],
)
def test_it_launches_nothing_once_something_has_changed(
    kernel: Tuned,
    machine: Machine,
    bound: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., None],
) -> None:
    assert bound(X, OUT) is not None
    before = len(machine.launches)
    change(kernel, machine, monkeypatch)
    assert bound(X, OUT) is None
    assert len(machine.launches) == before


def test_it_launches_nothing_on_freed_memory_or_an_address_that_is_not_aligned(
    machine: Machine, bound: Callable[..., Any]
) -> None:
    before = len(machine.launches)
    assert bound(X[1:], OUT) is None
    assert bound(X, OUT[1:]) is None
    whole = torch.ones(128)
    parts = whole[:64], whole[64:]
    whole.untyped_storage().resize_(0)
    launched = [bound(X, part) is not None for part in parts]  # no message prints the tensors
    assert launched == [False, False]
    assert len(machine.launches) == before
