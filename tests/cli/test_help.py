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
import pytest

from safetune.cli import main

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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_names_each_argument_in_the_singular_and_brackets_only_those_to_leave_out(
    safetune: Any, name: str
) -> None:
    """`tune` and `warm` can do without TARGET, with --recorded."""
    arguments = [each for each in main.commands[name].params if isinstance(each, click.Argument)]
    usage = safetune(name, "--help").stdout.splitlines()[0]
    words = usage.partition("[OPTIONS]")[2].split()

    singular = re.compile(r"\[?[A-Z|=]*[A-RT-Z]\]?(\.\.\.)?")
    assert [word for word in words if not singular.fullmatch(word)] == []
    assert [word.endswith("...") for word in words] == [each.nargs == -1 for each in arguments]
    assert [word[0] != "[" for word in words] == [each.required for each in arguments]


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


def test_the_versions(safetune: Any) -> None:
    pattern = r"safetune \S+ \(Triton \S+, torch \S+, Python \S+\)\n"
    assert re.fullmatch(pattern, safetune("--version").stdout)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("safetune sho", {"show"}),
        ("safetune show ad", {"add_one"}),
        ("safetune clear ", {"add_one", "kernel"}),
    ],
)
def test_a_shell_completes_commands_and_kernel_names(
    tuned: Any, run: FreshProcess, line: str, offered: set[str]
) -> None:
    position = str(line.count(" "))
    asked = {"COMP_WORDS": line, "COMP_CWORD": position, "_SAFETUNE_COMPLETE": "bash_complete"}

    result = run(env=asked)

    assert {row.partition(",")[2] for row in result.stdout.splitlines()} == offered


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
