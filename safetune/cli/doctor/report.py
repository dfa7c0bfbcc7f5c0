"""One check of `safetune doctor`: what was found, and what to do about it."""

from __future__ import annotations

from enum import Enum

from safetune.frozen import dataclass


class State(str, Enum):
    """FAIL: safetune cannot do its work. WARN: it can, and something is likely to surprise."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Check:
    """Return a check that passed."""
    return Check(name, State.OK, found)


def warn(name: str, found: str, fix: str) -> Check:
    """Return a check whose result is likely to surprise."""
    return Check(name, State.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    """Return a check that shows why safetune cannot do its work."""
    return Check(name, State.FAIL, found, fix)
