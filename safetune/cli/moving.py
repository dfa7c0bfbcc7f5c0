"""`safetune export`, `import`, `merge` and `pack`: choices as files that people review."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from safetune.cli.stored import json_option, open_store, print_json
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
    "--device", metavar="TEXT", help="Only for devices with this in their names, e.g. H100."
)
_place = click.Path(path_type=Path)


@click.command("export")
@click.argument("place", metavar="DIR|FILE", type=_place)
@_kernel_option
@_device_option
@json_option
def export(place: Path, kernel: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Write the stored choices to DIR, one file per kernel and device.

    A FILE, whose name ends in .json, takes those of one kernel and device.
    """
    from safetune.store.packs import exchange

    collected = exchange.of_store(open_store())
    chosen = exchange.selected(collected.entries, kernel, device)
    _tell_left_out(collected)
    if not chosen:
        raise TargetError(_nothing(collected.entries, kernel, device))
    _write(chosen, place, as_json)


@click.command("import")
@click.argument("source", metavar="SOURCE...", nargs=-1, required=True, type=_place)
@json_option
def import_(source: tuple[Path, ...], as_json: bool) -> None:
    """Take the choices of SOURCE into the store.

    SOURCE is a file that export wrote, a directory of them, or another safetune.db. All are taken
    or, where one is broken, none.
    """
    from safetune.store.local.store import Store
    from safetune.store.packs import exchange

    entries = exchange.merged(*(_collect(path).entries for path in source))
    done = exchange.import_into(Store.open(Settings.current().cache_dir), entries)
    if as_json:
        print_json(vars(done))
        return
    click.echo(
        f"{counted(done.new, 'choice')} imported, {done.known} known already, {done.kept} not "
        "taken: the store has another one of the same generation"
        if done.kept
        else f"{counted(done.new, 'choice')} imported, {done.known} known already"
    )


@click.command("merge")
@click.argument("source", metavar="SOURCE...", nargs=-1, required=True, type=_place)
@click.option(
    "--into", required=True, metavar="DIR|FILE", type=_place, help="Where to write the result."
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
    """Write the choices of every SOURCE to one place, as export does.

    SOURCE is a file that export wrote, a directory of them, or a safetune.db. Where two have a
    choice for the same thing, the later generation wins, and of one generation the first made.
    """
    from safetune.store.packs import exchange

    every = exchange.merged(*(_collect(path).entries for path in source))
    chosen = exchange.selected(every, kernel, device)
    if not chosen:
        raise TargetError(_nothing(every, kernel, device))
    _write(chosen, into, as_json)


@click.command("pack")
@click.argument("directory", metavar="DIR", type=_place)
@_kernel_option
@_device_option
@json_option
def pack(directory: Path, kernel: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Make DIR, a directory for SAFETUNE_PACKS, of all that is known here.

    That is what is stored and what the directories in SAFETUNE_PACKS hold, merged. DIR must not be
    there yet, or be empty.
    """
    from safetune.store.packs import exchange

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TargetError(f"{directory} is there already and not empty; pack makes it anew")
    collected = exchange.of_store(open_store())
    _tell_left_out(collected)
    others = [_collect(path).entries for path in Settings.current().packs if _has_packs(path)]
    every = exchange.merged(collected.entries, *others)
    chosen = exchange.selected(every, kernel, device)
    if not chosen:
        raise TargetError(_nothing(every, kernel, device))
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    _write(chosen, directory, as_json)
    if not as_json:
        click.echo(f"use it with SAFETUNE_PACKS={directory.absolute()}")


def _collect(path: Path) -> Collected:
    from safetune.store.packs import exchange

    collected = exchange.collect(path)
    _tell_left_out(collected)
    return collected


def _has_packs(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.json"))


def _tell_left_out(collected: Collected) -> None:
    for line in collected.left_out:
        click.echo(f"Warning: left out: {line}", err=True)


def _write(entries: Sequence[StoredChoice], place: Path, as_json: bool) -> None:
    """Write entries to a directory, or to a file where they are of one kernel and device."""
    from safetune.store.packs import exchange

    packs = exchange.packs_of(entries)
    if place.suffix == ".json" and not place.is_dir():
        if len(packs) > 1:
            raise TargetError(
                f"{place} is one file, and there are {len(packs)} kernels and devices: name a "
                f"directory, or choose with --kernel and --device among {', '.join(packs)}"
            )
        targets = {place: entries}
    else:
        targets = {place / name: pack for name, pack in packs.items()}
    written: list[dict[str, Any]] = []
    for path, pack in targets.items():
        exchange.write_pack(pack, path)
        written.append({"path": str(path), "choices": len(pack)})
    if as_json:
        print_json({"written": written})
        return
    for each in written:
        click.echo(f"{each['path']}: {counted(each['choices'], 'choice')}")


def _nothing(entries: Sequence[StoredChoice], kernel: tuple[str, ...], device: str | None) -> str:
    if not entries:
        return "there are no choices; `safetune tune` makes some"
    wanted = [*(f"kernel {name!r}" for name in kernel), *([f"device {device!r}"] if device else [])]
    there = sorted({(e.key.kernel_name, str(e.key.device["name"])) for e in entries})
    listed = ", ".join(f"{name} on {place}" for name, place in there)
    return f"there is no choice for {' and '.join(wanted)}; there are: {listed}"
