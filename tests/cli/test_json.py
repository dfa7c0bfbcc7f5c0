"""The JSON of commands is of the types whose schema is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.json_types import OUTPUTS, check, schema

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "output.schema.json"


def test_the_published_schema_is_that_of_the_types() -> None:
    """`python -m tests.cli.json_types > docs/output.schema.json` writes it."""
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == schema()


def test_what_commands_print(
    safetune: Any, tuned: Any, targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("tune", tuned)
    check("tune", json.loads(safetune("tune", targets / "faulty.py:hopeless", "--json").stdout))
    check("tune --dry-run", safetune.json("tune", targets / "add.py", "--dry-run"))
    listed = safetune.json("list")
    check("list", listed)
    assert listed[0]["call"] == {"values": {"N": 100}, "dtypes": {"x": "float32"}, "options": {}}
    assert listed[0]["created"].endswith("Z")
    check("show", safetune.json("show", "add_one"))
    check("doctor", json.loads(safetune("doctor", "--quick", "--json").stdout))
    check("error", json.loads(safetune("show", "no_such", "--json").stdout))
    block = listed[0]["config"]["BLOCK"]
    check("pin", safetune.json("pin", "add_one", f"BLOCK={block}"))
    safetune.json("export", tmp_path / "packs")
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    safetune.json("import", tmp_path / "packs")
    elsewhere = safetune.json("show", "add_one")
    check("show", elsewhere)
    assert elsewhere[0]["origin"] == "import"
    with pytest.raises(msgspec.ValidationError, match="unknown field `new`"):
        check("list", [{**listed[0], "new": 1}])


def test_what_coverage_prints(recorded: None, safetune: Any) -> None:
    check("coverage", safetune.json("coverage"))


def test_what_export_import_and_clear_print(
    safetune: Any, tuned: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = safetune.json("export", tmp_path / "packs")
    check("export", exported)
    assert sum(file["choices"] for file in exported["written"]) == len(safetune.json("list"))
    check("export --failures", safetune.json("export", "--failures", tmp_path / "failures.json"))
    check("import", safetune.json("import", tmp_path / "packs"))
    check("clear --failures", safetune.json("clear", "--failures", "add_one"))
    cleared = safetune.json("clear", "add_one", "--yes")
    check("clear", cleared)
    assert cleared["cleared"] > 0


def test_what_lint_prints(safetune: Any, tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "docs" / "examples" / "unmodified.py"
    found = json.loads(safetune("lint", example, "--json").stdout)
    check("lint", found)
    assert [finding["rule"] for finding in found] == ["phantom"]


def test_what_verify_prints(safetune: Any, targets: Path) -> None:
    """A launch with a finding, one without, one that is skipped and one that is not checked."""
    words = ("--shape", "small", "--dtype", "float16")
    found = json.loads(
        safetune("verify", f"{targets / 'overlapping.py'}:fill", *words, "--json").stdout
    )
    check("verify", found)
    assert found["launches"][1]["report"]["findings"]
    unchecked = json.loads(safetune("verify", targets / "unchecked.py", "--json").stdout)
    check("verify", unchecked)
    assert any(launch["report"] is None for launch in unchecked["launches"])
    skipped = safetune.json("verify", targets / "add.py", "--max-elements", 200)
    check("verify", skipped)
    assert skipped["skipped"]


def test_every_command_that_has_json_has_a_type() -> None:
    from safetune.cli import main

    with_json = {
        name
        for name, command in main.commands.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert {name.partition(" ")[0] for name in OUTPUTS} == with_json | {"error"}
