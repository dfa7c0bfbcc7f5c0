"""The wheel, the sdist and an editable install give the same packages, on any machine.

`kernels/` and `cache/` are top-level folders of the repository but packages inside `safetune` once
installed: their own names belong to other projects. Built from a copy of the sources and installed
without network, each in an environment that sees this one's torch and Triton but not its safetune.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]

#: Not sources: environments, caches, and what builds leave.
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")

#: Stands for a shipped config, so that the test holds before the first one is shipped too.
PROBE = {"probe": [1, 2.5, "x"]}

REPORT = """
import importlib, importlib.metadata, importlib.resources, importlib.util, json
modules = {}
for name in ("safetune", "safetune.cache", "safetune.kernels", "safetune.tuning", "safetune.store"):
    modules[name] = importlib.import_module(name).__file__
distribution = importlib.metadata.distribution("safetune")
cache = importlib.resources.files("safetune.cache")
from safetune.store.packs.packs import shipped
print(json.dumps({
    "modules": modules,
    "shipped": str(shipped()),
    "files": [str(file) for file in distribution.files],
    "licence": distribution.metadata.get_all("License-File"),
    "typed": (importlib.resources.files("safetune") / "py.typed").is_file(),
    "cache": {
        file.name: file.read_text(encoding="utf-8")
        for file in cache.iterdir()
        if file.name.endswith((".json", ".md"))
    },
    "top_level": {
        name: str(importlib.util.find_spec(name)) for name in ("kernels", "cache", "tests")
    },
}))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, for builds to write into, with one more file in cache/."""
    copy = tmp_path_factory.mktemp("sources") / "safetune"
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    (copy / "cache" / "probe.json").write_text(json.dumps(PROBE), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    _checked([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(sources)])
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(
    scope="module", params=["wheel", "sdist", pytest.param("editable", marks=pytest.mark.full)]
)
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    """(how, environment, REPORT) for safetune installed each way."""
    how: str = request.param
    if how == "editable":
        what = ["--editable", str(request.getfixturevalue("sources"))]
    else:
        what = [str(request.getfixturevalue("built")[how])]
    directory = tmp_path_factory.mktemp(how)
    python = _environment_beside(directory / "venv")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    _checked([str(python), "-m", "pip", "install", "--quiet", *options, *what])
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir()
    report = json.loads(_checked([str(python), "-c", REPORT], cwd=elsewhere).stdout)
    return how, directory / "venv", report


def _environment_beside(directory: Path) -> Path:
    """Make a virtual environment that sees this one's packages; return its Python.

    The .pth file adds folders to the path without running the .pth files in them, and it is by one
    of those that an editable safetune of this environment would come in.
    """
    _checked([sys.executable, "-m", "venv", "--without-pip", str(directory)])
    (site_packages,) = directory.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "beside.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return directory / "bin" / "python"


def _checked(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_every_package_comes_from_the_install(
    installed: tuple[str, Path, dict[str, Any]], sources: Path
) -> None:
    how, environment, report = installed
    home = sources if how == "editable" else environment
    for name, file in report["modules"].items():
        assert Path(file).is_relative_to(home), f"{name} comes from {file}"


def test_the_only_top_level_names_are_safetune_and_the_plugin_of_pytest(
    installed: tuple[str, Path, dict[str, Any]],
) -> None:
    """A top-level `kernels` would overwrite Hugging Face's files in the same environment."""
    how, _, report = installed
    first_parts = {Path(file).parts[0] for file in report["files"]}
    expected = {"safetune", "safetune_pytest"} if how != "editable" else set()
    names = {
        part
        for part in first_parts
        if not part.startswith("__editable__") and part not in ("..", "__pycache__")
        if not part.endswith(".dist-info")
    }
    assert names == expected
    for spec in report["top_level"].values():
        assert "/safetune" not in spec


def test_the_examples_can_be_copied_from_any_install(
    installed: tuple[str, Path, dict[str, Any]],
) -> None:
    how, environment, _ = installed
    copy = environment.parent / f"examples of {how}"
    command = [f"{environment}/bin/python", "-m", "safetune", "demo", "--copy", str(copy)]
    _checked(command, cwd=environment.parent)
    wanted = {file.name for file in (ROOT / "docs" / "examples").iterdir() if file.is_file()}
    assert {file.name for file in copy.iterdir()} == wanted


def test_pytest_finds_the_fixtures_and_imports_nothing_of_safetune(
    installed: tuple[str, Path, dict[str, Any]],
) -> None:
    _, environment, _ = installed
    test = environment.parent / "test_project.py"
    test.write_text(
        "import sys\n"
        "def test_without(): assert not {'safetune', 'triton', 'torch'} & set(sys.modules)\n"
        "def test_with(safetune_off, safetune_store): assert not safetune_store.exists()\n"
    )
    options = ["-q", "-p", "no:cacheprovider", str(test)]
    assert "2 passed" in _checked([f"{environment}/bin/python", "-m", "pytest", *options]).stdout


def test_typing_marker_and_licence_are_there(
    installed: tuple[str, Path, dict[str, Any]],
) -> None:
    _, environment, report = installed
    assert report["typed"]
    assert report["licence"] == ["LICENSE"]
    (licence,) = [file for file in report["files"] if file.endswith("/LICENSE")]
    (site_packages,) = environment.glob("lib/python*/site-packages")
    assert (site_packages / licence).read_text() == (ROOT / "LICENSE").read_text()


