"""A library that takes safetune where it is installed, and sets its mode for its users."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FreshProcess

SHIM = Path(__file__).resolve().parents[1] / "docs" / "examples" / "autotune_shim.py"

#: argv: the file of the shim. A kernel with two configs, whose launch prints what it was.
LIBRARY = f"""
import importlib.util, json, sys
import torch, triton
import triton.language as tl

spec = importlib.util.spec_from_file_location("shim", {str(SHIM)!r})
shim = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shim)

@shim.autotune(
    configs=[triton.Config({{"BLOCK": 64}}), triton.Config({{"BLOCK": 128}})],
    key=["n", "kept"],
    keep=["kept"],
)
@triton.jit
def kernel(x, n, kept, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, offset, mask=offset < n)

def launch():
    x = torch.zeros(300, dtype=torch.int32)
    kernel[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](x, 300, 1)
    assert x.tolist() == list(range(300))
    return type(kernel).__module__
"""

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""

#: Counts processes that start, and whatever touches the store.
WATCH = """
import os, sys
seen = []
def hook(event, args):
    starts = event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec")
    if starts or str(args[:1]).find(os.environ["SAFETUNE_CACHE_DIR"]) >= 0:
        seen.append((event, str(args)[:99]))
sys.addaudithook(hook)
"""


def ran(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("installed", [True, False])
def test_the_shim_is_safetune_where_it_is_installed_and_triton_where_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool
) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "off")
    if not installed:
        monkeypatch.setitem(sys.modules, "safetune", None)  # its import fails
    path = tmp_path / "library.py"
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("library", path)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    if not installed:
        del library.kernel.configs[1:]  # Triton times more than one on a GPU only
    expected = "safetune.frontend.autotuner" if installed else "triton.runtime.autotuner"
    assert library.launch() == expected


def test_a_library_turns_tuning_off_and_the_environment_turns_it_on(
    fresh_process: FreshProcess, cache_dir: Path
) -> None:
    code = (
        f"{LIBRARY}\nimport safetune\nsafetune.configure(mode='off')\n{WATCH}\n"
        "launch()\nprint(kernel.best_config.kwargs, seen)"
    )
    done = fresh_process(code, env={"SAFETUNE_MODE": None}, warm=True)
    assert ran(done) == "{'BLOCK': 64} []"
    assert not cache_dir.exists()
    code += "\nassert len(kernel.cache) == 1"
    done = fresh_process(code, env={"SAFETUNE_MODE": "tune"}, warm=True)
    assert "[]" not in ran(done)
    assert list(cache_dir.glob("*.db"))


def test_a_mode_that_is_not_known_is_an_error(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import safetune
    from safetune import settings

    request.addfinalizer(lambda: safetune.configure(mode="tune"))
    with pytest.raises(safetune.InvalidSetting, match="mode='on' is not valid; use one of: tune"):
        safetune.configure(mode="on")
    with pytest.raises(safetune.InvalidSetting, match=r"mode=\['tune'\] is not valid"):
        safetune.configure(mode=["tune"])  # type: ignore[arg-type]
    safetune.configure(mode="frozen")
    assert settings.Settings.current().mode is settings.Mode.FROZEN
    monkeypatch.setenv("SAFETUNE_MODE", "tune")
    assert settings.Settings.current().mode is settings.Mode.TUNE


@pytest.mark.full
def test_the_command_tunes_a_kernel_of_a_library_that_turns_tuning_off(
    fresh_process: FreshProcess, tmp_path: Path
) -> None:
    """Its file calls `configure` when it is imported as the command's TARGET."""
    workload = """
import safetune
safetune.configure(mode="off")

@kernel.workload
def small(device, dtype):
    from safetune import Workload
    yield Workload("small", (5,), (torch.zeros(300, dtype=torch.int32), 300, 1))
"""
    target = tmp_path / "library.py"
    target.write_text(LIBRARY + workload)
    code = f"from safetune.cli import main; main(['tune', {str(target)!r}, '--json'])"
    done = fresh_process(code, env={"SAFETUNE_MODE": None}, warm=True)
    assert '"choice"' in ran(done)


def test_a_tuning_and_its_store_need_neither_click_nor_rich_nor_sqlite_utils(
    fresh_process: FreshProcess, cache_dir: Path
) -> None:
    without = WITHOUT.format(names=["click", "rich", "sqlite_utils"])
    done = fresh_process(f"{without}{LIBRARY}\nlaunch()\nprint(len(kernel.cache))")
    assert ran(done) == "1"
    assert list(cache_dir.glob("*.db"))


@pytest.mark.full
def test_the_shim_is_typed() -> None:
    words = ["--strict", "--follow-imports=skip", "--ignore-missing-imports", str(SHIM)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
