"""Exceptions of a config, as outcomes."""

from __future__ import annotations

import pytest

from safetune.child import failures


@pytest.mark.parametrize("as_cause", [True, False])
def test_a_lack_of_memory_behind_the_compilers_exception_is_named(as_cause: bool) -> None:
    """By this name the parent knows that the limit was reached, and says so."""
    try:
        try:
            raise MemoryError
        except MemoryError as lack:
            raise ValueError("no code is made") from lack if as_cause else lack.__cause__
    except ValueError as error:
        outcome = failures.of_compile(error)
    assert outcome.message == "no code is made\nMemoryError"
