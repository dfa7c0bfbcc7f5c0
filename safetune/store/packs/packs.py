"""Packs: the choices of one kernel on one kind of device, as JSON that people review.

`schema` says what is in a pack and checks it. Its text is a function of its content: sorted, one
line per fact, so that a diff shows the facts that changed.

At launch, read-only directories of packs are the last layer of a lookup. A pack is found by its
name, which has kernel and device, and is read at the first miss of its kernel: a process whose
choices are all in the store opens no pack. The content of a file counts, not its name. A broken
pack is skipped with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetune.errors import PackError, StoreError, StoreWarning
from safetune.keys import encoding
from safetune.keys.tuning_key import CALL
from safetune.messages import warn
from safetune.store import schema
from safetune.store.records import ChoiceRecord, RelatedChoice, StoredChoice

if TYPE_CHECKING:
    from msgspec import Struct

    from safetune.keys.tuning_key import TuningKey

#: A pack of 10,000 choices has 5 MB.
MAX_BYTES = 64 << 20


def read_pack(path: Path) -> list[StoredChoice]:
    """Return the choices in a pack; raises `PackError`, which names the file and the reason."""
    try:
        return load(beginning(path, MAX_BYTES + 1))
    except (OSError, PackError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise PackError(f"{path}: {reason}") from error


def beginning(path: Path, count: int) -> bytes:
    """Return the first bytes of a regular file; raises `PackError` for a pipe, and `OSError`."""
    # Opening a pipe would wait until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PackError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(count)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A file of this content, synced, to be given the name `path`; it is gone at the end."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync_directory(path: Path) -> None:
    """Have the names in a directory survive a power cut, where its file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def shipped() -> Path | None:
    """Return the directory of the packs that were installed with safetune."""
    spec = importlib.util.find_spec("safetune.cache")
    directories = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(directories[0]) if directories else None


def file_name(kernel_name: str, kernel_digest: str, device_name: str, device_digest: str) -> str:
    """Return the name under which a pack is looked for: one for each kernel and kind of device."""
    words = [re.sub(r"[^A-Za-z0-9]+", "_", name)[:80] for name in (kernel_name, device_name)]
    return ".".join([*words, encoding.digest([kernel_digest, device_digest])[:8], "json"])


def name_of(entry: StoredChoice) -> str:
    """Return the name of the pack that this choice belongs in."""
    key = entry.key
    return file_name(key.kernel_name, key.kernel_digest, key.device["name"], key.device_digest)


class Packs:
    """The packs in some directories, in their order.

    Safe after a fork and from several threads: at worst a file is read twice. A file is read once
    per process, so that a choice does not change in the middle of a run.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = tuple(directories)
        self._read: dict[Path, list[StoredChoice]] = {}

    def find(self, key: TuningKey, declared: str) -> ChoiceRecord | None:
        """Return the choice for exactly this key, made from exactly these configs."""
        for _, entry in self._of_kernel(key):
            if entry.key.digest == key.digest and entry.choice.declared == declared:
                return entry.choice
        return None

    def related(self, key: TuningKey) -> list[RelatedChoice]:
        """Return every choice for the key's kernel and device, of any toolchain."""
        return [
            RelatedChoice(entry.key.toolchain, entry.key.call, entry.choice, pack=str(path))
            for path, entry in self._of_kernel(key)
        ]

    def _of_kernel(self, key: TuningKey) -> Iterator[tuple[Path, StoredChoice]]:
        kernel, device = key.kernel, key.device
        name = file_name(kernel.name, kernel.digest, device.name, device.digest)
        for directory in self._directories:
            path = directory / name
            if path not in self._read:
                self._read[path] = self._content(path)
            for entry in self._read[path]:
                same = (entry.key.kernel_digest, entry.key.device_digest)
                if same == (kernel.digest, device.digest) and not entry.unknown:
                    yield path, entry

    def _content(self, path: Path) -> list[StoredChoice]:
        try:
            return read_pack(path)
        except PackError as error:
            directory = path.parent
            if getattr(error.__cause__, "errno", None) != errno.ENOENT:
                warn(f"skipping a pack: {error}", StoreWarning)
            elif not directory.is_dir() and directory not in {p.parent for p in list(self._read)}:
                warn(
                    f"SAFETUNE_PACKS names {directory}, which is not a directory",
                    StoreWarning,
                )
            return []


