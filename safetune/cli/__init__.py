"""The `safetune` command. Commands import what they need when they run."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import click

from safetune.cli.output import describe, echo, warnings_as_lines
from safetune.errors import NoWorkingConfig
from safetune.settings import installs

#: The exit code that shells give a program that SIGINT ended.
INTERRUPTED = 130

_DEBUG = "safetune.debug"


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_DEBUG] = value or context.meta.get(_DEBUG, False)


#: On the group and on each command, so that it works before and after the command's name.
debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


class _Group(click.Group):
    """Turns every error into one line and an exit code: 1 no working config, 2 the rest."""

    def invoke(self, context: click.Context) -> Any:
        try:
            with warnings_as_lines():
                return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click answers its own exceptions
        except KeyboardInterrupt:
            echo("Interrupted; finished trials are stored.", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            if context.meta.get(_DEBUG):
                traceback.print_exc()
            else:
                echo(f"Error: {describe(error)}", err=True)
            sys.exit(1 if isinstance(error, NoWorkingConfig) else 2)


@click.group(cls=_Group)
@debug_option
@click.version_option(package_name="safetune")
def main() -> None:
    """Tune Triton kernels in subprocesses and manage the stored choices."""
    installs()  # `import safetune` leaves a bad SAFETUNE_INSTALL to this command


# After the debug option, which is on each command.
from safetune.cli import moving, stored  # noqa: E402
from safetune.cli.run import run_command  # noqa: E402
from safetune.cli.tune import tune_command  # noqa: E402
from safetune.cli.verify import verify_command  # noqa: E402

for _command in (
    *(tune_command, verify_command, run_command),
    *(stored.list_choices, stored.show, stored.path, stored.stats, stored.clear, stored.gc),
    *(moving.export, moving.import_, moving.merge, moving.pack),
):
    main.add_command(debug_option(_command))
