"""The shared memory that a kernel needs at least, from the tiles that its loops load for `tl.dot`.

Triton keeps the operands that a loop loads in `num_stages - 1` buffers or more. Counted are tiles
whose sides a config sets, with two bytes an element.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from safetune.keys.launch_usage import bindings
from safetune.keys.source_text import last_name, walk
from safetune.lint.values import WrittenConfig

#: Shared memory for one program on the supported GPUs that have the least: those of compute
#: capability 8.6, 8.9 and 12.0, such as an RTX 4090.
SMALLEST = 101_376

_ELEMENT_BYTES = 2

#: The calls that say how large a tile is, and the position of its sides.
_BLOCKS = {"make_block_ptr": 4, "make_tensor_descriptor": 3}


#: The names of the two sides of a tile.
Tile: TypeAlias = tuple[str, str]


def looped_tiles(function: ast.FunctionDef) -> list[list[Tile]]:
    """Return for each loop the tiles that it loads and multiplies."""
    loops = [node for node in walk(function) if isinstance(node, (ast.For, ast.While))]
    return [tiles for loop in loops if (tiles := [*_operands(loop, function)])]


def least_shared_memory(loops: Sequence[Sequence[Tile]], config: WrittenConfig) -> int:
    """Return the bytes of shared memory that a config needs at least; 0 where nothing tells."""
    stages = config.options.get("num_stages")
    if not isinstance(stages, int) or stages < 2:
        return 0
    elements = (sum(_elements(tile, config.kwargs) for tile in tiles) for tiles in loops)
    return max(elements, default=0) * _ELEMENT_BYTES * (stages - 1)


def _elements(tile: Tile, sizes: Mapping[str, Any]) -> int:
    rows, columns = (sizes.get(side) for side in tile)
    return rows * columns if isinstance(rows, int) and isinstance(columns, int) else 0


def _operands(loop: ast.AST, function: ast.FunctionDef) -> Iterator[Tile]:
    inside = [*walk(loop)]
    products = [n for n in inside if isinstance(n, ast.Call) and last_name(n.func) == "dot"]
    operands = [operand for product in products for operand in product.args[:2]]
    assigned = [node for node in inside if isinstance(node, ast.Assign)] if operands else []
    loads = (load for operand in operands for load in _loads(operand, assigned))
    for load in {ast.dump(each): each for each in loads}.values():
        sides = sorted({*_sides(load, function)})
        if len(sides) == 2:
            yield sides[0], sides[1]


def _loads(operand: ast.expr, assigned: Sequence[ast.Assign]) -> Iterator[ast.Call]:
    """Yield the load whose result is an operand, of what the loop assigns."""
    if isinstance(operand, ast.Call) and last_name(operand.func) == "load":
        yield operand
    elif isinstance(operand, ast.Name):
        for node in assigned:
            match node:
                case ast.Assign(targets=[ast.Name(id=operand.id)], value=ast.Call() as call):
                    if last_name(call.func) == "load":
                        yield call


def _sides(load: ast.Call, function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of the sides of the tile that a load reads."""
    owner = load.func.value if isinstance(load.func, ast.Attribute) else None
    pending: list[ast.AST] = [*load.args[:1]] if last_name(owner or load) == "tl" else []
    if owner is not None and last_name(owner) != "tl":
        pending = [owner]  # a descriptor's
    seen: set[str] = set()
    while pending:
        for node in walk(pending.pop()):
            match node:
                case ast.Call(func=made) if last_name(made) in _BLOCKS:
                    yield from _names(_block_of(node))
                case ast.Call(func=made, args=[_, ast.Name(id=side)]) if (
                    last_name(made) == "arange"
                ):
                    yield side
                case ast.Name(id=name) if name not in seen:
                    seen.add(name)
                    pending += [v for v in bindings(name, (function,)) if isinstance(v, ast.expr)]


def _block_of(call: ast.Call) -> ast.expr | None:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "block_shape"]
    position = _BLOCKS[last_name(call.func)]
    return next(iter([*given, *call.args[position : position + 1]]), None)


def _names(shape: ast.expr | None) -> list[str]:
    items = shape.elts if isinstance(shape, (ast.Tuple, ast.List)) else []
    return [item.id for item in items if isinstance(item, ast.Name)]
