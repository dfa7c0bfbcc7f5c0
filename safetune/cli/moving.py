"""`safetune export` and `import`: choices as files that people review."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from safetune.cli import tables
from safetune.cli.command import FILE, Filter, command, filtered
from safetune.cli.emit import emit
from safetune.cli.output import counted, echo
from safetune.cli.stored import open_store, shared_directory
from safetune.errors import TargetError

if TYPE_CHECKING:
    from safetune.store.packs.exchange import Collected
    from safetune.store.records import StoredChoice

_sources = click.argument("source", metavar="SOURCE...", nargs=-1, required=True, type=FILE)


@command(
    "export",
    "safetune export packs",
    "safetune export packs --kernel add_kernel --device H100",
    "safetune export --into packs",
    "safetune export --failures failures.json",
)
@click.argument("directory", metavar="[DIR]", type=FILE, required=False)
@click.option("--into", metavar="DIR", type=FILE, help="Merge the choices into these packs.")
@click.option(
    "--failures",
    metavar="FILE",
    type=FILE,
    help="Write no choices, only the configs that died or accessed memory illegally, for "
    "SAFETUNE_FAILURES on another machine.",
)
@tables.format_option
@tables.names_option
@filtered("kernel", "device")
def export(
    directory: Path | None,
    into: Path | None,
    failures: Path | None,
    kind: str,
    names: dict[str, str],
    only: Filter,
) -> None:
    """Write the stored choices to DIR, one file per kernel and device.

    With --format, writes tables of vLLM, SGLang or Hugging Face kernels. With --into, merges them
    with the choices in DIR: of two choices for the same key and configs the later generation wins,
    then the one made first.
    """
    if [directory, into, failures].count(None) != 2:
        raise click.UsageError("Give one of DIR, --into DIR and --failures FILE.")
    if (into or directory or Path()).suffix == ".json":
        raise click.UsageError("Give a directory: export writes a file per kernel and device.")
    if kind != tables.PACK and directory is None:
        raise click.UsageError(f"--format {kind} needs DIR.")
    if failures is not None:
        _write_failures(failures, only)
    elif into is not None:
        there = [into] if into.exists() else []
        _write(_packs_of(_merged(there, _stored()), only, into))
    elif directory is not None and kind == tables.PACK:
        _write(_packs_of(_stored(), only, directory))
    elif directory is not None:
        _write(tables.of_choices(_selected(_stored(), only), directory, kind, names))


@command("import", "safetune import packs", "safetune import other/safetune.db")
@_sources
@tables.format_option
@click.option(
    "--target", metavar="TARGET", help="With --format: the kernels whose stored keys get a choice."
)
@tables.names_option
def import_(
    source: tuple[Path, ...],
    kind: str,
    target: str | None,
    names: dict[str, str],
) -> None:
    """Copy the choices of SOURCE into the store.

    SOURCE is a file that export wrote, a directory of such files, or another safetune.db. If a
    file is broken, no choice is copied. With --format, SOURCE has tables of another project, and
    each stored key of TARGET gets the config that they name.
    """
    from safetune.store.packs import exchange
    from safetune.store.shared.protocol import namespace

    pack = kind == tables.PACK
    entries = _merged(source) if pack else tables.read(source, kind, target, names)
    done = exchange.import_into(open_store(writes=True), entries)
    if shared := shared_directory(writes=True):
        for entry in entries:
            shared.publish(namespace(entry.key.device, entry.key.toolchain), [entry])
    lines = [f"{counted(done.new, 'choice')} imported, {done.known} already stored"]
    for count, why in (
        (done.kept, "the store has another choice of the same generation"),
        (done.older, "the store has a choice of a later generation"),
        (done.unknown, "only a newer safetune knows all their fields"),
    ):
        if count:
            lines.append(f"{count} not imported: {why}")
    emit(vars(done), [", ".join(lines)])


def _stored() -> list[StoredChoice]:
    from safetune.store.packs import exchange

    return _reported(exchange.of_store(open_store()))


def _merged(paths: Iterable[Path], stored: Iterable[StoredChoice] = ()) -> list[StoredChoice]:
    """Return the choices in some packs or databases, merged with the stored ones."""
    from safetune.store.packs import exchange

    return exchange.merged(stored, *(_reported(exchange.collect(path)) for path in paths))


def _reported(collected: Collected) -> list[StoredChoice]:
    """Return the collected choices; print a warning for each omitted one."""
    for line in collected.left_out:
        echo(f"Warning: skipped: {line}", err=True)
    return collected.entries


def _packs_of(
    entries: Sequence[StoredChoice], only: Filter, directory: Path
) -> dict[Path, tuple[str, int]]:
    """Return the packs of the selected choices."""
    from safetune.store.packs import exchange
    from safetune.store.packs.packs import dump

    packs = exchange.packs_of(_selected(entries, only))
    return {directory / name: (dump(pack), len(pack)) for name, pack in packs.items()}


def _write(files: Mapping[Path, tuple[str, int]]) -> None:
    """Write files, each with its text, and print how many choices each has."""
    from safetune.store.packs import exchange

    for file, (text, _) in files.items():
        exchange.write(file, text)
    written = [{"path": str(file), "choices": count} for file, (_, count) in files.items()]
    lines = (f"{file}: {counted(count, 'choice')}" for file, (_, count) in files.items())
    emit({"written": written}, lines)


def _write_failures(file: Path, only: Filter) -> None:
    from safetune.store.packs import exchange, failures

    found = failures.of_store(open_store(), only.matches)
    exchange.write(file, failures.dump(found))
    written = [{"path": str(file), "failures": len(found)}]
    emit({"written": written}, [f"{file}: {counted(len(found), 'failure')}"])


def _selected(entries: Sequence[StoredChoice], only: Filter) -> list[StoredChoice]:
    """Return the choices of some kernels and devices; raises `TargetError` without one."""
    if found := [entry for entry in entries if only.matches(entry.key)]:
        return found
    if not entries:
        raise TargetError("no choice is stored yet; run `safetune tune` first")
    raise TargetError("no stored choice matches --kernel and --device; see `safetune list`")
