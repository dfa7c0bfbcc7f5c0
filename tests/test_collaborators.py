"""Tests hand collaborators in through constructors, and leave module globals alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PRODUCT = HERE.parent / "safetune"

#: How many module globals of the product tests replace, limits and pauses most of them.
MOST = 28


def _modules(tree: ast.Module) -> set[str]:
    """Return the names by which a test file knows modules of the product."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname for each in node.names if each.name.startswith("safetune.")}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("safetune"):
            folder = PRODUCT.joinpath(*str(node.module).split(".")[1:])
            for each in node.names:
                if (folder / f"{each.name}.py").exists() or (folder / each.name).is_dir():
                    found.add(each.asname or each.name)
    return {name for name in found if name}


def _replaced(path: Path) -> Iterator[str]:
    """Yield each `monkeypatch.setattr(module, "name", ...)` of a module of the product."""
    text = path.read_text(encoding="utf-8")
    if ".setattr(" not in text:
        return
    tree = ast.parse(text)
    modules = _modules(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        target = node.args[0]
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
            and isinstance(target, ast.Name)
            and target.id in modules
        ):
            name = ast.unparse(node.args[1]).strip("'")
            yield f"{path.relative_to(HERE)}:{node.lineno}: {target.id}.{name}"


def test_no_more_module_globals_are_replaced_than_before() -> None:
    found = [each for path in sorted(HERE.rglob("*.py")) for each in _replaced(path)]
    assert len(found) <= MOST, "\n".join(["give the product a parameter instead:", *found])
