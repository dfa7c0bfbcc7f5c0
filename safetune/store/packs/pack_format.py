"""A pack: the choices of one kernel on one kind of device, as JSON that people review.

Its text is the one text of what it holds: sorted, one line per fact, so that what changes in a file
under version control is what changed. Nothing in it is taken on trust. The digests of keys and
configs are computed from what is written out, every field is checked, and what this version does
not know is refused: a pack can say which declared config to launch, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.keys.device import Device
from safetune.keys.tuning_key import key_digest
from safetune.store.packs import checks as checks
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

#: The format that this version writes, and the newest that it reads.
FORMAT = 1

#: A pack of 10,000 choices has 5 MB.
MAX_BYTES = 64 << 20

_LAST_SECOND = 253402300799  # of the year 9999

_CALL = ("values", "dtypes", "options")
_CHOICE = (*_CALL, "config", "median_ms", "measured", "generation", "created")


def file_name(kernel_name: str, kernel_digest: str, device_name: str, device_digest: str) -> str:
    """Return the name under which a pack is looked for: one for each kernel and kind of device."""
    words = [re.sub(r"[^A-Za-z0-9]+", "_", name)[:80] for name in (kernel_name, device_name)]
    return ".".join([*words, encoding.digest([kernel_digest, device_digest])[:8], "json"])


def name_of(entry: StoredChoice) -> str:
    """Return the name of the pack that this choice belongs in."""
    key = entry.key
    return file_name(key.kernel_name, key.kernel_digest, key.device["name"], key.device_digest)


def dump(entries: Iterable[StoredChoice]) -> str:
    """Return the pack of these choices, all of one kernel and device, as text.

    Raises:
        PackError: one is no choice for a pack; `checked` tells for each.
    """
    listed = [checked(entry) for entry in entries]
    key = listed[0].key
    groups: dict[str, list[StoredChoice]] = {}
    for entry in listed:
        group = encoding.dumps([entry.key.toolchain, entry.choice.declared])
        groups.setdefault(group, []).append(entry)
    tunings = ",\n".join(_tuning_text(group) for _, group in sorted(groups.items()))
    return (
        f'{{\n  "safetune_pack": {FORMAT},\n'
        f'  "kernel": {{"name": {_line(key.kernel_name)}, "digest": {_line(key.kernel_digest)}}},\n'
        f'  "device": {_line(key.device)},\n'
        f'  "tunings": [\n{tunings}\n  ]\n}}\n'
    )


def load(data: bytes) -> list[StoredChoice]:
    """Return the choices in a pack's bytes; raises `PackError`, which says what is wrong where."""
    try:
        return _load(data)
    except RecursionError as error:
        raise PackError("its lists or objects are too deep for a pack") from error


def _load(data: bytes) -> list[StoredChoice]:
    if len(data) > MAX_BYTES:
        raise PackError(f"it has over {MAX_BYTES >> 20} MiB, too much for a pack")
    content = checks.parsed(data)
    _check_format(content)
    pack = checks.fields(content, "the pack", ("safetune_pack", "kernel", "device", "tunings"))
    kernel = checks.fields(pack["kernel"], "kernel", ("name", "digest"))
    entries = [
        _entry(kernel, pack["device"], tuning, choice, f"tunings[{i}].choices[{j}]")
        for i, tuning in enumerate(checks.items(pack["tunings"], "tunings"))
        for j, choice in enumerate(_choices(tuning, f"tunings[{i}]"))
    ]
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if (entry.key.digest, entry.choice.declared) in seen:
            raise PackError(f"two choices for {encoding.dumps(entry.key.call)}")
        seen.add((entry.key.digest, entry.choice.declared))
    return entries


def checked(entry: StoredChoice) -> StoredChoice:
    """Return a stored choice as a pack gives it back; raises `PackError` where it cannot be in one.

    What is of one machine, such as the kernel's file, is left out, and so are digits of the time
    that say nothing.
    """
    key, choice = entry.key, entry.choice
    kernel = {"name": key.kernel_name, "digest": key.kernel_digest}
    tuning = {"toolchain": key.toolchain, "declared": choice.declared}
    data = {
        **checks.fields(key.call, "the call", _CALL),
        "config": choice.config,
        "median_ms": float(f"{choice.median_ms:.5g}"),
        "measured": choice.measured,
        "generation": choice.generation,
        "created": _time_text(choice.created),
    }
    return _entry(kernel, key.device, tuning, data, "the choice")


