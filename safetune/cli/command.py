"""The declaration of a command: its name, its examples, and shared options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from safetune.frozen import dataclass
from safetune.store.records import KeyRecord

#: In the context of a command: whether an error is shown with its traceback.
DEBUG = "safetune.debug"

#: In the same place: the words after the command's name.
ARGUMENTS = "safetune.arguments"

#: Adds an option to a command.
Option = Callable[[Callable[..., Any]], Any]

#: Every command, in the order of the modules.
COMMANDS: list[click.Command] = []

FILE = click.Path(path_type=Path)


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[DEBUG] = value or context.meta.get(DEBUG, False)


#: On the group and on each command, so that it works before and after the command's name.
debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)
_json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print JSON instead of text for people."
)


def examples(*lines: str) -> str:
    """Return the end of a command's help: command lines to copy."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def command(
    name: str, *lines: str, json: bool = True, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command of `safetune`, with examples; it gets --debug and, as a rule, --json."""

    def declare(function: Callable[..., Any]) -> click.Command:
        made = click.command(name, click.Command, epilog=examples(*lines), **settings)(function)
        if json:
            _json_option(made)
        COMMANDS.append(debug_option(made))
        return made

    return declare


def in_another_process(*arguments: str) -> list[str]:
    """Return the command line that runs this command with other arguments."""
    from safetune.both import elsewhere

    run = "from safetune.cli import main; main(prog_name='safetune')"
    return elsewhere.python(run, *arguments)


@dataclass(frozen=True)
class Filter:
    """The keys that a command selects; an empty field matches every key."""

    kernel: Sequence[str] = ()
    device: str = ""
    file: str = ""

    def matches(self, key: KeyRecord) -> bool:
        """Whether a key's kernel, device and file match."""
        return (
            (not self.kernel or key.kernel_name in self.kernel)
            and self.device.lower() in str(key.device["name"]).lower()
            and self.file in f"{key.kernel_file}:{key.kernel_line}"
        )


def text_of(_: click.Context, __: click.Parameter, text: str | None) -> str:
    """Return the text of an option, "" without the option; an empty one is a mistake."""
    if text == "":
        raise click.BadParameter("it is empty, as of a variable that is not set.")
    return text or ""


def pairs(_: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Return the values of an option by their names, from `NAME=VALUE`."""
    for text in texts:
        if not all(text.partition("=")):
            form = str(option.metavar).removesuffix("...")
            raise click.BadParameter(f"{text!r} is not {form}, as in N=1000")
    return dict(text.split("=", 1) for text in texts)


key_option: Option = click.option(
    "--key",
    "parts",
    multiple=True,
    metavar="NAME=VALUE",
    callback=pairs,
    help="Only keys with this value.",
)


_FILTERS = {
    "kernel": click.option(
        "--kernel", multiple=True, metavar="NAME", help="Only kernels of this name."
    ),
    "device": click.option(
        "--device", metavar="TEXT", callback=text_of, help="Only devices with TEXT in their names."
    ),
    "file": click.option(
        "--file",
        metavar="TEXT",
        callback=text_of,
        help="Only kernels with TEXT in their file:line.",
    ),
}


def filtered(*names: str) -> Option:
    """Add options that choose keys, by these fields of a `Filter`, which the command gets."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**options: Any) -> Any:
            return function(only=Filter(**{n: options.pop(n) for n in names}), **options)

        for name in reversed(names):
            _FILTERS[name](call)
        return call

    return decorate