def load(data: bytes) -> list[StoredChoice]:
    """Return the choices in a pack's bytes; raises `PackError`, which names the bad field."""
    if len(data) > MAX_BYTES:
        raise PackError(f"it has over {MAX_BYTES >> 20} MiB, too much for a pack")
    return schema.entries(schema.parsed(data))


def checked(entry: StoredChoice) -> StoredChoice:
    """Return a stored choice as a pack gives it back; raises `PackError` if no pack may have it.

    Facts about one machine, such as the kernel's file, are left out, and digits of the time that
    carry no information. A choice that came out of a pack stays as it is.
    """
    if entry.source is not None:
        return entry
    try:
        content = schema.content(entry)
    except StoreError as error:
        raise PackError(str(error)) from error
    (choice,) = content["tunings"][0]["choices"]
    choice["median_ms"] = float(f"{choice['median_ms']:.5g}")
    choice["created"] = schema.time_text(choice["created"])
    return schema.entries(content)[0]


def dump(entries: Iterable[StoredChoice]) -> str:
    """Return the pack of these choices, all of one kernel and device; raises `PackError`."""
    listed = [checked(entry) for entry in entries]
    packs = [schema.content(entry) for entry in listed]
    kernel = {"name": listed[0].key.kernel_name, "digest": listed[0].key.kernel_digest}
    kernel |= _unknown([pack["kernel"] for pack in packs], schema.Kernel)
    facts = {"device": listed[0].key.device, **_unknown(packs, schema.Pack)}
    groups: dict[str, list[StoredChoice]] = {}
    for entry, pack in zip(listed, packs, strict=True):
        more = schema.unknown_fields(pack["tunings"][0], schema.Tuning)
        group = encoding.dumps([entry.key.toolchain, entry.choice.declared, more])
        groups.setdefault(group, []).append(entry)
    tunings = ",\n".join(_tuning_text(group) for _, group in sorted(groups.items()))
    of_kernel = ", ".join(_fields(kernel))
    head = [f'"safetune_pack": {schema.FORMAT}', f'"kernel": {{{of_kernel}}}', *_fields(facts)]
    lines = "".join(f"  {line},\n" for line in head)
    return f'{{\n{lines}  "tunings": [\n{tunings}\n  ]\n}}\n'


def _unknown(objects: Iterable[Mapping[str, Any]], kind: type[Struct]) -> dict[str, Any]:
    """The fields of a newer version in some objects; raises `PackError` where two differ."""
    found: dict[str, Any] = {}
    for data in objects:
        for name, value in schema.unknown_fields(data, kind).items():
            if encoding.dumps(found.setdefault(name, value)) != encoding.dumps(value):
                raise PackError(
                    f"two packs of a newer safetune differ in {name!r}: merge with that"
                )
    return dict(sorted(found.items()))


def _tuning_text(entries: Sequence[StoredChoice]) -> str:
    (tuning,) = schema.content(entries[0])["tunings"]
    facts = {name: tuning[name] for name in ("toolchain", "declared")}
    facts |= schema.unknown_fields(tuning, schema.Tuning)
    lines = "".join(f"      {line},\n" for line in _fields(facts))
    ordered = sorted(entries, key=lambda entry: natural(entry.key.call))
    choices = ",\n".join(map(_choice_text, ordered))
    return f'    {{\n{lines}      "choices": [\n{choices}\n      ]\n    }}'


def _choice_text(entry: StoredChoice) -> str:
    ((choice,),) = (tuning["choices"] for tuning in schema.content(entry)["tunings"])
    names = [name for name in schema.Choice.__struct_fields__ if name in choice]
    facts = {name: choice[name] for name in names}
    facts |= schema.unknown_fields(choice, schema.Choice)
    lines = ",\n".join(f"          {line}" for line in _fields(facts))
    return f"        {{\n{lines}\n        }}"


def _fields(facts: Mapping[str, Any]) -> list[str]:
    return [f"{_line(name)}: {_line(value)}" for name, value in facts.items()]


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def natural(call: dict[str, Any]) -> list[Any]:
    """A total order in which 256 comes before 1024."""
    pairs = [pair for name in CALL for pair in call[name]]
    return [*((str(name), _rank(value)) for name, value in pairs), ("", (9, encoding.dumps(call)))]


def _rank(value: Any) -> tuple[int, Any]:
    kinds = {type(None): 0, bool: 1, int: 2, float: 2, str: 3}
    kind = kinds.get(type(value), 4)
    return kind, encoding.dumps(value) if kind in (0, 4) else value
