"""Whether a kernel's text waits for another process, thread or stream.

Such a kernel continues once the other side has written to memory. In a child, nobody writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from safetune.keys.kernel_text import KernelText, kernel_texts
from safetune.keys.source_text import stores, walk

_ASSEMBLY = "inline_asm_elementwise"
#: Calls that read values written by others. `atomic_` begins the names of more.
_ASKING = frozenset({"load", _ASSEMBLY, "extern_elementwise"})
#: Functions of a device's library, whose behaviour the text does not show.
_EXTERN = "triton.language.extra."
_BRANCH = re.compile(r"\bbra\b")


def waits_on_memory(kernel: Any) -> bool:
    """Whether a kernel, or a function that it calls, loops until memory has a certain value.

    True for a `while` whose condition, also through a name that the loop assigns, reads memory, is
    an atomic operation, or calls assembly or a library function; and for assembly that branches.
    """
    found = kernel_texts(kernel)
    texts = {function: text for function, text in found.items() if text is not None}
    return any(_waits(text, texts) for text in texts.values())


def _waits(text: KernelText, texts: dict[Any, KernelText]) -> bool:
    loops = [node for node in walk(text.node) if isinstance(node, ast.While)]
    asks = any(_asks(text, call, texts) for loop in loops for call in _deciding(loop))
    return asks or any(_branches(text, call) for call in text.calls())


def _asks(text: KernelText, call: ast.Call, texts: dict[Any, KernelText]) -> bool:
    value = text.value(call.func)
    if (callee := texts.get(getattr(value, "fn", None))) is not None:
        others = {function: each for function, each in texts.items() if each is not callee}
        return any(_asks(callee, inner, others) for inner in callee.calls())
    if str(getattr(value, "__module__", "")).startswith(_EXTERN):
        return True
    names = text.names(call.func)
    return any(name in _ASKING or name.startswith("atomic_") for name in names)


def _branches(text: KernelText, call: ast.Call) -> bool:
    if _ASSEMBLY not in text.names(call.func):
        return False
    parts = [node for node in walk(call) if isinstance(node, (ast.Constant, ast.Name))]
    texts = [p.value if isinstance(p, ast.Constant) else text.value(p) for p in parts]
    return any(_BRANCH.search(str(getattr(each, "value", each))) for each in texts)


def _deciding(loop: ast.While) -> Iterator[ast.Call]:
    """Yield the calls that a loop's condition depends on, as far as the loop makes them again."""
    assigned = [
        part for part in walk(loop) if isinstance(part, (ast.Assign, ast.AugAssign, ast.AnnAssign))
    ]
    pending: list[ast.AST] = [loop.test]
    while pending:
        node = pending.pop()
        yield from (part for part in walk(node) if isinstance(part, ast.Call))
        names = {part.id for part in walk(node) if isinstance(part, ast.Name)}
        feeding = [part for part in assigned if names & {name for _, name in stores(part)}]
        assigned = [part for part in assigned if part not in feeding]
        pending += [part.value for part in feeding if part.value is not None]
