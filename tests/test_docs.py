"""What the documentation says is what is there, and what it shows is run.

README.md and every page under docs/: `sh` blocks run in bash and `python` blocks in Python, except
lines that need something a test does not have (`ELSEWHERE`).
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune import settings
from safetune.settings import MissPolicy, Mode, PhantomPolicy, Settings

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

ROOT = Path(__file__).resolve().parents[1]

#: The pages whose blocks are run.
PAGES = sorted((ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))

#: Lines of `sh` blocks that are not run here, with who runs them.
ELSEWHERE = {
    r"git clone \S+( \S+)?": "a user with a checkout",
    r"cd [\w.-]+": "goes with git clone",
    r"(python3? -m )?pip install .*": "make env; tests/test_packaging.py installs offline",
    r"python3? -m venv \S+": "make env",
    r"make( [a-z-]+)?( \w+=('[^']*'|\S+))*": "CI: .ci/run; those that need a GPU, by hand",
    r"bash \.ci/run": "CI",
    r"(bash|python3?) benchmarks/\S+.*": "by hand, on a GPU",
}

#: Commands that take long, and what the quick suite runs in their place. All of the shipped
#: kernels' workloads are tuned by SAFETUNE_TEST_FULL=1, two of them by `make demo` too.
SHORTER = {
    "safetune tune safetune.kernels.layer_norm": (
        "safetune tune safetune.kernels.layer_norm --shape=layer-33x50"
    ),
}

#: Pages whose commands take half a minute or more, and are those of other pages and tests in part.
LONG = ("cli", "packs", "cluster", "search", "migrating")

#: The pages whose Python warns on purpose. Elsewhere an example that only warns is a broken one.
WARNS = {"getting_started.md": "its key has a name that nothing reads"}
ERRORS = (
    "import warnings, safetune; warnings.simplefilter('error', UserWarning); "
    "warnings.simplefilter('error', safetune.SafetuneWarning)"
)

SH_TIMEOUT_S = 120.0

#: On every machine the same: the interpreter, and no GPU in sight.
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line after the fence, and its text."""

    language: str
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    language, start, inside = "", 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            inside.append(line)
        elif start:
            yield Block(language, start, "\n".join(inside) + "\n")
            start = 0
        else:
            language, start, inside = line[3:].strip(), number + 1, []
    assert not start, f"{page}:{start - 1}: this block has no end"


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, command) of the `sh` blocks, continued lines joined, comments left out."""
    for block in blocks(page):
        if block.language == "sh":
            lines = block.text.replace("\\\n", "").splitlines()
            for number, line in enumerate(lines, block.line):
                command = re.sub(r"(^|\s)#.*", "", line).strip()
                if command:
                    yield number, command


def elsewhere(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in ELSEWHERE)


def place(page: Path, line: int) -> str:
    return f"{page.relative_to(ROOT)}:{line}"


def sh_cases() -> Iterator[Any]:
    """Each page with commands, with the short ones; marked `full`: as the page has them."""
    for page in with_blocks("sh"):
        marks = [pytest.mark.full] if page.stem in LONG else []
        yield pytest.param(page, True, id=page.stem, marks=marks)
        if any(command in SHORTER for _, command in commands(page)):
            yield pytest.param(page, False, id=f"{page.stem} whole", marks=pytest.mark.full)


class TestBlocks:
    @pytest.mark.parametrize("page", with_blocks("python"), ids=lambda page: page.stem)
    def test_python(self, page: Path, tmp_path: Path, fresh_process: FreshProcess) -> None:
        """All blocks of a page in one file and process, at the line numbers of the page."""
        # As jax.py it would be what its own `import jax` finds.
        script = write_python(page, tmp_path).rename(tmp_path / "page.py")
        if page.name not in WARNS:  # on the line of the page's title
            script.write_text(f"{ERRORS}{script.read_text(encoding='utf-8')}", encoding="utf-8")

        result = fresh_process(script, env=INTERPRETER, warm=True, ends=None)

        assert result.returncode == 0, f"lines are those of {page.name}\n{result.stderr}"

    @pytest.mark.parametrize(("page", "shorter"), list(sh_cases()))
    def test_sh(self, page: Path, shorter: bool, tmp_path: Path, cache_dir: Path) -> None:
        """All commands of a page in one store, from a folder with docs/ and the page's Python.

        The Python blocks of `page.md` are there as `page.py`.
        """
        here = [command for _, command in commands(page) if not elsewhere(command)]
        if not here:
            pytest.skip("CI runs all of it")
        if shorter:
            here = [SHORTER.get(command, command) for command in here]
        (tmp_path / "docs").symlink_to(ROOT / "docs")
        write_python(page, tmp_path)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(["set -x", *here])],
            cwd=tmp_path,
            env={**os.environ, **INTERPRETER, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SH_TIMEOUT_S,
            check=False,
        )

        assert result.returncode == 0, f"{page.name}, the last of these:\n{result.stderr}"

    def test_the_docs_have_every_command_that_is_shortened(self) -> None:
        assert set(SHORTER) <= {command for page in PAGES for _, command in commands(page)}

    def test_make_targets_and_files_that_run_elsewhere_are_there(self) -> None:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        missing = []
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
            for line, command in commands(page):
                if not elsewhere(command):
                    continue
                target = re.match(r"make ([a-z-]+)(?!\S)", command)
                if target and not re.search(rf"^{target[1]}:", makefile, re.MULTILINE):
                    missing.append(f"{place(page, line)}: make {target[1]}")
                for word in command.split():
                    if re.match(r"(benchmarks|docs|\.ci)/", word) and not (ROOT / word).exists():
                        missing.append(f"{place(page, line)}: {word}")
        assert not missing, "\n".join(missing)

    def test_only_commands_that_need_another_machine_are_skipped(self) -> None:
        """A pattern that is too wide would let every example rot."""
        skipped = (
            *("make demo", "make test PYTEST_ARGS='-k store -x'", "pip install safetune"),
            "git clone https://example.com/safetune",
        )
        runs = (
            *("safetune list", "safetune tune docs/examples/faulty.py"),
            *("make demo && rm -rf /", "python docs/examples/demo.py"),
        )
        assert [command for command in (*skipped, *runs) if elsewhere(command)] == [*skipped]


def write_python(page: Path, folder: Path) -> Path:
    """Write the Python of a page to a file there, every line at its line number in the page."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in blocks(page):
        if block.language == "python":
            new = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(new)] = new
    script = folder / f"{page.stem}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return script


