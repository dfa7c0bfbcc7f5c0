"""The `safetune` command. Commands import what they need when they run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import click

from safetune.cli import (  # noqa: F401 - each declares its commands
    clear,
    coverage,
    demo,
    doctor,
    lint,
    listing,
    moving,
    pin,
    prune,
    run,
    show,
    tune,
    verify,
    warm,
)
from safetune.cli.command import ARGUMENTS, COMMANDS, debug_option, examples
from safetune.cli.emit import AS_JSON, PRINTED, print_json
from safetune.cli.output import (
    describe,
    echo,
    show_traceback,
    warnings_as_lines,
)
from safetune.errors import NoWorkingConfig

#: What `--help` lists, by what it is for.
GROUPS = {
    "Tune": ("demo", "tune", "run", "warm"),
    "Look": ("list", "show", "coverage"),
    "Move": ("export", "import", "pin"),
    "Check": ("doctor", "lint", "verify"),
    "Clean": ("clear", "prune"),
}

#: The exit code that shells give a program that SIGINT ended.
INTERRUPTED = 130

#: That of a program that SIGPIPE ended.
READER_GONE = 141


class _Group(click.Group):
    """Prints every error as one line and sets the exit code: 1 for no working config, else 2.

    With --json, prints it as JSON too, unless the result is printed already.
    """

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, each with the first sentence of its help."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self._sentence(name)) for name in names])

    def _sentence(self, name: str) -> str:
        return self.commands[name].get_short_help_str(limit=sys.maxsize)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        name = next((word for word in args if not word.startswith("-")), "")
        context.meta[ARGUMENTS] = args[args.index(name) + 1 :] if name else []
        context.meta[AS_JSON] = "--json" in args and name != "run"
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            with warnings_as_lines():
                return super().invoke(context)
        except BrokenPipeError:  # as by `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
            sys.exit(READER_GONE)
        except (click.exceptions.Exit, click.Abort):
            raise  # click answers its own exceptions
        except click.ClickException as error:
            _print_error(context, error, error.format_message())
            raise
        except KeyboardInterrupt:
            echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            _print_error(context, error, describe(error))
            if not show_traceback():
                echo(f"Error: {describe(error)}", err=True)
            sys.exit(1 if isinstance(error, NoWorkingConfig) else 2)


def _print_error(context: click.Context, error: Exception, message: str) -> None:
    if context.meta[AS_JSON] and not context.meta.get(PRINTED):
        with contextlib.suppress(OSError):  # the error may be that nothing can be printed
            print_json({"error": {"type": type(error).__name__, "message": message}})


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("safetune demo", "safetune tune my_kernels.py", "safetune show my_kernel"),
)
@debug_option
@click.version_option(package_name="safetune", message="%(package)s %(version)s")
def main() -> None:
    """Tune Triton kernels in subprocesses and manage the stored choices."""


for _command in COMMANDS:
    main.add_command(_command)
