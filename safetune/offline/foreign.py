"""Tables of vLLM, SGLang and Hugging Face kernels, as choices for a kernel's stored keys.

A row becomes the choice of a key only if it equals a config that the kernel declares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from safetune.config import OPTION_DEFAULTS, config_digest, config_record, declared_digest
from safetune.frozen import dataclass
from safetune.keys.tuning_key import readable
from safetune.offline.tasks import OfflineKernel
from safetune.store.packs import tables
from safetune.store.packs.tables import Kind, Table
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice


@dataclass(frozen=True)
class Offered:
    """The choices found for a kernel's keys, and a line for each key without one."""

    entries: list[StoredChoice]
    left_out: list[str]


def from_tables(
    kernel: OfflineKernel,
    keys: Iterable[KeyRecord],
    found: Sequence[Table],
    kind: Kind,
    names: Mapping[str, str],
) -> Offered:
    """Return, for each key of a kernel, the row of the matching table with the nearest M."""
    tuner = kernel.tuner
    declared, now = declared_digest(tuner.configs), time.time()
    configs = [(config_digest(c), config_record(c)) for c in tuner.configs]
    offered = Offered([], [])
    for key in keys:
        if key.kernel_digest != tuner.identity.digest:
            continue
        words = f"{key.kernel_name} {key.call['values']} on {key.device['name']}"
        row = _row_of(key, found, kind, names)
        if isinstance(row, str):
            offered.left_out.append(f"{words}: {row}")
            continue
        same = [(digest, record) for digest, record in configs if _is(record, row)]
        if len(same) != 1:
            which = "more than one" if same else "not one"
            offered.left_out.append(f"{words}: {dict(row)} is {which} of the configs it declares")
            continue
        ((digest, record),) = same
        choice = ChoiceRecord(key.digest, 1, digest, record, declared, 0.0, 0, now)
        offered.entries.append(StoredChoice(key, choice))
    return offered


def _row_of(
    key: KeyRecord, found: Sequence[Table], kind: Kind, names: Mapping[str, str]
) -> Mapping[str, Any] | str:
    """Return the row for a key, or why there is not one."""
    values = {name: readable(value) for name, value in key.call["values"]}
    size = values.get(names.get(tables.ROW, tables.ROW))
    if type(size) is not int:
        return f"its key has no number {tables.ROW!r}: name it, as in --name M=n_tokens"
    fitting = [table for table in found if _fits(table, key, values, names)]
    if len(fitting) != 1:
        listed = ", ".join(table.name for table in fitting)
        return f"{len(fitting)} tables fit: {listed}" if fitting else "no table fits"
    return fitting[0].nearest(size, kind) or {}


def _is(record: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a declared config is the one of a row, which may leave Triton's defaults out."""
    ours = {n: readable(v) for n, v in record.items() if n != "pre_hook"}
    return {**OPTION_DEFAULTS, **ours} == {**OPTION_DEFAULTS, **row}


def _fits(
    table: Table, key: KeyRecord, values: Mapping[str, Any], names: Mapping[str, str]
) -> bool:
    """Whether a table is for the key's device and shape: the key has all that is named before the
    device, and is not known to differ in what is named after it.
    """
    shape = True
    for name, text in table.parts:
        if text == table.device and name == "device_name":
            if text != _device(key):
                return False
            shape = False
            continue
        value = values.get(names.get(name, name), text if not shape else None)
        if str(value).replace(" ", "") != str(text).replace(" ", ""):
            return False
    return True


def _device(key: KeyRecord) -> str:
    return str(key.device["name"]).replace(" ", "_").replace("/", "_")
