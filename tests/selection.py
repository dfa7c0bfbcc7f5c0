"""Which tests run, and in which order: the quick part of the suite, a tenth of the rest, or all.

A test or parameter marked `full` repeats for more inputs what others show for a few. It runs with
SAFETUNE_TEST_FULL=1 only. SAFETUNE_TEST_TENTH=0 to 9 adds a tenth of these: the same ones for the
same number, each in one tenth. `.ci/run` takes the number from the commit.

Both variables are read when pytest starts: each test runs without any SAFETUNE_* variable.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

import pytest

#: Whether everything runs. For counts; a whole test or parameter gets the marker `full` instead.
FULL = os.environ.get("SAFETUNE_TEST_FULL") == "1"

#: The longest files. They come first: a process that began one of them last would run alone.
LONGEST = (
    "test_docs.py",
    "integrations/test_install.py",
    "kernels/test_every_config.py",
    "isolation/test_parent_side.py",
    "kernels/test_compile.py",
    "test_benchmarks.py",
    "store/local/test_faults.py",
    "isolation/test_faults.py",
    "miss/test_background.py",
    "integrations/test_shadow_tuner.py",
    "isolation/test_compile_pool.py",
    "kernels/test_layer_norm.py",
    "verify/test_shipped_kernels.py",
)


#: In the configuration: all tests that were collected, before any was left out.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def wanted_tenth(text: str) -> int | None:
    """Return the tenth that SAFETUNE_TEST_TENTH asks for.

    Raises:
        pytest.UsageError: it is not one digit.
    """
    if text and (len(text) != 1 or not text.isdecimal()):
        raise pytest.UsageError(f"SAFETUNE_TEST_TENTH={text!r} is not a digit; use 0 to 9")
    return int(text) if text else None


TENTH = wanted_tenth(os.environ.get("SAFETUNE_TEST_TENTH", ""))


def tenth_of(nodeid: str) -> int:
    """Return the tenth to which a test marked `full` belongs."""
    return zlib.crc32(nodeid.encode()) % 10


def select(
    items: Iterable[pytest.Item], full: bool = FULL, tenth: int | None = TENTH
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run and those that do not."""
    runs: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_quick = item.get_closest_marker("full") is None
        wanted = full or is_quick or tenth_of(item.nodeid) == tenth
        (runs if wanted else left_out).append(item)
    return runs, left_out


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the files of LONGEST first; else in the order in which they came."""
    ranks = {f"tests/{name}": rank for rank, name in enumerate(LONGEST)}
    return sorted(items, key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
