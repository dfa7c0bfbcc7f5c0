"""`SAFETUNE_MODE=record`, and `safetune tune --recorded` in another process."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.local import rows
from safetune.store.local.store import Store
from tests.cli.conftest import ROOT

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


def test_calls_are_tuned_as_they_were(recorded: None, safetune: Any, cache_dir: Path) -> None:
    assert safetune.json("list") == [], "nothing was tuned"

    first = safetune.json("tune", "--recorded")

    tuned = [(t["kernel"], t["shape"], t["measured"]) for t in first["tunings"]]
    assert tuned == [
        ("scale", "n=100, DTYPE=float32, ZERO=True", 2),
        ("scale", "n=200, DTYPE=float32, ZERO=True", 2),
        ("gather", "n=100", 2),
        ("gather", "n=100", 2),
    ]
    assert [(left["call"], left["reason"]) for left in first["left_out"]] == [
        (
            "inner for n=64 (float32)",
            "recorded:nested.<locals>.inner is not an attribute of its module: name a TARGET that "
            "has it",
        ),
    ]
    store = Store.open(cache_dir)
    assert {call.key for call in store.calls()} >= {each.key.digest for each in store.choices()}
    assert len(store.choices()) == 4, "the choices are for the keys of the recorded calls"
    store.close()

    again = safetune.json("tune", "--recorded", "recorded:gather_plain")

    assert [(t["kernel"], t["measured"]) for t in again["tunings"]] == [("gather", 0)]
    assert again["left_out"] == [], "the other gather has a choice, so it need not be tuned"

    table = safetune("tune", "--recorded")
    assert table.exit_code == 0
    assert "4 tunings, 0 configs measured, 4 already tuned" in table.stdout
    left_out = "not tuned: inner for n=64 (float32): recorded:nested"
    assert left_out in table.stdout
    assert left_out in table.stderr, "at the start"

    assert safetune.json("clear", "scale", "--yes")["cleared"] == 2
    assert safetune.error("tune", "--recorded", "recorded:scale") == (
        "Error: no recorded call matches; run the program with SAFETUNE_MODE=record"
    )


def test_a_script_is_named(fresh_process: FreshProcess, safetune: Any, targets: Path) -> None:
    fresh_process(targets / "recorded.py", env={"SAFETUNE_MODE": "record"}, warm=True)

    without = safetune.json("tune", "--recorded", code=1)
    assert without["tunings"] == []
    assert {left["reason"] for left in without["left_out"]} == {
        "its kernel is defined in a script: name the script as TARGET"
    }
    named = safetune.json("tune", "--recorded", f"{targets / 'recorded.py'}:scale")
    assert [tuning["measured"] for tuning in named["tunings"]] == [2, 2]

    again = safetune.json("tune", "--recorded", code=1)
    left_out = {left["call"].split()[0] for left in again["left_out"]}
    assert left_out == {"scale", "gather", "inner"}, "nothing says that the script is as it was"


def test_a_folder_of_the_working_directory_hides_no_library(
    fresh_process: FreshProcess, run: FreshProcess, targets: Path, tmp_path: Path
) -> None:
    """The program did not have that folder on its path: transformers looks for `kernels` so."""
    library, directory = tmp_path / "library", tmp_path / "project"
    for folder in (library, directory / "accelerator"):
        folder.mkdir(parents=True)
    text = (targets / "recorded.py").read_text()
    looks = "from importlib.util import find_spec\nif find_spec('accelerator'): import accelerator"
    (library / "library.py").write_text(f"{looks}\n{text}")
    (directory / "accelerator/__init__.py").write_text("import no_such_module")
    env: Any = {"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"}
    fresh_process("import library; library.call_all()", env=env, cwd=library, warm=True)

    env = {"PYTHONPATH": os.pathsep.join([str(library), str(ROOT)])}
    plan = json.loads(
        run("tune", "--recorded", "--dry-run", "--json", env=env, cwd=directory).stdout
    )

    assert [each["kernel"] for each in plan["tunings"]] == ["scale", "scale", "gather", "gather"]
    assert not [left for left in plan["left_out"] if "imported" in left["reason"]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("grids", None), ("kwargs", 7), ("args", []), ("declared", []), ("count", ["many"])],
)
def test_a_record_that_cannot_be_read_leaves_out_only_its_own_call(
    safetune: Any,
    recorded: None,
    cache_dir: Path,
    name: str,
    value: Any,
) -> None:
    """Regression: one that another version had written ended the sweep, and `coverage`."""
    store = Store.open(cache_dir)
    one = next(call for call in store.calls() if call.name == "scale")
    written = replace(one, arguments={**one.arguments, name: value})
    with store.connection.transaction() as connection:
        rows.CALL.insert(connection, rows.CALL.seal(written), "REPLACE")
    store.close()

    data = safetune.json("tune", "--recorded", "--dry-run")

    left_out = [each for each in data["left_out"] if each["call"].startswith("scale ")]
    assert len(left_out) == (0 if name in ("declared", "count") else 1)
    assert "scale" in {each["kernel"] for each in data["tunings"]}
    assert len(safetune.json("coverage")["calls"]) == len(data["tunings"]) + len(data["left_out"])


def test_a_recorded_call_that_cannot_be_tuned_leaves_out_only_itself(
    run: FreshProcess, recorded_calls: Path, cache_dir: Path, targets: Path, tmp_path: Path
) -> None:
    """Regression: it ended the sweep before the first tuning. Here it is told by a worker."""
    shutil.copytree(recorded_calls, cache_dir)
    text = (targets / "recorded.py").read_text()
    old, new = "configs=CONFIGS, key=[", "configs=[triton.Config({'BLOCK': 64, 'by': 2.0})], key=["
    assert old in text
    (tmp_path / "recorded.py").write_text(text.replace(old, new, 1))

    words = ("tune", "--recorded", "--devices", "0,1", "--json")
    done = run(*words, cwd=tmp_path, ends=1, warm=True)

    data = json.loads(done.stdout)
    assert {each["kernel"] for each in data["tunings"] if each["choice"]} == {"gather"}
    refused = [each for each in data["left_out"] if each["call"].startswith("scale ")]
    assert len(refused) == 2
    for each in refused:
        assert each["reason"] == (
            "Conflicting meta-parameters: by. The configs of scale set them, and so does this "
            "call: leave them out of the call or of the configs."
        )
        assert f"not tuned: {each['call']}: {each['reason']}" in done.stderr


@pytest.mark.full
def test_the_whole_way_from_recorded_calls_to_packs_that_cover_them(
    fresh_process: FreshProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the example shows it, with a SIGKILL in the middle of the tuning."""
    monkeypatch.delenv("COLUMNS", raising=False)  # lines that are not wrapped
    example = Path(__file__).resolve().parents[2] / "docs/examples/record_to_frozen.py"

    done = fresh_process(example, timeout_s=600.0)

    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    headings = [row.split()[-1] for row in rows if row.startswith("kernel keys")]
    assert headings == ["nothing", "pack"]
    shares = [(row.split()[0], row[-6:]) for row in rows if re.match(r"all(, by time)? 4 ", row)]
    assert shares == [("all", " 100 %"), ("all,", " 100 %")] * 2
    assert "keys were tuned already" in done.stdout


