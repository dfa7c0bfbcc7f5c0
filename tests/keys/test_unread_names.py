"""Names that nothing reads and that decide a config all the same: kept, by what launches pass.

The kernels have the shapes of those of libraries: a head dimension that only a block size is made
of (HSTU, attention-gym), a bucket of rows in front of a matrix product (swiglu), or of none (FLA).
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from safetune import safetune
from safetune.keys.key_names import KeyReport
from safetune.keys.launches import importers, launches_of
from safetune.lint.check import check
from safetune.lint.rules import RULES
from safetune.settings import PhantomPolicy
from tests.conftest import FreshProcess
from tests.keys import phantom_kernels
from tests.keys.classified import classify

Load = Callable[[str], ModuleType]

pytestmark = pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")

CONFIGS = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return functools.partial(phantom_kernels.load, tmp_path)


def report(kernel: Any, key: list[str], **options: Any) -> KeyReport:
    return classify(kernel, key, **{"configs": CONFIGS, **options})


def kinds(kernel: Any, key: list[str], **options: Any) -> dict[str, str]:
    return {name.name: name.kind.value for name in report(kernel, key, **options).names}


NORM = """
import functools, math, torch
from elsewhere import get, OPTIONS

@jit
def kernel(x, T, D, NB, BLOCK_D: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK_D) + BS * BLOCK, T)

def launch(x, q, T, NS, small, arguments, options):
    head_dim = q.shape[-1]
    BLOCK_D = max(16, triton.next_power_of_2(head_dim))
    NB = triton.cdiv(T, 2048)
    BS = math.ceil(T / NS)
    block = 64 if small else BLOCK_D
    renamed = again = head_dim
    {launch}
