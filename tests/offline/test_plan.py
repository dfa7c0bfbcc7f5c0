"""The order of a sweep's keys, and the time that each gets."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune
from safetune.offline import plan, tasks
from safetune.settings import SearchBudget
from safetune.store.local.store import Store
from safetune.store.records import CallCount, KeyRecord, RecordedCall


@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)


@triton.jit
def copy(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)


def planned(
    *sizes: int, functions: Any = (add,), budget: int | str | None = None
) -> tuple[plan.Planned, ...]:
    """Return the plan of two configs at each size for each kernel."""
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]

    def task(kernel: tasks.OfflineKernel, n: int) -> tasks.Task:
        return tasks.Task(kernel, Workload(str(n), (4,), (torch.zeros(n), n)), "float32")

    sketches = []
    for function in functions:
        tuner = safetune(configs=configs, key=["n"], budget=budget)(function)
        kernel = tasks.OfflineKernel(tuner.base_fn.__name__, tuner, tuner)
        for n in sizes:
            make = functools.partial(task, kernel, n)
            sketches.append(plan.sketch(make(), make, force=False))
    return plan.plan(sketches, Store.in_memory()).tunings


def test_a_time_is_shared_by_the_keys_that_have_something_to_measure() -> None:
    """The first two have no neighbours to learn from. What a key leaves over, or takes too much, is
    of those after it, and the last one gets all that is left.
    """
    now = [1000.0]
    tunings = planned(100, 300, 320, 640, 1)
    done = replace(tunings[3], new=())
    shared_time = plan.SharedTime((*tunings[:3], done, tunings[4]), 80.0, lambda: now[0])

    def seconds(number: int, at: float) -> float:
        now[0] = 1000.0 + at
        budget = shared_time.task(tunings[number]).kernel.tuner.budget
        assert budget is not None
        assert budget.configs is None
        return budget.seconds

    assert [seconds(0, 0.0), seconds(1, 5.0)] == [30.0, 45.0]
    assert [seconds(2, 60.0), seconds(4, 62.0)] == [10.0, 18.0]
    assert seconds(4, 90.0) == 0.0


def test_every_kernel_begins_with_more_of_the_time() -> None:
    def parts(tunings: Any) -> list[float]:
        shared_time = plan.SharedTime(tunings, 1.0, lambda: 0.0)
        return [shared_time.task(each).kernel.tuner.budget.seconds for each in tunings]

    found = planned(100, 320, 640, functions=(add, copy))
    assert parts(found) == [3 / 14, 3 / 11, 1 / 8, 3 / 7, 3 / 4, 1.0]


def test_a_number_of_configs_and_the_time_of_a_decorator_are_of_each_key() -> None:
    """Else the time of the last key's decorator is that of the whole sweep, and kernels without a
    budget are searched.
    """
    for budget in (1, "5m"):
        found = planned(100, 320, budget=budget)
        shared_time = plan.SharedTime(found)
        budgets = {shared_time.task(each).kernel.tuner.budget for each in found}
        assert budgets == {SearchBudget.parse("", budget)}


def test_the_keys_that_take_the_most_recorded_time_come_first() -> None:
    """A sweep may end early. Keys without recorded calls come last, as they were given."""
    store = Store.in_memory()
    sketches = planned(100, 320, 640, 1)
    for number, (calls, each_ms) in ((2, (5, 1.0)), (1, (100, 2.0))):
        key = sketches[number].request.key
        store.put_key(KeyRecord.of(key))
        store.put_call(RecordedCall(key.digest, "add", "here:add", {}, 1.0))
        store.count_calls(CallCount(key.digest, calls, 1, each_ms))

    found = plan.plan(sketches, store).tunings

    assert [each.shape for each in found] == ["320", "640", "100", "1"]
    assert [each.share for each in found] == [200 / 205, 5 / 205, None, None]


def test_processes_that_share_a_list_begin_with_what_takes_longest() -> None:
    """The most configs to measure, then the largest tensors; recorded time comes before both."""
    small, large, known, recorded = planned(100, 640, 320, 1)
    known, recorded = replace(known, new=known.new[:1]), replace(recorded, share=0.5)
    found = plan.longest_first([small, known, large, recorded])
    assert [each.shape for each in found] == ["1", "640", "100", "320"]
