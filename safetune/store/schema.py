"""A stored choice as JSON: the one schema of packs and shared records, decoded by msgspec.

A pack has the choices for one kernel on one kind of device; a shared record is a pack of one choice
with a checksum. Nothing in the text is trusted: digests of keys and configs are computed from their
values, every field is checked, and an error names the path of the bad field. A choice with unknown
fields from a newer version, in itself or in an enclosing object, is kept and passed on unchanged,
but never launched (`StoredChoice.unknown`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.keys.tuning_key import CALL, Device, key_digest
from safetune.store.local.rows import CHOICE, KEY, MOST
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

#: The format that this version writes, and the newest that it reads.
FORMAT = 1

#: Of the year 9999, since the epoch.
LAST_SECOND = 253402300799

#: Generations are counted up one by one. With a fixed limit, a record could claim the last one, and
#: every later `--force` would be refused: from here on the limit goes up by one each second.
_GENERATIONS = 1_000_000

#: Lists and objects in one another: more than a value of any call has, and few enough to print.
_MOST_DEPTH = 64

_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Count = Annotated[int, Meta(ge=0, le=MOST)]


class Kernel(Struct):
    """The kernel of a pack, identified by its digest."""

    name: str
    digest: _Digest

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"{self.name[:60]!r} is not the name of a function")


class _Toolchain(Struct):
    triton: str
    backend: str
    target: str
    environment: dict[str, str]

    def __post_init__(self) -> None:
        if not self.triton.isprintable():  # it is in logs
            raise ValueError(f"{self.triton[:60]!r} is not a version of Triton")


class _Call(Struct):
    values: list[tuple[str, Any]]
    dtypes: list[tuple[str, str]]
    options: list[tuple[str, Any]]


class Choice(_Call):
    """One choice of a pack: the call, the config, and how it was chosen."""

    config: Annotated[dict[str, Any], Meta(min_length=1)]
    median_ms: Annotated[float, Meta(ge=0, le=MOST)]  # 0 where others have chosen: not known
    measured: _Count
    generation: Annotated[int, Meta(ge=1)]
    created: Annotated[float, Meta(ge=0, le=LAST_SECOND)] | str
    marks: list[str] = []

    def __post_init__(self) -> None:
        if "ir_override" in self.config:
            raise ValueError(
                "config sets ir_override, which is code; choices must not contain code"
            )
        if self.generation > max(_GENERATIONS, time.time()):
            raise ValueError(f"generation is {self.generation}, too large for a tuning count")
        if not all(mark.isprintable() for mark in self.marks):  # they are in warnings
            raise ValueError("marks have control characters")
        seconds(self.created)


class Tuning(Struct):
    """The choices of a pack for one toolchain and one list of configs."""

    toolchain: _Toolchain
    declared: _Digest
    choices: list[Choice]


class Pack(Struct):
    """The choices for one kernel on one kind of device."""

    safetune_pack: int
    kernel: Kernel
    device: Device
    tunings: list[Tuning]
    checksum: str = ""

    def __post_init__(self) -> None:
        if not self.device.name.isprintable():  # it is shown in terminals
            raise ValueError(f"the device's name {self.device.name[:60]!r} has control characters")


#: msgspec looks at a type when it is first used, and two threads that do so at once would crash: it
#: is used here, where the module's import lock keeps the others out.
for _each in (Pack, _Call):
    msgspec.json.Decoder(_each)


def is_readable(key: KeyRecord) -> bool:
    """Whether a stored key has everything that readers expect. Another program may have written it,
    and checksums do not prevent that.
    """
    try:
        msgspec.convert(key.call, _Call)
    except (msgspec.ValidationError, RecursionError, UnicodeError):
        return False
    return not _is_deep(key.call) and type(key.device.get("name")) is str


def parsed(data: bytes | str) -> Any:
    """Return JSON with finite numbers and unique names in each object; raises `PackError`."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return encoding.loads(text, _no_duplicates)
    except (ValueError, RecursionError) as error:
        raise PackError(f"it is not the JSON of a pack: {error}") from error


