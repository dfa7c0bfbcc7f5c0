"""What holds for every command: its help, its examples, its JSON, completion by a shell."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import jsonschema
import pytest

from safetune.cli import main
from tests.cli.conftest import ROOT, check_json

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

COMMANDS = sorted(main.commands)


def examples(text: str) -> list[str]:
    """The command lines at the end of a help text."""
    _, _, after = text.partition("Examples:\n")
    return [line.strip() for line in after.splitlines() if line.strip()]


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_h_is_help_and_ends_with_examples_that_can_be_run_as_they_are(
    safetune: Any, words: tuple[str, ...]
) -> None:
    short, long = safetune(*words, "-h"), safetune(*words, "--help")

    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert examples(short.stdout)
    for line in examples(short.stdout):
        words_of_line = shlex.split(line)  # srun or the like may be before it
        name, *options = words_of_line[words_of_line.index("safetune") + 1 :]
        assert not words or main.commands[name] is main.commands[words[0]]
        above = click.Context(main, **main.context_settings)
        # Raises for an option that it does not have.
        main.commands[name].make_context(name, options, parent=above)


def test_the_help_lists_every_command_in_a_group_with_a_whole_sentence(safetune: Any) -> None:
    from safetune.cli import GROUPS

    assert sorted(itertools.chain(*GROUPS.values())) == COMMANDS

    shown = safetune("--help").stdout

    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    for title, names in GROUPS.items():
        assert f"\n{title}:\n  {names[0]} " in shown
        for name in names:
            sentence = " ".join((main.commands[name].help or "").split()).split(". ")[0]
            assert f" {name} {sentence.rstrip('.')}." in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("run", "demo")])
def test_every_command_has_json_for_a_usage_error_too(safetune: Any, name: str) -> None:
    result = safetune(name, "--json", "--no-such-option")

    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error == {"type": "NoSuchOption", "message": "No such option '--no-such-option'."}
    assert "Error: No such option '--no-such-option'." in result.stderr


def test_an_option_of_the_program_that_runs_is_not_ours(safetune: Any) -> None:
    result = safetune("run", "--no-such-option", "script.py", "--json")

    assert (result.exit_code, result.stdout) == (2, "")


def test_a_full_disk_is_one_line_also_where_the_error_is_to_be_json(start: Any) -> None:
    """Regression: the JSON of the error could not be printed either, which was a traceback."""
    with open("/dev/full", "w") as full:
        process = start("list", "--json", env={}, stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.startswith(b"Error: OSError: [Errno 28] No space left on device")
    assert errors.count(b"\n") == 1


def test_the_examples_are_copied_to_a_new_directory_only(safetune: Any, tmp_path: Path) -> None:
    there = tmp_path / "examples"

    copied = safetune("demo", "--copy", there).stdout.splitlines()

    assert str(there / "faulty.py") in copied
    assert [str(file) for file in sorted(there.iterdir())] == copied
    assert safetune.error("demo", "--copy", there) == (
        f"Error: {there} exists; give a new directory"
    )


@pytest.mark.full
def test_the_demo_shows_what_it_is_meant_to_show(run: FreshProcess) -> None:
    output = run("demo").stdout
    assert "The crash and the hang cost one config each; nothing was measured twice." in output


def test_the_version(safetune: Any) -> None:
    assert re.fullmatch(r"safetune \d\S+\n", safetune("--version").stdout)


def test_a_shell_completes_options_without_what_tunes(fresh_process: FreshProcess) -> None:
    program = (
        "import atexit, sys; sys.argv = ['safetune']; from safetune.cli import main; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main(prog_name='safetune')"
    )
    asked = {"COMP_WORDS": "safetune tune --bud", "COMP_CWORD": "2"}
    result = fresh_process(program, env={**asked, "_SAFETUNE_COMPLETE": "bash_complete"})
    assert result.stdout == "plain,--budget\n"
    assert "safetune.cli" in result.stderr.split()
    assert not {"torch", "safetune.tuning.requests"} & {*result.stderr.split()}


def test_no_field_is_left_out_of_the_published_schema(safetune: Any, tuned: Any) -> None:
    check_json(tuned, "tune")
    (listed, *_) = safetune.json("list")
    with pytest.raises(jsonschema.ValidationError, match="'new' was unexpected"):
        check_json([{**listed, "new": 1}], "list")
    del listed["kernel"]
    with pytest.raises(jsonschema.ValidationError, match="'kernel' is a required property"):
        check_json([listed], "list")


def test_json_that_few_tests_see(safetune: Any, tuned: Any, targets: Path, tmp_path: Path) -> None:
    assert safetune.json("show", "no_such", code=2)["error"]["type"] == "TargetError"
    assert safetune.json("export", "--failures", tmp_path / "failures.json")["written"]
    assert safetune.json("clear", "--failures", "add_one")["failures"] == 0
    example = ROOT / "docs" / "examples" / "unmodified.py"
    found = safetune.json("lint", example, code=1)
    assert [finding["rule"] for finding in found] == ["phantom"]


def test_every_command_that_has_json_is_in_the_schema() -> None:
    schema = json.loads((ROOT / "docs/output.schema.json").read_text(encoding="utf-8"))
    with_json = {
        name
        for name, command in main.commands.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert {name.partition(" ")[0] for name in schema["properties"]} == with_json | {"error"}
