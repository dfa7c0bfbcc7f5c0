"""Finds grid functions that only read their arguments, so that launches need not recheck them.

Triton launches with the dict that a grid function got; the function may have changed an entry, or
moved a tensor to other memory.
"""

from __future__ import annotations

import dis
import functools
import itertools
from types import CodeType
from typing import Any

#: Instructions that change an object.
_CHANGES = ("STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR", "STORE_SLICE")


@functools.lru_cache(maxsize=1024)
def only_reads(code: CodeType) -> bool:
    """Whether a function takes one dict and only reads entries of it by name.

    Tensor methods that change the tensor end in an underscore, with a few exceptions.
    """
    if code.co_argcount != 1 or code.co_kwonlyargcount or code.co_cellvars:
        return False
    if any(name.endswith("_") or name in ("data", "swap_tensors") for name in code.co_names):
        return False
    parameter = code.co_varnames[0]
    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for each, entry, reads in itertools.zip_longest(
        instructions, instructions[1:], instructions[2:]
    ):
        if each.opname in _CHANGES:
            return False
        if parameter not in _locals_of(each):
            continue
        if not each.opname.startswith("LOAD_FAST") or entry is None or reads is None:
            return False
        if not isinstance(entry.argval, str) or entry.opname != "LOAD_CONST":
            return False
        if reads.opname != "BINARY_SUBSCR" and reads.argrepr != "[]":
            return False
    return True


def _locals_of(instruction: dis.Instruction) -> Any:
    """Return the local variables that an instruction names; newer Pythons load two at once."""
    if "FAST" not in instruction.opname:
        return ()
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)
