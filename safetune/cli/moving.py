"""`safetune export`, `import`, `merge` and `pack`: choices as files that people review."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from safetune.cli.messages import echo
from safetune.cli.stored import (
    json_option,
    located,
    open_store,
    print_json,
    shared_directory,
)
from safetune.cli.tables import counted
from safetune.errors import TargetError
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.store.packs.exchange import Collected
    from safetune.store.records import StoredChoice

_kernel_option = click.option(
    "--kernel", multiple=True, metavar="NAME", help="Only choices for this kernel."
)
_device_option = click.option(
    "--device", metavar="TEXT", help="Only choices for devices with TEXT in their names, e.g. H100."
)
_path = click.Path(path_type=Path)


@click.command("export")
@click.argument("path", metavar="DIR|FILE", type=_path)
@_kernel_option
@_device_option
@json_option
def export(path: Path, kernel: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Write the stored choices to DIR, one file per kernel and device.

    With a FILE, whose name ends in .json, writes the choices of one kernel and device.
    """
    from safetune.store.packs import exchange

    _write(_reported(exchange.of_store(open_store())), kernel, device, path, as_json)


@click.command("import")
@click.argument("source", metavar="SOURCE...", nargs=-1, required=True, type=_path)
@json_option
def import_(source: tuple[Path, ...], as_json: bool) -> None:
    """Copy the choices of SOURCE into the store.

    SOURCE is a file that export wrote, a directory of such files, or another safetune.db. If a
    file is broken, no choice is copied.
    """
    from safetune.store.local.store import Store
    from safetune.store.packs import exchange
    from safetune.store.shared.record import namespace

    entries = _merged(source)
    directory = located().directory
    done = exchange.import_into(Store.open(directory) if directory else Store.in_memory(), entries)
    if shared := shared_directory(writes=True):
        for entry in entries:
            shared.publish(namespace(entry.key.device, entry.key.toolchain), [entry])
    if as_json:
        print_json(vars(done))
        return
    lines = [f"{counted(done.new, 'choice')} imported, {done.known} already stored"]
    for count, why in (
        (done.kept, "the store has another choice of the same generation"),
        (done.older, "the store has a choice of a later generation"),
        (done.unknown, "only a newer safetune knows all their fields"),
    ):
        if count:
            lines.append(f"{count} not imported: {why}")
    echo(", ".join(lines))


@click.command("merge")
@click.argument("source", metavar="SOURCE...", nargs=-1, required=True, type=_path)
@click.option(
    "--into", required=True, metavar="DIR|FILE", type=_path, help="Where to write the result."
)
@_kernel_option
@_device_option
@json_option
def merge(
    source: tuple[Path, ...],
    into: Path,
    kernel: tuple[str, ...],
    device: str | None,
    as_json: bool,
) -> None:
    """Merge the choices of every SOURCE and write them as export does.

    SOURCE is a file that export wrote, a directory of such files, or a safetune.db. Of two choices
    for the same key and configs the later generation wins, then the one made first.
    """
    _write(_merged(source), kernel, device, into, as_json)


@click.command("pack")
@click.argument("directory", metavar="DIR", type=_path)
@_kernel_option
@_device_option
@json_option
def pack(directory: Path, kernel: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Write every choice known on this machine to DIR, for SAFETUNE_PACKS.

    Merges the choices in the store with those in the directories of SAFETUNE_PACKS. DIR must not
    exist yet, or must be empty.
    """
    from safetune.store.packs import exchange

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TargetError(f"{directory} exists and is not empty; give a new directory")
    stored = _reported(exchange.of_store(open_store()))
    packs = [path for path in Settings.current().packs if any(path.glob("*.json"))]
    _write(_merged(packs, stored), kernel, device, directory, as_json)
    if not as_json:
        echo(f"use it with SAFETUNE_PACKS={directory.absolute()}")


def _merged(paths: Iterable[Path], stored: Iterable[StoredChoice] = ()) -> list[StoredChoice]:
    """Return the choices in some packs or databases, merged with those that are stored."""
    from safetune.store.packs import exchange

    return exchange.merged(stored, *(_reported(exchange.collect(path)) for path in paths))


def _reported(collected: Collected) -> list[StoredChoice]:
    """Return the collected choices; print a warning for each that is left out."""
    for line in collected.left_out:
        echo(f"Warning: left out: {line}", err=True)
    return collected.entries


def _write(
    every: Sequence[StoredChoice],
    kernel: tuple[str, ...],
    device: str | None,
    path: Path,
    as_json: bool,
) -> None:
    """Write the selected choices to a directory, or those of one kernel and device to a file."""
    from safetune.store.packs import exchange

    entries = exchange.selected(every, kernel, device)
    if not entries:
        raise TargetError(_nothing(every, kernel, device))
    packs = exchange.packs_of(entries)
    if path.suffix == ".json" and not path.is_dir():
        if len(packs) > 1:
            raise TargetError(
                f"{path} is one file, and there are {len(packs)} kernels and devices: name a "
                f"directory, or choose with --kernel and --device among {', '.join(packs)}"
            )
        targets = {path: entries}
    else:
        targets = {path / name: pack for name, pack in packs.items()}
    for file, pack in targets.items():
        exchange.write_pack(pack, file)
    if as_json:
        written = [{"path": str(file), "choices": len(pack)} for file, pack in targets.items()]
        print_json({"written": written})
        return
    for file, pack in targets.items():
        echo(f"{file}: {counted(len(pack), 'choice')}")


def _nothing(entries: Sequence[StoredChoice], kernel: tuple[str, ...], device: str | None) -> str:
    if not entries:
        return "no choice is stored yet; run `safetune tune` first"
    wanted = [*(f"kernel {name!r}" for name in kernel), *([f"device {device!r}"] if device else [])]
    there = sorted({(e.key.kernel_name, str(e.key.device["name"])) for e in entries})
    listed = ", ".join(f"{name} on {model}" for name, model in there)
    return f"no choice is stored for {' and '.join(wanted)}; choices are stored for: {listed}"
