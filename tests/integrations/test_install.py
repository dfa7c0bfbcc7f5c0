"""Programs that know nothing of safetune, run with it: real processes, a real sitecustomize."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safetune.settings import Settings

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: A library that adds in place: a tuner that tries its configs on it would add many times.
LIBRARY = """
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
{imports}

CONFIGS = [triton.Config({{"BLOCK": block}}) for block in (16, 32)]


@{autotune}(configs=CONFIGS, key=["n", "UNREAD"])
@triton.jit
def add_kernel(out, src, n, UNREAD, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(out + offset, mask=mask) + tl.load(src + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


def add(n=50, times=1):
    out, src = torch.zeros(n), torch.ones(n)
    for _ in range(times):
        add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](out, src, n, 7)
    assert (out == times).all(), out
    return type(add_kernel).__module__
"""

OURS, STOCK = "safetune.frontend.autotuner", "triton.runtime.autotuner"

#: Nothing is tuned, where a test asks only what is taken over: a tuning starts an interpreter more.
UNTUNED = {"SAFETUNE_MODE": "frozen"}

RUN = "import sys; from safetune.cli import main; sys.argv[0] = 'safetune'; main()"


@pytest.fixture
def library(tmp_path: Path) -> Callable[..., Path]:
    def write(autotune: str = "triton.autotune", imports: str = "") -> Path:
        (tmp_path / "lib.py").write_text(LIBRARY.format(autotune=autotune, imports=imports))
        return tmp_path

    return write


def reports(text: str) -> list[str]:
    """The lines at a program's end; not those of a tuning that takes longer than ten seconds."""
    return re.findall(r"^safetune: (?!.* runs with |tuning |\w+ tuned ).*$", text, re.MULTILINE)


class TestInstall:
    def test_every_spelling(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """One module for each; the kernels are the same, so one tuning serves them all."""
        spellings = {
            "plain": ("triton.autotune", ""),
            "runtime": ("triton.runtime.autotune", ""),
            "bare": ("autotune", "from triton import autotune"),
            "renamed": ("tuners.autotune", "import triton.runtime.autotuner as tuners"),
        }
        for name, spelling in spellings.items():
            folder = library(*spelling)
            (folder / "lib.py").rename(folder / f"{name}.py")
        names = ", ".join(spellings)
        done = fresh_process(
            f"import safetune; safetune.install(); import {names}\n"
            f"for library in ({names}): print(library.add(times=3))",
            cwd=folder,
            warm=True,
        )
        assert done.stdout.split() == [OURS] * 4
        assert reports(done.stderr) == [
            "safetune: 4 kernels, 12 launches: 1 tuned, 3 looked up, 8 known",
            "safetune: key names dropped, as nothing reads them: add_kernel (UNREAD)",
        ]

    def test_what_a_library_has_put_in_place_of_autotune_stays(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """vLLM keeps the first config only, FLA reads its own table: `install` undid both."""
        done = fresh_process(
            "import triton\n"
            "stock = triton.autotune\n"
            "def reversed_list(configs, **others): return stock(configs[::-1], **others)\n"
            "triton.autotune = reversed_list\n"
            "import safetune; safetune.install(); import lib\n"
            "print(lib.add(times=3), lib.add_kernel.configs == lib.CONFIGS[::-1])\n"
            "print(type(triton.runtime.autotune(lib.CONFIGS, [])(lib.add_kernel.fn)).__module__)\n",
            cwd=library(),
            warm=True,
        )
        assert done.stdout.split() == [STOCK, "True", OURS]
        assert reports(done.stderr)[0] == (
            "safetune: 1 kernel, 3 launches: 1 tuned, 0 looked up, 2 known"
        )

    @pytest.mark.parametrize(
        "how",
        ["run", *(pytest.param(h, marks=pytest.mark.full) for h in ("module", "argument"))],
    )
    def test_key_names_of_a_library_are_kept(
        self, library: Callable[..., Path], fresh_process: FreshProcess, how: str
    ) -> None:
        """And a pair that no kernel has is a warning, with the nearest one that there is."""
        pairs = {
            "module": "['lib.add_kernel:UNREAD', 'other.add_kernel:UNREAD']",
            "argument": "['add_kernel:UNREAD', 'add_kernel:N']",
        }
        own = "import lib; lib.add(); print(*lib.add_kernel.keys)"
        if how == "run":
            (library() / "train.py").write_text(own)
            kept = ("--keep", "add_kernel:UNREAD", "--keep", "add_kernl:UNREAD")
            done = fresh_process(RUN, "run", *kept, "train.py", cwd=library(), env=UNTUNED)
        else:
            code = f"import safetune; safetune.install(keep={pairs[how]}); {own}"
            done = fresh_process(code, cwd=library(), warm=True)
        assert "UNREAD" in done.stdout.split()
        assert "dropped" not in done.stderr
        missing = {
            "run": "'add_kernl:UNREAD' (did you mean 'add_kernel:UNREAD'?)",
            "module": "'other.add_kernel:UNREAD' (did you mean 'add_kernel:UNREAD'?)",
            "argument": "'add_kernel:N'",
        }
        assert f"install(keep=) has {missing[how]}" in done.stderr
        assert done.stderr.count("is not in the key of any kernel of this process") == 1

    def test_a_kernel_that_is_never_launched_is_not_counted(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """The report counted every kernel that a library declares as one of the program's."""
        folder = library()
        (folder / "idle.py").write_text((folder / "lib.py").read_text())
        code = "import safetune; safetune.install(); import idle, lib; lib.add()"
        done = fresh_process(code, cwd=folder, warm=True)
        assert "safetune: 1 of 2 kernels, 1 launch: 1 tuned, 0 looked up, 0 known" in done.stderr

    def test_a_second_process_looks_up(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        code = "import safetune; safetune.install(); import lib; lib.add(times=2)"
        fresh_process(code, cwd=library(), warm=True)
        done = fresh_process(code, cwd=library(), warm=True)
        assert "2 launches: 0 tuned, 1 looked up, 1 known" in done.stderr

    def test_a_key_without_a_choice_is_reported_as_such(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """Regression: a frozen program reported its fallbacks as keys that were looked up."""
        code = "import safetune; safetune.install(); import lib; lib.add(times=2)"
        done = fresh_process(code, cwd=library(), env={"SAFETUNE_MODE": "frozen"}, warm=True)
        assert "0 tuned, 1 looked up (1 without a choice), 1 known" in done.stderr

    def test_a_key_that_cannot_be_tuned_is_not_reported_as_tuned(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """Regression: Triton's tutorial of grouped products, whose tensors hold addresses."""
        code = """
import safetune; safetune.install()
import lib, torch
x = torch.zeros(64)
lib.add(times=1)
table = torch.tensor([x.data_ptr()])
lib.add_kernel[(1,)](table, table, 1, 7)
"""
        done = fresh_process(code, cwd=library(), warm=True)
        assert "holds an address of this process" in done.stderr
        assert "2 launches: 1 tuned, 1 looked up (1 without a choice), 0 known" in done.stderr

    def test_a_choice_that_another_made_meanwhile_is_not_reported_as_tuned(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """Regression: ranks that waited for the one that tuned said that each had tuned.

        A grid is computed once the choice was missing: here it launches the same kernel again.
        """
        code = """
import safetune; safetune.install()
import lib, torch, triton
from safetune.integrations import prepare
twin = triton.autotune(configs=lib.CONFIGS, key=["n", "UNREAD"])(lib.add_kernel.fn)
made = []
def grid(meta):
    if not made:
        made.append(prepare.prepare(launch, twin, (4,)))
    return (4,)
def launch(kernel, grid):
    kernel[grid](torch.zeros(50), torch.ones(50), 50, 7)
report = prepare.prepare(launch, lib.add_kernel, grid)
print(made[0].tunings, report.tunings)
"""
        done = fresh_process(code, cwd=library(), warm=True)
        assert done.stdout == "1 1\n", "the twin's, in both reports"
        assert "1 kernel, 2 launches: 1 tuned, 1 looked up, 0 known" in done.stderr

    def test_torch_s_own_tuners_stay_triton_s(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """Dynamo rebuilds what it pruned with `autotune`; ours would be pruned again, for ever."""
        code = """
import lib, safetune, triton
installation = safetune.install()
inside = {"__name__": "torch._higher_order_ops.triton_kernel_wrap", "triton": triton}
exec("rebuild = lambda old: triton.autotune(configs=old.configs[:1], key=[])(old.fn)", inside)
print(type(inside["rebuild"](lib.add_kernel)).__module__)
lib.add_kernel = inside["rebuild"](lib.add_kernel)
lib.add()
print(len(installation.tuners), installation.refused)
"""
        done = fresh_process(code, cwd=library(), warm=True)
        assert done.stdout.splitlines() == [STOCK, "0 {}"], done.stderr

    def test_a_tuner_that_cannot_be_taken_over_runs_as_before_and_is_named(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        code = """
import safetune
safetune.install()
import lib, triton

kernel = triton.autotune(lib.CONFIGS, ["n"])(triton.autotune(lib.CONFIGS, ["n"])(lib.add_kernel.fn))
print(type(kernel).__module__)
"""
        done = fresh_process(code, cwd=library(), warm=True)
        assert done.stdout.split() == [STOCK], done.stderr
        left = reports(done.stderr)[-1]
        assert "left to triton.autotune: add_kernel (add_kernel has a tuner already" in left

    def test_a_tuner_that_was_not_taken_over_stays_triton_s(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """Also where its launch would find nothing wrong any more."""
        code = """
import os, safetune
installation = safetune.install()
os.environ["SAFETUNE_PHANTOM"] = "error"
import lib
del os.environ["SAFETUNE_PHANTOM"]
from safetune.integrations.install import launched_in_place_of
print(*installation.refused, launched_in_place_of(lib.add_kernel))
"""
        done = fresh_process(code, cwd=library(), warm=True)
        assert done.stdout.split() == ["add_kernel", "None"], done.stderr

    def test_warnings_that_are_errors_do_not_break_a_library(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """A user of it cannot change its keys, and pytest is often told `-W error`."""
        code = """
import warnings
warnings.simplefilter("error")
import safetune
safetune.install()
import lib, triton
from triton.runtime.autotuner import Autotuner

print(lib.add())
fn = lib.add_kernel.fn
lib.add_kernel = type("Own", (Autotuner,), {})(fn, fn.arg_names, lib.CONFIGS, ["n"], None, None)
lib.add()
twice = triton.autotune(lib.CONFIGS + [triton.Config({"BLOCK": 16})], ["n"])(fn)
print(type(twice).__module__)
"""
        done = fresh_process(code, cwd=library(), warm=True)
        assert done.stdout.split() == [OURS, OURS], done.stderr
        counts, dropped = reports(done.stderr)
        assert "2 launches" in counts
        assert dropped.endswith("add_kernel (UNREAD)")

    def test_threads_that_install_at_once(self, fresh_process: FreshProcess) -> None:
        """The second one comes while the first is at it, and gets what that one makes."""
        done = fresh_process(
            "import threading, triton, safetune, safetune.integrations.install as module\n"
            "begin, made = module.Installation.begin, []\n"
            "def interrupted(self, forked=False):\n"
            "    module.Installation.begin = begin\n"
            "    other.start(); other.join(0.2)  # which waits, and so does not end\n"
            "    begin(self, forked)\n"
            "module.Installation.begin = interrupted\n"
            "other = threading.Thread(target=lambda: made.append(safetune.install()))\n"
            "made.append(safetune.install()); other.join()\n"
            "print(len(set(made)), hasattr(triton.autotune.__wrapped__, '__wrapped__'))",
            warm=True,
        )
        assert done.stdout.split() == ["1", "False"], done.stderr


#: Launches in this process, then in one that is forked off it in some way.
FORKING = """
import multiprocessing, os, sys
import lib

def work():
    lib.add(60, times=3)

def fork():
    if (child := os.fork()) == 0:
        work()
        sys.exit()
    return os.waitpid(child, 0)[1]

if __name__ == "__main__":
    lib.add(50, times=2)
    if sys.argv[1] == "os.fork":
        sys.exit(fork())
    context = multiprocessing.get_context(sys.argv[1])
    for target in (work, os.getpid) if sys.argv[1] == "fork" else (work,):
        process = context.Process(target=target)
        process.start(); process.join()
"""


@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(m, marks=pytest.mark.full) for m in ("os.fork", "forkserver"))],
)
def test_every_process_reports_its_own_launches(
    library: Callable[..., Path], fresh_process: FreshProcess, method: str
) -> None:
    """One that was forked leaves without `atexit` under multiprocessing, as vLLM's engine does;
    one that was forked and launches nothing says nothing.
    """
    here = library()
    (here / "train.py").write_text(FORKING)
    done = fresh_process(RUN, "run", here / "train.py", method, cwd=here)
    assert [line for line in reports(done.stderr) if "launches" in line] == [
        "safetune: 1 kernel, 3 launches: 1 tuned, 0 looked up, 2 known",
        "safetune: 1 kernel, 2 launches: 1 tuned, 0 looked up, 1 known",
    ]


def test_while_torch_distributed_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose import may be what imports Triton, and so installs: the settings are read there."""
    unfinished = types.ModuleType("torch.distributed")
    monkeypatch.setitem(sys.modules, "torch.distributed", unfinished)
    monkeypatch.setattr(torch, "distributed", unfinished)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Settings.current().world_size == 1


class TestVariable:
    @pytest.mark.parametrize("before", ["", "import triton"], ids=["before triton", "after"])
    def test_it_acts_when_safetune_is_imported(
        self, library: Callable[..., Path], fresh_process: FreshProcess, before: str
    ) -> None:
        env = {"SAFETUNE_INSTALL": "1"} | (UNTUNED if before else {})
        done = fresh_process(
            f"{before}\nimport safetune, lib; print(lib.add())",
            cwd=library(),
            env=env,
        )
        assert done.stdout.split() == [OURS], done.stderr
        assert len(reports(done.stderr)) == 2  # and none of the measuring process

    def test_a_search_for_triton_does_not_count_as_an_import(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """torch.cuda makes one when it is initialised, and others ask whether they can use it."""
        done = fresh_process(
            "import safetune, sys\n"
            "from importlib.util import find_spec\n"
            "print(*(find_spec('triton') is not None for _ in range(2)), 'triton' in sys.modules)\n"
            "import lib; print(lib.add())\n"
            "print(*(type(each).__name__ for each in sys.meta_path))",
            cwd=library(),
            env={**UNTUNED, "SAFETUNE_INSTALL": "1"},
        )
        searches, kind, finders = done.stdout.splitlines()
        assert searches == "True True False"
        assert kind == OURS
        assert "_Waiting" not in finders
        assert len(reports(done.stderr)) == 2

    @pytest.mark.parametrize(
        "module",
        ["config", "kernels.layer_norm", pytest.param("offline.plan", marks=pytest.mark.full)],
    )
    def test_a_module_of_safetune_may_be_what_imports_triton(
        self, library: Callable[..., Path], fresh_process: FreshProcess, module: str
    ) -> None:
        """Then it is half imported, and what `install` imports could not import it."""
        done = fresh_process(
            f"import safetune.{module}, lib; print(lib.add(), lib.add.__module__)",
            cwd=library(),
            env={"SAFETUNE_INSTALL": "1", **UNTUNED},
        )
        assert "1 kernel, 1 launch: 0 tuned, 1 looked up" in done.stderr

    def test_a_module_of_safetune_may_be_kept_from_being_imported(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """As tests of a library do it, which try what it does without an integration."""
        done = fresh_process(
            "import sys; sys.modules['safetune.integrations.jax'] = None\n"
            "import safetune, lib; print(lib.add())",
            cwd=library(),
            env={"SAFETUNE_INSTALL": "1", **UNTUNED},
        )
        assert done.stdout.split() == [OURS], done.stderr

    def test_install_as_well(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        """There is one installation, however many asked for it."""
        done = fresh_process(
            "import safetune; safetune.install()\n"
            "import triton; print(hasattr(triton.autotune.__wrapped__, '__wrapped__'))",
            cwd=library(),
            env={"SAFETUNE_INSTALL": "1"},
        )
        assert done.stdout.split() == ["False"], done.stderr

    def test_alone_it_imports_nothing(self, fresh_process: FreshProcess) -> None:
        done = fresh_process(
            "import safetune, sys; print('triton' in sys.modules, 'torch' in sys.modules)",
            env={"SAFETUNE_INSTALL": "1"},
        )
        assert done.stdout.split() == ["False", "False"], done.stderr
        assert not reports(done.stderr)

    def test_a_tuning_process_does_not_install_safetune(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from safetune.isolation.fork_server import child_environment

        monkeypatch.setenv("SAFETUNE_INSTALL", "1")
        assert "SAFETUNE_INSTALL" not in child_environment()

    def test_a_value_that_means_nothing(self, fresh_process: FreshProcess) -> None:
        code = "import safetune, triton; print(triton.autotune.__module__)"
        done = fresh_process(code, env={"SAFETUNE_INSTALL": "yes"})
        assert done.stdout.startswith("triton."), done.stderr
        assert done.stderr.count("SAFETUNE_INSTALL='yes' is not valid; use one of: 0, 1.") == 1
        assert "Traceback" not in done.stderr

    def test_finders_that_it_asks_may_be_waiting_or_old(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        done = fresh_process(
            "import importlib, sys, safetune\n"
            "old = type('Old', (), {'find_module': lambda self, name, path=None: None})\n"
            "sys.meta_path.insert(0, old()); importlib.reload(safetune)\n"
            "import lib; print(lib.add())",
            cwd=library(),
            env={"SAFETUNE_INSTALL": "1", **UNTUNED},
        )
        assert done.stdout.split() == [OURS], done.stderr

    @pytest.mark.parametrize("before", ["", "import triton\n"], ids=["before triton", "after"])
    def test_another_variable_that_means_nothing(
        self, library: Callable[..., Path], fresh_process: FreshProcess, before: str
    ) -> None:
        """Every kernel would be left to Triton, and tuned in this process, all but unheard."""
        done = fresh_process(
            f"{before}import safetune, lib; print('ran')",
            cwd=library(),
            env={"SAFETUNE_INSTALL": "1", "SAFETUNE_MODE": "frozn"},
            ends=1,
        )
        assert done.stdout == ""
        assert "InvalidSetting: SAFETUNE_MODE='frozn' is not valid; use one of:" in done.stderr


class TestRun:
    def test_a_variable_that_means_nothing(
        self, fresh_process: FreshProcess, tmp_path: Path
    ) -> None:
        (tmp_path / "train.py").write_text("print('ran')\n")
        env = {"SAFETUNE_MODE": "frozn"}
        done = fresh_process(RUN, "run", tmp_path / "train.py", env=env, ends=2)
        assert done.stdout == ""
        assert done.stderr.startswith("Error: SAFETUNE_MODE='frozn' is not valid; use one of:")
        assert done.stderr.count("\n") == 1

    def test_a_script_its_arguments_and_its_exit_code(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        here = library()
        (here / "train.py").write_text(
            "import sys, lib\n"
            "assert sys.path[0] == sys.argv[0].rpartition('/')[0]\n"
            "print(__name__, sys.argv[1:], lib.add())\n"
            "sys.exit(7)\n"
        )
        words = ("run", here / "train.py", "--debug", "-m", "x")
        done = fresh_process(RUN, *words, cwd=here, env=UNTUNED, ends=7)
        assert done.stdout.strip() == f"__main__ ['--debug', '-m', 'x'] {OURS}"
        assert len(reports(done.stderr)) == 2

    def test_a_module_and_the_processes_that_it_starts(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        here = library()
        (here / "launcher.py").write_text(
            "import multiprocessing, subprocess, sys\n"
            "import lib\n"
            "def work():\n"
            "    print('spawned', lib.add(), flush=True)\n"
            "if __name__ == '__main__':\n"
            "    worker = [sys.executable, '-c', \"import lib; print('worker', lib.add())\"]\n"
            "    subprocess.run(worker, check=True)\n"
            "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
            "    process.start(); process.join()\n"
            "    sys.exit(process.exitcode)\n"
        )
        done = fresh_process(RUN, "run", "-m", "launcher", cwd=here, env=UNTUNED)
        assert sorted(done.stdout.splitlines()) == [f"spawned {OURS}", f"worker {OURS}"]

    @pytest.mark.full
    def test_the_workers_of_torchrun(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        pytest.importorskip("torch.distributed.run")
        here = library()
        (here / "train.py").write_text(
            "import lib, os, sys\n"
            "kind = type(lib.add_kernel).__module__\n"
            "sys.stdout.write(f\"rank {os.environ['RANK']} {kind}\\n\")\n"
        )
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        done = fresh_process(RUN, "run", *launcher, here / "train.py", cwd=here)
        assert sorted(done.stdout.splitlines()) == [f"rank 0 {OURS}", f"rank 1 {OURS}"]
        assert len([line for line in reports(done.stderr) if "1 kernel" in line]) == 2

    def test_a_sitecustomize_that_was_there_still_runs(
        self, library: Callable[..., Path], fresh_process: FreshProcess, tmp_path: Path
    ) -> None:
        here, site = library(), tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text("import sys; sys.marked = __file__\n")
        (here / "train.py").write_text(
            "import sys, lib; print(sys.marked, lib.add(), sys.modules['sitecustomize'].__file__)"
        )
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        done = fresh_process(
            RUN, "run", here / "train.py", cwd=here, env={**UNTUNED, "PYTHONPATH": path}
        )
        theirs = str(site / "sitecustomize.py")
        assert done.stdout.split() == [theirs, OURS, theirs], done.stderr

    def test_without_a_standard_error(self, fresh_process: FreshProcess, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print('ran')\n")
        code = (
            "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        )
        code += "  # as `2>&-` does"
        done = fresh_process(code, "-c", RUN, "run", tmp_path / "train.py")
        assert done.stdout == "ran\n"

    def test_it_runs_though_safetune_cannot_be_imported(
        self, fresh_process: FreshProcess, tmp_path: Path
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.marked = 1\n")
        (tmp_path / "train.py").write_text(
            "import os, subprocess, sys\n"
            "environment = {**os.environ, 'SAFETUNE_INSTALL': 'yes'}\n"
            "child = [sys.executable, '-c', 'import sys; print(sys.marked)']\n"
            "subprocess.run(child, check=True, env=environment)\n"
        )
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = fresh_process(RUN, "run", tmp_path / "train.py", env={"PYTHONPATH": path})
        assert done.stdout.split() == ["1"], done.stderr
        assert "SAFETUNE_INSTALL='yes' is not valid" in done.stderr

    def test_a_python_without_safetune_starts_all_the_same(
        self, library: Callable[..., Path], fresh_process: FreshProcess
    ) -> None:
        here = library()
        (here / "train.py").write_text(
            "import os, subprocess, sys\n"
            "path = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
            "bare = [sys.executable, '-S', '-c', 'import sitecustomize; print(\"started\")']\n"
            "subprocess.run(bare, check=True, env={'PYTHONPATH': path, 'SAFETUNE_INSTALL': '1'})\n"
        )
        done = fresh_process(RUN, "run", here / "train.py", cwd=here)
        assert done.stdout.split() == ["started"], done.stderr


FLA = """
import importlib, json, warnings
warnings.simplefilter("ignore")
import safetune
installation = safetune.install()
from triton.runtime.autotuner import Autotuner
kinds = {}
for name in ("fla.modules.norm.layernorm", "fla.ops.gla.chunk", "fla.ops.delta_rule.chunk"):
    module = importlib.import_module(name)
    for key, value in vars(module).items():
        while hasattr(value, "fn") and not isinstance(value, Autotuner):
            value = value.fn
        if isinstance(value, Autotuner):
            kinds[key] = type(value).__module__
print(json.dumps([kinds, len(installation.tuners), installation.refused]))
"""


@pytest.mark.full
def test_the_kernels_of_a_real_library(fresh_process: FreshProcess) -> None:
    """fla-core's layers, imported under `install`: ours, or of its class, reached at a launch."""
    import json

    try:
        importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs fla-core")
    done = fresh_process(FLA, env={"TRITON_INTERPRET": "0"})
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    kinds, count, refused = found
    assert {"layer_norm_fwd_kernel", "layer_norm_bwd_kernel"} <= set(kinds)
    assert set(kinds.values()) == {OURS, "fla.ops.utils.cache"}
    assert count > 20
    assert not refused
