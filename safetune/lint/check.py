"""Searches a tree of files and returns the findings that no comment suppresses."""

from __future__ import annotations

import contextlib
import gc
import operator
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from platform import python_version

from safetune.both import backend
from safetune.errors import InvalidSetting
from safetune.keys.text_facts import without_notes
from safetune.lint.names import File, Files, file_at
from safetune.lint.rules import RULES, Finding, findings_of
from safetune.lint.tuners import MENTION, Tuner, tuners_in
from safetune.messages import logger

#: `# safetune: ignore`, and with the rules that are ignored.
_IGNORE = re.compile(r"#\s*safetune:\s*ignore(?:\[([^\]]*)\])?")


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files under some paths; raises `InvalidSetting` for a missing one."""
    for path in paths:
        if path.is_dir():
            files = (p for p in path.rglob("*.py") if p.is_file())
            yield from sorted(p for p in files if "/." not in f"/{p.relative_to(path).as_posix()}")
        elif path.is_file():
            yield path
        else:
            raise InvalidSetting(f"{path} does not exist; give files or folders")


def check(paths: Sequence[Path], rules: Collection[str] = RULES) -> tuple[list[Finding], int]:
    """Return the findings of rules under some paths, by place, and the number of tuners."""
    findings: list[Finding] = []
    tuners = 0
    for path, tuner in tuners_under(paths):
        tuners += 1
        with _left_out(f"{path}:{tuner.function.lineno}: {tuner.name}"):
            found = [each for each in findings_of(tuner, str(path)) if each.rule in rules]
            findings += [each for each in found if not _is_ignored(each, tuner.file)]
    place = operator.attrgetter("path", "line", "column", "rule", "message")
    return sorted(set(findings), key=place), tuners


def tuners_under(paths: Sequence[Path]) -> Iterator[tuple[Path, Tuner]]:
    """Yield the tuners in these files and folders, each with its file."""
    known: Files = {}
    with warnings.catch_warnings(), backend.no_collection(), without_notes():
        warnings.simplefilter("ignore")  # of the compiler, about the text of others
        for path in python_files(paths):
            tuners: list[Tuner] = []
            with _left_out(path):
                if _mentions(path):
                    file = file_at(path.resolve(), known)
                    if file is None:
                        raise SyntaxError(f"Python {python_version()} cannot read it")
                    tuners += tuners_in(file)
            yield from ((path, tuner) for tuner in tuners)
        # The trees count as old, so the collector does not walk them when it resumes.
        gc.freeze()
        gc.unfreeze()


@contextlib.contextmanager
def _left_out(what: object) -> Iterator[None]:
    """Go on without a file or kernel whose text nothing here was made for."""
    try:
        yield
    except Exception as error:
        logger.warning("skipping %s: %s", what, str(error) or type(error).__name__)


def _mentions(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    return "jit" in text and MENTION.search(text) is not None


def _is_ignored(finding: Finding, file: File) -> bool:
    for line in finding.ignored_at:
        match = _IGNORE.search(file.lines[line - 1])
        if match and (match[1] is None or finding.rule in re.split(r"[\s,]+", match[1].strip())):
            return True
    return False
