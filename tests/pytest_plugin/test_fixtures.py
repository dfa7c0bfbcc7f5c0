"""The fixtures for other projects, in a run of pytest of its own, with the plugin as installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROJECT = """
import sys

def test_nothing_is_imported_for_a_test_without_them():
    assert not {"safetune", "torch", "triton"} & set(sys.modules)

def test_a_store_of_its_own(safetune_store):
    import demo_kernels
    assert not safetune_store.exists()
    demo_kernels.run()
    assert demo_kernels.add_one.bench_time > 0
    assert (safetune_store / "safetune.db").is_file()

def test_another_store_knows_nothing_of_it(safetune_store):
    import demo_kernels
    assert len(demo_kernels.add_one.cache) == 0
    demo_kernels.run()
    assert len(demo_kernels.add_one.cache) == 1
    assert (safetune_store / "safetune.db").is_file()

def test_off_launches_the_first_config_and_stores_nothing(safetune_store, safetune_off):
    import demo_kernels
    demo_kernels.run()
    assert len(demo_kernels.add_one.cache) == 0
    assert not safetune_store.exists()
"""

KERNELS = """
import torch, triton, triton.language as tl
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["N"])
@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)

def run():
    x = torch.zeros(100)
    add_one[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
    assert x.sum() == 100
"""


def test_the_fixtures_of_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "demo_kernels.py").write_text(KERNELS)
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "safetune_pytest").symlink_to(ROOT / "safetune" / "pytest_plugin")
    path = os.pathsep.join([str(plugins), str(ROOT)])
    environment = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SAFETUNE_MODE": "off"}
    options = ["-q", "-p", "safetune_pytest", "-p", "no:cacheprovider", "."]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