"""

SHOWN = "kernel[(1,)](x, T, 1, 1, 16, 1)"

#: (name, the launch, the kinds of D and NB)
LAUNCHES = [
    ("HSTU", "kernel[(1,)](x, T, D=head_dim, NB=1, BLOCK_D=head_dim, BS=1)", "stand-in phantom"),
    ("by position", "kernel[(1,)](x, T, head_dim, 1, head_dim, 1)", "stand-in phantom"),
    (
        "attention-gym",
        "kernel[(1,)](x, T, D=head_dim, NB=1, BLOCK_D=BLOCK_D, BS=1)",
        "stand-in phantom",
    ),
    ("in a branch", "kernel[(1,)](x, T, head_dim, 1, BLOCK_D=block, BS=1)", "stand-in phantom"),
    ("renamed", "kernel[(1,)](x, T, again, 1, BLOCK_D=BLOCK_D, BS=1)", "stand-in phantom"),
    ("written out", "kernel[(1,)](x, T, q.shape[-1], 1, BLOCK_D, BS=1)", "stand-in phantom"),
    (
        "unpacked",
        "rows, columns = q.shape\n    kernel[(1,)](x, T, q.shape[-1], q.shape[0], columns * 2, 1)",
        "stand-in phantom",
    ),
    (
        "unpacked with a star",
        "rows, *_, n = q.size()\n    kernel[(1,)](x, T, n, rows, BLOCK_D=q.size(-1), BS=1)",
        "stand-in phantom",
    ),
    ("in an index", "kernel[(1,)](x, T, 1, NB, BLOCK_D=16, BS=OPTIONS[NB])", "phantom stand-in"),
    ("a run-time value", "kernel[(1,)](x, T * NB, 1, NB, BLOCK_D=16, BS=1)", "phantom stand-in"),
    ("the value itself", "kernel[(1,)](x, T, 1, NB=T, BLOCK_D=16, BS=1)", "phantom stand-in"),
    ("FLA", "kernel[(1,)](x, T, 1, NB, BLOCK_D=16, BS=BS)", "phantom phantom"),
    (
        "FLA, if the rows were made of NB",
        "BS = NB * 4\n    kernel[(1,)](x, T, 1, NB, BLOCK_D=16, BS=BS)",
        "phantom stand-in",
    ),
    (
        "a stride, for what another one tells",
        "kernel[(1,)](x, T, D=q.stride(0), NB=1, BLOCK_D=q.stride(1) == 1, BS=1)",
        "stand-in phantom",
    ),
    (
        "a stride of another tensor",
        "kernel[(1,)](x, T, D=q.stride(0), NB=1, BLOCK_D=x.stride(1) == 1, BS=1)",
        "phantom phantom",
    ),
    (
        "two launches",
        "kernel[(1,)](x, T, 1, 1, 16, 1)\n    kernel[(1,)](x, T, D=BS, NB=1, BLOCK_D=BS, BS=1)",
        "stand-in phantom",
    ),
    ("run", "kernel.run(x, T, head_dim, 1, head_dim, 1, grid=(1,))", "stand-in phantom"),
    ("none", "pass", "unseen unseen"),
    ("keywords", "kernel[(1,)](x, T, D=head_dim, NB=NB, **options)", "unseen unseen"),
    ("a starred tuple", "kernel[(1,)](x, *arguments)", "unseen unseen"),
    ("a grid alone", "call = kernel[(1,)]\n    call(x, T)", "unseen unseen"),
    ("a function of its own", "get(kernel, T, 1, 1, 16, 1, grid=(1,))", "unseen unseen"),
    (
        "partly shown",
        "kernel[(1,)](x, T, 1, 1, 16, 1)\n    kernel[(1,)](x, **options)",
        "unseen unseen",
    ),
    ("handed on", f"{SHOWN}\n    get(kernel, T, options)", "unseen unseen"),
    ("handed on in a table", f"{SHOWN}\n    get([kernel])", "unseen unseen"),
    ("returned", f"{SHOWN}\n    return kernel", "unseen unseen"),
    ("of two functions", f"{SHOWN}\ndef other():\n    def kernel(): pass", "unseen unseen"),
    ("wrapped", f"k = get(kernel.fn)\n    {SHOWN.replace('kernel', 'k')}", "phantom phantom"),
    (
        "wrapped, with options",
        f"{SHOWN}\n    k = get(kernel.fn)\n    k[(1,)](**options)",
        "unseen unseen",
    ),
    ("looked at", f"{SHOWN}\n    kernel.cache.clear()", "phantom phantom"),
    ("another kernel's", "other[(1,)](x, T, D=1, NB=1, BLOCK_D=16, BS=1)", "unseen unseen"),
]


@pytest.mark.parametrize(
    ("what", "launch", "expected"), LAUNCHES, ids=[case[0] for case in LAUNCHES]
)
def test_a_name_that_a_read_argument_is_made_of_is_kept(
    load: Load, what: str, launch: str, expected: str
) -> None:
    sys.modules["elsewhere"] = ModuleType("elsewhere")
    sys.modules["elsewhere"].__dict__.update(get=None, OPTIONS=None)
    kernel = load(NORM.replace("{launch}", launch)).kernel
    found = kinds(kernel, ["x", "D", "NB"])
    assert f"{found['D']} {found['NB']}" == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            """
            class Op:
                def __init__(self, d):
                    self.d, self.block = d, 16
                    self.block_d = triton.next_power_of_2(d)
                    self.dim = d
                def __call__(self, x, T):
                    kernel[(1,)](x, T, D=self.dim, NB=self.block, BLOCK_D=self.block_d, BS=1)
            """,
            "stand-in phantom",
        ),
        (
            """
            def forward(x, T, d, blocks, block_d, BS=1):
                kernel[(1,)](x, T, d, blocks, block_d, BS=BS)
            def op(x, T, head_dim):
                return forward(x, T, head_dim, T // 2, block_d=triton.next_power_of_2(head_dim))
            """,
            "stand-in phantom",
        ),
        (
            """
            class Op:
                def forward(self, x, T, d, *, block_d):
                    kernel[(1,)](x, T, d, T // 2, block_d, BS=1)
                def op(self, x, T, d):
                    return self.forward(x, T, d, block_d=max(16, d))
            """,
            "stand-in phantom",
        ),
    ],
    ids=["fields", "parameters", "a method's"],
)
def test_values_are_followed_to_fields_and_to_the_calls_of_a_function(
    load: Load, text: str, expected: str
) -> None:
    kernel_text, _, _ = NORM.partition("def launch")
    module = load(kernel_text.replace("from elsewhere", "# from") + textwrap.dedent(text))
    found = kinds(module.kernel, ["x", "D", "NB"])
    assert f"{found['D']} {found['NB']}" == expected


@pytest.mark.parametrize(
    ("key", "configs", "expected"),
    [
        (["x", "D"], [{"BLOCK": 1}], "stand-in"),
        (["x", "D", "BLOCK_D"], [{"BLOCK": 1}], "phantom"),
        (["x", "D"], [{"BLOCK": 1, "BLOCK_D": 16}], "phantom"),
    ],
)
def test_a_name_is_no_stand_in_for_what_key_or_configs_set(
    load: Load, key: list[str], configs: list[dict[str, int]], expected: str
) -> None:
    launch = "kernel[(1,)](x, T, D=head_dim, NB=1, BLOCK_D=head_dim, BS=1)"
    kernel = load(NORM.replace("{launch}", launch).replace("from elsewhere", "# from")).kernel
    assert kinds(kernel, key, configs=[triton.Config(each) for each in configs])["D"] == expected


@pytest.mark.parametrize("above", [True, False])
def test_a_name_is_no_stand_in_for_what_a_heuristic_sets(load: Load, above: bool) -> None:
    text = """
    @triton.heuristics({"BLOCK_D": lambda args: 16})
    @jit
    def kernel(x, D, BLOCK_D: tl.constexpr):
        tl.store(x, BLOCK_D)
    """
    heuristics = load(textwrap.dedent(text)).kernel
    kernel = heuristics.fn if above else heuristics
    assert kinds(kernel, ["x", "D"]) == {"x": "read", "D": "phantom"}


def test_a_name_stands_for_what_a_prune_function_reads(load: Load) -> None:
    text = """
    @jit
    def kernel(x, T, rows, BLOCK: tl.constexpr):
        tl.store(x, BLOCK)

    def launch(x, n):
        kernel[(1,)](x, T=n, rows=n)
    """
    kernel = load(textwrap.dedent(text)).kernel
    prune = {"early_config_prune": lambda configs, named, **kwargs: configs[: named["rows"]]}
    assert kinds(kernel, ["x", "T"]) == {"x": "read", "T": "phantom"}
    assert kinds(kernel, ["x", "T"], prune_configs_by=prune) == {"x": "read", "T": "stand-in"}


def test_without_a_launch_a_complete_key_drops_what_nothing_reads(load: Load) -> None:
    """Where every constexpr is in the key or set by a config, no launch can make another of it."""
    text = "@jit\ndef kernel(x, NB, BLOCK: tl.constexpr):\n    tl.store(x, BLOCK)"
    assert kinds(load(text).kernel, ["x", "NB"]) == {"x": "read", "NB": "phantom"}


def test_without_a_launch_a_matrix_product_keeps_what_may_be_a_size(load: Load) -> None:
    text = "@jit\ndef kernel(x, NB, BLOCK: tl.constexpr):\n    tl.dot(x, BLOCK)"
    assert kinds(load(text).kernel, ["x", "NB"]) == {"x": "read", "NB": "unseen"}


PRODUCT = """
import torch
from triton.language import dot as product

@jit
def load_gamma(a):
    return tl.load(a)

@jit
def multiply(a, b):
    return {product}

@jit
def through(a, b):
    return multiply(a, b)

@jit
def kernel(a, b, N, M_HINT, BLOCK: tl.constexpr):
    tl.store(a + tl.arange(0, BLOCK), {call} + N)

LIMIT = 64

def closest(rows):
    return min((16, 64, 256), key=lambda size: abs(size - rows))

def launch(a, b, rows, flag):
    M, K = a.shape
    {launch}
"""
ROWS = "kernel[(1,)](a, b, N=K, M_HINT=triton.next_power_of_2(M))"


@pytest.mark.parametrize(
    ("product", "call", "expected"),
    [
        ("a * b", "tl.dot(a, b)", "size"),
        ("tl.dot(a, b)", "multiply(a, b)", "size"),
        ("tl.dot_scaled(a, b)", "through(a, b)", "size"),
        ("a * b", "through(a, b)", "phantom"),
        ("a * b", "tl.sum(a)", "phantom"),
        ("tl.dot(a, b)", "a", "phantom"),
        ("a * b", "not_there_yet(a, b)", "size"),
        ("a * b  # as tl.dot(a, b)", "a", "phantom"),
        ("a * b", "a + 'no tl.dot(a, b)'", "phantom"),
        ("a * b  # not tl.dot_scaled(a, b)", "through(a, b)", "phantom"),
        ("tl.static_assert(a > b, 'tl.dot(a, b) needs 16 rows')", "multiply(a, b)", "phantom"),
        ("a * b", "load_gamma(a)", "phantom"),
        ("product(a, b)", "multiply(a, b)", "size"),
        ("a * b", "(tl.dot)(a, b)", "size"),
        ("tl.\\\n        dot(a, b)", "multiply(a, b)", "size"),
        ("a * b", "a.warpgroup_mma(b)", "size"),
    ],
)
def test_a_size_is_kept_for_a_matrix_product_alone(
    load: Load, tmp_path: Path, product: str, call: str, expected: str
) -> None:
    """The text was searched for `dot(`, which comments and messages have, and `gamma(` ends in."""
    text = PRODUCT.format(product=product, call=call, launch=ROWS)
    assert kinds(load(text).kernel, ["N", "M_HINT"])["M_HINT"] == expected
    written = tmp_path / "lint" / "kernels.py"
    written.parent.mkdir()
    tuner = '@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["N", "M_HINT"])\n'
    text = text.replace("@jit\ndef kernel", f"{tuner}@triton.jit\ndef kernel")
    written.write_text(phantom_kernels.HEADER + text.replace("@jit", "@triton.jit"))
    assert [finding.rule for finding in check([written], RULES)[0]] == [expected]


#: (name, the value of M_HINT, whether it is kept for a kernel with tl.dot)
SIZES = [
    ("swiglu", "triton.next_power_of_2(M)", True),
    ("a run-time size", "M", True),
    ("a part of a shape", "a.shape[0]", True),
    ("a method", "a.size(0)", True),
    ("a count", "a.numel() // 16", True),
    ("a length", "len(a)", True),
    ("a bucket of its own", "closest(rows)", True),
    ("a parameter", "rows", True),
    ("an attribute", "flag.rows", True),
    ("a choice", "M if flag else 16", True),
    ("made of a key name's and another", "M * K", True),
    ("made of a key name's", "triton.cdiv(K, 128)", False),
    ("a key name's", "K", False),
    ("a constant", "64", False),
    ("a constant of the module", "LIMIT * 2", False),
    ("a constant of another module", "torch.float16", False),
    ("a dtype", "a.dtype", False),
    ("a stride", "a.stride(0)", False),
    ("a size of an element", "a.element_size()", False),
    ("a flag", "rows is not None", False),
    ("a part of a list", "[M, K][0]", True),
    ("a name of a dtype", "str(a.dtype).split('.')[-1]", False),
    ("a negated flag", "not flag", False),
]


@pytest.mark.parametrize(("what", "value", "kept"), SIZES, ids=[case[0] for case in SIZES])
def test_what_is_passed_tells_whether_a_name_is_a_size(
    load: Load, what: str, value: str, kept: bool
) -> None:
    launch = f"kernel[(1,)](a, b, N=K, M_HINT={value})"
    text = PRODUCT.format(product="a", call="tl.dot(a, b)", launch=launch)
    found = kinds(load(text).kernel, ["N", "M_HINT"])["M_HINT"]
    assert found == ("size" if kept else "phantom")


@pytest.mark.parametrize("given", ["K", "a.shape[1]", "a.shape[-1]", "a.size(1)"])
@pytest.mark.parametrize("hint", ["K", "a.shape[1]", "a.size(1)"])
def test_a_size_that_another_key_name_gives_has_many_spellings(
    load: Load, given: str, hint: str
) -> None:
    launch = f"kernel[(1,)](a, b, N={given}, M_HINT={hint})"
    text = PRODUCT.format(product="a", call="tl.dot(a, b)", launch=launch)
    found = kinds(load(text).kernel, ["N", "M_HINT"])["M_HINT"]
    assert found == ("size" if (given, hint) in DIFFERENT else "phantom")


#: The text does not show the number of dimensions where neither is unpacked.
DIFFERENT = {("a.shape[-1]", "a.shape[1]"), ("a.shape[-1]", "a.size(1)")}


def test_the_report_names_the_rule_and_the_launch(load: Load) -> None:
    reasons = []
    for product in ("tl.dot(a, b)", "tl.sum(a)"):
        text = PRODUCT.format(product="a", call=product, launch=ROWS)
        module = load(text)
        names = report(module.kernel, ["N", "M_HINT"]).names
        reasons.append(names[1].reason.replace(Path(str(module.__file__)).name, "FILE"))
    assert reasons == [
        "nothing reads it; made of M at FILE:30, which may decide a tile of tl.dot; kept",
        "nothing reads it; made of M at FILE:30, but the kernel has no tl.dot; dropped",
    ]
    launch = "kernel[(1,)](x, T, D=head_dim, NB=1, BLOCK_D=BLOCK_D, BS=1)"
    module = load(NORM.replace("{launch}", launch).replace("from elsewhere", "# from"))
    (_, stand_in) = report(module.kernel, ["x", "D"]).names
    file = Path(str(module.__file__)).name
    assert stand_in.reason == (
        f"nothing reads it; BLOCK_D, which the key lacks, is made of it at {file}:18; kept"
    )
    module = load(NORM.replace("{launch}", "pass").replace("from elsewhere", "# from"))
    assert report(module.kernel, ["x", "D"]).names[1].reason == (
        "nothing reads it; some launches hide its value, and the key lacks BLOCK_D, BS; kept"
    )


@pytest.mark.parametrize(
    ("text", "key", "calls", "same"),
    [
        (
            NORM.replace("{launch}", "kernel[(1,)](x, T, head_dim, 1, BLOCK_D, 1)"),
            ["T", "D"],
            [(1, 64, 1, 64, 1), (1, 256, 1, 256, 1)],
            False,
        ),
        (
            NORM.replace("{launch}", "kernel[(1,)](x, T, head_dim, NB, BLOCK_D, BS)"),
            ["T", "NB"],
            [(1, 64, 1, 64, 1), (1, 64, 4, 64, 1)],
            True,
        ),
        (
            PRODUCT.format(product="a", call="tl.dot(a, b)", launch=ROWS),
            ["N", "M_HINT"],
            [(None, 64, 16), (None, 64, 65536)],
            False,
        ),
        (
            PRODUCT.format(product="a", call="tl.sum(a)", launch=ROWS),
            ["N", "M_HINT"],
            [(None, 64, 16), (None, 64, 65536)],
            True,
        ),
    ],
    ids=["head dimensions of HSTU", "NB of FLA", "rows of swiglu", "rows without a product"],
)
def test_calls_have_keys_of_their_own_where_the_name_is_kept(
    load: Load, text: str, key: list[str], calls: list[tuple[Any, ...]], same: bool
) -> None:
    jit = load(text.replace("from elsewhere", "# from")).kernel
    tuner = safetune(configs=CONFIGS, key=key)(jit)
    keys = {tuner.shapes.of((None, *call), {}).key((None, *call), {}) for call in calls}
    assert (len(keys) == 1) is same


def test_a_policy_or_a_name_is_asked_before_a_launch(load: Load) -> None:
    kernel = load(NORM.replace("{launch}", "pass").replace("from elsewhere", "# from")).kernel
    assert kinds(kernel, ["x", "D"], keep=["D"])["D"] == "kept"
    assert kinds(kernel, ["x", "D"], policy=PhantomPolicy.KEEP)["D"] == "kept"


# other modules of the package


KERNELS = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, n, D, NB, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK_D) * BLOCK, n)
"""
LAUNCH = """
import triton

def launch(x, n, head_dim):
    {name}[(head_dim,)](x, n, D=head_dim, NB=n, BLOCK_D=16)
"""

#: (name, files of the package beside its kernels, name of the kernel in launch.py)
PACKAGES = [
    ("relative", {"launch.py": "from .kernels import kernel"}, "kernel"),
    ("absolute", {"launch.py": "from {package}.ops.kernels import kernel"}, "kernel"),
    ("renamed", {"launch.py": "from .kernels import other, kernel as k  # (or not)"}, "k"),
    (
        "on lines",
        {"launch.py": "from .kernels import (\n    other,  # )\n    kernel,\n)"},
        "kernel",
    ),
    ("continued", {"launch.py": "from .kernels import other, \\\n    kernel"}, "kernel"),
    ("everything", {"launch.py": "from .kernels import *"}, "kernel"),
    ("the module", {"launch.py": "from . import kernels"}, "kernels.kernel"),
    ("the module by name", {"launch.py": "import {package}.ops.kernels as ks"}, "ks.kernel"),
    (
        "the module by its whole name",
        {"launch.py": "import {package}.ops.kernels"},
        "{package}.ops.kernels.kernel",
    ),
    (
        "through the package",
        {"__init__.py": "from .kernels import kernel", "launch.py": "from . import kernel"},
        "kernel",
    ),
    (
        "through another module",
        {"middle.py": "from .kernels import kernel", "launch.py": "from .middle import kernel"},
        "kernel",
    ),
    ("in a function", {"launch.py": "if True:\n    from .kernels import kernel"}, "kernel"),
    (
        "by a function of its name",
        {"launch.py": "from .kernels import kernel as k\n\ndef kernel(x):\n    launch(x, 1, 16)"},
        "k",
    ),
    (
        "of the module, by a function of its name",
        {"launch.py": "from . import kernels\n\ndef kernel(x):\n    launch(x, 1, 16)"},
        "kernels.kernel",
    ),
]


def package(directory: Path, files: dict[str, str], name: str, folder: str = "ops") -> Path:
    """Write a package with kernels in a folder, and a launch; return the file of the kernels."""
    root = directory / f"pack{abs(hash((directory, name)))}"
    inside = root / folder
    inside.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (inside / "kernels.py").write_text(KERNELS)
    for file, text in files.items():
        text = text.replace("{package}", root.name)
        body = LAUNCH.replace("{name}", name.replace("{package}", root.name))
        (inside / file).write_text(text + body if file == "launch.py" else text)
    return inside / "kernels.py"


@pytest.mark.parametrize(("what", "files", "name"), PACKAGES, ids=[case[0] for case in PACKAGES])
def test_a_launch_in_a_module_that_imports_the_kernel_counts(
    tmp_path: Path, what: str, files: dict[str, str], name: str
) -> None:
    file = package(tmp_path, files, name)
    module = loaded(file)
    (launch,) = launches_of(module.kernel)
    assert launch.file == "launch.py"
    assert kinds(module.kernel, ["n", "D", "NB"])["D"] == "read"
    assert "the grid (launch.py:" in report(module.kernel, ["n", "D", "NB"]).names[1].reason


def loaded(file: Path) -> ModuleType:
    """The module of a file, which need not be on the path, and is not left in `sys.modules`."""
    name = f"loaded_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("another module", "from elsewhere import kernel"),
        ("a module of that name", "from kernels import kernel"),
        ("not imported", "kernel = None"),
        ("in a comment", "# from .kernels import kernel"),
        ("in a longer line", "x = 'from .kernels import kernel'"),
    ],
)
def test_a_launch_of_another_kernel_of_that_name_does_not_count(
    tmp_path: Path, what: str, text: str
) -> None:
    file = package(tmp_path, {"launch.py": text}, "kernel")
    assert importers(str(file), "kernel") == []


