"""Where tuners are used as by stock Triton or better: daemons, Ray, no home, copies of modules."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch

from safetune import safetune
from safetune.errors import TuningWarning
from safetune.miss import reporting

SOURCE = """
import torch
import triton
import triton.language as tl

from safetune import autotune
from safetune.miss import reporting

CONFIGS = [triton.Config({"BLOCK": block}) for block in (32, 64)]
N = 100


@triton.jit
def double(x, n, BLOCK: tl.constexpr, UNREAD: tl.constexpr = None):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


ours = autotune(configs=CONFIGS, key=["n"])(double)
stock = triton.autotune(configs=CONFIGS, key=["n"])(double)


class Doubled(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, N)
        return x


def works(module):
    return bool((module(torch.ones(N)) == 2).all())


def report():
    print(works(Doubled(ours)), reporting.tunings.begun, len(ours.configs_timings), flush=True)
"""

#: What `report` prints where the configs were tried in child processes.
TUNED = "True 1 2"

DAEMON = """
import multiprocessing
import sys

from doubling import report

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=report, daemon=True)
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""

#: Under another name of this user, who has no home, where nothing can be written.
HOMELESS = """
import os
import sys

shell = "mount -o remount,bind,ro / && exec \\"$@\\""
namespaces = "--user --map-user=54321 --map-group=54321 --keep-caps --mount"
os.execvp("unshare", ["unshare", *namespaces.split(), "sh", "-c", shell, "sh", *sys.argv[1:]])
"""

WITHOUT_HOME = """
import pwd

from doubling import report

try:
    print(pwd.getpwuid(54321))
except KeyError:
    report()
"""

ACTOR = """
import os

import ray

import doubling

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)


@ray.remote
class Actor:
    def works(self, module):
        return doubling.works(module), doubling.reporting.tunings.begun, os.getpid()


actor = Actor.remote()
right, tunings, pid = ray.get(actor.works.remote(doubling.Doubled(doubling.ours)))
print(right, tunings, pid != os.getpid())
ray.shutdown()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "doubling.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """Finds the module, too; what the tests' own process would import comes first."""
    spec = importlib.util.find_spec("safetune")
    assert spec is not None
    assert spec.origin is not None
    path = [str(Path(spec.origin).parents[1]), str(folder), os.environ.get("PYTHONPATH", "")]
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.fixture
def doubling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("doubling", folder / "doubling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "doubling", module)
    spec.loader.exec_module(module)
    return module


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda found: pickle.loads(pickle.dumps(found)),
    "cloudpickle": lambda found: pickle.loads(cloudpickle.dumps(found)),
}


def error_of(way: Callable[[Any], Any], found: Any) -> type[Exception] | None:
    try:
        way(found)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_module_that_holds_a_tuner_is_copied_as_with_a_stock_one(
    doubling: ModuleType, way: Callable[[Any], Any]
) -> None:
    """Before and after its first launch; a copy finds the choice and tunes nothing."""
    module = doubling.Doubled(doubling.ours)
    for _ in range(2):
        stock_error = error_of(way, doubling.Doubled(doubling.stock))
        assert error_of(way, module) is stock_error
        copied = module if stock_error else way(module)
        begun = reporting.tunings.begun
        assert doubling.works(module)
        assert doubling.works(copied)
        assert reporting.tunings.begun - begun <= 1
    assert torch.equal(copied.weight, module.weight)
    assert reporting.tunings.begun == begun, "the second round tuned nothing"


def test_a_tuner_is_sent_whatever_its_process_has_seen(doubling: ModuleType) -> None:
    """Its launches went with it, and with them the class of every argument in the process:
    `TypeError: cannot set '__doc__' attribute of immutable type '_thread.lock'`.
    """
    x, n = torch.ones(doubling.N), doubling.N
    with pytest.warns(TuningWarning, match=r"is not tuned.*_thread\.lock"):
        doubling.ours[(4,)](x, n, UNREAD=threading.Lock())
    assert doubling.works(doubling.Doubled(doubling.ours))
    copied = WAYS["cloudpickle"](doubling.ours)
    assert doubling.works(doubling.Doubled(copied))
    assert len(copied.cache) == 1


def test_a_tuner_is_identified_by_the_text_that_its_process_reads(
    doubling: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept the identity of the sender's hook, and so the sender's choices."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "its_hook", ModuleType("its_hook"))  # gone after the test

    def hook(statement: str) -> Any:
        (folder / "its_hook.py").write_text(f"def hook(nargs, **_):\n    {statement}\n")
        del sys.modules["its_hook"]
        importlib.invalidate_caches()
        return importlib.import_module("its_hook").hook

    decorate = safetune(configs=doubling.CONFIGS, key=["n"], pre_hook=hook("pass"))
    tuner = decorate(doubling.double)
    digest, sent = tuner.identity.digest, cloudpickle.dumps(tuner)
    there = hook("nargs['x'].zero_()")
    found = pickle.loads(sent)
    assert found.hooks.pre_hook is there
    assert found.identity.digest != digest


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_daemonic_process_tunes_in_children(
    fresh_process: Any, folder: Path, environment: dict[str, str], start: str
) -> None:
    """It may have no children of multiprocessing."""
    (folder / "daemon.py").write_text(DAEMON)
    done = fresh_process(folder / "daemon.py", start, env=environment)
    assert done.stdout.split("\n")[0] == TUNED


def _may_unshare() -> bool:
    command = ["unshare", "--user", "--map-user=54321", "--keep-caps", "--mount", "true"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, check=False).returncode
    )


@pytest.mark.full
@pytest.mark.parametrize("home", ["/", None])
def test_no_home_no_name_and_nothing_to_write_to_cost_a_warning(
    fresh_process: Any, folder: Path, environment: dict[str, str], home: str | None
) -> None:
    if not _may_unshare():
        pytest.skip("needs namespaces of its own")
    (folder / "homeless.py").write_text(WITHOUT_HOME)
    names = ("SAFETUNE_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "USER", "LOGNAME")
    env = {**environment, **dict.fromkeys(names), "HOME": home}
    done = fresh_process(HOMELESS, sys.executable, folder / "homeless.py", env=env)
    assert done.stdout.strip() == TUNED
    assert done.stderr.count("Warning: ") == 1
    problem = "Read-only file system" if home else "there is no home directory"
    assert problem in done.stderr
    assert "choices are kept in memory" in done.stderr


@pytest.mark.full
def test_a_ray_actor_tunes_in_children(
    fresh_process: Any, folder: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install ray")
    (folder / "actor.py").write_text(ACTOR)
    rays = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": "/tmp", "RAY_USAGE_STATS_ENABLED": "0"}
    done = fresh_process(folder / "actor.py", env={**environment, **rays})
    assert done.stdout.splitlines()[-1] == "True 1 True"
