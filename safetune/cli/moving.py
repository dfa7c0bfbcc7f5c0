"""`safetune export`, `import`, `merge` and `pack`: choices as files that people review."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from safetune.cli import tables
from safetune.cli.command import FILE, Filter, command, filtered
from safetune.cli.output import counted, echo, print_json
from safetune.cli.stored import open_store, shared_directory
from safetune.errors import TargetError
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.store.packs.exchange import Collected
    from safetune.store.records import StoredChoice

_sources = click.argument("source", metavar="SOURCE...", nargs=-1, required=True, type=FILE)


@command(
    "export",
    "safetune export packs",
    "safetune export h100.json --kernel add_kernel --device H100",
)
@click.argument("path", metavar="DIR|FILE", type=FILE)
@tables.format_option(tables.T4)
@tables.names_option
@filtered("kernel", "device")
def export(
    path: Path, kind: str, names: tuple[tuple[str, str], ...], only: Filter, as_json: bool
) -> None:
    """Write the stored choices to DIR, one file per kernel and device.

    With a FILE, whose name ends in .json, writes the choices of one kernel and device. With
    --format, writes the tables of vLLM, SGLang or Hugging Face kernels to DIR, or all trials as T4.
    """
    if kind == tables.PACK:
        _write(_packs_of(_stored(), only, path), as_json)
    elif kind == tables.T4:
        _write(tables.trials(path, only), as_json, "trial")
    else:
        _write(tables.of_choices(_selected(_stored(), only), path, kind, dict(names)), as_json)


@command("import", "safetune import packs", "safetune import other/safetune.db")
@_sources
@tables.format_option(tables.DEJAVU)
@click.option(
    "--target", metavar="TARGET", help="With --format: the kernels whose stored keys get a choice."
)
@tables.names_option
def import_(
    source: tuple[Path, ...],
    kind: str,
    target: str | None,
    names: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Copy the choices of SOURCE into the store.

    SOURCE is a file that export wrote, a directory of such files, or another safetune.db. If a
    file is broken, no choice is copied. With --format, SOURCE has tables of another project,
    or caches of triton-dejavu, and each stored key of TARGET gets the config that they name.
    """
    from safetune.store.packs import exchange
    from safetune.store.shared.protocol import namespace

    pack = kind == tables.PACK
    entries = _merged(source) if pack else tables.read(source, kind, target, dict(names))
    done = exchange.import_into(open_store(writes=True), entries)
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


@command("merge", "safetune merge packs other.json --into merged")
@_sources
@click.option(
    "--into", required=True, metavar="DIR|FILE", type=FILE, help="Where to write the result."
)
@filtered("kernel", "device")
def merge(source: tuple[Path, ...], into: Path, only: Filter, as_json: bool) -> None:
    """Merge the choices of every SOURCE and write them as export does.

    SOURCE is a file that export wrote, a directory of such files, or a safetune.db. Of two choices
    for the same key and configs the later generation wins, then the one made first.
    """
    _write(_packs_of(_merged(source), only, into), as_json)


@command("pack", "safetune pack image-packs")
@click.argument("directory", metavar="DIR", type=FILE)
@filtered("kernel", "device")
def pack(directory: Path, only: Filter, as_json: bool) -> None:
    """Write every choice known on this machine to DIR, for SAFETUNE_PACKS.

    Merges the choices in the store with those in the directories of SAFETUNE_PACKS. DIR must not
    exist yet, or must be empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TargetError(f"{directory} exists and is not empty; give a new directory")
    _write(_packs_of(_merged(_packs(), _stored()), only, directory), as_json)
    if not as_json:
        echo(f"use it with SAFETUNE_PACKS={directory.absolute()}")


def all_choices() -> list[StoredChoice]:
    """Return every choice that a launch can find here: in the store, or in a pack."""
    from safetune.store.packs.packs import shipped

    own = shipped()
    return _merged([*_packs(), *([own] if own and any(own.glob("*.json")) else [])], _stored())


def _packs() -> list[Path]:
    return [path for path in Settings.current().packs if any(path.glob("*.json"))]


def _stored() -> list[StoredChoice]:
    from safetune.store.packs import exchange

    return _reported(exchange.of_store(open_store()))


def _merged(paths: Iterable[Path], stored: Iterable[StoredChoice] = ()) -> list[StoredChoice]:
    """Return the choices in some packs or databases, merged with those that are stored."""
    from safetune.store.packs import exchange

    return exchange.merged(stored, *(_reported(exchange.collect(path)) for path in paths))


def _reported(collected: Collected) -> list[StoredChoice]:
    """Return the collected choices; print a warning for each that is left out."""
    for line in collected.left_out:
        echo(f"Warning: left out: {line}", err=True)
    return collected.entries


def _packs_of(
    entries: Sequence[StoredChoice], only: Filter, path: Path
) -> dict[Path, tuple[str, int]]:
    """Return the packs of the selected choices: in a directory, or a file with the only one."""
    from safetune.store.packs import exchange
    from safetune.store.packs.packs import dump

    packs = exchange.packs_of(_selected(entries, only))
    if path.suffix == ".json" and not path.is_dir():
        if len(packs) > 1:
            raise TargetError(
                f"{path} is one file, and there are {len(packs)} kernels and devices: name a "
                f"directory, or choose with --kernel and --device among {', '.join(packs)}"
            )
        packs = {"": next(iter(packs.values()))}
    return {path / name: (dump(pack), len(pack)) for name, pack in packs.items()}


def _write(files: Mapping[Path, tuple[str, int]], as_json: bool, noun: str = "choice") -> None:
    """Write files, each with its text, and print of how many choices or trials each is."""
    from safetune.store.packs import exchange

    for file, (text, _) in files.items():
        exchange.write(file, text)
    if as_json:
        written = [{"path": str(file), f"{noun}s": count} for file, (_, count) in files.items()]
        print_json({"written": written})
        return
    for file, (_, count) in files.items():
        echo(f"{file}: {counted(count, noun)}")


def _selected(entries: Sequence[StoredChoice], only: Filter) -> list[StoredChoice]:
    """Return the choices of some kernels and devices; raises `TargetError` without one."""
    if found := [entry for entry in entries if only.matches(entry.key)]:
        return found
    if not entries:
        raise TargetError("no choice is stored yet; run `safetune tune` first")
    wanted = [f"kernel {name!r}" for name in only.kernel]
    wanted += [f"device {only.device!r}"] * bool(only.device)
    there = sorted({(e.key.kernel_name, str(e.key.device["name"])) for e in entries})
    listed = ", ".join(f"{name} on {model}" for name, model in there)
    raise TargetError(
        f"no choice is stored for {' and '.join(wanted)}; choices are stored for: {listed}"
    )