def _tuning_text(entries: Sequence[StoredChoice]) -> str:
    first = entries[0]
    ordered = sorted(entries, key=lambda entry: _natural(entry.key.call))
    choices = ",\n".join(_choice_text(entry) for entry in ordered)
    return (
        f'    {{\n      "toolchain": {_line(first.key.toolchain)},\n'
        f'      "declared": {_line(first.choice.declared)},\n'
        f'      "choices": [\n{choices}\n      ]\n    }}'
    )


def _choice_text(entry: StoredChoice) -> str:
    choice = entry.choice
    facts = {
        **{name: entry.key.call[name] for name in _CALL},
        **{name: getattr(choice, name) for name in _CHOICE if name not in (*_CALL, "created")},
        "created": _time_text(choice.created),
    }
    lines = ",\n".join(f'          "{name}": {_line(value)}' for name, value in facts.items())
    return f"        {{\n{lines}\n        }}"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _natural(call: dict[str, Any]) -> list[Any]:
    """An order in which 256 comes before 1024, and which is total."""
    pairs = [pair for name in _CALL for pair in call[name]]
    return [*((str(name), _rank(value)) for name, value in pairs), ("", (9, encoding.dumps(call)))]


def _rank(value: Any) -> tuple[int, Any]:
    kinds = {type(None): 0, bool: 1, int: 2, float: 2, str: 3}
    kind = kinds.get(type(value), 4)
    return kind, encoding.dumps(value) if kind in (0, 4) else value


def _check_format(content: Any) -> None:
    if not isinstance(content, dict) or type(content.get("safetune_pack")) is not int:
        raise PackError('it is no pack: it does not say "safetune_pack" and a number')
    if not 1 <= content["safetune_pack"] <= FORMAT:
        raise PackError(
            f"it has pack format {content['safetune_pack']}, and this safetune knows {FORMAT}: "
            "install the safetune that wrote it, or export it again"
        )


def _choices(tuning: Any, where: str) -> list[Any]:
    return checks.items(
        checks.fields(tuning, where, ("toolchain", "declared", "choices"))["choices"],
        f"{where}.choices",
    )


def _entry(kernel: Any, device: Any, tuning: Any, data: Any, where: str) -> StoredChoice:
    name = checks.function_name(kernel["name"], "kernel.name")
    digest = checks.digest(kernel["digest"], "kernel.digest")
    checks.like(Device, device, "device")
    toolchain = checks.toolchain(tuning["toolchain"])
    choice = checks.fields(data, where, _CHOICE)
    call = {part: checks.pairs(choice[part], f"{where}.{part}") for part in _CALL}
    key = KeyRecord(
        digest=key_digest(name, digest, call, device, toolchain),
        kernel_name=name,
        kernel_digest=digest,
        kernel_source="",
        kernel_file="",
        kernel_line=0,
        device_digest=encoding.digest(device),
        device=device,
        toolchain=toolchain,
        call=call,
    )
    config = checks.config(choice["config"], f"{where}.config")
    record = ChoiceRecord(
        key=key.digest,
        generation=checks.count(choice["generation"], f"{where}.generation", least=1),
        config_digest=encoding.digest(config),
        config=config,
        declared=checks.digest(tuning["declared"], "declared"),
        median_ms=checks.milliseconds(choice["median_ms"], f"{where}.median_ms"),
        measured=checks.count(choice["measured"], f"{where}.measured"),
        created=checks.moment(choice["created"], f"{where}.created"),
    )
    return StoredChoice(key, record)


def _time_text(seconds: float) -> str:
    moment = datetime.fromtimestamp(max(0, min(int(seconds), _LAST_SECOND)), timezone.utc)
    return moment.strftime(checks.TIME)
