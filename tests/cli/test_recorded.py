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

#: A pruning function for `targets/recorded.py`, and the line that it is put before.
PRUNE = """
def prune(configs, named, **_):
    import os

    if named["n"] == int(os.environ.get("TEST_WORST", 0)):
        raise ValueError("too small")
    return configs


def grid(meta):"""


@pytest.fixture
def recorded(fresh_process: FreshProcess, targets: Path) -> None:
    """The calls of `targets/recorded.py`, made by a program that is gone."""
    done = fresh_process(
        "import recorded; recorded.call_all()",
        env={"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"},
        cwd=targets,
    )
    assert done.returncode == 0, done.stderr
    runs_with = [line for line in done.stderr.splitlines() if "runs with" in line]
    assert len(runs_with) == 5, done.stderr


def test_calls_are_tuned_as_they_were(
    recorded: None, safetune: Any, targets: Path, cache_dir: Path, monkeypatch: Any
) -> None:
    assert safetune.json("list") == [], "nothing was tuned"
    monkeypatch.chdir(targets)

    first = safetune.json("tune", "--recorded")

    tuned = [(t["kernel"], t["shape"], t["measured"]) for t in first["tunings"]]
    assert tuned == [
        ("scale", "n=100, DTYPE=float32, ZERO=True", 2),
        ("scale", "n=200, DTYPE=float32, ZERO=True", 2),
        ("gather", "n=100", 2),
    ]
    assert [(left["call"], left["reason"]) for left in first["left_out"]] == [
        (
            "gather for n=100 (float32/int64)",
            "the integers in index are not recorded: record them with SAFETUNE_RECORD_VALUES=1, "
            "give the kernel `inputs=`, which makes its tensors, or use zeros with --zeros",
        ),
        (
            "inner for n=64 (float32)",
            "recorded:nested.<locals>.inner is not an attribute of its module: name a TARGET that "
            "has it",
        ),
    ]
    store = Store.open(cache_dir)
    assert {call.key for call in store.calls()} >= {each.key.digest for each in store.choices()}
    assert len(store.choices()) == 3, "the choices are for the keys of the recorded calls"
    marks = {
        key.kernel_name: {mark for trial in trials for mark in trial.outcome.marks}
        for name in ("scale", "gather")
        for key, trials in store.trials_of(name)
        if trials
    }
    store.close()
    assert marks == {"scale": {"regenerated: x, factors", "first"}, "gather": {"first"}}

    again = safetune.json("tune", "--recorded", "--zeros", "recorded:gather_plain")

    assert [(t["kernel"], t["measured"]) for t in again["tunings"]] == [("gather", 2)]
    assert again["left_out"] == [], "the other gather has a choice, so it need not be tuned"

    table = safetune("tune", "--recorded")
    assert table.exit_code == 0
    assert (
        "3 tunings, 0 configs measured, 3 already tuned (--force to measure again)\n"
        in table.stdout
    )
    assert "not tuned: inner for n=64 (float32): recorded:nested" in table.stdout
    assert "not tuned: inner for n=64 (float32): recorded:nested" in table.stderr, "at the start"

    assert safetune.json("clear", "scale", "--yes")["cleared"] == 2
    assert safetune.error("tune", "--recorded", "recorded:scale") == (
        "Error: no such call is recorded; run the program with SAFETUNE_MODE=record"
    )


def test_a_script_is_named(fresh_process: FreshProcess, safetune: Any, targets: Path) -> None:
    done = fresh_process(targets / "recorded.py", env={"SAFETUNE_MODE": "record"})
    assert done.returncode == 0, done.stderr

    result = safetune("tune", "--recorded", "--json")
    without = json.loads(result.stdout)

    assert result.exit_code == 1, "nothing was tuned"
    assert without["tunings"] == []
    assert {left["reason"] for left in without["left_out"]} == {
        "its kernel is defined in a script: name the script as TARGET"
    }
    named = safetune.json("tune", "--recorded", f"{targets / 'recorded.py'}:scale")
    assert [tuning["measured"] for tuning in named["tunings"]] == [2, 2]

    again = json.loads(safetune("tune", "--recorded", "--json").stdout)
    assert "scale" not in {left["call"].split()[0] for left in again["left_out"]}, "it has choices"


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
    done = fresh_process("import library; library.call_all()", env=env, cwd=library, warm=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PYTHONPATH", str(library))

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = ("tune", "--recorded", "--dry-run", "--json")
    output, errors = start(*words, env={}, cwd=directory, **pipes).communicate()

    plan = json.loads(output)
    assert [each["kernel"] for each in plan["tunings"]] == ["scale", "scale", "gather"], errors
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

    assert replay.sort_out([call], [], False, left_out) == []

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

    assert replay.sort_out(calls, [], False, left_out) == []

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
    targets: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
) -> None:
    """Regression: one that another version had written ended the sweep, and `coverage`."""
    store = Store.open(cache_dir)
    one = next(call for call in store.calls() if call.name == "scale")
    written = replace(one, arguments={**one.arguments, name: value})
    with store.connection.transaction() as connection:
        rows.CALL.upsert(connection, rows.CALL.seal(vars(written)))
    store.close()

    monkeypatch.chdir(targets)
    data = safetune.json("tune", "--recorded", "--dry-run")

    left_out = [each["reason"] for each in data["left_out"] if each["call"].startswith("scale ")]
    if name in ("declared", "count"):
        assert left_out == []
    else:
        assert len(left_out) == 1
        assert "scale" in {each["kernel"] for each in data["tunings"]}
    assert len(safetune.json("coverage")["calls"]) == len(data["tunings"]) + len(data["left_out"])


