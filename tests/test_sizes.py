"""Files and functions stay small enough to read in one sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_KERNEL_LINES = 120

PRODUCT_FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("safetune", "kernels")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=str)
def test_file_is_short(path: Path) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines; split it where it has two subjects"


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=str)
def test_functions_are_short(path: Path) -> None:
    long = [
        f"{path}:{function.lineno} {function.name}: {lines} lines, at most {most}"
        for function, lines, most in _functions(path)
        if lines > most
    ]
    assert not long, "\n".join(long)


def _functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int, int]]:
    """Yield (function, its lines without decorators and docstring, how many it may have)."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node, lines, MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is `triton.jit` or `jit`, with or without arguments."""
    return any(
        ast.unparse(item.func if isinstance(item, ast.Call) else item).rpartition(".")[2] == "jit"
        for item in node.decorator_list
    )
