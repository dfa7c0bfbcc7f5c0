"""A name that nothing reads is launched as one constant, until something reads it.

A program may change whatever was looked at to find that out. T is the name here, each change makes
something read it, and the next launch is with the caller's value.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from safetune import safetune
from safetune.errors import PhantomKeyWarning
from safetune.launch.call_shape import PIN

if TYPE_CHECKING:
    from tests.launch.conftest import Machine

pytestmark = pytest.mark.internals

OUT = torch.zeros(64)

#: Where T is in a launch.
T = 5


@dataclass
class Case:
    """A tuner, its jit function, and the module of its kernel, which is the test's own."""

    machine: Machine
    module: Any
    tuner: Any
    jit: Any

    def launched_t(self, value: int = 7, n: int = 32) -> Any:
        self.tuner[(1,)](OUT, n, value)
        return self.machine.launches[-1][T]


def set_heuristic(case: Case, name: str = "maxnreg") -> None:
    case.tuner.fn.values[name] = lambda named: 32 if named["T"] else 64


def read_t(*arguments: Any, **named: Any) -> Any:
    """A hook, prune function or performance model, that gets T with all others."""
    return arguments[0] if arguments else len(named)


def replaced_kernel(case: Case) -> None:
    case.tuner.fn = case.machine.kernel_of(case.module.other)


def replaced_heuristics(case: Case) -> None:
    case.tuner.fn = triton.heuristics({"maxnreg": lambda named: 32 if named["T"] else 64})(case.jit)


def replaced_below(case: Case) -> None:
    case.tuner.fn.fn = case.machine.kernel_of(case.module.other)


#: The function of a kernel, and what is changed.
CHANGES: dict[str, tuple[str, Callable[[Case], object]]] = {
    "fn": ("plain", replaced_kernel),
    "heuristics around fn": ("plain", replaced_heuristics),
    "a function of heuristics": ("with heuristics", set_heuristic),
    "a function added to heuristics": (
        "with heuristics",
        lambda case: set_heuristic(case, "enable_fp_fusion"),
    ),
    "fn of heuristics": ("with heuristics", replaced_below),
    "the source": (
        "plain",
        lambda case: case.jit._unsafe_update_src(case.module.SOURCE_THAT_READS),
    ),
    "a callee": ("calls", lambda case: setattr(case.module, "ignores", case.module.reads)),
    "a callee's callee": (
        "calls_through",
        lambda case: setattr(case.module, "ignores", case.module.reads),
    ),
    "a callee's source": (
        "calls",
        lambda case: case.module.ignores._unsafe_update_src(case.module.reads.src),
    ),
    "a callee in a module": (
        "calls_in_a_module",
        lambda case: setattr(case.module.helpers, "act", case.module.reads),
    ),
    "a module": (
        "calls_in_a_module",
        lambda case: setattr(case.module, "helpers", type("M", (), {"act": case.module.reads})),
    ),
    "a callee in a closure": (
        "a closure",
        lambda case: case.module.replace(case.module.reads),
    ),
    "launch_metadata": ("plain", lambda case: setattr(case.jit, "launch_metadata", read_t)),
    "repr": ("plain", lambda case: setattr(case.jit, "_repr", lambda key: f"k{key.constants}")),
    "early_config_prune": (
        "plain",
        lambda case: setattr(case.tuner, "early_config_prune", read_t),
    ),
    "perf_model": ("plain", lambda case: setattr(case.tuner, "perf_model", read_t)),
    "pre_hook": ("plain", lambda case: setattr(case.tuner, "pre_hook", read_t)),
    "post_hook": ("plain", lambda case: setattr(case.tuner, "post_hook", read_t)),
    "a config's pre_hook": (
        "plain",
        lambda case: setattr(case.tuner.configs[0], "pre_hook", read_t),
    ),
    "configs": (
        "plain",
        lambda case: setattr(
            case.tuner, "configs", [triton.Config({"BLOCK": 16}, pre_hook=read_t)] * 2
        ),
    ),
    "configs in place": (
        "plain",
        lambda case: case.tuner.configs.append(triton.Config({"BLOCK": 64}, pre_hook=read_t)),
    ),
}

