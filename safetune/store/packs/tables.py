"""Tables of configs as shipped with vLLM, SGLang and Hugging Face kernels.

A JSON file per shape and device, such as `N=4096,K=4096,device_name=NVIDIA_L4.json`, has a config
for each tuned M. A launch uses the row with the nearest M.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from safetune.config import OPTION_DEFAULTS, shown_options
from safetune.errors import PackError
from safetune.frozen import dataclass
from safetune.keys.tuning_key import readable
from safetune.store.packs.packs import beginning
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

_MAX_BYTES = 4 << 20
#: A comma that ends a part of a file's name: none in brackets.
_COMMA = re.compile(r",(?![^\[]*\])")
_DEVICE = "device_name"
#: The parts that their readers expect after the device, in this order.
_LAST = ("dtype", "block_shape", "per_channel_quant")
#: What stands for M in the tables of all three.
ROW = "M"


class Kind(str, Enum):
    """The projects with tables; they differ in paths, and in the distance between two values of
    M.
    """

    VLLM = "vllm"
    SGLANG = "sglang"
    HF = "hf"


@dataclass(frozen=True)
class Table:
    """One file. `parts` are those of its name, in order: (`N`, `4096`), (`device_name`, ...).

    A part without a value is (its text, None). `extra` has what is not a row: vLLM's
    `triton_version`.
    """

    parts: tuple[tuple[str, str | None], ...]
    rows: Mapping[int, Any]
    extra: Mapping[str, Any]

    @property
    def device(self) -> str:
        """The device's name, with `_` for spaces."""
        return dict(self.parts).get(_DEVICE) or ""

    @property
    def name(self) -> str:
        """The file's name."""
        words = [name if value is None else f"{name}={value}" for name, value in self.parts]
        return f"{','.join(words)}.json"

    def text(self) -> str:
        """Return the file's content."""
        rows = {str(size): config for size, config in self.rows.items()}
        return json.dumps({**self.extra, **rows}, indent=4) + "\n"

    def nearest(self, size: int, kind: Kind) -> Any:
        """Return the row that its project would launch for this M."""
        apart: Callable[[int], float] = lambda row: abs(row - size)  # noqa: E731
        if kind is Kind.HF:
            apart = lambda row: abs(math.log(size / row))  # noqa: E731
        return self.rows[min(self.rows, key=apart)]


def read_table(path: Path) -> Table:
    """Return the table in a file; raises `PackError`, which names the file and the reason."""
    try:
        content = json.loads(beginning(path, _MAX_BYTES))
        if not isinstance(content, dict):
            raise PackError("it is not a table of configs")
        rows = {int(name): row for name, row in content.items() if name.isdecimal()}
        extra = {name: value for name, value in content.items() if not name.isdecimal()}
        if not rows or not all(isinstance(row, dict) for row in rows.values() if row is not None):
            raise PackError("it does not have one config for each M")
        if any(isinstance(value, (dict, list)) for value in extra.values()):
            raise PackError(f"it has entries other than configs by M: {', '.join(extra)}")
    except (OSError, ValueError, RecursionError, PackError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise PackError(f"{path}: {reason}") from error
    words = [part.partition("=") for part in _COMMA.split(path.stem)]
    parts = tuple((name, value if equals else None) for name, equals, value in words)
    return Table(parts, rows, extra)


def tables_of(
    entries: Iterable[StoredChoice], kind: Kind, names: Mapping[str, str]
) -> dict[str, Table]:
    """Return the tables made from choices, by their path below a folder.

    Args:
        names: from a name in the tables to the one in the kernel's key, if they differ.

    Raises:
        PackError: a choice has no M, or two have the same place.
    """
    in_table = {of_key: name for name, of_key in names.items()}
    places: dict[tuple[Any, ...], dict[int, StoredChoice]] = {}
    for entry in sorted(entries, key=lambda entry: entry.choice.created):
        values = {
            in_table.get(name, name): str(readable(value)).replace(" ", "")
            for name, value in entry.key.call["values"]
        }
        size = values.pop(ROW, "")
        if not size.isdecimal():
            raise PackError(
                f"the key of {entry.key.kernel_name} has no number {ROW!r}: give its name there, "
                f"e.g. --name {ROW}=n_tokens"
            )
        device = str(entry.key.device["name"]).replace(" ", "_")
        last = [(name, values.pop(name)) for name in _LAST if name in values]
        parts = (*values.items(), (_DEVICE, device), *last)
        dtypes = "-".join(dict.fromkeys(dtype for _, dtype in entry.key.call["dtypes"]))
        place = (_folder(entry.key, kind), parts, entry.key.kernel_name, dtypes)
        places.setdefault(place, {})[int(size)] = entry  # of two toolchains, the later choice
    found: dict[str, Table] = {}
    for (folder, parts, kernel, dtypes), rows in places.items():
        if len({other[3] for other in places if other[:2] == (folder, parts)}) > 1:
            parts = (*parts, ("dtype", dtypes))
        version = {str(entry.key.toolchain["triton"]) for entry in rows.values()}
        extra = {"triton_version": max(version)} if kind is Kind.VLLM else {}
        configs = {size: table_config(rows[size].choice) for size in sorted(rows)}
        table = Table(parts, configs, extra)
        path = f"{folder}{table.name}"
        if found.setdefault(path, table) is not table:
            raise PackError(f"choices of {kernel} and another kernel map to {path}: use --kernel")
    return found


def table_config(choice: ChoiceRecord) -> dict[str, Any]:
    """Return a choice's config as a row: without hooks and rarely set options."""
    config = {name: value for name, value in choice.config.items() if name != "pre_hook"}
    few = OPTION_DEFAULTS.keys() - shown_options(config)
    return {name: readable(value) for name, value in config.items() if name not in few}


def _folder(key: KeyRecord, kind: Kind) -> str:
    """Return SGLang's folder for a version of Triton."""
    version = str(key.toolchain["triton"]).replace(".", "_")
    return f"triton_{version}/" if kind is Kind.SGLANG else ""
