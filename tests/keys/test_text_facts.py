"""What is noted of texts: a later process finds it, and a change of anything that it rests on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.keys.text_facts import files_state

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

KERNEL = """
import triton, triton.language as tl

FACTOR = tl.constexpr(2)

@triton.jit
def scaled(value, unused):
    return value * FACTOR

@triton.heuristics({"D": lambda args: args["BLOCK"]})
@triton.jit
def kernel(x, n, NB, SIZE, BLOCK: tl.constexpr, D: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, D)
    tl.store(x + i, scaled(tl.load(x + i, mask=i < n), NB), mask=i < n)

def launch(x, n):
    kernel[(triton.cdiv(n, 64),)](x, n, triton.cdiv(n, 7), x.numel())
"""
#: Prints the classes, the identity, and whether a kernel's text was read.
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import triton
from safetune import safetune
from safetune.keys import text_facts
from package import kernels
read, reader = [], text_facts._read
text_facts._read = lambda text: read.append(text) or reader(text)
configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
options = json.loads(sys.argv[1])
prune = {"early_config_prune": kernels.prune} if hasattr(kernels, "prune") else None
tuner = safetune(configs=configs, key=["n", "NB", "SIZE"], prune_configs_by=prune, **options)
tuner = tuner(kernels.kernel)
report = tuner.key_report
print(json.dumps({
    "kinds": {each.name: each.kind.value for each in report.names},
    "report": str(report),
    "identity": tuner.identity.digest,
    "read": bool(read),
}))
"""


@pytest.fixture
def classes(
    tmp_path: Path, fresh_process: FreshProcess, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run the script in a fresh process, with the notes of those before it or with none."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(KERNEL)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(notes: str = "notes", **options: Any) -> dict[str, Any]:
        folder = notes if notes.startswith("~") else str(tmp_path / notes)
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
        done = fresh_process(script, json.dumps(options), cwd=tmp_path)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def edit(path: Path, old: str, new: str) -> None:
    """Change a file in place, and leave its size and its time as they were."""
    before, text = path.stat(), path.read_text()
    assert text.count(old) == 1
    assert len(old) == len(new)
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Python would take the old one's bytecode for it, and run that.
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def test_a_later_process_reads_no_text(classes: Callable[..., dict[str, Any]]) -> None:
    first = classes()
    assert first["kinds"] == {"n": "read", "NB": "phantom", "SIZE": "phantom"}
    assert first["read"]
    assert classes() == {**first, "read": False}


#: What is changed, where, and whether NB is still dropped.
CHANGES = {
    "the kernel": ("kernels.py", "tl.store(x + i, scaled(", "tl.store(x +NB, scaled(", "read"),
    "a callee": ("kernels.py", "return value * FACTOR", "return value *unused ", "read"),
    "a value": ("kernels.py", "constexpr(2)", "constexpr(3)", "phantom"),
    "a heuristic": (
        "kernels.py",
        'lambda args: args["BLOCK"]',
        'lambda args: args["NB"] +1',
        "read",
    ),
    "a launch": ("kernels.py", "cdiv(n, 64),)](x,", "cdiv(n, 7) ,)](x,", "read"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_though_size_and_time_of_the_file_stay(
    change: str, classes: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    before = classes()
    file, old, new, kind = CHANGES[change]
    edit(tmp_path / "package" / file, old, new)
    after = classes()
    assert after["kinds"]["NB"] == kind
    assert {**after, "read": True} == classes("no notes")
    assert (after["identity"] == before["identity"]) == (change == "a launch")


def test_options_and_hooks_decide_too(
    classes: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert classes()["kinds"]["NB"] == "phantom"
    assert classes(keep=["NB"])["kinds"]["NB"] == "kept"
    assert classes(phantom="keep")["kinds"]["NB"] == "kept"
    kernels = tmp_path / "package" / "kernels.py"
    hook = "\ndef prune(configs, named_args, **kwargs):\n    return configs[:named_args['NB']]\n"
    kernels.write_text(KERNEL + hook)
    assert classes()["kinds"] == {"n": "read", "NB": "read", "SIZE": "phantom"}


def test_a_note_that_is_not_whole_is_made_again(
    classes: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    first = classes()
    notes = [path for path in (tmp_path / "notes").rglob("*") if path.is_file()]
    assert notes
    for note in notes:
        note.write_bytes(note.read_bytes()[:-3])
    assert classes() == first


def test_nothing_is_noted_in_a_folder_that_cannot_be_written(
    classes: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    assert classes("a file/notes") == classes("a file/notes")
    assert classes("a file/notes") == classes("no notes")


def test_nothing_is_noted_where_there_is_no_home_directory(
    classes: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Triton's cache would then be in a folder `~` of the working directory."""
    assert classes("~/notes")["kinds"]["NB"] == "phantom"
    assert not (tmp_path / "~").exists()


def test_a_frozen_process_writes_no_notes(
    classes: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")
    assert classes()["kinds"]["NB"] == "phantom"
    assert not [path for path in (tmp_path / "notes").rglob("*") if path.is_file()]


HASH = """
import sys
from safetune.keys import text_facts
from triton.runtime import cache
read = []
sys.addaudithook(lambda event, given: event == "open" and read.append(str(given[0])))
print(text_facts.triton_hash(cache.triton_key))
print(any("libtriton" in name for name in read))
"""


def test_the_400_MB_of_triton_are_hashed_by_one_process(
    fresh_process: FreshProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "notes"))
    first, second = (fresh_process(HASH).stdout.split() for _ in range(2))
    assert (first[-1], second[-1]) == ("True", "False")
    assert first[:-1] == second[:-1]
    assert first[:-1] != []


def test_a_link_to_nowhere_has_no_state(tmp_path: Path) -> None:
    """An editor may have one beside a file that it changes."""
    (tmp_path / "a.py").write_text("")
    (tmp_path / ".#a.py").symlink_to("nowhere")
    assert len(files_state(tmp_path.iterdir())) == 1
