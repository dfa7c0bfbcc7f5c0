"""Findings as text, as JSON, as GitHub's annotations, and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetune.lint.rules import RULES, Finding

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding: `file:line:column: rule: kernel: message`."""
    return "\n".join(
        f"{f.path}:{f.line}:{f.column}: {f.rule}: {f.kernel}: {f.message}" for f in findings
    )


def as_json(findings: Sequence[Finding]) -> str:
    """Return a list of objects with the fields of a finding."""
    names = [each.name for each in fields(Finding) if each.name != "ignored_at"]
    return json.dumps([{name: getattr(f, name) for name in names} for f in findings], indent=2)


def as_github(findings: Sequence[Finding]) -> str:
    """Return a workflow command per finding, which GitHub shows beside the line."""
    return "\n".join(
        f"::warning file={_property(f.path)},line={f.line},col={f.column},"
        f"title={_property(f'safetune {f.rule}')}::{_escaped(f'{f.kernel}: {f.message}')}"
        for f in findings
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(findings: Sequence[Finding]) -> str:
    """Return a SARIF 2.1.0 log, for code scanning."""
    names = sorted(RULES)
    rules = [{"id": name, "shortDescription": {"text": RULES[name]}} for name in names]
    driver = {"name": "safetune", "version": version("safetune"), "rules": rules}
    results = [_result(finding, names.index(finding.rule)) for finding in findings]
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    path = Path(finding.path)
    uri = path.as_uri() if path.is_absolute() else path.as_posix()
    region = {"startLine": finding.line, "startColumn": finding.column}
    place = {"artifactLocation": {"uri": uri}, "region": region}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": "warning",
        "message": {"text": f"{finding.kernel}: {finding.message}"},
        "locations": [{"physicalLocation": place}],
    }


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
    "sarif": as_sarif,
}
