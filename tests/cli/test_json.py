"""The published form of what commands print, to which `safetune.json` holds every test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.conftest import ROOT, check_json


def test_no_field_is_left_out_of_it(safetune: Any, tuned: Any) -> None:
    check_json(tuned, "tune")
    (listed, *_) = safetune.json("list")
    with pytest.raises(jsonschema.ValidationError, match="'new' was unexpected"):
        check_json([{**listed, "new": 1}], "list")
    del listed["kernel"]
    with pytest.raises(jsonschema.ValidationError, match="'kernel' is a required property"):
        check_json([listed], "list")


def test_what_few_tests_print(safetune: Any, tuned: Any, targets: Path, tmp_path: Path) -> None:
    assert safetune.json("show", "no_such", code=2)["error"]["type"] == "TargetError"
    assert safetune.json("export", "--failures", tmp_path / "failures.json")["written"]
    assert safetune.json("clear", "--failures", "add_one")["failures"] == 0
    example = ROOT / "docs" / "examples" / "unmodified.py"
    found = safetune.json("lint", example, code=1)
    assert [finding["rule"] for finding in found] == ["phantom"]


def test_every_command_that_has_json_is_in_it() -> None:
    from safetune.cli import main

    schema = json.loads((ROOT / "docs/output.schema.json").read_text(encoding="utf-8"))
    with_json = {
        name
        for name, command in main.commands.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert {name.partition(" ")[0] for name in schema["properties"]} == with_json | {"error"}
