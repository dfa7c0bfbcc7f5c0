"""One check of `safetune doctor`: the finding, and its remedy."""

from __future__ import annotations

from safetune.frozen import dataclass


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        state: `fail` if safetune cannot do its work; `warn` if something is likely to surprise.
    """

    name: str
    state: str
    found: str
    fix: str = ""


def check(name: str, found: str, fail: str = "", warn: str = "") -> Check:
    """Return a check; with a remedy it fails, or warns."""
    return Check(name, "fail" if fail else "warn" if warn else "ok", found, fail or warn)
