"""Packs: the choices of one kernel on one kind of device, as JSON that people review.

`schema` defines and checks the content. The text depends only on the content: sorted, one fact per
line, so that a diff shows the changed facts.

At launch, read-only directories of packs are the last layer of a lookup. A kernel's first miss
reads the file with the name that `export` gives to its pack; a process with all its choices in the
store opens no pack. If that file lacks the key, the other files of the directory are read, once:
content counts, not names. A broken pack is skipped with one warning.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetune.errors import PackError, StoreError, StoreWarning
from safetune.keys import encoding
from safetune.keys.tuning_key import CALL
from safetune.messages import warn
from safetune.store import schema
from safetune.store.records import ChoiceRecord, RelatedChoice, StoredChoice, precedence

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
    """Yield a synced temporary file with this content, to be renamed to `path`; it is removed at
    the end.
    """
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


def shipped() -> Path | None:
    """Return the directory of the packs installed with safetune; None without one."""
    spec = importlib.util.find_spec("safetune.cache")
    directories = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(directories[0]) if directories else None


def file_name(kernel_name: str, kernel_digest: str, device_name: str, device_digest: str) -> str:
    """Return the file name of a pack, one per kernel and kind of device."""
    words = [re.sub(r"[^A-Za-z0-9]+", "_", name)[:80] for name in (kernel_name, device_name)]
    return ".".join([*words, encoding.digest([kernel_digest, device_digest])[:8], "json"])


def name_of(entry: StoredChoice) -> str:
    """Return the file name of the pack for this choice."""
    key = entry.key
    return file_name(key.kernel_name, key.kernel_digest, key.device["name"], key.device_digest)


#: In the text of a pack, the digest of its kernel. Export writes it at the beginning.
_DIGEST = re.compile(rb'"digest"\s*:\s*"([0-9a-f]{32})"')
_HEAD = 4096


class Packs:
    """The packs in some directories, in order; within a directory, the expected file name first.

    Thread-safe, also after a fork: at worst a file is read twice. A file is read once per process,
    so that a choice does not change in the middle of a run.
    """

    def __init__(self, directories: Sequence[Path], shipped: Path | None = None) -> None:
        """Look into these directories, and last into the one that comes with safetune."""
        self._directories, self._shipped = tuple(directories), shipped
        self._read: dict[Path, list[StoredChoice]] = {}
        self._by_kernel: dict[Path, dict[str, list[Path]]] = {}

    def find(
        self, key: TuningKey, declared: str, among: Collection[str] | None = None
    ) -> ChoiceRecord | None:
        """Return the choice for exactly this key, made from exactly these configs.

        A choice in the same file comes first if it is pinned to a config with a digest in `among`.
        """
        for _, entries in self._of_kernel(key):
            found = [
                entry.choice
                for entry in entries
                if entry.key.digest == key.digest
                if entry.choice.declared == declared
                or (entry.choice.pinned and entry.choice.config_digest in (among or ()))
            ]
            if found:
                return min(found, key=precedence)
        return None

    def of_key(self, key: TuningKey) -> Iterator[tuple[Path, ChoiceRecord]]:
        """Yield the choices for exactly this key, from any config list, with their files."""
        for path, entries in self._of_kernel(key):
            yield from ((path, e.choice) for e in entries if e.key.digest == key.digest)

    def related(self, key: TuningKey) -> list[RelatedChoice]:
        """Return all choices for the key's kernel and device, from any toolchain."""
        return [
            RelatedChoice(entry.key.toolchain, entry.key.call, entry.choice, pack=str(path))
            for path, entries in self._of_kernel(key)
            for entry in entries
        ]

    def _of_kernel(self, key: TuningKey) -> Iterator[tuple[Path, list[StoredChoice]]]:
        """Yield each file with its choices for the key's kernel and device."""
        kernel, device = key.kernel, key.device
        name = file_name(kernel.name, kernel.digest, device.name, device.digest)
        for path in self._paths(name, kernel.digest):
            if path not in self._read:
                self._read[path] = _content(path)
            yield (
                path,
                [
                    entry
                    for entry in self._read[path]
                    if (entry.key.kernel_digest, entry.key.device_digest)
                    == (kernel.digest, device.digest)
                    if not entry.unknown
                ],
            )

    def _paths(self, name: str, kernel_digest: str) -> Iterator[Path]:
        for directory in self._directories:
            yield directory / name
            if directory not in self._by_kernel:
                self._by_kernel[directory] = _files_by_kernel(directory)
            others = self._by_kernel[directory].get(kernel_digest, ())
            yield from (path for path in others if path.name != name)
        if self._shipped is not None:
            yield self._shipped / name


def _content(path: Path) -> list[StoredChoice]:
    try:
        return read_pack(path)
    except PackError as error:
        if getattr(error.__cause__, "errno", None) not in (errno.ENOENT, errno.ENOTDIR):
            warn(f"skipping a pack: {error}", StoreWarning)
        return []


def _files_by_kernel(directory: Path) -> dict[str, list[Path]]:
    """Return the packs of a directory by the digests of their kernels; read no pack whole."""
    found: dict[str, list[Path]] = {}
    if not directory.is_dir():
        warn(f"SAFETUNE_PACKS names {directory}, which is not a directory", StoreWarning)
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(OSError, PackError):
            text = beginning(path, _HEAD)
            for digest in set(_DIGEST.findall(text) or _DIGEST.findall(beginning(path, MAX_BYTES))):
                found.setdefault(digest.decode(), []).append(path)
    return found


def load(data: bytes) -> list[StoredChoice]:
    """Return the choices in a pack's bytes; raises `PackError`, which names the bad field."""
    if len(data) > MAX_BYTES:
        raise PackError(f"it is over {MAX_BYTES >> 20} MiB, the limit for a pack")
    return schema.entries(schema.parsed(data))


def checked(entry: StoredChoice) -> StoredChoice:
    """Return a stored choice as it would read back from a pack; raises `PackError` if no pack may
    have it.

    Omits facts about one machine, such as the kernel's file, and insignificant digits of the time.
    A choice from a pack stays unchanged.
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
    """Return the pack text of these choices, all for one kernel and device; raises `PackError`."""
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
                    f"two packs of a newer safetune differ in {name!r}: merge them with that "
                    "version"
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
    """Return a sort key of a total order in which 256 comes before 1024."""
    pairs = [pair for name in CALL for pair in call[name]]
    return [*((str(name), _rank(value)) for name, value in pairs), ("", (9, encoding.dumps(call)))]


def _rank(value: Any) -> tuple[int, Any]:
    kinds = {type(None): 0, bool: 1, int: 2, float: 2, str: 3}
    kind = kinds.get(type(value), 4)
    return kind, encoding.dumps(value) if kind in (0, 4) else value
