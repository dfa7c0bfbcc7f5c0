"""Which files and tuners are looked at, comments that ignore, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.lint.conftest import HEADER, Lint, rules

KERNEL = (
    HEADER
    + """
@triton.autotune(configs=CONFIGS, key=["N", "NB"])
@triton.jit
def kernel(x, N, NB, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), N)

def launch(x, N):
    kernel[(1,)](x, N, N // 64)
"""
)


@pytest.mark.parametrize(
    ("comment", "line", "left"),
    [
        ("# safetune: ignore[phantom]", "key=", 0),
        ("# safetune: ignore[flag, phantom]", "key=", 0),
        ("# safetune: ignore", "key=", 0),
        ("# safetune: ignore[phantom]", "def kernel", 0),
        ("# safetune: ignore[flag]", "key=", 1),
        ("# safetune: ignore[phantom]", "tl.store", 1),
    ],
)
def test_a_comment_leaves_out_findings_of_its_line_or_kernel(
    lint: Lint, comment: str, line: str, left: int
) -> None:
    lines = [f"{each}  {comment}" if line in each else each for each in KERNEL.splitlines()]
    assert rules(lint({"kernels.py": "\n".join(lines)})) == ["phantom"] * left


TERMS = " + ".join(["1"] * 2000)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("configs=CONFIGS", "configs=" + " + ".join(["CONFIGS"] * 2000)),
        ("CONFIGS =", f"SUM = {TERMS}\nCONFIGS ="),
        ("CONFIGS =", "CONFIGS = CONFIGS\nA = B\nB = A\nCONFIGS ="),
        (
            "configs=CONFIGS",
            "configs=[*CONFIGS, *(triton.Config({}, b) for b in range(1099511627776))]",
        ),
        ("configs=CONFIGS", "configs=[5, None, triton.Config(3, 4), *CONFIGS, *unknown]"),
        ("CONFIGS =", "from ........ import nothing\nfrom .kernels import *\nCONFIGS ="),
        ("@triton.jit", "@triton.jit(do_not_specialize=unknown)"),
        ("CONFIGS =", "k = triton.autotune(CONFIGS, ['N'])(triton.jit(lambda x: x))\nCONFIGS ="),
        ("CONFIGS =", "k = triton.autotune(configs=3, key=4)(triton.jit(None))\nCONFIGS ="),
    ],
)
def test_what_the_text_does_not_tell_does_not_hide_what_it_does(
    lint: Lint, old: str, new: str
) -> None:
    assert rules(lint({"kernels.py": KERNEL.replace(old, new)})) == ["phantom"]


@pytest.mark.parametrize(
    "odd",
    [
        KERNEL.replace("tl.store(x", f"N = {TERMS}\n    tl.store(x"),
        f"{KERNEL}\nX = a{'.b' * 5000}\n",
        f"{KERNEL}\nX = {'[' * 5000}{']' * 5000}\n",
        f"{KERNEL}\ndef (",
        f"{KERNEL}\0",
    ],
    ids=["a long sum", "a long chain", "brackets", "a syntax error", "a null byte"],
)
def test_an_odd_file_does_not_end_a_run_over_a_tree(lint: Lint, odd: str) -> None:
    assert "phantom" in rules(lint({"odd.py": odd, "kernels.py": KERNEL}))


SHARED = f"""{HEADER}
KEY = ["N", "NB"]

@triton.jit
def ignores(x, NB):
    return x

def halves():
    return [triton.Config({{"BLOCK": 64}}, num_warps=w) for w in (4, 4)]
"""


def test_configs_keys_and_callees_are_found_in_other_files_of_the_tree(lint: Lint) -> None:
    found = lint(
        {
            "package/__init__.py": "",
            "package/shared.py": SHARED,
            "package/ops/__init__.py": "",
            "package/ops/kernels.py": """
            import triton
            import triton.language as tl
            from .. import shared
            from ..shared import KEY, halves as configs

            @triton.autotune(configs=configs(), key=KEY)
            @triton.jit
            def kernel(x, N, NB, FLAG: tl.constexpr, BLOCK: tl.constexpr):
                if FLAG:
                    tl.store(x + tl.arange(0, BLOCK), shared.ignores(N, NB))
            """,
            "package/launches.py": """
            from package.ops.kernels import kernel

            def launch(x, N, dropout):
                kernel[(1,)](x, N, N // 64, FLAG=dropout > 0)
            """,
        }
    )
    assert sorted(rules(found)) == ["flag", "phantom", "twice"]


def test_a_file_with_the_name_of_its_folder_is_not_the_package(lint: Lint) -> None:
    kernels = KERNEL.replace("CONFIGS =", "from . import lists\n_ =").replace(
        "CONFIGS", "lists.ALL"
    )
    lists = "import triton\nALL = [triton.Config({'BLOCK': 64}) for _ in range(2)]"
    files = {"package/package.py": "", "package/lists.py": lists, "package/kernels.py": kernels}
    assert sorted(rules(lint(files))) == ["phantom", "twice"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="functions with type parameters are newer")
def test_a_function_with_type_parameters_is_run(lint: Lint) -> None:
    configs = "def configs[T](all: T) -> T:\n    return all + all\n"
    text = KERNEL.replace("@triton.autotune", f"{configs}\n@triton.autotune")
    assert rules(lint({"k.py": text.replace("=CONFIGS", "=configs(CONFIGS)")})) == [
        "twice",
        "twice",
        "phantom",
    ]


@pytest.mark.parametrize(
    "tuner",
    [
        "@triton.autotune(CONFIGS, ['N', 'NB'])\n@triton.jit\n",
        "import safetune\n@safetune.autotune(CONFIGS, key=['N', 'NB'])\n@triton.jit\n",
        "from safetune import safetune\n@safetune(CONFIGS, key=['N', 'NB'])\n@triton.jit\n",
        "from library import tuner\n@tuner(configs=CONFIGS, key=['N', 'NB'])\n@triton.jit()\n",
        "TUNE = triton.autotune(configs=CONFIGS, key=['N', 'NB'])\n@TUNE\n@triton.jit\n",
        "@triton.heuristics({'X': lambda a: a['x']})\n@triton.autotune(CONFIGS, ['N', 'NB'])\n"
        "@triton.jit\n",
    ],
)
def test_every_way_to_write_a_tuner_is_seen(lint: Lint, tuner: str) -> None:
    head, _, rest = KERNEL.partition("@triton.autotune")
    assert rules(lint({"k.py": head + tuner + rest.partition("@triton.jit\n")[2]})) == ["phantom"]


def test_a_tuner_that_is_called_on_a_kernel_and_one_inside_a_function_are_seen(lint: Lint) -> None:
    head, _, rest = KERNEL.partition('@triton.autotune(configs=CONFIGS, key=["N", "NB"])\n')
    body, _, launch = rest.partition("def launch")
    called = "kernel = triton.autotune(configs=CONFIGS, key=['N', 'NB'])(kernel)\n"
    assert rules(lint({"k.py": f"{head}{body}\n{called}\ndef launch{launch}"})) == ["phantom"]
    inner = KERNEL.partition("@triton.autotune")[2].partition("def launch")[0]
    nested = "\n".join(f"    {line}" for line in f"@triton.autotune{inner}".splitlines())
    text = f"{head}\ndef make():\n{nested}\n    return kernel\n"
    assert rules(lint({"k.py": text})) == ["phantom"]


def test_decorators_of_other_languages_and_broken_files_are_left_alone(lint: Lint) -> None:
    other = KERNEL.replace("@triton.jit", "@tilelang.jit")
    assert lint({"other.py": other, "broken.py": f"{KERNEL}\ndef (", "notes.txt": KERNEL}) == []


def safetune(*words: object) -> Any:
    from safetune.cli import main

    return CliRunner(catch_exceptions=False).invoke(main, ["lint", *map(str, words)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL)
    return path


def test_the_command_prints_file_line_and_column_and_exits_with_1(file: Path) -> None:
    result = safetune(file)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{file}:7:45: phantom: kernel: key name NB: nothing reads it")
    assert result.stderr == "1 finding in 1 tuner\n"
    assert safetune(file, "--ignore", "phantom").exit_code == 0
    assert safetune(file, "--select", "flag").exit_code == 0
    assert safetune(file, "--select", "phantom").exit_code == 1


def test_a_file_that_this_python_cannot_read_is_named(file: Path) -> None:
    broken = file.with_name("broken.py")
    broken.write_text(f"{KERNEL}\ndef (")
    result = safetune(file.parent)
    assert result.exit_code == 1, "of the other file"
    (line,) = [line for line in result.stderr.splitlines() if "broken" in line]
    assert f"skipping {broken}: Python 3" in line
    assert result.stderr.endswith("1 finding in 1 tuner\n")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_a_file_is_read_in_its_own_encoding(file: Path, encoding: str) -> None:
    text = KERNEL.replace("import torch", "import torch  # é")
    if encoding == "latin-1":
        text = f"# -*- coding: {encoding} -*-\n{text}"
    file.write_text(text, encoding=encoding)
    result = safetune(file)
    assert (result.exit_code, result.stderr) == (1, "1 finding in 1 tuner\n")


def test_json_and_github_have_the_place_and_the_rule(file: Path) -> None:
    (finding,) = json.loads(safetune(file, "--json").stdout)
    assert (finding["rule"], finding["line"], finding["column"]) == ("phantom", 7, 45)

    github = safetune(file, "--format", "github").stdout
    assert github.startswith(f"::warning file={file},line=7,col=45,title=safetune phantom::kernel:")


def test_a_tree_without_findings_exits_with_0_and_a_path_that_is_not_there_with_2(
    tmp_path: Path,
) -> None:
    (tmp_path / "gone.py").symlink_to("nowhere")
    (tmp_path / "folder.py").mkdir()
    assert safetune(tmp_path).exit_code == 0
    missing = safetune(tmp_path / "missing")
    assert missing.exit_code == 2
    assert "missing does not exist; give files or folders" in missing.stderr


def test_a_lint_leaves_nothing_in_tritons_cache_and_does_not_import_torch(
    file: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    code = (
        f"import sys; from pathlib import Path; from safetune.lint.check import check\n"
        f"found, _ = check([Path({str(file)!r})])\n"
        "print(len(found), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "1 False\n"
    assert not cache.exists()