def entries(content: Any) -> list[StoredChoice]:
    """Return the choices in a pack; raises `PackError`, which names the bad field."""
    _check_format(content)
    sealed = {name: value for name, value in content.items() if name != "checksum"}
    found: dict[tuple[str, str], StoredChoice] = {}
    try:
        if _is_deep(content):
            raise PackError("its lists or objects are nested too deeply")
        msgspec.convert(content, Pack)
        if sealed != content and encoding.digest(sealed) != content["checksum"]:
            raise PackError("its checksum does not match")
        for tuning in content["tunings"]:
            for choice in tuning["choices"]:
                entry = _entry({**sealed, "tunings": [{**tuning, "choices": [choice]}]})
                if found.setdefault((entry.key.digest, entry.choice.declared), entry) is not entry:
                    raise PackError(f"two choices for {encoding.dumps(entry.key.call)[:200]}")
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        where = path.removesuffix("`") or "the pack"
        raise PackError(f"{where}: {reason[0].lower()}{reason[1:]}") from error
    except UnicodeError as error:
        raise PackError("a string is not valid UTF-8") from error
    return list(found.values())


def content(entry: StoredChoice) -> Mapping[str, Any]:
    """Return the pack of one choice, as it was decoded; raises `RecordError`."""
    if entry.source is not None:
        return entry.source
    key, declared = entry.key, entry.choice.declared
    for table, record in ((KEY, key), (CHOICE, entry.choice)):
        table.seal(record)
    choice = {name: key.call.get(name) for name in CALL} | {
        "config": entry.choice.config,
        "median_ms": float(entry.choice.median_ms),
        "measured": entry.choice.measured,
        "generation": entry.choice.generation,
        "created": float(entry.choice.created),
    }
    if entry.choice.marks:
        choice["marks"] = list(entry.choice.marks)
    return {
        "safetune_pack": FORMAT,
        "kernel": {"name": key.kernel_name, "digest": key.kernel_digest},
        "device": key.device,
        "tunings": [{"toolchain": key.toolchain, "declared": declared, "choices": [choice]}],
    }


def time_text(seconds_since_epoch: float) -> str:
    """Return a time as packs show it: in UTC, with microseconds if it has any."""
    found = max(0.0, min(seconds_since_epoch, LAST_SECOND))
    text = datetime.fromtimestamp(found, timezone.utc).replace(tzinfo=None).isoformat()
    return f"{text}Z"


def seconds(created: float | str) -> float:
    """Return the time in `created` as seconds since the epoch; raises `ValueError`."""
    if not isinstance(created, str):
        return float(created)
    with contextlib.suppress(ValueError):
        in_utc = datetime.fromisoformat(created.removesuffix("Z")).replace(tzinfo=timezone.utc)
        if in_utc.timestamp() >= 0 and time_text(in_utc.timestamp()) == created:
            return in_utc.timestamp()
    raise ValueError(f"created is {created[:60]!r}, not a time such as 2026-11-21T07:30:00Z")


def unknown_fields(data: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Return the fields of an object that only a newer version knows, sorted."""
    return {name: data[name] for name in sorted(set(data) - set(kind.__struct_fields__))}


def _entry(content: dict[str, Any]) -> StoredChoice:
    kernel, device, (tuning,) = content["kernel"], content["device"], content["tunings"]
    name, digest, toolchain = kernel["name"], kernel["digest"], tuning["toolchain"]
    (choice,) = tuning["choices"]
    call = {part: choice[part] for part in CALL}
    of_kernel = (name, digest, "", 0)
    of_device = (encoding.digest(device), device)
    key_of_call = key_digest(name, digest, call, device, toolchain)
    key = KeyRecord(key_of_call, *of_kernel, *of_device, toolchain, call)
    record = ChoiceRecord(
        key=key.digest,
        config_digest=encoding.digest(choice["config"]),
        declared=tuning["declared"],
        **{field: choice[field] for field in ("generation", "config", "measured")},
        median_ms=float(choice["median_ms"]),
        created=seconds(choice["created"]),
        marks=tuple(choice.get("marks", ())),
    )
    objects = ((content, Pack), (kernel, Kernel), (tuning, Tuning), (choice, Choice))
    unknown = tuple(name for data, kind in objects for name in unknown_fields(data, kind))
    return StoredChoice(key, record, content, unknown)


def _check_format(content: Any) -> None:
    if not isinstance(content, dict) or type(content.get("safetune_pack")) is not int:
        raise PackError('it is not a pack: it has no number "safetune_pack"')
    if not 1 <= content["safetune_pack"] <= FORMAT:
        raise PackError(
            f"it has pack format {content['safetune_pack']}, but this safetune reads {FORMAT}: "
            "install the safetune that wrote it, or export it again"
        )


def _is_deep(data: Any, most: int = _MOST_DEPTH) -> bool:
    if not isinstance(data, (dict, list)):
        return False
    inner = data.values() if isinstance(data, dict) else data
    return most == 0 or any(_is_deep(each, most - 1) for each in inner)


def _no_duplicates(named: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(named)
    if len(found) < len(named):
        raise ValueError("an object has a duplicate name")
    return found
