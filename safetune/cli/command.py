"""The declaration of a command: its name, its examples, and shared options."""

from __future__ import annotations

import functools
import math
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


class _Command(click.Command):
    """Refuses an empty option or path, such as an unset variable of a shell gives.

    It would mean something else: all devices, the working directory.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        if not context.resilient_parsing:
            given, _, _ = self.make_parser(context).parse_args([*args])
            for each in self.params:
                value = given.get(str(each.name))
                if value == "" or (isinstance(value, (list, tuple)) and "" in value):
                    self._refuse(each, context)
        return super().parse_args(context, args)

    def _refuse(self, parameter: click.Parameter, context: click.Context) -> None:
        if isinstance(parameter, click.Option):
            raise click.UsageError(f"{max(parameter.opts, key=len)} is empty.", context)
        if isinstance(parameter.type, click.Path):
            raise click.UsageError(f"The path {parameter.human_readable_name} is empty.", context)


def command(
    name: str, *lines: str, json: bool = True, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command of `safetune`, with examples; it gets --debug and, as a rule, --json."""

    def declare(function: Callable[..., Any]) -> click.Command:
        made = click.command(name, _Command, epilog=examples(*lines), **settings)(function)
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


class Number(click.FloatRange):
    """A number in a range; click alone accepts NaN in every range."""

    def convert(self, value: Any, parameter: Any, context: Any) -> Any:
        """Return the number."""
        found = super().convert(value, parameter, context)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", parameter, context)
        return found


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


_FILTERS = {
    "kernel": click.option(
        "--kernel", multiple=True, metavar="NAME", help="Only kernels of this name."
    ),
    "device": click.option(
        "--device", default="", metavar="TEXT", help="Only devices with TEXT in their names."
    ),
    "file": click.option(
        "--file", default="", metavar="TEXT", help="Only kernels with TEXT in their file:line."
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