def test_recorded_calls_are_looked_up_under_install_too(run: FreshProcess) -> None:
    """Triton's import installs safetune then, which needs its own modules whole."""
    errors = run("tune", "--recorded", env={"SAFETUNE_INSTALL": "1"}, ends=2).stderr
    assert "no recorded call matches" in errors


PROGRAM = """
from typing import NamedTuple
import torch, triton, triton.language as tl
from safetune import safetune

class View(NamedTuple):
    data: torch.Tensor
    step: int

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]

@safetune(configs=CONFIGS, key=["n"])
@triton.jit
def apply(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(src.data + offset * src.step, mask=mask)
    tl.store(dst.data + offset * dst.step, value, mask=mask)

def call_all():
    grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)
    apply[grid](View(torch.zeros(64), 1), View(torch.ones(64), 1), 64)

if __name__ == "__main__":
    call_all()
"""


def test_named_tuples_come_back_in_another_process(
    fresh_process: FreshProcess, safetune: Any, tmp_path: Path
) -> None:
    """Regression: a named tuple came back as a tuple, and no config worked."""
    file = tmp_path / "with_classes.py"
    file.write_text(PROGRAM)
    fresh_process(file, env={"SAFETUNE_MODE": "record"}, warm=True)

    result = safetune.json("tune", "--recorded", file)

    assert [(t["kernel"], t["measured"]) for t in result["tunings"]] == [("apply", 2)]
    assert result["tunings"][0]["choice"]
    assert result["left_out"] == []
    assert safetune.json("coverage", file)["by_calls"]["exact"] == 1.0


