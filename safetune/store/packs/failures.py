"""Lists of configs that died or accessed invalid memory, to be carried to other machines.

`safetune export --failures` writes a list. A process with the list in SAFETUNE_FAILURES does not
try these configs for these keys.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from safetune.errors import InvalidSetting
from safetune.keys import encoding
from safetune.outcome import Outcome, Verdict
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord, TrialRecord
from safetune.store.schema import time_text

_VERDICTS = (Verdict.DIED, Verdict.ILLEGAL_ACCESS)


class _Failure(Struct):
    """A config that failed for a key; what else is known of the key is for people."""

    kernel: str
    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    config: Annotated[dict[str, Any], Meta(min_length=1)]
    verdict: Literal["died", "illegal_access"]
    detail: str = ""
    message: str = ""
    created: str = ""
    device: str = ""
    triton: str = ""
    values: list[tuple[str, Any]] = []


class _List(Struct):
    safetune_failures: Literal[1]
    failures: list[_Failure]


#: Here, where the module's import lock keeps other threads out: see `schema`.
_decoder = msgspec.json.Decoder(_List)


def of_store(store: Store, wanted: Callable[[KeyRecord], bool]) -> list[dict[str, Any]]:
    """Return the stored failures for some keys, the last one per config."""
    return [
        _data(key, trial)
        for key, trials in store.trials_of()
        if wanted(key)
        for trial in {trial.config_digest: trial for trial in trials}.values()
        if trial.outcome.verdict in _VERDICTS
    ]


def _data(key: KeyRecord, trial: TrialRecord) -> dict[str, Any]:
    return {
        "kernel": key.kernel_name,
        "key": key.digest,
        "config": trial.config,
        "verdict": trial.verdict,
        "detail": trial.outcome.detail,
        "message": trial.outcome.message,
        "created": time_text(trial.created),
        "device": key.device["name"],
        "triton": key.toolchain["triton"],
        "values": key.call["values"],
    }


def dump(failures: Sequence[dict[str, Any]]) -> str:
    """Return the file content for a list."""
    return f"{json.dumps({'safetune_failures': 1, 'failures': failures}, indent=1)}\n"


@functools.cache
def read(path: Path) -> dict[tuple[str, str], Outcome]:
    """Return the outcomes in a list by key digest and config digest; read once per process.

    Raises:
        InvalidSetting: it cannot be read, or is no such list.
    """
    try:
        listed = _decoder.decode(path.read_bytes()).failures
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidSetting(
            f"SAFETUNE_FAILURES={str(path)!r} cannot be read ({reason}); give a file that "
            "`safetune export --failures FILE` wrote"
        ) from error
    return {
        (each.key, encoding.digest(each.config)): Outcome(
            Verdict(each.verdict),
            detail=each.detail,
            message=f"{each.message.partition(';')[0] or each.verdict} (listed in {path})",
        )
        for each in listed
    }
