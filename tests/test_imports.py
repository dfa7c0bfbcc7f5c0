"""Importing safetune does nothing but import: no store, no process, no allocator, nothing heavy.

Every statement is run in a fresh process under an audit hook, which sees what happens inside the
libraries too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

RESOLVE_ALL = "import safetune\nfor name in safetune.__all__: getattr(safetune, name)"

#: What a plain `import safetune` must leave to those who need it.
HEAVY = ["torch", "triton", "numpy", "sqlite3", "sqlite_utils", "rich", "click", "cloudpickle"]

#: argv: code to run first, code to watch. Prints what the second did, as JSON.
OBSERVE = """
import json, os, sys
prepare, watched = sys.argv[1:3]
exec(prepare, {})
store = os.environ["SAFETUNE_CACHE_DIR"]
seen = {"processes": [], "store": [], "drivers": []}
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}

def hook(event, args):
    if event in STARTS:
        seen["processes"].append(f"{event} {args}")
    if event in ("open", "os.mkdir", "os.listdir", "os.scandir", "sqlite3.connect"):
        if str(args[0]).startswith(store):
            seen["store"].append(f"{event} {args}")
    if event == "ctypes.dlopen" and "libcuda" in str(args[0]):
        seen["drivers"].append(f"{event} {args}")

sys.addaudithook(hook)
exec(watched, {})
seen["modules"] = sorted(sys.modules)
print(json.dumps(seen))
"""


def observe(fresh_process: FreshProcess, watched: str, prepare: str = "") -> dict[str, Any]:
    """Run `watched` in a fresh process and return what it did."""
    done = fresh_process(OBSERVE, prepare, watched)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_import_is_light(fresh_process: FreshProcess) -> None:
    modules = set(observe(fresh_process, "import safetune")["modules"])
    assert "safetune" in modules
    assert not modules & set(HEAVY)


@pytest.mark.parametrize(
    ("prepare", "watched"),
    [
        ("", "import safetune"),
        ("import torch, triton", RESOLVE_ALL),
        ("import torch, triton", "import safetune.kernels"),
    ],
    ids=["package", "every public name", "kernels"],
)
def test_import_touches_nothing(
    fresh_process: FreshProcess, cache_dir: Path, prepare: str, watched: str
) -> None:
    seen = observe(fresh_process, watched, prepare)
    assert seen["processes"] == []
    assert seen["store"] == []
    assert seen["drivers"] == []
    assert not cache_dir.exists()


@pytest.mark.internals
@pytest.mark.parametrize(
    "watched", [RESOLVE_ALL, "import safetune.kernels"], ids=["public names", "kernels"]
)
def test_import_sets_no_triton_allocator(fresh_process: FreshProcess, watched: str) -> None:
    """An allocator set at import would replace the one that the program, or torch, has set."""
    done = fresh_process(
        "import sys\n"
        "import torch, triton\n"
        "from triton.runtime import _allocation\n"
        "names = [n for n in ('_allocator', '_profile_allocator') if hasattr(_allocation, n)]\n"
        "before = {name: getattr(_allocation, name).get() for name in names}\n"
        "exec(sys.argv[1], {})\n"
        "for name in names:\n"
        "    assert getattr(_allocation, name).get() is before[name], name\n"
        "print(*names)\n",
        watched,
    )
    assert "_allocator" in done.stdout.split()


def test_every_public_name_resolves() -> None:
    import safetune

    assert safetune.__all__
    assert len(safetune.__all__) == len(set(safetune.__all__))
    for name in safetune.__all__:
        assert getattr(safetune, name) is not None
        assert name in dir(safetune)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A lazy `__getattr__` that raises anything else breaks `hasattr` and `from ... import`."""
    import safetune

    assert not hasattr(safetune, "no_such_name")


def test_autotune_is_the_same_decorator() -> None:
    import safetune

    assert safetune.autotune is safetune.safetune


def test_the_package_is_not_shadowed_by_its_decorator(fresh_process: FreshProcess) -> None:
    """`from safetune import safetune` gives the decorator and leaves the package importable."""
    fresh_process(
        "from safetune import safetune\n"
        "import safetune.errors\n"
        "import safetune as package\n"
        "assert callable(package.safetune)\n"
        "assert package.errors.SafetuneError\n"
    )
