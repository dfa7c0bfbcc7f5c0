"""A choice that cannot be launched in the caller costs its specialisation one attempt.

The interpreter compiles nothing, so the device of these tests refuses at the launch: a FLAG that
is set needs BLOCK bytes of a memory that has `limit`. tests/gpu/test_modes.py does it for real.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction

from safetune.errors import TuningWarning
from safetune.miss import reporting

BLOCKS = (16, 32, 64, 128)


class Device:
    """Refuses launches in this process, and counts the attempts by (FLAG, BLOCK)."""

    def __init__(self) -> None:
        self.limit = 1 << 20
        self.attempts: Counter[tuple[int, int]] = Counter()

    def check(self, flag: int, block: int) -> None:
        self.attempts[flag, block] += 1
        if flag and block > self.limit:
            raise OutOfResources(block, self.limit, "shared memory")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, caller = Device(), os.getpid()
    run = InterpretedFunction.run

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() == caller and "BLOCK" in kwargs:
            made.check(kwargs["FLAG"], kwargs["BLOCK"])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", limited)
    return made


class Timed:
    """Configs whose times are known: hooks tell the benchmark which of them runs."""

    def __init__(self, *fastest_first: int) -> None:
        self.times = {block: float(rank + 1) for rank, block in enumerate(fastest_first)}
        running: dict[str, int] = {}
        times, caller = self.times, os.getpid()

        def hook(arguments: dict[str, Any]) -> None:
            if os.getpid() != caller:  # what a closure holds is part of a hook's identity
                running["block"] = arguments["BLOCK"]

        def bench(launch: Any, quantiles: Any) -> list[float]:
            launch()
            return [times[running["block"]]] * 3

        self.hooks = [hook] * len(BLOCKS)
        self.bench = bench


@pytest.fixture
def tuned(copies: Any, small: Device) -> Any:
    """Chooses 128, then 64, 32, 16; FLAG is not in the key."""
    timed = Timed(128, 64, 32, 16)
    made = copies(*timed.hooks, blocks=BLOCKS, do_bench=timed.bench)
    assert made() == 128
    small.attempts.clear()
    return made


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.fault("stored-choice-fails")
def test_the_next_best_that_can_be_launched_is(
    tuned: Any, small: Device, caught: list[warnings.WarningMessage]
) -> None:
    small.limit = 32

    assert [tuned(flag=1) for _ in range(3)] == [32, 32, 32]

    assert small.attempts == {(1, 128): 1, (1, 64): 1, (1, 32): 3}
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("safetune: copy_kernel: BLOCK=128 ")
    assert "OutOfResources: out of resource: shared memory, Required: 128" in text
    assert "; BLOCK=32 " in text


def test_other_specialisations_keep_the_choice(
    tuned: Any, small: Device, caught: list[warnings.WarningMessage]
) -> None:
    small.limit = 64
    for _ in range(2):
        assert tuned(flag=1) == 64
        assert tuned(flag=0) == 128
    assert small.attempts[1, 128] == 1
    assert tuned(flag=2) == 64
    assert small.attempts[2, 128] == 1, "another constexpr is another attempt, and another warning"
    assert len(caught) == 2
    assert small.attempts[0, 64] == 0


def test_other_keys_are_not_touched(tuned: Any, small: Device) -> None:
    small.limit = 64
    tuned(n=101)
    with pytest.warns(UserWarning, match="BLOCK=128 "):
        tuned(flag=1)
    assert [state.key[0] for state in tuned.tuner.states if state.hit] == [101]
    assert tuned(n=101) == 128


def test_nothing_is_tuned_again(tuned: Any, small: Device) -> None:
    before = reporting.tunings.begun
    small.limit = 16
    with pytest.warns(UserWarning, match="BLOCK=16 "):
        assert [tuned(flag=1), tuned(), tuned(flag=1)] == [16, 128, 16]
    assert reporting.tunings.begun == before


def test_a_config_that_is_known_to_fail_is_not_a_substitute(copies: Any, small: Device) -> None:
    """64 is the second best but dies, and 32 was found too slow only in order of declaration."""
    timed = Timed(128, 64, 32, 16)

    def dies(arguments: dict[str, Any]) -> None:
        if os.getpid() != caller:
            os.abort()

    caller = os.getpid()
    timed.hooks[2] = dies
    made = copies(*timed.hooks, blocks=BLOCKS, do_bench=timed.bench)
    made()
    small.limit = 64
    with pytest.warns(UserWarning, match="; BLOCK=32 "):
        assert made(flag=1) == 32


def test_when_nothing_can_be_launched_the_last_error_comes_out(
    tuned: Any, small: Device, caught: list[warnings.WarningMessage]
) -> None:
    small.limit = 8
    for _ in range(3):
        with pytest.raises(OutOfResources, match="Required: 16") as raised:
            tuned(flag=1)
        assert raised.value.required == 16
    assert small.attempts == {(1, block): 1 for block in BLOCKS}
    assert tuned() == 128
    assert caught == []


def test_an_error_of_a_hook_is_the_callers(copies: Any, small: Device) -> None:
    def refuse(arguments: dict[str, Any]) -> None:
        if arguments["FLAG"]:
            raise OutOfResources(1, 0, "the hook's own")

    made = copies(refuse, refuse)
    first = made()
    with pytest.raises(OutOfResources, match="the hook's own"):
        made(flag=1)
    assert made() == first
    assert all(state.hit is not None for state in made.tuner.states)


def test_an_error_that_says_nothing_of_the_config_is_not_caught(
    tuned: Any, small: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(flag: int, block: int) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(small, "check", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tuned(flag=1)
    assert all(state.hit is not None for state in tuned.tuner.states)


def test_a_stored_choice_of_another_process(
    tuned: Any, small: Device, copies: Any, caught: list[warnings.WarningMessage]
) -> None:
    """A tuner that has tuned nothing itself: what it knows is in the store."""
    timed = Timed(128, 64, 32, 16)
    other = copies(*timed.hooks, blocks=BLOCKS, do_bench=timed.bench)
    small.limit = 32
    assert [other(flag=1), other(flag=1), other()] == [32, 32, 128]
    assert small.attempts == {(1, 128): 1, (1, 64): 1, (1, 32): 2, (0, 128): 1}
    assert len(caught) == 1


def test_another_heuristic_value_is_another_specialisation(
    copies: Any, small: Device, caught: list[warnings.WarningMessage]
) -> None:
    """By a size that is not in the key, say: one too large must not spoil the others."""
    timed, said = Timed(128, 64, 32, 16), [0]
    made = copies(*timed.hooks, blocks=BLOCKS, do_bench=timed.bench)
    made.tuner.fn = triton.heuristics({"FLAG": lambda named: said[0]})(made.tuner.fn)
    dst, src = torch.zeros(100), torch.ones(100)

    def launch(flag: int) -> int:
        said[0] = flag
        made.tuner[(8,)](dst, src, 100)
        return int(made.block(made.tuner.best_config))

    assert launch(0) == 128
    small.limit = 8
    for _ in range(2):
        with pytest.raises(OutOfResources):
            launch(1)
    assert launch(0) == 128
    small.limit = 32
    assert [launch(2), launch(0), launch(2)] == [32, 128, 32]
    assert small.attempts[2, 128] == 1
    assert len([each for each in caught if each.category is TuningWarning]) == 1


def test_a_heuristic_is_called_once_for_each_launch_of_a_key_with_a_rejected_config(
    copies: Any, small: Device, caught: list[warnings.WarningMessage]
) -> None:
    timed, said = Timed(128, 64, 32, 16), [0]
    made = copies(*timed.hooks, blocks=BLOCKS, do_bench=timed.bench)
    asked: list[int] = []

    def flag(named: dict[str, Any]) -> int:
        asked.append(named["BLOCK"])
        return said[0]

    made.tuner.fn = triton.heuristics({"FLAG": flag})(made.tuner.fn)
    dst, src = torch.zeros(100), torch.ones(100)
    made.tuner[(8,)](dst, src, 100)
    small.limit, said[0] = 32, 1
    made.tuner[(8,)](dst, src, 100)
    said[0] = 0
    asked.clear()
    for _ in range(3):
        made.tuner[(8,)](dst, src, 100)
    assert asked == [128] * 3


def test_with_mode_off_nothing_is_caught(
    copies: Any, small: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "off")
    small.limit = 8
    with pytest.raises(OutOfResources):
        copies(blocks=BLOCKS)(flag=1)
    assert small.attempts == {(1, 16): 1}


def test_with_mode_off_the_first_config_that_pruning_leaves_is_launched(
    copies: Any, small: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pruned config may be one that the kernel cannot run with these arguments."""
    monkeypatch.setenv("SAFETUNE_MODE", "off")

    def large(configs: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        return [config for config in configs if config.kwargs["BLOCK"] > 32]

    made = copies(blocks=BLOCKS, prune_configs_by={"early_config_prune": large})
    assert made(flag=1) == made(flag=0) == 64


def test_calls_that_triton_compiles_again_have_other_specialisations(copies: Any) -> None:
    """What a specialisation is: at least what Triton compiles again for."""
    from safetune.launch.call_shape import specialisation

    tuner = copies(blocks=BLOCKS).tuner
    memory = torch.zeros(128)

    def kind(dst: Any, n: Any, flag: Any = 0, **options: Any) -> Any:
        passed = dict(zip(tuner.arg_names, (dst, memory, n), strict=False))
        return specialisation(tuner.fn, tuner.arg_names, {**passed, "FLAG": flag, **options})

    assert kind(memory, 100) == kind(memory.clone(), 116)
    different = [
        kind(memory, 100),
        kind(memory[1:], 100),
        kind(memory.to(torch.float16), 100),
        kind(memory, 1),
        kind(memory, 112),
        kind(memory, 1 << 40),
        kind(memory, 100.0),
        kind(memory, True),
        kind(memory, 100, flag=True),
        kind(memory, 100, flag=1),
        kind(memory, 100, debug=True),
        kind(None, 100),
    ]
    assert len(set(different)) == len(different)
