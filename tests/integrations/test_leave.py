"""Kernels that are left to Triton are tuned in the program's own process, as without safetune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.keys.left_kernels import is_left_by_name
from safetune.settings import Settings

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: A library whose `do_bench` says in which process a config was launched.
LIBRARY = """
import os
import torch
import triton
import triton.language as tl
{imports}


def do_bench(call, quantiles=None, **_):
    call()
    with open({pids!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    return [1.0, 1.0, 1.0]


CONFIGS = [triton.Config({{"BLOCK": block}}) for block in (16, 32)]


@{autotune}(configs=CONFIGS, key=["n"], do_bench=do_bench)
@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < n), mask=at < n)


def copy(n=50):
    dst, src = torch.zeros(n), torch.ones(n)
    copy_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
    assert torch.equal(dst, src)
    print(os.getpid())
"""


@pytest.fixture
def launched(tmp_path: Path, fresh_process: FreshProcess) -> Any:
    """Run a program on the library; return its number, those that measured, and its stderr."""

    def run(program: str, autotune: str = "triton.autotune", imports: str = "", **env: str) -> Any:
        pids = tmp_path / "pids"
        pids.unlink(missing_ok=True)
        library = LIBRARY.format(autotune=autotune, imports=imports, pids=str(pids))
        (tmp_path / "lib.py").write_text(library)
        done = fresh_process(program, cwd=tmp_path, env=env, warm=True)
        measured = set(pids.read_text().split()) if pids.exists() else set()
        return done.stdout.split()[-1], measured, done.stderr

    return run


INSTALLED = "import safetune; safetune.install(); import lib; lib.copy()"
OURS = {"autotune": "safetune.safetune", "imports": "import safetune"}
BEFORE = "import lib, safetune; safetune.install(); lib.copy()"


@pytest.mark.parametrize(
    ("program", "library", "names"),
    [
        (INSTALLED, {}, "other, copy_*"),
        pytest.param(INSTALLED, {}, "lib.copy_kernel", marks=pytest.mark.full),
        pytest.param(BEFORE, {}, "lib.*", marks=pytest.mark.full),
        ("import lib; lib.copy()", OURS, "*.copy_kernel"),
        pytest.param("import lib; lib.copy()", OURS, "copy_kernel", marks=pytest.mark.full),
    ],
)
def test_a_kernel_that_is_left_is_measured_in_the_program(
    launched: Any, program: str, library: dict[str, str], names: str
) -> None:
    """Decorated by Triton, before or after `install`, and by safetune."""
    own, measured, _ = launched(program, **library)
    assert measured
    assert own not in measured

    own, measured, stderr = launched(program, **library, SAFETUNE_LEAVE=names)
    assert measured == {own}
    if library is not OURS:
        left = "safetune: left to triton.autotune: copy_kernel (by SAFETUNE_LEAVE or leave=)"
        assert left in stderr


@pytest.mark.parametrize(
    "mode", ["frozen", *(pytest.param(m, marks=pytest.mark.full) for m in ("background", "record"))]
)
def test_the_mode_says_nothing_of_a_kernel_that_is_left(launched: Any, mode: str) -> None:
    program = "import lib; lib.copy()"
    own, measured, _ = launched(program, **OURS, SAFETUNE_LEAVE="copy_kernel", SAFETUNE_MODE=mode)

    assert measured == {own}


def test_install_and_run_take_names_too(
    launched: Any, tmp_path: Path, fresh_process: FreshProcess
) -> None:
    own, measured, _ = launched(
        "import safetune; safetune.install(leave='lib.copy*'); import lib; lib.copy()"
    )
    assert measured == {own}

    (tmp_path / "pids").unlink()
    (tmp_path / "main.py").write_text("import lib; lib.copy()")
    done = fresh_process(
        "import sys; from safetune.cli import main\n"
        "sys.argv = ['safetune', 'run', '--leave', 'lib.copy_kernel', '--leave', 'x', 'main.py']\n"
        "main()",
        cwd=tmp_path,
        env={"SAFETUNE_LEAVE": "y.*"},
    )
    assert {*(tmp_path / "pids").read_text().split()} == {*done.stdout.split()}
    assert "SAFETUNE_LEAVE or install(leave=) has 'x', 'y.*', which names no kernel" in done.stderr


def test_a_name_that_fits_no_kernel_is_a_warning_at_exit(launched: Any) -> None:
    _, _, stderr = launched("import lib; lib.copy()", **OURS, SAFETUNE_LEAVE="lib.copy_kernl")
    assert stderr.count("has 'lib.copy_kernl', which names no kernel") == 1

    _, _, stderr = launched("import lib; lib.copy()", **OURS, SAFETUNE_LEAVE="lib.copy_kernel")
    assert "names no kernel" not in stderr


def test_a_name_without_a_dot_is_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_LEAVE", "add_*, fla.*")
    settings = Settings.current()

    assert is_left_by_name("add_one", "ops.add_one", settings)
    assert is_left_by_name("scale", "fla.ops.scale", settings)
    assert not is_left_by_name("scale", "add_ops.scale", settings)
