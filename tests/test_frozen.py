"""The frozen dataclasses of the product behave as Python's own, and are defined without `exec`."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from safetune import frozen


class Plain:
    """Some fields of each kind."""

    first: int
    second: str = "two"
    hidden: Any = field(default=None, compare=False, repr=False)
    many: list[int] = field(default_factory=list)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.__dict__["size"] = len(self.many)


def defined(dataclass: Callable[..., Any], name: str) -> Any:
    """`Plain` as a dataclass, importable under its name so that it can be pickled."""
    namespace = {n: v for n, v in vars(Plain).items() if n not in ("__dict__", "__weakref__")}
    cls = dataclass(frozen=True)(type(name, (), {**namespace, "__qualname__": name}))
    return setattr(sys.modules[__name__], name, cls) or cls


OURS = defined(frozen.dataclass, "Ours")
PYTHONS = defined(dataclasses.dataclass, "Pythons")

CALLS: dict[str, Callable[[Any], Any]] = {
    "positional": lambda cls: vars(cls(1, "x", None, [3])),
    "by name": lambda cls: vars(cls(second="x", first=1)),
    "defaults": lambda cls: vars(cls(1)),
    "lists of their own": lambda cls: cls(1).many is cls(1).many,
    "equal": lambda cls: cls(1, hidden=2) == cls(1, hidden=3),
    "unequal": lambda cls: cls(1) == cls(2),
    "another class": lambda cls: cls(1) == (1, "two", []),
    "text": lambda cls: repr(cls(1, hidden=2)).replace(cls.__name__, ""),
    "changed": lambda cls: vars(dataclasses.replace(cls(1), second="x")),
    "plain data": lambda cls: dataclasses.asdict(cls(1, many=[2])),
    "fields": lambda cls: [each.name for each in dataclasses.fields(cls)],
    "copied": lambda cls: vars(copy.deepcopy(cls(1, many=[2]))),
    "pickled": lambda cls: vars(pickle.loads(pickle.dumps(cls(1, many=[2])))),
    "nothing": lambda cls: cls(),
    "too many": lambda cls: cls(1, "x", None, [], 5),
    "unknown": lambda cls: cls(1, third=3),
    "not for the caller": lambda cls: cls(1, size=3),
    "twice": lambda cls: cls(1, first=1),
    "set": lambda cls: setattr(cls(1), "first", 2),
    "deleted": lambda cls: delattr(cls(1), "first"),
}


def outcome(call: Callable[[Any], Any], cls: Any) -> Any:
    try:
        return call(cls)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_behaves_as_a_dataclass_of_python(call: Callable[[Any], Any]) -> None:
    assert outcome(call, OURS) == outcome(call, PYTHONS)


def test_equal_records_are_one_key_of_a_dict() -> None:
    @frozen.dataclass(frozen=True)
    class Pair:
        """Two numbers."""

        left: int
        right: int = 0

    assert {Pair(1): "x"}[Pair(1, 0)] == "x"
    assert Pair(1) not in {Pair(1, 2): "x"}


def test_own_methods_stay() -> None:
    @frozen.dataclass(frozen=True)
    class Number:
        """A number, with a text of its own."""

        value: int

        def __repr__(self) -> str:
            return f"number {self.value}"

    assert repr(Number(1)) == "number 1"


def test_a_definition_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six functions were compiled for each class, in each process."""
    compiled: list[str] = []

    def execute(text: str, *spaces: Any) -> None:
        compiled.extend(re.findall(r"def (?!__create_fn__)\w+", text))
        exec(text, *spaces)

    monkeypatch.setattr(dataclasses, "exec", execute, raising=False)
    defined(frozen.dataclass, "Another")
    assert compiled == []  # from Python 3.13 on, an empty function around none
    defined(dataclasses.dataclass, "Reference")
    assert compiled
