"""Findings as text, as JSON, and as GitHub's annotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from safetune.lint.rules import Finding


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding: `file:line:column: rule: kernel: message`."""
    return "\n".join(
        f"{f.path}:{f.line}:{f.column}: {f.rule}: {f.kernel}: {f.message}" for f in findings
    )


def as_data(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as plain JSON data."""
    return [{n: value for n, value in vars(f).items() if n != "ignored_at"} for f in findings]


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


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "github": as_github,
}
