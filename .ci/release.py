"""Make a release: `make release VERSION=0.2.0`, in a clean checkout.

Sets the version in pyproject.toml and CITATION.cff, dates the changes in CHANGELOG.md, builds wheel
and sdist into dist/, commits and tags. If the build fails, the files are as before. Nothing is
published: the last line that it prints is the command for that.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGED = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")

#: Where `twine upload` goes: fill in the name of a repository in ~/.pypirc.
REPOSITORY = "REPOSITORY"


def edit(folder: Path, version: str, day: str) -> None:
    """Write the version, and its day, into the files of a checkout."""
    lines = {
        "pyproject.toml": (r'^version = ".+"$', f'version = "{version}"'),
        "CITATION.cff": (r"^version: .+$", f"version: {version}"),
        "CHANGELOG.md": (r"^## \[Unreleased\]$", f"## [Unreleased]\n\n## [{version}] - {day}"),
    }
    for name, (pattern, line) in lines.items():
        text = (folder / name).read_text(encoding="utf-8")
        text, count = re.subn(pattern, line, text, count=1, flags=re.MULTILINE)
        if not count:
            sys.exit(f"{name} has no line {pattern}")
        (folder / name).write_text(text, encoding="utf-8")


def git(*arguments: str) -> str:
    """Run git in the checkout; return its output."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(version: str = "", *options: str) -> None:
    """Release `version`; `options` go to `python -m build`."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        sys.exit("which version? make release VERSION=0.2.0")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("## [Unreleased]")[2]
    if not changes.partition("\n## ")[0].strip():
        sys.exit("CHANGELOG.md has nothing below [Unreleased]: say what is new")
    if changed := git("status", "--porcelain"):
        sys.exit(f"commit or stash your changes first:\n{changed}")
    out = ROOT / "dist" / version
    try:
        edit(ROOT, version, datetime.date.today().isoformat())
        build = [sys.executable, "-m", "build", *options, "--outdir", str(out), str(ROOT)]
        subprocess.run(build, check=True)
    except BaseException:
        git("checkout", "--", *CHANGED)
        raise
    git("commit", "-am", f"Release {version}")
    git("tag", "-a", f"v{version}", "-m", f"safetune {version}")
    print("built", *sorted(file.name for file in out.iterdir()))
    print(f"publish: git push --follow-tags && twine upload --repository {REPOSITORY} {out}/*")


if __name__ == "__main__":
    main(*sys.argv[1:])
