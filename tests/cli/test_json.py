"""The JSON of commands is of the types whose schema is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.json_types import OUTPUTS, schema

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "output.schema.json"


def check(name: str, data: Any) -> None:
    """Raise unless data is of the type, and has no other field."""
    msgspec.convert(data, OUTPUTS[name], strict=True)


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
