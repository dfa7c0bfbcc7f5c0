"""Tuners that `install` did not make: a library's own class, and decorators applied before it.

Real processes: `install` changes Triton for good. Every kernel here adds in place, so that a tuner
that tries its configs on the caller's tensors adds too often.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

LIBRARY = """
import torch
import triton
import triton.language as tl
from triton import autotune
from triton.runtime.autotuner import Autotuner

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]
KEY = ["n", "UNREAD"]


@triton.jit
def add_kernel(out, src, extra, n, UNREAD, BLOCK: tl.constexpr, HAS_EXTRA: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(out + offset, mask=mask) + tl.load(src + offset, mask=mask)
    if HAS_EXTRA:
        value += tl.load(extra + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


class Known(Autotuner):
    # Looks for a config in a table of its own first, and allows for arguments that are None.
    table = {}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not self.user_defined_pre_hook and (self.reset_to_zero or self.restore_value):
            self.pre_hook = lambda arguments, reset_only=False: 1 / 0
        if not self.user_defined_post_hook and self.restore_value:
            self.post_hook = lambda arguments, exception: 1 / 0

    def run(self, *args, **kwargs):
        n = args[3]
        if n in self.table:
            self.cache[(n, 7, "torch.float32", "torch.float32")] = self.table[n]
        return super().run(*args, **kwargs)


def known(fn=add_kernel, configs=CONFIGS, key=KEY, cls=Known, **settings):
    settings = {"reset_to_zero": None, "restore_value": None, **settings}
    return cls(fn, fn.arg_names, configs, key, **settings)


def clock(launch, quantiles):
    launch()
    return [1.0, 1.0, 1.0]


def add(kernel, n=50, times=1):
    out, src = torch.zeros(n), torch.ones(n)
    for _ in range(times):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](out, src, None, n, 7, HAS_EXTRA=False)
    assert (out == times).all(), out


def add_untuned(out, src, n):  # shows what is passed for UNREAD
    add_kernel[(1,)](out, src, None, n, 7, BLOCK=64, HAS_EXTRA=False)
"""

START = "import safetune\ninstallation = safetune.install()\nfrom lib import *\n"


@pytest.fixture
def run(
    tmp_path: Path, fresh_process: FreshProcess
) -> Callable[[str], tuple[list[str], list[str]]]:
    """A function that runs code beside the library; returns what it printed, and the report."""
    (tmp_path / "lib.py").write_text(LIBRARY)

    def run(code: str) -> tuple[list[str], list[str]]:
        done = fresh_process(code, cwd=tmp_path, warm=True)
        lines = r"^safetune: (?!tuning |\w+ tuned )(.*)$"  # not those after ten seconds of a tuning
        return done.stdout.splitlines(), re.findall(lines, done.stderr, re.MULTILINE)

    return run


Run = Callable[[str], tuple[list[str], list[str]]]
DROPPED = "key names dropped, as nothing reads them: add_kernel (UNREAD)"


class TestReached:
    @pytest.mark.parametrize(
        "make",
        [
            "known()",
            pytest.param(
                "known(triton.heuristics({'HAS_EXTRA': lambda a: a['extra'] is not None})"
                "(add_kernel))",
                marks=pytest.mark.full,
            ),
            "triton.heuristics({'HAS_EXTRA': lambda a: a['extra'] is not None})("
            "autotune(CONFIGS, KEY)(add_kernel))",
        ],
        ids=["a class of its own", "heuristics below", "decorated before, under heuristics"],
    )
    def test_a_tuner_that_install_did_not_make(self, run: Run, make: str) -> None:
        """Its kernel is tuned apart, and it shows the choice where Triton's would."""
        printed, report = run(
            "from lib import *\n"
            f"kernel = {make}\n"
            "import safetune; safetune.install()\n"
            "add(kernel, times=3)\n"
            "tuner = kernel if isinstance(kernel, Autotuner) else kernel.fn\n"
            "((key, config),) = tuner.cache.items()\n"
            "print(key, config is tuner.best_config)\n"
            "print(len(tuner.configs_timings))\n"
        )
        assert printed == ["(50, 7, 'torch.float32', 'torch.float32') True", "2"]
        assert report[0] == "1 kernel, 3 launches: 1 tuned, 0 looked up, 2 known"
        assert set(report[1:]) <= {DROPPED}

    def test_offline_commands_find_the_tuner_that_launches_in_its_place(self, run: Run) -> None:
        printed, _ = run(
            "from lib import *\n"
            "from safetune.offline.tasks import find_kernels\n"
            "library = {'k': known(), 'again': triton.heuristics({})(known(cls=Autotuner))}\n"
            "print(find_kernels(library))\n"
            "import safetune; safetune.install()\n"
            "(first, second), (same, _) = find_kernels(library), find_kernels(library)\n"
            "print(first.name, first.outer is library['k'], second.outer is library['again'])\n"
            "print(first.tuner is same.tuner, first.tuner is not second.tuner)\n"
            "add(library['k'])\n"
            "print(len(first.tuner.cache))\n"
        )
        assert printed == ["[]", "add_kernel True True", "True True", "1"]

    def test_the_settings_are_the_tuner_s(self, run: Run) -> None:
        """A library's stand-ins for Triton's hooks are not a user's hooks; None is not a tensor."""
        printed, report = run(
            START + "add(known(restore_value=['out'], reset_to_zero=['extra']))\n"
            "ours = installation.tuners[0]\n"
            "print(ours.hooks.restore_value, ours.hooks.reset_to_zero, ours.hooks.pre_hook)\n"
            "def hook(arguments, reset_only=False): arguments['out'].fill_(5)\n"
            "def left(configs, arguments, **kwargs): return configs[1:]\n"
            "kernel = known(pre_hook=hook, do_bench=clock, prune_configs_by={\n"
            "    'early_config_prune': left})\n"
            "add(kernel)\n"
            "ours = installation.tuners[1]\n"
            "print(ours.hooks.pre_hook is hook, kernel.best_config)\n"
        )
        assert printed[0] == "('out',) ('extra',) None"
        assert printed[1].startswith("True BLOCK: 32")
        assert report[0] == "1 kernel, 2 launches: 1 tuned, 1 looked up, 0 known"

    def test_settings_that_change_later(self, run: Run) -> None:
        """As under Triton, whose `run` reads them anew at each launch."""
        printed, report = run(
            START + "kernel = known(configs=CONFIGS[:1])\n"
            "add(kernel, times=2)\n"
            "kernel.configs = CONFIGS[1:]\n"
            "add(kernel)\n"
            "print(kernel.best_config.kwargs, len(kernel.cache))\n"
            "kernel.configs[:] = [triton.Config({'BLOCK': 64})]\n"
            "add(kernel)\n"
            "print(kernel.best_config.kwargs, len(kernel.cache))\n"
        )
        assert printed == ["{'BLOCK': 32} 0", "{'BLOCK': 64} 0"]
        assert report[0] == "1 kernel, 4 launches: 0 tuned, 0 looked up, 4 known"

    def test_a_copy_a_pickle_and_an_emptied_cache(self, run: Run) -> None:
        printed, report = run(
            START + "import copy, cloudpickle\n"
            "kernel = known()\n"
            "add(kernel)\n"
            "other = copy.copy(kernel); other.configs = CONFIGS[:1]\n"
            "add(other); add(kernel)\n"
            "print(other.best_config.kwargs)\n"
            "state = cloudpickle.loads(cloudpickle.dumps(vars(kernel)))\n"
            "print([n for n, value in state.items() if 'safetune' in type(value).__module__])\n"
            "kernel.cache.clear(); add(kernel); print(len(kernel.cache))\n"
        )
        assert printed == ["{'BLOCK': 16}", "[]", "1"]
        assert report[0] == "1 kernel, 4 launches: 1 tuned, 1 looked up, 2 known"

    def test_a_deep_copy(self, run: Run) -> None:
        """triton-viz makes one of each tuner; after a launch, the copy raised AttributeError."""
        printed, report = run(
            START + "import copy\n"
            "kernel = known()\n"
            "add(kernel)\n"
            "other = copy.deepcopy(kernel)\n"
            "add(other, times=2); add(kernel)\n"
            "print(other.cache == kernel.cache, other.cache is kernel.cache)\n"
        )
        assert printed == ["True False"]
        assert report[0] == "1 kernel, 4 launches: 1 tuned, 0 looked up, 3 known"

    def test_launches_by_a_run_that_a_library_has_replaced_count(self, run: Run) -> None:
        """As GPTQModel does; the report said 0 launches and -1 known."""
        _, report = run(
            "from lib import Autotuner\n"
            "stock = Autotuner.run\n"
            "def locked(self, *args, **kwargs): return stock(self, *args, **kwargs)\n"
            "Autotuner.run = locked\n" + START + "add(known(), times=3)\n"
        )
        assert report[0] == "1 kernel, 3 launches: 1 tuned, 0 looked up, 2 known"

    def test_a_fallback_is_never_in_the_library_s_cache(self, run: Run) -> None:
        """It stayed there for good, while the choice of the background tuning was launched."""
        printed, _ = run(
            "import os; os.environ['SAFETUNE_MODE'] = 'background'\n"
            + START
            + "from safetune.miss import background\n"
            "import builtins\n"
            "def note(arguments): builtins.block = arguments['BLOCK']\n"
            "def slow_first(launch, quantiles):\n"
            "    launch()\n"
            "    return [2.0 if builtins.block == 16 else 1.0] * 3\n"
            "for config in CONFIGS: config.pre_hook = note\n"
            "kernel = known(do_bench=slow_first)\n"
            "add(kernel)\n"
            "print(kernel.best_config.kwargs, kernel.cache)\n"
            "(state,) = installation.tuners[0].states\n"
            "background.wait(state)\n"
            "add(kernel)\n"
            "(chosen,) = kernel.cache.values()\n"
            "print(kernel.best_config.kwargs, chosen.kwargs)\n"
            "state.set_choice(CONFIGS[0])\n"
            "add(kernel, times=2)\n"
            "(chosen,) = kernel.cache.values()\n"
            "print(kernel.best_config.kwargs, chosen.kwargs)\n"
        )
        assert printed == [
            "{'BLOCK': 16} {}",
            "{'BLOCK': 32} {'BLOCK': 32}",
            "{'BLOCK': 16} {'BLOCK': 16}",
        ]


class TestLeft:
    def test_a_config_that_the_library_knows_is_launched(self, run: Run) -> None:
        """For its key, and from when it is known; every other key is tuned."""
        printed, report = run(
            START + "kernel = known()\n"
            "add(kernel, 50)\n"
            "mine = Known.table[60] = Known.table[50] = triton.Config({'BLOCK': 64})\n"
            "add(kernel, 60, times=2)\n"
            "print(kernel.best_config is mine)\n"
            "add(kernel, 50)\n"
            "print(kernel.best_config is mine)\n"
        )
        assert printed == ["True", "True"]
        assert report == [
            "1 kernel, 4 launches: 1 tuned, 0 looked up, 3 known",
            DROPPED,
            "launched with configs that were written into its cache: add_kernel (2 keys)",
        ]

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (
                "known(cls=type('Own', (Known,), {'prune_configs': lambda s, k: s.configs}),"
                " do_bench=clock, restore_value=['out'], pre_hook=save, post_hook=restore)",
                "Own has a prune_configs of its own",
            ),
            (
                "known(cls=type('Own', (Known,), {'run': by_itself}),"
                " do_bench=clock, pre_hook=save, post_hook=restore)",
                "tuned in this process by Own",
            ),
            (
                "known(configs=[Like(16), Like(32)],"
                " do_bench=clock, pre_hook=save, post_hook=restore)",
                "configs[0] of add_kernel is Like (Like); it must be a triton.Config, e.g."
                " triton.Config({'BLOCK': 128}, num_warps=4)",
            ),
        ],
        ids=["own pruning", "own run", "own configs"],
    )
    def test_a_tuner_that_a_shadow_tuner_cannot_replace_is_left_and_reported(
        self, run: Run, make: str, reason: str
    ) -> None:
        """It runs as before, and the report says why."""
        _, report = run(
            START + "def save(a, reset_only=False):\n"
            "    if not reset_only: save.copy = a['out'].clone()\n"
            "def restore(a, exception): a['out'].copy_(save.copy)\n"
            "class Like:\n"
            "    pre_hook = None\n"
            "    def __init__(self, block): self.kwargs = {'BLOCK': block}\n"
            "    def __repr__(self): return 'Like'\n"
            "    def all_kwargs(self): return self.kwargs\n"
            "def by_itself(self, *args, **kwargs):\n"
            "    self.nargs = dict(zip(self.arg_names, args))\n"
            "    for config in self.configs: self._bench(*args, config=config, **kwargs)\n"
            "    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())\n"
            f"add({make})\n"
        )
        assert report[-1] == f"left to triton.autotune: add_kernel ({reason})"
