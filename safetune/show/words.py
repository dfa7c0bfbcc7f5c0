"""Stored records as text for people, and as data for JSON."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from safetune.config import OPTION_DEFAULTS, shown_options
from safetune.keys.tuning_key import readable
from safetune.outcome import Outcome, duration
from safetune.store.local.store import AGREED, IMPORTED

#: In place of `Store.origin`, for a choice in a directory of SAFETUNE_PACKS.
PACK = "pack "

#: The end of a shared store's identity, which tells databases of one location apart.
_DIGEST = re.compile(" [0-9a-f]{32}$")

#: The folder of a library in a path.
_LIBRARIES = re.compile(r".*/(?:site|dist)-packages/")

#: Triton's compile errors begin with a location in the kernel's source and end with the reason.
_TRITON_LOCATION = re.compile(r"at \d+:\d+:")


def origin_words(origin: str) -> str:
    """Return the origin of a choice as text; `origin` is `Store.origin`'s."""
    known = {"": "measured here", IMPORTED: "imported", AGREED: "agreed on in sync()"}
    if origin.startswith(PACK):
        return f"in the {origin}"
    return known.get(origin) or f"from {_DIGEST.sub('', origin)}"


def origin_word(origin: str) -> str:
    """Return the origin of a choice in one word."""
    known = {"": "here", IMPORTED: "import", AGREED: "sync()"}
    return "pack" if origin.startswith(PACK) else known.get(origin, "shared")


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON data."""
    return {**asdict(outcome), "verdict": outcome.verdict.value, "label": outcome.label}


def left_out_data(left_out: Iterable[Any]) -> list[dict[str, str]]:
    """Return omitted recorded calls, with reasons, as plain JSON data."""
    return [{"call": left.words, "reason": left.reason} for left in left_out]


def place(file: str, line: int) -> str:
    """Return `file:line`, with a shortened path in a library or below the working directory."""
    if not file:
        return "(unknown file)"
    short = _LIBRARIES.sub("", file).removeprefix(os.path.join(os.getcwd(), ""))
    return f"{short}:{line}"


def words(values: Mapping[str, object]) -> str:
    """Return values as text, such as `BLOCK=64 num_warps=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def config_parts(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a stored config's kwargs by name, and its non-default options."""
    options = {name: record[name] for name in (*OPTION_DEFAULTS, "pre_hook") if name in record}
    kwargs = {name: record[name] for name in sorted(record) if name not in options}
    hook = {"pre_hook": options["pre_hook"]} if options.get("pre_hook") else {}
    return kwargs, shown_options(options) | hook


def readable_config(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a stored config's kwargs by name, then its options, as people read them."""
    kwargs, options = config_parts(record)
    values = {name: str(readable(value)) for name, value in (kwargs | options).items()}
    return values | ({"pre_hook": "yes"} if "pre_hook" in values else {})


def config_words(record: Mapping[str, Any]) -> str:
    """Return a stored config as text."""
    return words(readable_config(record))


def config_source(record: Mapping[str, Any]) -> str:
    """Return a stored config as the source of a `triton.Config`; its hook is only mentioned."""
    kwargs, options = config_parts(record)
    hook = "  # and its pre_hook" * (options.pop("pre_hook", None) is not None)
    given = ", ".join(f'"{name}": {_source(value)}' for name, value in kwargs.items())
    parts = [f"{{{given}}}", *(f"{name}={value!r}" for name, value in options.items())]
    return f"triton.Config({', '.join(parts)}),{hook}"


def _source(value: Any) -> str:
    """Return an encoded value, as `keys.identity.encode` makes it, as source."""
    if not isinstance(value, dict):
        return repr(value)
    if "list" in value:
        return f"[{', '.join(map(_source, value['list']))}]"
    if "tuple" in value:
        parts = [_source(each) for each in value["tuple"]]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if "dict" in value:
        return f"{{{', '.join(f'{_source(k)}: {_source(v)}' for k, v in value['dict'])}}}"
    if "dtype" in value:
        return f"{value.get('of', 'tl')}.{value['dtype']}"
    return f'float("{value["float"]}")' if "float" in value else str(readable(value))


def readable_call(call: Mapping[str, Any]) -> dict[str, str]:
    """Return a stored key as people read it: values and options by name, and the dtypes."""
    named = (*call["values"], *call["options"])
    values = {name: str(readable(value)) for name, value in named}
    dtypes = "/".join(dict.fromkeys(dtype for _, dtype in call["dtypes"]))
    return values | ({"dtype": dtypes} if dtypes else {})


def readable_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return `readable_call` of several keys; with each argument's dtype if two would look
    equal.
    """
    shown = [readable_call(call) for call in calls]
    if len({words(values) for values in shown}) == len(calls):
        return shown
    return [
        {name: value for name, value in values.items() if name != "dtype"} | dict(call["dtypes"])
        for values, call in zip(shown, calls, strict=True)
    ]


def call_data(call: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a stored key as plain JSON data: its values, dtypes and options, each by name."""
    return {
        "values": {name: readable(value) for name, value in call["values"]},
        "dtypes": dict(call["dtypes"]),
        "options": {name: readable(value) for name, value in call["options"]},
    }


def call_words(call: Mapping[str, Any]) -> str:
    """Return the values and dtypes of a stored key as text."""
    values = readable_call(call)
    dtypes = values.pop("dtype", "")
    return " ".join(filter(None, (words(values), dtypes)))


def time_words(ms: float) -> str:
    """Return a choice's time, or '' if unknown, e.g. of an imported choice."""
    return duration(ms) if ms > 0 else ""


def date(seconds: float) -> str:
    """Return the date of a time since the epoch, in this machine's time zone."""
    return moment(seconds)[:10]


def moment(seconds: float) -> str:
    """Return the date and the minute of a time since the epoch."""
    from safetune.store.schema import LAST_SECOND

    # A row that another program wrote may say 1e300.
    local = time.localtime(max(0, min(seconds, LAST_SECOND)))
    return time.strftime("%Y-%m-%dT%H:%M", local)


def one_reason(message: str) -> str:
    """Return the line of a failure's message that contains the reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if _TRITON_LOCATION.match(lines[0]) else lines[0]
