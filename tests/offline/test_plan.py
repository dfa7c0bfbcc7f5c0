"""What a sweep compiles for the keys of a kernel: each binary once, early."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.experimental.gluon._runtime  # which cannot be imported once TRITON_INTERPRET changes
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from safetune import Workload, safetune
from safetune.errors import WorkloadError
from safetune.inputs.compile_spec import CallerSpecs
from safetune.offline import plan, tasks
from safetune.outcome import Binary
from safetune.store.local.store import Store
from safetune.store.records import CallCount, KeyRecord, RecordedCall
from safetune.tuning.bench import LaunchBench
from safetune.tuning.requests import SearchBudget
from tests.backends import FakeBackend, launching_on
from tests.conftest import stop_servers

pytestmark = pytest.mark.internals

TARGET = GPUTarget("cuda", 90, 32)
TIMEOUT_S = 60.0
PROPERTIES = {"multiprocessor_count": 132, "max_shared_mem": 232448}


@pytest.fixture(autouse=True)
def h100() -> Iterator[None]:
    made = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGET,
        utils=SimpleNamespace(get_device_properties=lambda index: PROPERTIES),
    )
    with launching_on(FakeBackend(), "cuda", active=made):
        yield


def add(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)


def copy(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)


def planned(
    *sizes: int, functions: Any = (add,), allocated: Any = None, budget: int | str | None = None
) -> plan.Plan:
    """Return the plan of two configs at each size for each kernel; note what tensors are made."""
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]

    def task(kernel: tasks.OfflineKernel, n: int) -> tasks.Task:
        if allocated is not None:
            allocated.append(n)
        return tasks.Task(kernel, Workload(str(n), (4,), (torch.zeros(n), n)), "float32")

    sketches = []
    for function in functions:
        jit = function if isinstance(function, JITFunction) else JITFunction(function)
        tuner = safetune(configs=configs, key=["n"], budget=budget)(jit)
        kernel = tasks.OfflineKernel(jit.__name__, tuner, tuner)
        for n in sizes:
            make = functools.partial(task, kernel, n)
            sketches.append(plan.sketch(make(), make, force=False))
    if allocated is not None:
        allocated.clear()
    return plan.plan(sketches, Store.in_memory())


def test_keys_share_their_compilations() -> None:
    """300 is as 100 to Triton, 640 as 320, and 1 is a constant."""
    found = planned(100, 300, 320, 640, 1)

    assert found.compilations == 6
    assert [len(each.binaries) for each in found.tunings] == [2] * 5


def test_an_argument_that_is_not_specialised_makes_no_binary_of_its_own() -> None:
    found = planned(100, 320, 1, functions=(JITFunction(add, do_not_specialize=["n"]),))

    assert found.compilations == 2
    assert plan.compile_ahead(found.tunings) == {}


def test_what_cannot_be_made_again_ends_no_other_tuning() -> None:
    """Regression: its error ended a sweep, and each process of one, before the first tuning."""
    found = planned(100, 320, 1)

    def fail() -> tasks.Task:
        raise WorkloadError("no memory")

    first, second, third = found.tunings
    broken = replace(second, sketch=replace(second.sketch, make=fail))
    (ahead,) = plan.compile_ahead((first, broken, third)).values()
    assert len(ahead) == 2, "what the third one needs"


def test_what_later_keys_compile_is_known_when_the_first_one_begins() -> None:
    """The first key gives its own to its compilers itself; no tensor is made for nothing."""
    made: list[int] = []
    found = planned(100, 300, 320, 640, 1, allocated=made)

    (ahead,) = plan.compile_ahead(found.tunings).values()

    assert len(ahead) == len(set(ahead)) == 4
    assert made == [320, 1]


def test_each_kernel_has_its_own() -> None:
    found = planned(100, 320, functions=(add, copy))

    ahead = plan.compile_ahead(found.tunings)

    kernels = {each.sketch.request.key.kernel.digest for each in found.tunings}
    assert {kernel: len(specs) for kernel, specs in ahead.items()} == dict.fromkeys(kernels, 2)


def test_a_search_compiles_nothing_ahead() -> None:
    """Which configs it measures is not known yet."""
    assert plan.compile_ahead(planned(100, 320, budget=1).tunings) == {}


def test_a_time_is_shared_by_the_keys_that_have_something_to_measure() -> None:
    """The first two have no neighbours to learn from. What a key leaves over, or takes too much, is
    of those after it, and the last one gets all that is left.
    """
    now = [1000.0]
    tunings = planned(100, 300, 320, 640, 1).tunings
    done = replace(tunings[3], new=())
    sweep = plan.Sweep((*tunings[:3], done, tunings[4]), 80.0, lambda: now[0])

    def seconds(number: int, at: float) -> float:
        now[0] = 1000.0 + at
        budget = sweep.task(tunings[number]).kernel.tuner.budget
        assert budget is not None
        assert budget.configs is None
        return budget.seconds

    assert [seconds(0, 0.0), seconds(1, 5.0)] == [30.0, 45.0]
    assert [seconds(2, 60.0), seconds(4, 62.0)] == [10.0, 18.0]
    assert seconds(4, 90.0) == 0.0


def test_every_kernel_and_no_known_one_begins_with_more_of_the_time() -> None:
    def parts(tunings: Any) -> list[float]:
        sweep = plan.Sweep(tunings, 1.0, lambda: 0.0)
        return [sweep._parts[each.key] for each in tunings]

    found = planned(100, 320, 640, functions=(add, copy)).tunings
    assert parts(found) == [3.0, 3.0, 1.0] * 2
    assert parts([replace(each, estimate_s=1.0) for each in found]) == [1.0] * 6


def test_a_number_of_configs_and_the_time_of_a_decorator_are_of_each_key() -> None:
    """Else the time of the last key's decorator is that of the whole sweep, and kernels without a
    budget are searched.
    """
    for budget in (1, "5m"):
        found = planned(100, 320, budget=budget)
        sweep = plan.Sweep(found.tunings, found.most_s)
        budgets = {sweep.task(each).kernel.tuner.budget for each in found.tunings}
        assert budgets == {SearchBudget.parse("", budget)}


def test_the_keys_that_take_the_most_recorded_time_come_first() -> None:
    """A sweep may end early. Keys without recorded calls come last, as they were given."""
    store = Store.in_memory()
    sketches = [each.sketch for each in planned(100, 320, 640, 1).tunings]
    for number, (calls, each_ms) in ((2, (5, 1.0)), (1, (100, 2.0))):
        key = sketches[number].request.key
        store.put_key(KeyRecord.of(key))
        store.put_call(RecordedCall(key.digest, "add", "here:add", {}, 1.0))
        store.count_calls(CallCount(key.digest, calls, 1, each_ms))

    found = plan.plan(sketches, store).tunings

    assert [each.sketch.shape for each in found] == ["320", "640", "100", "1"]
    assert [each.share for each in found] == [200 / 205, 5 / 205, None, None]


def test_a_later_key_finds_compiled_what_an_earlier_one_had_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really compiled for sm_90, by the compilers of the first key. Nothing is launched."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET")
    stop_servers()
    first, later = (each.sketch for each in planned(100, 320).tunings)
    request = tasks.request_for(later.make())
    specs = CallerSpecs(request.call, most_shared=request.most_shared)
    (ahead,) = plan.compile_ahead(planned(100, 320).tunings).values()

    with LaunchBench(tasks.request_for(replace(first.make(), ahead=ahead))) as bench:
        assert not any(isinstance(specs.spec_of(config), Binary) for config in request.configs)
        ready = list(bench.compiled([0, 1], TIMEOUT_S))
        deadline = time.monotonic() + TIMEOUT_S
        while not all(isinstance(specs.spec_of(config), Binary) for config in request.configs):
            assert time.monotonic() < deadline, "the later key was never compiled"

    assert sorted((each.config, each.failure) for each in ready) == [(0, None), (1, None)]
    stop_servers()
