"""The `safetune` command. Commands import what they need when they run."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import click

from safetune.cli.output import (
    PRINTED,
    describe,
    echo,
    examples,
    print_json,
    version_of,
    warnings_as_lines,
)
from safetune.errors import NoWorkingConfig
from safetune.settings import installs

#: The exit code that shells give a program that SIGINT ended.
INTERRUPTED = 130

_DEBUG, _AS_JSON = "safetune.debug", "safetune.json"


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
    """Turns every error into one line and an exit code: 1 no working config, 2 the rest.

    With --json, also into JSON on standard output, unless the result is there already.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        command = next((word for word in args if not word.startswith("-")), "")
        context.meta[_AS_JSON] = "--json" in args and command != "run"
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            with warnings_as_lines():
                return super().invoke(context)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click answers its own exceptions
        except click.ClickException as error:
            _print_error(context, error, error.format_message())
            raise
        except KeyboardInterrupt:
            echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            _print_error(context, error, describe(error))
            if context.meta.get(_DEBUG):
                traceback.print_exc()
            else:
                echo(f"Error: {describe(error)}", err=True)
            sys.exit(1 if isinstance(error, NoWorkingConfig) else 2)


def _print_error(context: click.Context, error: Exception, message: str) -> None:
    if context.meta[_AS_JSON] and not context.meta.get(PRINTED):
        print_json({"error": {"type": type(error).__name__, "message": message}})


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        own, triton, torch = map(version_of, ("safetune", "triton", "torch"))
        echo(f"safetune {own} (Triton {triton}, torch {torch}, Python {sys.version.split()[0]})")
        context.exit()


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("safetune demo", "safetune tune my_kernels.py", "safetune show my_kernel"),
)
@debug_option
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the versions of safetune, Triton, torch and Python.",
)
def main() -> None:
    """Tune Triton kernels in subprocesses and manage the stored choices."""
    installs()  # `import safetune` leaves a bad SAFETUNE_INSTALL to this command


# After the debug option, which is on each command.
from safetune.cli import moving, stored  # noqa: E402
from safetune.cli.clear import clear  # noqa: E402
from safetune.cli.coverage import coverage_command  # noqa: E402
from safetune.cli.demo import demo  # noqa: E402
from safetune.cli.doctor import doctor  # noqa: E402
from safetune.cli.lint import lint_command  # noqa: E402
from safetune.cli.listing import list_choices  # noqa: E402
from safetune.cli.prune import prune_command  # noqa: E402
from safetune.cli.run import run_command  # noqa: E402
from safetune.cli.show import show  # noqa: E402
from safetune.cli.tune import tune_command  # noqa: E402
from safetune.cli.verify import verify_command  # noqa: E402
from safetune.cli.warm import warm_command  # noqa: E402

for _command in (
    clear,
    coverage_command,
    demo,
    doctor,
    prune_command,
    run_command,
    tune_command,
    verify_command,
    warm_command,
    lint_command,
    *(list_choices, show, stored.path, stored.stats, stored.gc),
    *(moving.export, moving.import_, moving.merge, moving.pack),
):
    main.add_command(debug_option(_command))
main.add_command(show, "explain")