class TestLinks:
    TEXTS = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "cache").glob("*.md")})

    def test_they_lead_somewhere(self) -> None:
        dead = []
        for page in self.TEXTS:
            text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
            for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
                if re.match(r"[a-z]+:", target):
                    continue
                name, _, anchor = target.partition("#")
                file = (page.parent / name).resolve() if name else page
                if not file.exists():
                    dead.append(f"{page.relative_to(ROOT)}: {target}: no such file")
                elif anchor and anchor not in anchors(file):
                    dead.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
        assert not dead, "\n".join(dead)

    def test_every_page_can_be_reached(self) -> None:
        """From README.md, by links alone."""
        seen, waiting = set(), [ROOT / "README.md"]
        while waiting:
            page = waiting.pop()
            seen.add(page)
            for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
                file = (page.parent / target).resolve()
                if file.exists() and file not in seen:
                    waiting.append(file)
        assert not set(PAGES) - seen


ARCHITECTURE = [
    page for page in PAGES if page.name == "architecture.md" or page.parent.name == "contracts"
]


def test_the_architecture_names_files_that_exist() -> None:
    """A page that names a moved file sends its reader on a search."""
    missing = [
        f"{page.name}: {name}"
        for page in ARCHITECTURE
        for name in re.findall(
            r"`([\w.]+(?:/[\w.]+)*(?:\.py|/))`", page.read_text(encoding="utf-8")
        )
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "safetune"))
    ]
    assert not missing, "\n".join(missing)