#: What only Triton's own path calls: a known launch of the same arguments needs none of it.
SEEN_BY_TRITON = ("launch_metadata", "repr", "configs in place")

_numbers = itertools.count()


@pytest.fixture(params=["fast", "SAFETUNE_FAST_LAUNCH=0"])
def new_case(
    request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Case]:
    monkeypatch.setenv("SAFETUNE_FAST_LAUNCH", "1" if request.param == "fast" else "0")

    def make(function: str) -> Case:
        path = Path(__file__).with_name("changed_kernels.py")
        spec = importlib.util.spec_from_file_location(f"changed_kernels_{next(_numbers)}", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if function == "a closure":
            written, module.replace = module.enclosing(module.ignores)
        else:
            written = module.plain if function == "with heuristics" else getattr(module, function)
        jit = machine.kernel_of(written)
        kernel: Any = jit
        if function == "with heuristics":
            kernel = triton.heuristics({"maxnreg": lambda named: 32})(jit)
        configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
        tuner = safetune(configs=configs, key=["n", "T"])(kernel)
        tuner._miss = lambda key, *_: tuner.states.of(key).set_choice(tuner.configs[0])
        return Case(machine, module, tuner, jit)

    return make


@pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")
class TestAReaderThatComesLater:
    @pytest.mark.parametrize("change", CHANGES)
    def test_after_launches_without_it(self, new_case: Callable[[str], Case], change: str) -> None:
        function, apply = CHANGES[change]
        case = new_case(function)
        assert [case.launched_t() for _ in range(3)] == [PIN] * 3
        apply(case)
        if change in SEEN_BY_TRITON:
            case.launched_t(n=33)
        assert [case.launched_t(value) for value in (7, 7, 8, 7)] == [7, 7, 8, 7]
        assert case.tuner.key_names == ["n", "T"]

    @pytest.mark.parametrize("change", CHANGES)
    def test_before_the_first_launch(self, new_case: Callable[[str], Case], change: str) -> None:
        function, apply = CHANGES[change]
        case = new_case(function)
        apply(case)
        assert [case.launched_t() for _ in range(3)] == [7] * 3

    @pytest.mark.parametrize("change", ["a callee", "the source", "a function of heuristics"])
    def test_a_reader_that_goes_away_is_noticed(
        self, new_case: Callable[[str], Case], change: str
    ) -> None:
        function, apply = CHANGES[change]
        case = new_case(function)
        before = dict(vars(case.module)), case.jit.src, dict(getattr(case.tuner.fn, "values", {}))
        case.launched_t()
        apply(case)
        assert case.launched_t() == 7
        vars(case.module).update(before[0])
        case.jit._unsafe_update_src(before[1])
        if before[2]:
            case.tuner.fn.values.update(before[2])
        case.launched_t(n=33)
        assert [case.launched_t() for _ in range(2)] == [PIN] * 2
        assert case.tuner.key_names == ["n"]


@pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")
@pytest.mark.parametrize("way", ["a hook", "run of the kernel", "run of the class"])
def test_who_watches_launches_sees_the_callers_value(
    new_case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The key stays: who watches does not change which config is best."""
    case = new_case("plain")
    assert [case.launched_t() for _ in range(2)] == [PIN] * 2
    seen: list[Any] = []
    run = JITFunction.run

    def watching(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments[-1])
        return run(*arguments, **named)

    with monkeypatch.context() as patch:
        if way == "a hook":
            patch.setattr(case.jit, "pre_run_hooks", [lambda *a, **named: seen.append(a[-1])])
        elif way == "run of the class":
            patch.setattr(JITFunction, "run", watching)
        else:
            patch.setitem(vars(case.jit), "run", partial(watching, case.jit))
        assert [case.launched_t(value) for value in (7, 8)] == [7, 8]
    assert seen == [7, 8]
    assert case.launched_t() == PIN
    assert len(case.tuner.cache) == 1


def test_names_that_are_assigned_are_the_key(new_case: Callable[[str], Case]) -> None:
    case = new_case("other")
    for keys, choices in (["n", "T"], 3), (["n"], 1), (["T"], 3):
        case.tuner.keys = keys
        assert case.tuner.keys == case.tuner.key_names == keys
        for value in (7, 8, 9, 7):
            assert case.launched_t(value) == value
        assert len(case.tuner.cache) == choices


@pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")
def test_a_long_list_that_nothing_changes_keeps_its_classes(
    new_case: Callable[[str], Case],
) -> None:
    """The lengths of two lists are two objects from 257 on: each look at the key classified its
    names again, and forgot every launch.
    """
    case = new_case("plain")
    case.tuner.configs = [triton.Config({"BLOCK": 16}, num_stages=n) for n in range(1, 301)]
    assert case.tuner.key_report is case.tuner.key_report
    case.tuner.configs.append(triton.Config({"BLOCK": 64}, pre_hook=read_t))
    assert case.tuner.key_names == ["n", "T"]


def test_a_dropped_name_is_warned_of_once_when_its_class_is_first_needed(
    new_case: Callable[[str], Case],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case = new_case("plain")
    assert case.tuner.lazy_key.last_report is None, "no text is read before"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            case.launched_t()
        case.tuner.perf_model = None  # classified again, to the same end
        case.launched_t()
    assert [each.category for each in caught] == [PhantomKeyWarning]


@pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")
def test_another_hook_is_another_kernel_in_the_store(new_case: Callable[[str], Case]) -> None:
    """Each also where it is a list that is changed in place."""
    tuner = new_case("plain").tuner
    digests = [tuner.identity.digest]
    tuner.pre_hook = read_t
    digests.append(tuner.identity.digest)
    tuner.reset_to_zero.append("out")
    digests.append(tuner.identity.digest)
    tuner.fn = new_case("other").jit
    digests.append(tuner.identity.digest)
    assert len(set(digests)) == 4
    assert tuner.hooks.reset_to_zero == ("out",)


def test_an_edited_kernel_does_not_have_the_choices_of_the_one_before(
    new_case: Callable[[str], Case],
) -> None:
    """The names in its key are the same."""
    case = new_case("other")
    case.launched_t()
    assert len(case.tuner.cache) == 1
    case.jit._unsafe_update_src(case.jit.src.replace("n + T", "n - T"))
    assert case.tuner.key_names == ["n", "T"]
    assert case.tuner.cache == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "doubles", module.triples),
        lambda module: module.replace_doubles(module.triples),
        lambda module: module.doubles._unsafe_update_src(module.triples.src),
        lambda module: setattr(module, "ADDED", tl.constexpr(5)),
        lambda module: setattr(module.helpers, "AMOUNT", tl.constexpr(5)),
    ],
    ids=[
        "a callee of computed values",
        "one in a closure",
        "its source",
        "a constant",
        "a constant of a module",
    ],
)
def test_a_key_that_is_tuned_after_a_change_of_what_the_kernel_names_is_of_the_new_kernel(
    new_case: Callable[[str], Case], change: Callable[[Any], object]
) -> None:
    """Its trials were stored for the kernel as it was at the first miss."""
    case = new_case("computes")
    before = case.tuner.identity
    case.module.ADDED = tl.constexpr(1)  # an equal value is no change
    assert case.tuner.identity is before
    change(case.module)
    assert case.tuner.identity.digest != before.digest


def test_a_known_launch_has_the_key_as_it_is_written_now(new_case: Callable[[str], Case]) -> None:
    case = new_case("other")
    case.launched_t()
    before = [*case.tuner.cache]
    case.tuner.keys.remove("T")
    case.launched_t()
    (after,) = case.tuner.cache
    assert [(7 in key) for key in (*before, after)] == [True, False]
