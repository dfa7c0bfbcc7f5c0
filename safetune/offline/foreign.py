"""Choices that others have made, as choices of a kernel's stored keys.

In: tables of vLLM, SGLang and Hugging Face kernels, or triton-dejavu's caches. A row becomes the
choice of a key only if it is one of the configs that the kernel declares.
"""

from __future__ import annotations

import ast
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetune.config import OPTION_DEFAULTS, config_digest, config_record, declared_digest
from safetune.errors import PackError
from safetune.frozen import dataclass
from safetune.keys.tuning_key import readable
from safetune.offline.tasks import OfflineKernel
from safetune.store.packs import packs, tables
from safetune.store.packs.tables import Kind, Table
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

_DEJAVU = "cache.json"
#: What reading a file raises that is another one; it may be as deep as anybody made it.
_NOT_ITS_FORM = (
    *(OSError, LookupError, AttributeError, TypeError, ValueError, SyntaxError),
    *(RecursionError, MemoryError),
)
#: Options of earlier Tritons, which triton-dejavu writes down with their defaults.
_RETIRED = frozenset(
    {
        *("num_buffers_warp_spec", "num_consumer_groups", "enable_persistent"),
        *("reg_dec_producer", "reg_inc_consumer", "enable_warp_specialization"),
    }
)


@dataclass(frozen=True)
class Offered:
    """The choices that were found for a kernel's keys, and a line for each key without one."""

    entries: list[StoredChoice]
    left_out: list[str]


@dataclass(frozen=True)
class DejavuRow:
    """One key of triton-dejavu: values of the named arguments, dtypes, the config, and its time."""

    device: str
    values: Mapping[str, Any]
    dtypes: tuple[str, ...]
    config: Mapping[str, Any]
    median_ms: float


def from_tables(
    kernel: OfflineKernel,
    keys: Iterable[KeyRecord],
    found: Sequence[Table],
    kind: Kind,
    names: Mapping[str, str],
) -> Offered:
    """Return for each key of a kernel the row of the table that fits it, for the nearest M."""

    def row_of(key: KeyRecord) -> tuple[Mapping[str, Any], float] | str:
        values = {name: readable(value) for name, value in key.call["values"]}
        size = values.get(names.get(tables.ROW, tables.ROW))
        if type(size) is not int:
            return f"its key has no number {tables.ROW!r}: name it, as in --name M=n_tokens"
        fitting = [table for table in found if _fits(table, key, values, names)]
        if len(fitting) != 1:
            listed = ", ".join(table.name for table in fitting)
            return f"{len(fitting)} tables fit: {listed}" if fitting else "no table fits"
        return fitting[0].nearest(size, kind) or {}, 0.0

    return _offered(kernel, keys, row_of)


def from_dejavu(
    kernel: OfflineKernel, keys: Iterable[KeyRecord], rows: Sequence[DejavuRow]
) -> Offered:
    """Return for each key of a kernel the config that triton-dejavu has kept for the same call."""

    def row_of(key: KeyRecord) -> tuple[Mapping[str, Any], float] | str:
        values = {name: readable(value) for name, value in key.call["values"]}
        dtypes = tuple(dtype for _, dtype in key.call["dtypes"])
        for row in rows:
            named = {name: value for name, value in row.values.items() if name in values}
            if row.device and row.device != _device(key):
                continue
            if named == values and row.dtypes == dtypes:
                return row.config, row.median_ms
        return "triton-dejavu has no such call"

    return _offered(kernel, keys, row_of)


def read_dejavu(path: Path) -> Iterator[DejavuRow]:
    """Yield the rows of a `cache.json`, or of all below a folder; raises `PackError`."""
    for file in sorted(path.rglob(_DEJAVU)) if path.is_dir() else [path]:
        folders = [part.removeprefix("gpu_") for part in file.parts if part.startswith("gpu_")]
        try:
            content = json.loads(packs.beginning(file, packs.MAX_BYTES))
            names = list(content["keys"])
            for text, config in content["cache"].items():
                parts = ast.literal_eval(text)
                kinds = tuple(str(part).removeprefix("torch.") for part in parts[len(names) :])
                values = dict(zip(names, parts, strict=False))
                ms = float(content["timings"].get(text, [0.0])[0])
                device = folders[-1] if folders else ""
                if math.isfinite(ms):  # else no config worked
                    yield DejavuRow(device, values, kinds, _parsed(config), ms)
        except _NOT_ITS_FORM as error:
            reason = f"{type(error).__name__}: {error!s:.80}"
            raise PackError(f"{file}: it is not a cache of triton-dejavu: {reason}") from error


def _parsed(config: str) -> dict[str, Any]:
    """Return a `str(triton.Config)` by names: `BLOCK: 64, num_warps: 4, maxnreg: None`."""
    pairs = [word.partition(": ")[::2] for word in config.split(", ")]
    return {name: _literal(value) for name, value in pairs if name not in _RETIRED}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _offered(kernel: OfflineKernel, keys: Iterable[KeyRecord], row_of: Any) -> Offered:
    tuner = kernel.tuner
    declared, now = declared_digest(tuner.configs), time.time()
    configs = [(config_digest(c), config_record(c)) for c in tuner.configs]
    offered = Offered([], [])
    for key in keys:
        if key.kernel_digest != tuner.identity.digest:
            continue
        words = f"{key.kernel_name} {key.call['values']} on {key.device['name']}"
        found = row_of(key)
        if isinstance(found, str):
            offered.left_out.append(f"{words}: {found}")
            continue
        row, median_ms = found
        same = [(digest, record) for digest, record in configs if _is(record, row)]
        if len(same) != 1:
            which = "more than one" if same else "not one"
            offered.left_out.append(f"{words}: {dict(row)} is {which} of the configs it declares")
            continue
        ((digest, record),) = same
        choice = ChoiceRecord(key.digest, 1, digest, record, declared, median_ms, 0, now)
        offered.entries.append(StoredChoice(key, choice))
    return offered


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
