"""The `safetune` command. Commands import what they need when they run."""

from __future__ import annotations

import sys
from typing import Any

import click

from safetune.errors import NoWorkingConfig, SafetuneError


class _Group(click.Group):
    """Turns safetune's errors into one line and an exit code: 1 no working config, 2 the rest."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except SafetuneError as error:
            if context.params.get("debug"):
                raise
            click.echo(f"Error: {error}", err=True)
            sys.exit(1 if isinstance(error, NoWorkingConfig) else 2)


@click.group(cls=_Group)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="safetune")
def main(debug: bool) -> None:
    """Tune Triton kernels in subprocesses and look after the choices."""


from safetune.cli.stored import clear, list_choices, path, show  # noqa: E402
from safetune.cli.tune import tune_command  # noqa: E402

for _command in (tune_command, list_choices, show, path, clear):
    main.add_command(_command)
