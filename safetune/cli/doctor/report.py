"""One check of `safetune doctor`: the finding, and its remedy."""

from __future__ import annotations

from enum import Enum

from safetune.frozen import dataclass


class State(str, Enum):
    """FAIL: safetune cannot do its work. WARN: it can, but something is likely to surprise."""

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


def check(name: str, found: str, fail: str = "", warn: str = "") -> Check:
    """Return a check; with a remedy it fails, or warns."""
    state = State.FAIL if fail else State.WARN if warn else State.OK
    return Check(name, state, found, fail or warn)