LIBRARY = """
import torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]


class CachedAutotuner(Autotuner):
    pass


@triton.autotune(configs=CONFIGS, key=["n", "unused"])
@triton.jit
def fill(dst, n, unused, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, 1.0, mask=offset < n)


@triton.jit
def clear(dst, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, 0.0, mask=offset < n)


def cached(kernel):
    return CachedAutotuner(kernel, kernel.arg_names, CONFIGS, ["n"], None, None)


kept = cached(clear)
grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)
"""


def test_what_safetune_run_has_recorded_is_tuned_without_a_variable(
    run: FreshProcess, tmp_path: Path
) -> None:
    """Regression: "is not an attribute of its module", and nothing said that a variable helps."""
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "program.py").write_text(
        "import torch\nfrom library import *\n"
        "fill[grid](torch.ones(50), 50, 7)\nkept[grid](torch.ones(50), 50)"
    )
    program = ("run", "--keep", "fill:unused", "program.py")
    run(*program, env={"SAFETUNE_MODE": "record"}, cwd=tmp_path)

    tuned = run("tune", "--recorded", "--json", cwd=tmp_path)
    run("coverage", "--fail-under", "100", cwd=tmp_path)

    said = json.loads(tuned.stdout)
    assert sorted(t["kernel"] for t in said["tunings"]) == ["clear", "fill"]
    assert said["left_out"] == []
    assert "kernels" not in tuned.stderr, "no report of an installation"
    frozen = run(*program, env={"SAFETUNE_MODE": "frozen"}, cwd=tmp_path)
    assert "has no choice" not in frozen.stderr


class TestLeft:
    """Kernels that SAFETUNE_LEAVE names are left to Triton by `tune`, too."""

    def test_workloads(self, safetune: Any, targets: Path) -> None:
        safetune.set(SAFETUNE_LEAVE="add_*")

        result = safetune("tune", targets / "add.py", "--json")

        assert result.exit_code == 0, result.stdout
        tuned = {tuning["kernel"] for tuning in json.loads(result.stdout)["tunings"]}
        assert tuned == {"kernel"}
        assert "left to Triton by SAFETUNE_LEAVE: add_one\n" in result.stderr
        assert safetune.error("tune", f"{targets / 'add.py'}:add_one") == (
            "Error: SAFETUNE_LEAVE leaves all kernels of TARGET to Triton"
        )

    def test_recorded_calls(self, recorded: None, safetune: Any) -> None:
        safetune.set(SAFETUNE_LEAVE="recorded.gather, *inner")

        said = safetune.json("tune", "--recorded")

        assert {tuning["kernel"] for tuning in said["tunings"]} == {"scale"}
        assert said["left_out"] == []
        covered = safetune.json("coverage")
        assert {call["kernel"] for call in covered["calls"]} == {"scale"}
        assert covered["by_calls"]["exact"] == 1.0
