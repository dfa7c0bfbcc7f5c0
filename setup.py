"""The one thing that pyproject.toml cannot say: README with the absolute links that PyPI needs."""

import re
from pathlib import Path

import setuptools

HERE = Path(__file__).parent


def readme() -> str:
    """Return README.md with its links and images below the repository's address."""
    address = re.search(r'^Repository = "(.+)"$', (HERE / "pyproject.toml").read_text(), re.M)[1]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?<=\]\()(?![a-z]+:|#)", f"{address}/blob/main/", text)
    return re.sub(r'(src|srcset)="(?![a-z]+:)', rf'\1="{address}/raw/main/', text)


setuptools.setup(long_description=readme(), long_description_content_type="text/markdown")
