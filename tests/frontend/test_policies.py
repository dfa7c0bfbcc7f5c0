"""A framework that replaces methods of Triton's tuner class to pin a config is obeyed.

Every kernel adds in place and notes its launches in this process: one to time a config shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

import safetune
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: Methods that replace those of a class `tuner`; each has `stock`, which was there.
POLICIES = {
    # Megatron-LM 6076: a list of one
    "run with one config": """
def run(self, *args, **kwargs):
    saved, self.configs = self.configs, [c for c in self.configs if c.kwargs["BLOCK"] == 16]
    try:
        return stock(self, *args, **kwargs)
    finally:
        self.configs = saved
""",
    "run that launches": """
def run(self, *args, **kwargs):
    config = [c for c in self.configs if c.kwargs["BLOCK"] == 16][0]
    self.best_config = config
    config.pre_hook(config.kwargs)
    return self.fn.run(*args, **kwargs, **config.all_kwargs())
""",
    "run that fills the cache": """
def run(self, *args, **kwargs):
    pinned = [c for c in self.configs if c.kwargs["BLOCK"] == 16][0]
    self.cache.setdefault((args[1], "torch.float32"), pinned)
    return stock(self, *args, **kwargs)
""",
    "_bench": """
def _bench(self, *args, config, **meta):
    return [0.0 if config.kwargs["BLOCK"] == 16 else 1.0] * 3
""",
    "_bench that asks Triton's": """
def _bench(self, *args, config, **meta):
    measured = stock(self, *args, config=config, **meta)
    return [-1.0] * 3 if config.kwargs["BLOCK"] == 16 else measured
""",
    "prune_configs": """
def prune_configs(self, kwargs):
    return [c for c in stock(self, kwargs) if c.kwargs["BLOCK"] == 16]
""",
}

#: Those that leave the choice to safetune.
WATCHING = {
    "run": """
def run(self, *args, **kwargs):
    return stock(self, *args, **kwargs)
""",
    "_bench": """
def _bench(self, *args, config, **meta):
    return stock(self, *args, config=config, **meta)
""",
}

IMPORTS = """
import os
import torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner
import library
"""

LIBRARY = """
import os
import torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner

def note(arguments):
    open(os.environ["NOTES"], "a").write(f"{os.getpid()} {arguments['BLOCK']}\\n")

def clock(launch, quantiles):
    launch()
    return [1.0] * 3

@triton.jit
def add_kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)

def decorated(decorate):
    configs = [triton.Config({"BLOCK": b}, pre_hook=note) for b in (64, 32, 16)]
    return decorate(configs, ["n"], do_bench=clock)(add_kernel)

def launch(kernel, n=100, times=2):
    x = torch.zeros(n)
    for _ in range(times):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    assert (x == times).all()
    here = [line for line in open(os.environ["NOTES"]) if line.startswith(f"{os.getpid()} ")]
    print(kernel.best_config.kwargs["BLOCK"], len(here))
"""


def policy(text: str, tuner: str = "Autotuner") -> str:
    name = text.split("(")[0].split()[-1]
    return f"stock = {tuner}.{name}\n{text}\n{tuner}.{name} = {name}\n"


INSTALL = "import safetune; safetune.install(); decorate = triton.autotune\n"
DECORATE = "import safetune; decorate = safetune.autotune\n"


@pytest.fixture
def run(tmp_path: Path, fresh_process: FreshProcess) -> object:
    (tmp_path / "library.py").write_text(LIBRARY)

    def run(code: str) -> list[str]:
        env = {"NOTES": str(tmp_path / "notes")}
        done = fresh_process(IMPORTS + code, cwd=tmp_path, env=env, warm=True)
        return done.stdout.splitlines()

    return run


seen: list[int] = []


def note(arguments: dict[str, Any]) -> None:
    seen.append(arguments["BLOCK"])  # a child appends to a list of its own


def clock(launch: Callable[[], object], quantiles: Any) -> list[float]:
    launch()
    return [1.0, 1.0, 1.0]


@triton.jit
def add_kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)


def decorated() -> Any:
    configs = [triton.Config({"BLOCK": b}, pre_hook=note) for b in (64, 32, 16)]
    return safetune.safetune(configs, ["n"], do_bench=clock)(add_kernel)


def launch(kernel: Any, n: int = 100, times: int = 2) -> list[int]:
    """Return the configs that this process has launched."""
    seen.clear()
    x = torch.zeros(n)
    for _ in range(times):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    assert (x == times).all()
    return list(seen)


def replace(patch: pytest.MonkeyPatch, text: str, tuner: Any) -> None:
    name = text.split("(")[0].split()[-1]
    scope = {"stock": getattr(tuner, name)}
    exec(text, scope)
    patch.setattr(tuner, name, scope[name])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tuner", [Autotuner, safetune.Autotuner], ids=["Triton's", "safetune's"])
def test_a_pinned_config_is_launched(
    name: str, tuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is timed here: two launches are two."""
    before = decorated()
    replace(monkeypatch, POLICIES[name], tuner)
    assert launch(decorated()) == [16, 16]
    assert launch(before) == [16, 16]


@pytest.mark.parametrize("name", ["run with one config", "_bench that asks Triton's"])
@pytest.mark.parametrize("own", [False, True], ids=["decorated", "a library's class"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_under_install(run, name: str, own: bool, order: str) -> None:  # type: ignore[no-untyped-def]
    pin = policy(POLICIES[name])
    code = [pin, INSTALL] if order == "before" else [INSTALL, pin]
    if own:
        code += ["class Own(Autotuner): pass\n"]
        code += ["def decorate(configs, key, **o):\n"]
        code += ["    return lambda fn: Own(fn, fn.arg_names, configs, key, None, None, **o)\n"]
    assert run("".join(code) + "library.launch(library.decorated(decorate))\n") == ["16 2"]


@pytest.mark.parametrize("name", WATCHING)
def test_a_policy_that_asks_triton_gets_safetunes_choice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuned in a child: here are only the two launches."""
    replace(monkeypatch, WATCHING[name], Autotuner)
    kernel = decorated()
    chosen = kernel.best_config.kwargs["BLOCK"] if launch(kernel) else None
    assert seen == [chosen] * 2
    (stored,) = open_lookup(Settings.current()).store.choices()
    assert stored.choice.config["BLOCK"] == chosen


def test_a_policy_that_goes_away() -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, POLICIES["run with one config"], Autotuner)
        kernel = decorated()
        assert launch(kernel) == [16, 16]
    kernel.cache[(100, "torch.float32")] = kernel.configs[0]
    assert launch(kernel) == [64, 64]
    assert type(kernel) is safetune.Autotuner


def test_what_cannot_be_obeyed_is_one_warning(fresh_process: FreshProcess, tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    code = (
        IMPORTS + DECORATE + "Autotuner.do_bench = property(lambda self: library.clock)\n"
        "kernels = [library.decorated(decorate) for _ in range(3)]\n"
    )
    done = fresh_process(code, cwd=tmp_path, env={"NOTES": str(tmp_path / "notes")}, warm=True)
    text = "a library has replaced do_bench of triton.runtime.autotuner.Autotuner, which safetune"
    assert done.stderr.count(text) == 1
