"""`safetune export --format` and `import --format`: files that other projects read and write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from safetune.cli.command import Filter, Option
from safetune.cli.output import echo, prints_to_stderr
from safetune.cli.stored import open_store
from safetune.errors import TargetError
from safetune.store.records import StoredChoice

#: The formats of packs and trials, beside those of `tables.Kind`.
PACK, T4, DEJAVU = "pack", "t4", "dejavu"
_TABLES = ("vllm", "sglang", "hf")


class _Names(click.ParamType):  # type: ignore[type-arg]
    """`M=n_tokens`: a name in the tables, and the one in the key."""

    name = "names"

    def convert(self, value: Any, parameter: Any, context: Any) -> tuple[str, str]:
        table, equals, key = str(value).partition("=")
        if not (table and equals and key):
            self.fail(f"{value!r} is not TABLE=KEY, as in M=n_tokens", parameter, context)
        return table, key


def format_option(*more: str) -> Option:
    """Return the option that names a format, packs by default."""
    return click.option(
        "--format",
        "kind",
        type=click.Choice([PACK, *_TABLES, *more]),
        default=PACK,
        show_default=True,
        help="The project whose files these are.",
    )


names_option = click.option(
    "--name",
    "names",
    multiple=True,
    type=_Names(),
    metavar="TABLE=KEY",
    help="The name in the kernel's key for a name in the tables, e.g. M=n_tokens.",
)


def of_choices(
    entries: Sequence[StoredChoice], path: Path, kind: str, names: dict[str, str]
) -> dict[Path, tuple[str, int]]:
    """Return the tables of others with some choices, by their paths, and the sizes of each."""
    from safetune.store.packs import tables

    found = tables.tables_of(entries, tables.Kind(kind), names)
    return {path / name: (table.text(), len(table.rows)) for name, table in found.items()}


def trials(path: Path, only: Filter) -> dict[Path, tuple[str, int]]:
    """Return stored trials as T4 files, one for each key."""
    from safetune.store.packs import t4

    found = t4.t4_files([each for each in open_store().trials_of() if only.matches(each[0])])
    if not found:
        raise TargetError("no such trial is stored; run `safetune tune` first")
    return {
        path / name: (json.dumps(data, indent=2) + "\n", len(data["results"]))
        for name, data in found.items()
    }


def read(
    sources: Sequence[Path], kind: str, target: str | None, names: dict[str, str]
) -> list[StoredChoice]:
    """Return what the files of others choose for the stored keys of the kernels of TARGET."""
    if target is None:
        raise click.UsageError(f"--format {kind} needs --target: whose keys the choices are for.")
    from safetune.cli import targets
    from safetune.offline import foreign
    from safetune.store.packs import tables

    with prints_to_stderr():
        kernels = targets.kernels_of([target], with_workload=False)
    store, found = open_store(), []
    if kind == DEJAVU:
        rows = [row for source in sources for row in foreign.read_dejavu(source)]
    else:
        files = [file for source in sources for file in _files(source)]
        read_tables = [tables.read_table(file) for file in files]
    for kernel in kernels:
        keys = [key for key, _ in store.trials_of(kernel.name)]
        if kind == DEJAVU:
            offered = foreign.from_dejavu(kernel, keys, rows)
        else:
            offered = foreign.from_tables(kernel, keys, read_tables, tables.Kind(kind), names)
        found += offered.entries
        for line in offered.left_out:
            echo(f"Warning: left out: {line}", err=True)
    if not found:
        raise TargetError(
            f"no stored key of {target} gets a choice; run the program with "
            "SAFETUNE_MODE=record first, which stores its keys"
        )
    return found


def _files(source: Path) -> list[Path]:
    return sorted(source.rglob("*device_name=*.json")) if source.is_dir() else [source]
