"""How large the product is, by folder, and which functions are too long: a part of `make lint`.

    python tests/lint_structure.py

prints lines of code (neither blank, comment nor docstring) beside each folder's budget, functions,
and public names: functions and classes of a module that no underscore begins. Exits with 1 if a
function has more than 80 lines, or a Triton kernel more than 120, without its docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Folders, those of safetune/ without its name, and the most lines of code they are to have.
BUDGETS: dict[tuple[str, ...], int] = {
    ("",): 1_450,  # the modules at the top
    ("frontend",): 450,
    ("keys",): 2_300,
    ("launch",): 1_050,
    ("miss",): 950,
    ("tuning", "child", "inputs", "isolation", "both"): 5_900,
    ("store",): 2_300,
    ("compilers", "integrations"): 1_100,
    ("offline",): 950,
    ("cli", "show"): 2_300,
    ("lint",): 600,
    ("verify", "pytest_plugin"): 1_000,
    ("kernels",): 2_470,
}
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 120

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files_of(folder: str) -> list[Path]:
    """Return the Python files of a folder of the product."""
    if not folder:
        return sorted((ROOT / "safetune").glob("*.py"))
    top = ROOT / folder if folder == "kernels" else ROOT / "safetune" / folder
    return sorted(top.rglob("*.py"))


def code_lines(text: str) -> int:
    """Return how many lines of a file have code."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        if docstring := _docstring(node):
            docstrings.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def long_functions(text: str) -> Iterator[str]:
    """Yield a line for each function that is too long, without its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _FUNCTIONS):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if docstring := _docstring(node):
                lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
            most = MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES
            if lines > most:
                yield f"{node.lineno} {node.name}: {lines} lines, at most {most}"


def _docstring(node: ast.AST) -> ast.stmt | None:
    match node:
        case (
            ast.Module(body=[ast.Expr(value=ast.Constant(value=str())) as first, *_])
            | ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str())) as first, *_])
            | ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str())) as first, *_])
            | ast.AsyncFunctionDef(body=[ast.Expr(value=ast.Constant(value=str())) as first, *_])
        ):
            return first
    return None


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is `triton.jit` or `jit`, with or without arguments."""
    return any(
        ast.unparse(item.func if isinstance(item, ast.Call) else item).rpartition(".")[2] == "jit"
        for item in node.decorator_list
    )


def _row(name: str, texts: Sequence[str], budget: int) -> tuple[list[int], str]:
    trees = [ast.parse(text) for text in texts]
    functions = sum(isinstance(node, _FUNCTIONS) for tree in trees for node in ast.walk(tree))
    public = sum(
        isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
        for tree in trees
        for node in tree.body
    )
    numbers = [sum(map(code_lines, texts)), budget, functions, public]
    over = f"  {numbers[0] - budget:,} over" if numbers[0] > budget else ""
    return numbers, f"{name:<34}" + "".join(f"{number:>10,}" for number in numbers) + over


def main() -> int:
    """Print the table and the functions that are too long; 1 if there are any."""
    print(f"{'folder':<34}{'code':>10}{'budget':>10}{'functions':>10}{'public':>10}")
    sums, long = [0, 0, 0, 0], []
    for folders, budget in BUDGETS.items():
        files = [path for folder in folders for path in files_of(folder)]
        texts = [path.read_text(encoding="utf-8") for path in files]
        numbers, line = _row(", ".join(folders) or "top level", texts, budget)
        print(line)
        sums = [old + new for old, new in zip(sums, numbers, strict=True)]
        for path, text in zip(files, texts, strict=True):
            long += [f"{path.relative_to(ROOT)}:{found}" for found in long_functions(text)]
    print(f"{'in all':<34}" + "".join(f"{number:>10,}" for number in sums))
    print(*long, sep="\n", end="\n" if long else "")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
