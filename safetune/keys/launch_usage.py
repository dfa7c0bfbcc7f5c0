"""What the launches of a kernel pass for a key name that nothing reads.

Such a name decides which config is best where it stands for another value: for an argument that is
read and that the key lacks, or for the size of a matrix product.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from typing import Any

from safetune.keys.launches import Launch
from safetune.keys.name_values import sizes_in, texts_of


class LaunchArguments:
    """The arguments of each launch of a kernel, as expressions.

    Attributes:
        shown: whether the text shows the arguments of every launch, and there is one.
    """

    def __init__(self, launches: Sequence[Launch], arg_names: Sequence[str]) -> None:
        passed = [
            (launch, launch.arguments(arg_names))
            for launch in launches
            if launch.call is not None or not isinstance(launch.grid, ast.Constant)  # a table's
        ]
        self.shown = bool(passed) and all(arguments is not None for _, arguments in passed)
        self._passed = [(launch, arguments or {}) for launch, arguments in passed]

    def made_of(self, name: str, others: Collection[str]) -> str:
        """Return which of some other arguments is made of the value that is passed for a name.

        NB = f(T) and BS = g(T) are not made of each other, BS = f(NB) is made of NB.
        """
        for launch, arguments in self._passed:
            values = self._texts(launch, arguments, name, whole=False)
            for other in others:
                if values & self._texts(launch, arguments, other, whole=True):
                    return f"{other}, which the key lacks, is made of it at {launch.location}"
        return ""

    def sizes_of(self, name: str, given: Collection[str]) -> str:
        """Return the sizes that the value of a name is made of and that no given name has."""
        for launch, arguments in self._passed:
            if name not in arguments:
                continue
            texts = [self._texts(launch, arguments, other, whole=False) for other in given]
            known = set[str]().union(*texts)
            left = [
                ast.unparse(size)
                for size in sizes_in(arguments[name], launch.scopes)
                if not known & texts_of(size, launch.scopes, whole=False)
            ]
            if left:
                return f"{', '.join(left)} at {launch.location}"
        return ""

    @staticmethod
    def _texts(launch: Launch, arguments: dict[str, Any], name: str, whole: bool) -> set[str]:
        if name not in arguments:
            return set()
        return texts_of(arguments[name], launch.scopes, whole)
