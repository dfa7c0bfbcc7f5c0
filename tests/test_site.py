"""`make docs`: the pages build into a site without a warning, and its reference is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines() if not line.startswith(":")]
    named = [re.sub(r".*<(.+)>", r"\1", line) for line in lines if line]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert sorted([*named, "index"]) == sorted(pages)


def test_every_public_name_is_in_the_reference() -> None:
    """The names of `safetune.errors` are taken from there as a whole."""
    import safetune
    from safetune import errors

    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\.\. \w+:: safetune\.(\w+)(?:\(.*\))?$", text, re.MULTILINE))
    others = {name for name in safetune.__all__ if not hasattr(errors, name)}
    assert others - {"__version__", "autotune"} - shown == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="Sphinx 9 needs Python 3.11")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(DOCS), str(out)],
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


class TestSite:
    def test_every_public_name_has_its_entry(self, site: Path) -> None:
        import safetune

        inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
        names = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
        missing = [
            name
            for name in safetune.__all__
            if name != "__version__"
            if not {f"safetune.{name}", f"safetune.errors.{name}"} & names
        ]
        assert not missing

    def test_every_command_and_option_has_its_entry(self, site: Path) -> None:
        from safetune.cli import main

        html = (site / "reference" / "commands.html").read_text(encoding="utf-8")
        for command in main.commands.values():
            name = command.name
            assert f'id="safetune-{name}"' in html
            for parameter in command.params:
                if parameter.param_type_name == "option" and not parameter.hidden:
                    assert f'id="cmdoption-safetune-{name}-{parameter.opts[0].lstrip("-")}"' in html

    def test_options_and_quotes_are_as_they_were_written(self, site: Path) -> None:
        """Smart quotes made an en dash of `--budget` outside of code, which no shell takes."""
        changed = [
            f"{page.relative_to(site)}: {text}"
            for page in site.rglob("*.html")
            for text in re.findall(r"[^<>]{0,20}[\u2013\u2014][a-z]\w*", page.read_text("utf-8"))
        ]
        assert not changed

    def test_examples_are_code_to_copy(self, site: Path) -> None:
        shown = (site / "reference" / "examples.html").read_text(encoding="utf-8")
        for example in (DOCS / "examples").glob("*.*"):
            assert f'id="{re.sub(r"[._]", "-", example.name)}"' in shown
            assert len(example.read_text(encoding="utf-8").splitlines()) > 5
        assert (
            'href="reference/examples.html#unmodified-py"' in (site / "migrating.html").read_text()
        )
        assert (site / "_static" / "copybutton.js").exists()

    def test_nothing_is_fetched(self, site: Path) -> None:
        """A page opened from the disk, without network, is complete."""
        for page in site.rglob("*.html"):
            text = page.read_text(encoding="utf-8")
            loaded = re.findall(r"<(?:script|img)[^>]* src=\"([^\"]+)\"", text)
            loaded += re.findall(r"<link[^>]* rel=\"stylesheet\"[^>]* href=\"([^\"]+)\"", text)
            assert loaded
            assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page

    def test_links_between_pages_lead_somewhere(self, site: Path) -> None:
        dead = []
        for page in site.rglob("*.html"):
            for target in re.findall(r"href=\"([^\"#:?]+)[#\"]", page.read_text(encoding="utf-8")):
                if not (page.parent / target).exists():
                    dead.append(f"{page.relative_to(site)}: {target}")
        assert not dead