def test_folders_without_an_init_are_parts_of_a_package(tmp_path: Path) -> None:
    launch = {"launch.py": "from {package}.ops.triton.kernels import kernel"}
    file = package(tmp_path, launch, "kernel", folder="ops/triton")
    assert [path.name for path in importers(str(file), "kernel")] == ["launch.py"]


def test_a_module_outside_of_packages_is_searched_alone(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "launch.py").write_text("from kernels import kernel" + LAUNCH)
    assert importers(str(tmp_path / "kernels.py"), "kernel") == []


#: Prints what each name is classed as, for each way in which a program may get to the kernel.
PROGRAM = """
import importlib, json, runpy, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import triton
from safetune import safetune
from safetune.keys.identity import kernel_identity
from safetune.keys.tuning_key import tuning_key
name = sys.argv[2]
for how in sys.argv[3:]:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        del sys.modules[loaded]
    if how == "main":
        kernel = runpy.run_module(f"{name}.ops.kernels", run_name="__main__")["kernel"]
    elif how == "path":
        kernel = runpy.run_path(f"{sys.argv[1]}/{name}/ops/kernels.py")["kernel"]
    else:
        for module in how.split(","):
            importlib.import_module(f"{name}.ops.{module}")
        kernel = sys.modules[f"{name}.ops.kernels"].kernel
    report = safetune([triton.Config({"BLOCK": 1})], ["n", "D", "NB"])(kernel).key_report
    call = {"n": 4, "D": 8, "NB": 2, "BLOCK_D": 16}
    key = tuning_key(kernel_identity(kernel), report.kept, kernel.arg_names, call, -1)
    names = [[each.name, each.kind.value, each.reason] for each in report.names]
    print(json.dumps([names, key.digest]))
"""


def test_every_program_finds_the_same_names_whatever_it_imported_before(
    tmp_path: Path, fresh_process: FreshProcess
) -> None:
    """`safetune tune`, each rank and each program must store and find choices under one key."""
    files = {"launch.py": "from .kernels import kernel", "grids.py": "from .launch import *"}
    root = package(tmp_path, files, "kernel").parents[1]
    ways = ["kernels", "kernels,launch", "launch,kernels", "grids", "main", "path"]
    found: list[str] = []
    for order in (ways, ways[::-1]):
        result = fresh_process(PROGRAM, tmp_path, root.name, *order, warm=True)
        found += result.stdout.splitlines()[-len(ways) :]
    assert len(found) == 2 * len(ways)
    (one,) = set(found)
    assert [kind for _, kind, _ in json.loads(one)[0]] == ["read", "read", "phantom"]
