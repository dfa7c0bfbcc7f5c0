"""`SAFETUNE_MODE=record`, and `safetune tune --recorded` in another process."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.offline import replay
from safetune.store.local import rows
from safetune.store.local.store import Store
from safetune.store.records import RecordedCall

if TYPE_CHECKING:
    from tests.cli.conftest import Start
    from tests.conftest import FreshProcess

#: Functions for `targets/recorded.py`, and the line that they are put before.
PRUNE = """
def prune(configs, named, **_):
    import os

    if named["n"] == int(os.environ.get("TEST_WORST", 0)):
        raise ValueError("too small")
    return configs


def grid(meta):"""

BUCKET = """
def bucket(n):
    import os

    return [n] if n == int(os.environ.get("TEST_WORST", 0)) else n


def grid(meta):"""


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
    marks: dict[str, set[str]] = {"scale": set(), "gather": set()}
    for name, found in marks.items():
        for _, trials in store.trials_of(name):
            found.update(mark for trial in trials for mark in trial.outcome.marks)
    store.close()
    assert marks == {
        "scale": {"regenerated: x, factors", "first"},
        "gather": {"regenerated: dst, src, index", "first"},
    }

    again = safetune.json("tune", "--recorded", "recorded:gather_plain")

    assert [(t["kernel"], t["measured"]) for t in again["tunings"]] == [("gather", 0)]
    assert again["left_out"] == [], "the other gather has a choice, so it need not be tuned"

    table = safetune("tune", "--recorded")
    assert table.exit_code == 0
    assert (
        "4 tunings, 0 configs measured, 4 already tuned (--force to measure again)\n"
        in table.stdout
    )
    assert "not tuned: inner for n=64 (float32): recorded:nested" in table.stdout
    assert "not tuned: inner for n=64 (float32): recorded:nested" in table.stderr, "at the start"

    assert safetune.json("clear", "scale", "--yes")["cleared"] == 2
    assert safetune.error("tune", "--recorded", "recorded:scale") == (
        "Error: no recorded call matches; run the program with SAFETUNE_MODE=record"
    )


def test_a_script_is_named(fresh_process: FreshProcess, safetune: Any, targets: Path) -> None:
    fresh_process(targets / "recorded.py", env={"SAFETUNE_MODE": "record"}, warm=True)

    result = safetune("tune", "--recorded", "--json")
    without = json.loads(result.stdout)

    assert result.exit_code == 1, "nothing was tuned"
    assert without["tunings"] == []
    assert {left["reason"] for left in without["left_out"]} == {
        "its kernel is defined in a script: name the script as TARGET"
    }
    named = safetune.json("tune", "--recorded", f"{targets / 'recorded.py'}:scale")
    assert [tuning["measured"] for tuning in named["tunings"]] == [2, 2]

    again = safetune("tune", "--recorded", "--json")
    assert again.exit_code == 1, "it has choices, and nothing says that the script is as it was"
    left_out = json.loads(again.stdout)["left_out"]
    assert {left["call"].split()[0] for left in left_out} == {"scale", "gather", "inner"}


def test_a_folder_of_the_working_directory_hides_no_library(
    fresh_process: FreshProcess, start: Any, targets: Path, tmp_path: Path, monkeypatch: Any
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
    monkeypatch.setenv("PYTHONPATH", str(library))

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = ("tune", "--recorded", "--dry-run", "--json")
    output, errors = start(*words, env={}, cwd=directory, **pipes).communicate()

    plan = json.loads(output)
    assert [each["kernel"] for each in plan["tunings"]] == ["scale", "scale", "gather", "gather"], (
        errors
    )
    assert not [left for left in plan["left_out"] if "imported" in left["reason"]]


@pytest.mark.parametrize("raised", ["ImportError('X')", "error"])
def test_a_call_is_left_out_with_the_first_cause_of_a_failed_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    """A library's own message, as that of transformers, may say nothing of it."""
    text = f"try:\n import nothing\nexcept ImportError as error:\n raise {raised} from error"
    (tmp_path / "half_installed.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    left_out: list[replay.LeftOut] = []
    call = RecordedCall("key", "kernel", "half_installed:kernel", {}, created=0.0)

    assert replay.sort_out([call], [], left_out) == []

    assert [(left.words, left.reason) for left in left_out] == [
        (
            "kernel",
            "half_installed cannot be imported (ModuleNotFoundError: No module named 'nothing'): "
            "name its file as TARGET",
        )
    ]


def test_a_module_that_cannot_be_imported_is_tried_once_and_named_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was imported again for each of its calls, which may take seconds each."""
    text = "open('imports', 'a').write('x')\nraise RuntimeError('first\\nsecond')"
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    calls = [RecordedCall(key, "kernel", "broken:kernel", {}, created=0.0) for key in "ab"]
    left_out: list[replay.LeftOut] = []

    assert replay.sort_out(calls, [], left_out) == []

    assert {left.reason for left in left_out} == {
        "broken cannot be imported (RuntimeError: first second): name its file as TARGET"
    }
    assert (tmp_path / "imports").read_text() == "x"


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
        rows.CALL.upsert(connection, rows.CALL.seal(written))
    store.close()

    data = safetune.json("tune", "--recorded", "--dry-run")

    left_out = [each["reason"] for each in data["left_out"] if each["call"].startswith("scale ")]
    if name in ("declared", "count"):
        assert left_out == []
    else:
        assert len(left_out) == 1
        assert "scale" in {each["kernel"] for each in data["tunings"]}
    assert len(safetune.json("coverage")["calls"]) == len(data["tunings"]) + len(data["left_out"])


KEY = 'key=["n", "DTYPE", "ZERO"]'

#: By a name: what is changed before the calls are recorded, and after that; and why `scale` is
#: left out then. Regression, each: it ended the sweep before the first tuning.
UNTUNED = {
    "pruning": (
        {KEY: f"{KEY}, prune_configs_by={{'early_config_prune': prune}}", "def grid(meta):": PRUNE},
        {},
        r"it cannot be tuned \(ValueError: too small \(.*/edited.py:\d+\)\)",
    ),
    "bucket": (
        {KEY: 'key={"n": bucket}', "def grid(meta):": BUCKET},
        {},
        r"key of scale: the function for 'n' returned \[100\], a list, for 100; return an int, .*",
    ),
    "refused": (
        {},
        {"configs=CONFIGS, key=[": "configs=[triton.Config({'BLOCK': 64, 'by': 2.0})], key=["},
        "Conflicting meta-parameters: by. The configs of scale set them, and so does this call: "
        "leave them out of the call or of the configs.",
    ),
}


@pytest.mark.parametrize(
    ("why", "options"),
    [pytest.param(why, (), id=why, marks=pytest.mark.full) for why in UNTUNED]
    + [pytest.param("refused", ("--devices", "0,1"), id="refused in a worker")],
)
def test_a_recorded_call_that_cannot_be_tuned_leaves_out_only_itself(
    start: Start, fresh_process: FreshProcess, targets: Path, tmp_path: Path, why: str, options: Any
) -> None:
    before, after, reason = UNTUNED[why]
    text, file = (targets / "recorded.py").read_text(), tmp_path / "edited.py"
    for old, new in before.items():
        text = text.replace(old, new, 1)
    file.write_text(text)
    env: Any = {"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"}
    fresh_process("import edited; edited.call_all()", env=env, cwd=tmp_path, warm=True)
    for old, new in after.items():
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)

    words = ("tune", "--recorded", *options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(*words, "--json", env={"TEST_WORST": "100"}, cwd=tmp_path, **pipes)
    output, errors = process.communicate()

    data = json.loads(output)
    assert process.returncode == (0 if why == "pruning" else 1), errors
    tuned = [each["kernel"] for each in data["tunings"] if each["choice"]]
    assert sorted(set(tuned)) == (["gather"] if why == "refused" else ["gather", "scale"]), errors
    refused = [each for each in data["left_out"] if each["call"].startswith("scale ")]
    assert len(refused) == (2 if why == "refused" else 1)
    for each in refused:
        assert re.fullmatch(reason, each["reason"]), each["reason"]
        assert f"not tuned: {each['call']}: {each['reason']}" in errors.decode()


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


def test_recorded_calls_are_looked_up_under_install_too(start: Any) -> None:
    """Triton's import installs safetune then, which needs its own modules whole."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start("tune", "--recorded", env={"SAFETUNE_INSTALL": "1"}, **pipes)
    _, errors = process.communicate()
    assert b"no recorded call matches" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'TARGET...'."),
        (("--top", "0.5", "x.py"), "--top needs --recorded."),
        (("--recorded", "--shape", "s"), "--shape and --dtype select workloads"),
    ],
)
def test_options_that_do_not_go_together(
    safetune: Any, words: tuple[str, ...], message: str
) -> None:
    result = safetune("tune", *words)
    assert result.exit_code == 2
    assert message in result.stderr