def test_the_architecture_lists_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {folder.parent.name for folder in (ROOT / "safetune").glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
    assert listed == folders | {"kernels"}


def test_the_architecture_shows_the_layers_that_are_checked() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = text.partition("## Who may import whom")[2].split("```")[1]
    shown = [re.sub(r" *\(.*\)$", "", line).split(", ") for line in picture.strip().splitlines()]
    source = (ROOT / "tests" / "test_layering.py").read_text(encoding="utf-8")
    (layers,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LAYERS" and node.value
    )
    assert [set(line) for line in shown[::-1]] == [set(layer) for layer in layers]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_decorator_has_one_spelling() -> None:
    """`from safetune import safetune` with `@safetune`, or `import safetune` with `.autotune`."""
    for page in PAGES:
        assert "@safetune.safetune" not in page.read_text(encoding="utf-8"), page


class TestTroubleshooting:
    def test_it_quotes_messages_as_they_are(self) -> None:
        """A message that is reworded is not found by its old text."""
        text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
        own = text.partition("## Messages of safetune")[2].partition("\n## ")[0]
        quoted = re.findall(r"^### `(.+)`$", own, re.MULTILINE)
        assert quoted
        texts = "\n".join(said for file in (ROOT / "safetune").rglob("*.py") for said in says(file))
        gone = [
            message
            for message in quoted
            if not re.search(".{0,40}".join(map(re.escape, message.split("…"))), texts)
        ]
        assert not gone


def says(file: Path) -> Iterator[str]:
    """The texts of a module, with `…` for each value in them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_faults_are_those_that_are_tested() -> None:
    from tests.faults.rows import ROWS

    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    text = page.partition("\n## Faults\n")[2]
    lines = re.findall(r"^\| (.+) \| (.+) \|$", text, re.MULTILINE)
    shown = [
        (what, ends.replace("`", ""))
        for ends, faults in lines
        if ends not in ("what happens", "---")
        for what in faults.split("; ")
    ]
    assert sorted(shown) == sorted((row.what, row.expected.replace("`", "")) for row in ROWS)


class TestCommandLine:
    PAGE = ROOT / "docs" / "cli.md"

    def test_every_command_has_a_section(self) -> None:
        from safetune.cli import main

        text = self.PAGE.read_text(encoding="utf-8")
        assert set(re.findall(r"^## `safetune (\w+)`$", text, re.MULTILINE)) == set(main.commands)

    def test_every_option_has_help(self) -> None:
        """The page of all options, docs/reference/commands.md, is made of it."""
        from safetune.cli import main

        for name, command in main.commands.items():
            assert command.help, name
            for parameter in command.params:
                if parameter.param_type_name == "option" and not parameter.hidden:
                    assert getattr(parameter, "help", None), (name, parameter.name)

    def test_every_verdict_is_explained(self) -> None:
        """But for those that nothing gives yet."""
        text = self.PAGE.read_text(encoding="utf-8")
        source = "".join(
            path.read_text(encoding="utf-8") for path in (ROOT / "safetune").rglob("*.py")
        )
        given = {name.lower() for name in re.findall(r"Verdict\.([A-Z_]+)", source)}
        rows = re.findall(r"^\| (`.+?`) \| \S", text, re.MULTILINE)
        explained = {name.split("(")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}
        assert given <= explained


class TestConfiguration:
    PAGE = ROOT / "docs" / "configuration.md"

    @pytest.fixture
    def rows(self) -> dict[str, list[str]]:
        """Values and default of each variable with a heading, and the rows of all tables."""
        text = self.PAGE.read_text(encoding="utf-8")
        headed = r"^### `(\w+)`\n\nValues: (.+)\. Default: (.+)\.\n\n(?=\S)"
        cells = {
            name: [values, default] for name, values, default in re.findall(headed, text, re.M)
        }
        for line in text.splitlines():
            if line.startswith("| `"):
                first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
                cells[first.strip("`")] = rest
        return cells

    def test_every_variable_that_is_read_and_no_other(self, rows: dict[str, list[str]]) -> None:
        read = {name for name in settings.VARIABLES if "_TEST_" not in name}
        variables = {name for name in rows if name.startswith("SAFETUNE_") or "WORLD_SIZE" in name}
        assert variables == read | {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}

    @pytest.mark.parametrize(
        ("variable", "kind", "field"),
        [
            ("SAFETUNE_MODE", Mode, "mode"),
            ("SAFETUNE_PHANTOM", PhantomPolicy, "phantom"),
        ],
    )
    def test_values_and_defaults(
        self, rows: dict[str, list[str]], variable: str, kind: Any, field: str
    ) -> None:
        values, default = rows[variable]

        assert values == ", ".join(f"`{member.value}`" for member in kind)
        assert default == f"`{getattr(Settings.current(), field).value}`"

    def test_values_of_a_variable_without_a_default(self, rows: dict[str, list[str]]) -> None:
        values, default = rows["SAFETUNE_ON_MISS"]

        assert values == ", ".join(f"`{member.value}`" for member in MissPolicy)
        assert default == "none"
        assert Settings.current().on_miss is None

    def test_the_default_directory(
        self, rows: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if sys.platform != "linux":
            pytest.skip("the table gives Linux's")
        monkeypatch.delenv("SAFETUNE_CACHE_DIR")
        monkeypatch.setenv("HOME", str(tmp_path))
        with_xdg, without = re.findall(r"`([^`]+)`", rows["SAFETUNE_CACHE_DIR"][1])

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert str(Settings.current().cache_dir) == os.path.expandvars(with_xdg)
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert Settings.current().cache_dir == Path(without).expanduser()

    def test_triton_knows_its_variables(self, rows: dict[str, list[str]]) -> None:
        from triton import knobs

        source = inspect.getsource(knobs)
        named = [name for name in rows if name.startswith("TRITON_")]
        assert len(named) == 3
        assert [name for name in named if f'"{name}"' not in source] == []

    def test_every_parameter_of_the_decorator(self, rows: dict[str, list[str]]) -> None:
        from safetune import safetune

        parameters = inspect.signature(safetune).parameters
        documented = {  # the rows with a default and a meaning
            name: rest[0].strip("`")
            for name, rest in rows.items()
            if len(rest) == 2 and name.islower()
        }
        expected = {
            name: repr(parameter.default).replace("'", '"')
            for name, parameter in parameters.items()
        }
        assert documented == expected
