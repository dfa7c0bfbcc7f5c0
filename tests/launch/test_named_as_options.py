"""A parameter that Triton also takes for an option of the compiler, such as `launch_pdl`.

Triton takes the option from the keywords of the launch for which it compiles, and then finds that
binary for launches that pass the parameter by position, or leave it out. So each launch has to
compile what it compiles under triton.autotune, also where a key name is dropped.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton

from safetune import safetune
from safetune.errors import PhantomKeyWarning, SafetuneWarning
from safetune.triton_internals import CONFIG_OPTIONS
from tests.backends import FakeBackend

if TYPE_CHECKING:
    from tests.launch.conftest import Machine

pytestmark = pytest.mark.internals

X, OUT = torch.zeros(64), torch.zeros(64)

#: Options, with two values of each, the default second; None where each config sets it.
OPTIONS: dict[str, tuple[Any, Any] | None] = {
    "launch_pdl": (True, False),
    "launch_cooperative_grid": (True, False),
    "enable_fp_fusion": (False, True),
    "sanitize_overflow": (False, True),
    "debug": (True, False),
    "maxnreg": (32, 64),
    **dict.fromkeys(sorted(CONFIG_OPTIONS)),
}

MODULE = """
import triton.language as tl

def kernel(x, out, n, T, {option}: {annotation}, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)
    {body}

def launched(x, out, n, T):
    kernel[(1,)](x, out, n, T)
"""

Made = Callable[..., Any]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Return a kernel's function with a parameter of a name."""

    def make(option: str, annotation: str = "tl.constexpr", body: str = "") -> Any:
        path = tmp_path / "named_as_options.py"
        path.write_text(MODULE.format(option=option, annotation=annotation, body=body))
        spec = importlib.util.spec_from_file_location("named_as_options", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    return make


@pytest.fixture(params=["choice", "frozen", "off", "no fast launch"])
def tuner_of(
    request: pytest.FixtureRequest,
    machine: Machine,
    back_end: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Return safetune's tuner of a kernel, with a choice, or a fallback for want of one."""
    if request.param == "no fast launch":
        monkeypatch.setenv("SAFETUNE_FAST_LAUNCH", "0")
    elif request.param != "choice":
        monkeypatch.setenv("SAFETUNE_MODE", request.param)

    def make(function: Any, key: list[str]) -> Any:
        tuner: Any = safetune(configs=configs(), key=key)(machine.kernel_of(function))
        if request.param in ("choice", "no fast launch"):
            tuner._miss = lambda state, *_: tuner.states.of(state).set_choice(tuner.configs[0])
        return tuner

    return make


def configs() -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, num_warps=8) for block in (16, 32)]


def calls(option: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls by position and by keyword; T is what nothing reads, and Triton compiles for 16."""
    values = OPTIONS[option]
    for t in (7, 16, 9, 1):
        for value, by_name in itertools.product(values or (None,), (t == 16, t != 16)):
            if values is None or (option == "debug" and not by_name):  # Triton itself passes it
                yield (X, OUT, 32, t), {}
            elif by_name:
                yield (X, OUT, 32, t), {option: value}
            else:
                yield (X, OUT, 32, t, value), {}


@pytest.mark.parametrize("annotation", ["tl.constexpr", "object"], ids=["constant", "variable"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_launch_gets_the_options_that_it_gets_under_stock_triton(
    machine: Machine, tuner_of: Callable[..., Any], made: Made, option: str, annotation: str
) -> None:
    function = made(option, annotation.replace("object", "''"))
    key = ["n", "T"] + ([] if OPTIONS[option] is None else [option])
    stock: Any = triton.autotune(configs=configs(), key=key)(machine.kernel_of(function))
    stock.prune_configs = lambda kwargs: stock.configs[:1]
    stock.do_bench = lambda call, quantiles: [1.0] * 3  # Triton 3.6 times one config, too
    found = []
    for tuner in (stock, tuner_of(function, key)):
        machine.launches = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SafetuneWarning)
            for args, kwargs in (*calls(option), *calls(option)):
                tuner[(1,)](*args, **kwargs)
        found.append([_unpinned(each) for each in machine.launches])
    assert found[1] == found[0]
    assert len({launch[0] for launch in found[0]}) > (OPTIONS[option] is not None), "differ"


def _unpinned(launch: Any) -> Any:
    """The binary's options, and what the launch passed as the parameter of their name."""
    return launch[0].partition(" ")[2], launch[7]


def test_a_dropped_name_is_pinned_where_the_option_is_a_constant_of_each_config(
    made: Made, machine: Machine
) -> None:
    pinned = {}
    for option, annotation in itertools.product(OPTIONS, ("tl.constexpr", "''")):
        jit = machine.kernel_of(made(option, annotation))
        with pytest.warns(PhantomKeyWarning):
            report = safetune(configs=configs(), key=["n", "T"])(jit).explain_key()
        assert report.dropped == ("T",)
        pinned[option, annotation] = report.pinned
    assert {each for each, names in pinned.items() if names} == {
        (option, "tl.constexpr") for option in CONFIG_OPTIONS
    }