PROGRAM = """
from typing import NamedTuple
import torch, triton, triton.language as tl
from safetune import safetune

class View(NamedTuple):
    data: torch.Tensor
    step: int

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]

@triton.jit
def twice(x):
    return x * 2

@safetune(configs=CONFIGS, key=["n"])
@triton.jit
def apply(dst, src, n, F: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = F(tl.load(src.data + offset * src.step, mask=mask))
    tl.store(dst.data + offset * dst.step, value, mask=mask)

def call_all():
    grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)
    apply[grid](View(torch.zeros(64), 1), View(torch.ones(64), 1), 64, twice)

if __name__ == "__main__":
    call_all()
"""


@pytest.mark.parametrize("as_script", [True, False], ids=["script", "module"])
def test_named_tuples_and_functions_come_back_in_another_process(
    fresh_process: FreshProcess, safetune: Any, tmp_path: Path, monkeypatch: Any, as_script: bool
) -> None:
    """Regression: a named tuple came back as a tuple, and no config worked."""
    file = tmp_path / "with_classes.py"
    file.write_text(PROGRAM)
    program = file if as_script else "import with_classes; with_classes.call_all()"
    fresh_process(program, env={"SAFETUNE_MODE": "record"}, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)

    result = safetune.json("tune", "--recorded", *([str(file)] if as_script else []))

    assert [(t["kernel"], t["measured"]) for t in result["tunings"]] == [("apply", 2)]
    assert result["tunings"][0]["choice"]
    assert result["left_out"] == []
    assert safetune.json("coverage")["by_calls"]["exact"] == 1.0


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