def test_a_recorded_call_that_pruning_cannot_take_leaves_out_only_itself(
    safetune: Any, fresh_process: FreshProcess, targets: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Regression: it ended the sweep before the first tuning."""
    key = 'key=["n", "DTYPE", "ZERO"]'
    text = (targets / "recorded.py").read_text()
    text = text.replace(key, f"{key}, prune_configs_by={{'early_config_prune': prune}}")
    text = text.replace("def grid(meta):", PRUNE)
    (tmp_path / "pruned.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    env: Any = {"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"}
    done = fresh_process("import pruned; pruned.call_all()", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("TEST_WORST", "100")

    data = safetune.json("tune", "--recorded", "--dry-run")

    planned = [(each["kernel"], each["shape"]) for each in data["tunings"]]
    assert planned == [("scale", "n=200, DTYPE=float32, ZERO=True"), ("gather", "n=100")]
    reasons = [each["reason"] for each in data["left_out"] if each["call"].startswith("scale ")]
    assert len(reasons) == 1
    place = rf"{tmp_path / 'pruned.py'}:\d+"
    assert re.fullmatch(rf"it cannot be tuned \(ValueError: too small \({place}\)\)", reasons[0])


@pytest.mark.parametrize("options", [(), ("--devices", "0,1")], ids=["here", "devices"])
def test_a_recorded_call_that_passes_what_all_configs_set_leaves_out_only_itself(
    start: Start, fresh_process: FreshProcess, targets: Path, tmp_path: Path, options: Any
) -> None:
    """Regression: `Conflicting meta-parameters` ended the sweep before the first tuning."""
    text, file = (targets / "recorded.py").read_text(), tmp_path / "refusing.py"
    file.write_text(text)
    env: Any = {"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"}
    done = fresh_process("import refusing; refusing.call_all()", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    changed = text.replace(
        "configs=CONFIGS", "configs=[triton.Config({'BLOCK': 64, 'by': 2.0})]", 1
    )
    file.write_text(changed)

    words = ("tune", "--recorded", *options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(*words, "--json", env={}, cwd=tmp_path, **pipes)
    output, errors = process.communicate()

    data = json.loads(output)
    assert process.returncode == 1, errors
    tuned = [(each["kernel"], bool(each["choice"])) for each in data["tunings"]]
    assert tuned == [("gather", True)], errors
    refused = [each for each in data["left_out"] if each["call"].startswith("scale ")]
    reason = (
        "Conflicting meta-parameters: by. The configs of scale set them, and so does this call: "
        "leave them out of the call or of the configs."
    )
    assert [each["reason"] for each in refused] == [reason] * 2
    for each in refused:
        assert f"not tuned: {each['call']}: {reason}" in errors.decode()
    again = start(*words, env={}, cwd=tmp_path, **pipes)
    shown = " ".join(again.communicate()[0].decode().split())
    assert "1 tuning, 0 configs measured, 1 already tuned" in shown
    assert ", 2 not begun" in shown
    assert again.returncode == 1


#: A function for a name of the key, and the line that it is put before.
BUCKET = """
def bucket(n):
    import os

    return [n] if n == int(os.environ.get("TEST_WORST", 0)) else n


def grid(meta):"""


def test_a_recorded_call_that_has_no_key_leaves_out_only_itself(
    safetune: Any, fresh_process: FreshProcess, targets: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Regression: what a function of `key` returned for one call ended the sweep."""
    text = (targets / "recorded.py").read_text().replace("def grid(meta):", BUCKET)
    text = text.replace('key=["n", "DTYPE", "ZERO"]', 'key={"n": bucket}')
    (tmp_path / "buckets.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    env: Any = {"SAFETUNE_MODE": "record", "PYTHONWARNINGS": "ignore"}
    done = fresh_process("import buckets; buckets.call_all()", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("TEST_WORST", "100")

    result = safetune("tune", "--recorded", "--json")

    data = json.loads(result.stdout)
    tuned = [(each["kernel"], each["shape"]) for each in data["tunings"]]
    assert tuned == [("scale", "n=200"), ("gather", "n=100")]
    reasons = [each["reason"] for each in data["left_out"] if each["call"].startswith("scale ")]
    assert reasons == [
        "key of scale: the function for 'n' returned [100], a list, for 100; return an int, bool, "
        "str, float or dtype"
    ]
    assert result.exit_code == 1


@pytest.mark.full
def test_the_whole_way_from_recorded_calls_to_packs_that_cover_them(
    fresh_process: FreshProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the example shows it, with a SIGKILL in the middle of the tuning."""
    monkeypatch.delenv("COLUMNS", raising=False)  # lines that are not wrapped
    example = Path(__file__).resolve().parents[2] / "docs/examples/record_to_frozen.py"

    done = fresh_process(example, timeout_s=600.0)

    assert done.returncode == 0, done.stderr
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    before, after = (row for row in rows if row.startswith("all 4"))
    assert before.endswith(" 100 % / 100 %"), "all calls have nothing"
    assert after.endswith(" 100 % / 100 % 0 % / 0 % 0 % / 0 %"), "all are in the pack"
    assert "keys were tuned already" in done.stdout


def test_recorded_calls_are_looked_up_under_install_too(start: Any) -> None:
    """Triton's import installs safetune then, which needs its own modules whole."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start("tune", "--recorded", env={"SAFETUNE_INSTALL": "1"}, **pipes)
    _, errors = process.communicate()
    assert b"no such call is recorded" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'TARGET...'."),
        (("--zeros", "x.py"), "--zeros needs --recorded."),
        (("--recorded", "--shape", "s"), "--shape and --dtype choose workloads"),
    ],
)
def test_options_that_do_not_go_together(
    safetune: Any, words: tuple[str, ...], message: str
) -> None:
    result = safetune("tune", *words)
    assert result.exit_code == 2
    assert message in result.stderr