def test_shipped_configs_can_be_read(
    installed: tuple[str, Path, dict[str, Any]], sources: Path
) -> None:
    _, _, report = installed
    expected = {
        path.name: path.read_text(encoding="utf-8")
        for path in (sources / "cache").iterdir()
        if path.suffix in (".json", ".md")
    }
    assert report["cache"] == expected
    assert json.loads(report["cache"]["probe.json"]) == PROBE
    assert Path(report["shipped"]) == Path(report["modules"]["safetune.cache"]).parent


def test_the_command_is_installed(installed: tuple[str, Path, dict[str, Any]]) -> None:
    _, environment, _ = installed
    help_text = _checked([str(environment / "bin" / "safetune"), "--help"], cwd=environment).stdout
    assert "tune" in help_text


def test_archives_hold_what_they_should(built: dict[str, Path], sources: Path) -> None:
    """The sdist is enough to build from; the wheel holds no tests, benchmarks or docs."""
    with tarfile.open(built["sdist"]) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "cache/probe.json"} <= in_sdist
    assert {"CHANGELOG.md", "docs/index.md", "docs/conf.py", "tests/conftest.py"} <= in_sdist
    assert {f"kernels/{path.name}" for path in (sources / "kernels").glob("*.py")} <= in_sdist
    with zipfile.ZipFile(built["wheel"]) as archive:
        in_wheel = set(archive.namelist())
    data = {"safetune/py.typed", "safetune/both/byte_kernels.ptx", "safetune/cache/probe.json"}
    assert data <= in_wheel
    for folder in ("safetune", "kernels", "cache"):
        package = "" if folder == "safetune" else "safetune/"
        for path in (sources / folder).rglob("*.py"):
            name = f"{package}{path.relative_to(sources)}"
            assert name.replace("safetune/pytest_plugin", "safetune_pytest") in in_wheel
    own = ("safetune/", "safetune-", "safetune_pytest/")
    assert all(name.startswith(own) for name in in_wheel)


def test_links_of_the_readme_work_where_the_package_is_shown(built: dict[str, Path]) -> None:
    """A package index shows README without the files beside it."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    described = text.partition("\n\n")[2]
    targets = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)\"", described)
    links = [link or image for link, image in targets]
    assert len(links) > 20
    assert not [link for link in links if not link.startswith("https://")]
    assert "Description-Content-Type: text/markdown" in text
    assert "Requires-Dist: triton<3.10" in text


def test_the_citation_and_the_addresses_are_those_of_the_package() -> None:
    """One line of pyproject.toml has the repository's address; these files cannot read it."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (address,) = re.findall(r'^Repository = "(.+)"$', project, re.MULTILINE)
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert f"\nversion: {version}\n" in citation
    assert f"\nrepository-code: {address}\n" in citation
    forms = (ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8")
    for url in re.findall(r"https://\S+?(?=[\"\s])", project + forms):
        assert url.startswith(address), url


@pytest.fixture
def small_checkout(tmp_path: Path) -> Path:
    """A committed project with the files that a release changes, and the release's program."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release.py", tmp_path / ".ci")
    for name in ("CITATION.cff", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A thing.\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "small"\nversion = "0.1.0"\n')
    for command in (
        "init -q",
        "config user.name A",
        "config user.email a@b",
        "add -A",
        "commit -qm 1",
    ):
        _checked(["git", *command.split()], cwd=tmp_path)
    return tmp_path


class TestRelease:
    COMMAND = (sys.executable, ".ci/release.py", "0.2.0", "--no-isolation")

    def test_one_command_builds_dates_commits_and_tags(self, small_checkout: Path) -> None:
        said = _checked([*self.COMMAND], cwd=small_checkout).stdout

        built = {path.name for path in (small_checkout / "dist" / "0.2.0").iterdir()}
        assert built == {"small-0.2.0-py3-none-any.whl", "small-0.2.0.tar.gz"}
        assert "\nversion: 0.2.0\n" in (small_checkout / "CITATION.cff").read_text()
        changes = (small_checkout / "CHANGELOG.md").read_text()
        assert re.search(
            r"\[Unreleased\]\n\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n\n- A thing", changes
        )
        assert _checked(["git", "describe"], cwd=small_checkout).stdout == "v0.2.0\n"
        assert _checked(["git", "status", "--porcelain"], cwd=small_checkout).stdout == ""
        assert "twine upload" in said.splitlines()[-1]

    def test_a_build_that_fails_changes_nothing(self, small_checkout: Path) -> None:
        (small_checkout / "setup.py").write_text("raise SystemExit(3)\n")
        _checked(["git", "add", "-A"], cwd=small_checkout)
        _checked(["git", "commit", "-qm", "2"], cwd=small_checkout)

        done = subprocess.run(self.COMMAND, cwd=small_checkout, capture_output=True, check=False)

        assert done.returncode != 0
        assert _checked(["git", "status", "--porcelain"], cwd=small_checkout).stdout == ""
        assert _checked(["git", "tag"], cwd=small_checkout).stdout == ""


def test_every_extra_that_is_named_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^(\w+) = \[", project.partition("[project.optional-dep")[2], re.M))
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "safetune").rglob("*.py")]
    for path in [*texts, ROOT / "README.md", ROOT / "pyproject.toml"]:
        named = re.findall(r"safetune\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        assert {name for names in named for name in names.split(",")} <= extras, path


def test_the_hook_for_other_repositories_runs_a_command() -> None:
    from safetune.cli import main

    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^  entry: safetune (\w+)$", hooks, re.MULTILINE)
    paths = main.commands[entry].params[0]
    assert (paths.param_type_name, paths.nargs) == ("argument", -1)  # pre-commit passes files