def call_all():
    grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)
    fill[grid](torch.ones(50), 50, 7)
    kept[grid](torch.ones(50), 50)
"""


@pytest.fixture
def run_under_safetune(fresh_process: FreshProcess, tmp_path: Path) -> Any:
    """A function that runs a program on `library.py`, which has no safetune, by `safetune run`."""
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "program.py").write_text("import library; library.call_all()")
    run = "from safetune.cli import main; main()"

    def start(mode: str, *options: str) -> str:
        words = ("run", *options, "program.py")
        done = fresh_process(run, *words, env={"SAFETUNE_MODE": mode}, cwd=tmp_path)
        return done.stderr

    return start


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="dropped", marks=pytest.mark.full),
        pytest.param(("--keep", "fill:unused"), id="kept"),
    ],
)
def test_what_safetune_run_has_recorded_is_tuned_without_a_variable(
    run_under_safetune: Any, start: Start, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Regression: "is not an attribute of its module", and nothing said that a variable helps."""
    run_under_safetune("record", *options)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for words in (("tune", "--recorded"), ("coverage", "--fail-under", "100")):
        process = start(*words, "--json", env={}, cwd=tmp_path, **pipes)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        if words[0] == "tune":
            said = json.loads(output)
            assert sorted(t["kernel"] for t in said["tunings"]) == ["clear", "fill"]
            assert said["left_out"] == []
            assert b"kernels" not in errors, "no report of an installation"

    assert "has no choice" not in run_under_safetune("frozen", *options)


class TestLeft:
    """Kernels that SAFETUNE_LEAVE names are left to Triton by `tune`, too."""

    def test_workloads(self, safetune: Any, targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_LEAVE", "add_*")

        result = safetune("tune", targets / "add.py", "--json")

        assert result.exit_code == 0, result.stdout
        tuned = {tuning["kernel"] for tuning in json.loads(result.stdout)["tunings"]}
        assert tuned == {"kernel"}
        assert "left to Triton by SAFETUNE_LEAVE: add_one\n" in result.stderr
        assert safetune.error("tune", f"{targets / 'add.py'}:add_one") == (
            "Error: SAFETUNE_LEAVE leaves all kernels of TARGET to Triton"
        )

    def test_recorded_calls(self, recorded: None, safetune: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("SAFETUNE_LEAVE", "recorded.gather, *inner")

        said = safetune.json("tune", "--recorded")

        assert {tuning["kernel"] for tuning in said["tunings"]} == {"scale"}
        assert said["left_out"] == []
        covered = safetune.json("coverage")
        assert {call["kernel"] for call in covered["calls"]} == {"scale"}
        assert covered["by_calls"]["exact"] == 1.0
