"""Reads every table of configs below some folders and writes it again: what is the same?

    python benchmarks/foreign_tables.py FOLDER...

A folder is where vLLM, SGLang or a Hugging Face kernel is unpacked or installed. `same` counts
files with the same name and the same rows in their order, `bytes` those with the same text, and
`refused` those that are named like a table and have something else in them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetune.errors import PackError
from safetune.store.packs.tables import read_table


def main() -> int:
    """Print a line for each folder; 1 if a table is not the same."""
    different = 0
    for folder in map(Path, sys.argv[1:]):
        files = sorted(folder.rglob("*device_name*.json"))
        same = identical = refused = 0
        for file in files:
            text = file.read_text(encoding="utf-8")
            try:
                table = read_table(file)
            except PackError as error:
                refused += 1
                print(error)
                continue
            rows = list(json.loads(text).items())
            same += table.name == file.name and list(json.loads(table.text()).items()) == rows
            identical += table.text() == text
        different += len(files) - refused - same
        print(f"{folder}: {len(files)} files, {same} same, {identical} bytes, {refused} refused")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
