"""The site that `make docs` builds from these pages, without network.

The pages are written to be read in the repository too. So links out of `docs/`, and the `<picture>`
elements with a light and a dark variant, are rewritten here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import tomllib
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
author = _PROJECT["authors"][0]["name"]
release = _PROJECT["version"]
copyright = author  # noqa: A001

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["examples", "figures", "_build"]
highlight_language = "text"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]

autodoc_member_order = "bysource"
maximum_signature_line_length = 80

pygments_style = "default"
pygments_dark_style = "monokai"

#: Quotes and dashes stay as written: `--budget` in a heading or a table is an option to copy.
smartquotes = False

html_theme = "furo"
html_title = "safetune"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_logo = "_static/logo.svg"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0f766e", "color-brand-content": "#0f766e"},
    "dark_css_variables": {"color-brand-primary": "#5eead4", "color-brand-content": "#5eead4"},
}
copybutton_exclude = ".linenos, .gp, .go"

#: Files beside `docs/` that have a page of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
REPOSITORY = _PROJECT["urls"]["Repository"]

#: A link to an example, which the site shows on a page of code.
_EXAMPLE = re.compile(r"(?<=\]\()examples/([\w.]+)(?=\))")
_LINK = re.compile(r"(?<=\]\()((?:\.\./)+)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
#: Code in a docstring, as Markdown has it, and a letter behind it.
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)(\w?)")
_PICTURE = re.compile(r'<picture>.*?<img src="(.*?)\.svg" alt="(.*?)".*?</picture>', re.DOTALL)


def rewrite(text: str, page: Path) -> str:
    """Return a page as the site has it."""

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[1] / match[2]).resolve()
        if not target.is_relative_to(ROOT) or target.is_relative_to(ROOT / "docs"):
            return match[0]
        name = target.relative_to(ROOT).as_posix()
        if name in PAGES:
            return os.path.relpath(ROOT / "docs" / PAGES[name], page.parent) + match[3]
        return f"{REPOSITORY}/blob/main/{name}{match[3]}"

    text = _PICTURE.sub(r"![\2](\1.svg){.only-light}" "\n" r"![\2](\1-dark.svg){.only-dark}", text)
    text = _EXAMPLE.sub(lambda match: f"reference/examples.md#{match[1].replace('.', '')}", text)
    return _LINK.sub(link, text)


def _on_read(app: Sphinx, name: str, content: list[str]) -> None:
    content[0] = rewrite(content[0], Path(app.env.doc2path(name)))


def _on_include(app: Sphinx, file: Path, parent: str, content: list[str]) -> None:
    """Files beside `docs/` are read as they would be from there."""
    inside = re.sub(r"(\]\(|src=\")docs/", r"\1", content[0])
    outside = re.sub(
        r"(?<=\]\()(?!\w+:|#)([^)#\s]+)",
        lambda match: match[0] if (ROOT / "docs" / match[0]).exists() else f"../{match[0]}",
        inside,
    )
    content[0] = rewrite(outside, Path(app.env.doc2path(parent)))


def _on_docstring(app: Sphinx, what: str, name: str, thing: object, *rest: Any) -> None:
    """Write code as reStructuredText has it."""
    lines: list[str] = rest[-1]
    lines[:] = [_CODE.sub(lambda found: rf"``{found[1]}``\ {found[2]}", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Rewrite pages and docstrings as they are read."""
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("source-read", _on_read)
    app.connect("include-read", _on_include)
