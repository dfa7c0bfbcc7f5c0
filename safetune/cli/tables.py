"""`safetune export --format` and `import --format`: files that other projects read and write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from safetune.cli.command import Option, pairs
from safetune.cli.output import echo, prints_to_stderr
from safetune.cli.stored import open_store
from safetune.errors import TargetError
from safetune.store.records import StoredChoice

#: The format of packs, beside those of `tables.Kind`.
PACK = "pack"
_TABLES = ("vllm", "sglang", "hf")


format_option: Option = click.option(
    "--format",
    "kind",
    type=click.Choice([PACK, *_TABLES]),
    default=PACK,
    show_default=True,
    help="The format of the files; `pack` is safetune's own.",
)
names_option: Option = click.option(
    "--name",
    "names",
    multiple=True,
    callback=pairs,
    metavar="TABLE=KEY",
    help="Match a name in the tables to a name in the kernel's key, e.g. M=n_tokens.",
)


def of_choices(
    entries: Sequence[StoredChoice], path: Path, kind: str, names: dict[str, str]
) -> dict[Path, tuple[str, int]]:
    """Return another project's tables of some choices, by path, with the size of each."""
    from safetune.store.packs import tables

    found = tables.tables_of(entries, tables.Kind(kind), names)
    return {path / name: (table.text(), len(table.rows)) for name, table in found.items()}


def read(
    sources: Sequence[Path], kind: str, target: str | None, names: dict[str, str]
) -> list[StoredChoice]:
    """Return the choices of other projects' files for the stored keys of TARGET's kernels."""
    if target is None:
        raise click.UsageError(f"--format {kind} needs --target, the kernels that get the choices.")
    from safetune.cli import targets
    from safetune.offline import foreign
    from safetune.store.packs import tables

    with prints_to_stderr():
        kernels = targets.kernels_of([target], with_workload=False)
    store, found = open_store(), []
    read_tables = [tables.read_table(file) for source in sources for file in _files(source)]
    for kernel in kernels:
        keys = [key for key, _ in store.trials_of(kernel.name)]
        offered = foreign.from_tables(kernel, keys, read_tables, tables.Kind(kind), names)
        found += offered.entries
        for line in offered.left_out:
            echo(f"Warning: skipped: {line}", err=True)
    if not found:
        raise TargetError(
            f"no choice fits a stored key of {target}; to store its keys, run the program with "
            "SAFETUNE_MODE=record first"
        )
    return found


def _files(source: Path) -> list[Path]:
    return sorted(source.rglob("*device_name=*.json")) if source.is_dir() else [source]
