"""The diff of a source, applied by git: the kernel then declares what stays, and no more."""

from __future__ import annotations

import linecache
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from triton.runtime.autotuner import Heuristics

from safetune.config import config_digest
from safetune.errors import TargetError
from safetune.keys.kernel_digest import base_function
from safetune.offline import source_edit

HEAD = """\
import triton
import triton.language as tl
from triton import Config

import safetune


def hook(arguments):
    pass


FEW = [Config({"BLOCK": 32}, num_warps=w) for w in (1, 2, 4)]


"""
BODY = """\
@triton.jit
def kernel(x, N, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1, mask=tl.arange(0, BLOCK) < N)
"""
WRITTEN = """\
@triton.heuristics({})
@safetune.autotune(
    configs=[
        Config({"BLOCK": 32}),  # for short rows: größer
        Config({"BLOCK": 64}, num_warps=8),
        Config(
            {"BLOCK": 128},
            num_stages=2,
        ),
        Config({"BLOCK": 256}, pre_hook=hook),
    ],
    key=["N"],
)
"""
MADE = """\
@safetune.autotune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps, num_ctas=2, maxnreg=64)
        for block in (32, 64)
        for warps in (2, 4)
    ],
    key=["N"],
)
"""
NAMED = '@safetune.safetune(FEW, ["N"])\n'
HOOKED = '@safetune.autotune([Config({"BLOCK": 2 << i}, pre_hook=hook) for i in (1, 2)], ["N"])\n'


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that returns the tuner of a source's kernel, read anew."""

    def read(decorator: str = "") -> Any:
        path = tmp_path / "edited.py"
        if decorator:
            path.write_text(HEAD + decorator + BODY, encoding="utf-8")
        linecache.checkcache(str(path))
        module: Any = ModuleType("edited_source")
        sys.modules[module.__name__] = module
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
        return module.kernel.fn if isinstance(module.kernel, Heuristics) else module.kernel

    yield read
    sys.modules.pop("edited_source", None)


def shortened(tuner: Any, folder: Path, monkeypatch: Any, *stay: int) -> str:
    monkeypatch.chdir(folder)
    digests = {config_digest(tuner.configs[i]) for i in stay}
    found = source_edit.diff(base_function(tuner.fn)[1], tuner.configs, digests)
    subprocess.run(["git", "apply", "-"], input=found.encode(), check=True)
    return found


@pytest.mark.parametrize(
    ("decorator", "stay"),
    [
        (WRITTEN, (1, 3)),
        (WRITTEN, (0, 2)),
        (WRITTEN, (0,)),
        (MADE, (0, 3)),
        (NAMED, (1,)),
        (HOOKED, (1,)),
    ],
)
def test_the_kernel_then_declares_what_stays(
    kernel: Any, tmp_path: Path, monkeypatch: Any, decorator: str, stay: tuple[int, ...]
) -> None:
    tuner = kernel(decorator)
    wanted = [config_digest(tuner.configs[i]) for i in stay]
    shortened(tuner, tmp_path, monkeypatch, *stay)
    after = kernel()
    assert [config_digest(config) for config in after.configs] == wanted
    assert after.lazy_key.written.names == tuner.lazy_key.written.names


def test_of_a_written_list_only_entries_are_taken_out(
    kernel: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    found = shortened(kernel(WRITTEN), tmp_path, monkeypatch, 0, 1, 3)
    changed = [line for line in found.splitlines()[2:] if line[0] in "+-"]
    assert changed == [
        "-        Config(",
        '-            {"BLOCK": 128},',
        "-            num_stages=2,",
        "-        ),",
    ]


def test_a_list_that_the_source_does_not_show_is_left_alone(kernel: Any) -> None:
    tuner = kernel(NAMED)
    function = base_function(tuner.fn)[1]
    Path(function.__code__.co_filename).write_text("# another file now\n", encoding="utf-8")
    with pytest.raises(TargetError, match="by hand"):
        source_edit.diff(function, tuner.configs, {config_digest(tuner.configs[0])})
