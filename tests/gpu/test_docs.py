"""The documentation's Python on a GPU; `tests/test_docs.py` runs it in the interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def written(import_file: Any, tmp_path: Path) -> Any:
    """A function that writes the Python blocks of a page to a file, and returns that."""
    docs = import_file("documentation_tests", ROOT / "tests" / "test_docs.py")

    def write(page: str) -> Path:
        # As jax.py it would be what its own `import jax` finds.
        script: Path = docs.write_python(ROOT / page, tmp_path)
        return script.rename(tmp_path / "page.py")

    return write


@pytest.mark.parametrize("page", ["README.md", "docs/cuda_graphs.md", "docs/torch_compile.md"])
def test_python(page: str, written: Any, fresh_process: Any) -> None:
    done = fresh_process(written(page), ends=None)
    assert done.returncode == 0, f"lines are those of {page}\n{done.stderr}"


def test_jax(written: Any, fresh_process: Any) -> None:
    """With what the page has only indented, as it cannot run without a GPU."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton")
    script = written("docs/jax.md")
    lines = script.read_text().splitlines()
    page = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(page) if line.startswith("<!-- not run without a GPU"))
    for place in range(start + 1, len(page)):
        if page[place] and not page[place].startswith("    "):
            break
        lines[place] = page[place][4:]
    assert any("triton_call(" in line for line in lines)
    script.write_text("\n".join(lines) + "\n")

    done = fresh_process(script, env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, ends=None)

    assert done.returncode == 0, f"lines are those of docs/jax.md\n{done.stderr}"
