"""What each rule finds, on kernels in the shape of those in which libraries had the mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safetune.lint.rules import RULES
from tests.lint.conftest import HEADER, Lint, rules

#: A norm with a bucket of rows that nothing reads, as FLA had it (#1147), and its run-time length.
NORM = """
@triton.autotune(configs=CONFIGS, key=["D", "NB"])
@triton.jit
def kernel(x, y, T{T}, D: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + rows * D, tl.load(x + rows * D, mask=rows < T), mask=rows < T)

def launch(x, y):
    T, D = x.shape
    NB = triton.cdiv(T, 2048)
    kernel[lambda meta: (triton.cdiv(T, meta["BLOCK"]),)](x, y, T, D=D, NB=NB)
"""


def test_a_key_name_that_nothing_reads_is_a_phantom_where_the_key_writes_it(lint: Lint) -> None:
    (finding,) = lint(NORM.format(T=""))
    assert finding.rule == "phantom"
    assert finding.kernel == "kernel"
    line = HEADER.splitlines() + NORM.splitlines()
    assert line[finding.line - 1][finding.column - 1 :].startswith('"NB"')
    assert "made of T at kernels.py:" in finding.message


def test_a_length_that_is_a_constexpr_compiles_for_each_value(lint: Lint) -> None:
    found = lint(NORM.format(T=": tl.constexpr"))
    assert rules(found) == ["phantom", "length"]
    assert "constexpr T is a length, T, made of x.shape[0]" in found[1].message


#: A backward pass whose programs share rows: BS changes with every batch (FLA #533).
BACKWARD = """
@triton.autotune(configs=CONFIGS, key=["D"])
@triton.jit
def kernel(x, y, T, D: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0) * BS, min((tl.program_id(0) + 1) * BS, T)):
        columns = tl.arange(0, BLOCK)
        tl.store(y + row * D + columns, tl.load(x + row * D + columns, mask=columns < D))

def launch(x, y, NS):
    T, D = {value}.shape
    BS = {BS}
    kernel[(NS,)](x, y, T, D=D, BS=BS)
"""


@pytest.mark.parametrize(
    ("value", "BS", "found"),
    [
        ("x", "triton.cdiv(T, NS)", ["length"]),
        ("x", "triton.next_power_of_2(T)", []),  # few values
        ("weight", "T", []),  # as many as a model has
        ("x", "triton.next_power_of_2(D)", []),  # made of a key name
        ("x", "16", []),
    ],
)
def test_what_is_made_of_a_length_is_one_unless_it_has_few_values(
    lint: Lint, value: str, BS: str, found: list[str]
) -> None:
    assert rules(lint(BACKWARD.format(value=value, BS=BS))) == found


#: A product whose tiles are made of a name that nothing reads (HSTU, attention-gym).
PRODUCT = """
@triton.autotune(configs=CONFIGS, key=[{key}])
@triton.jit
def kernel(a, b, c, M, D, N, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    tile = rows[:, None] * BLOCK_D + columns
    tl.store(c + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)) + N)

def launch(a, b, c, M, N):
    D = a.shape[-1]
    kernel[(1,)](a, b, c, M, D, N, BLOCK_D=triton.next_power_of_2(D))
"""


@pytest.mark.parametrize(
    ("key", "rule", "says"),
    [
        ('"N", "D"', "stand-in", "BLOCK_D, which the key lacks, is made of it"),
        ('"N", "BLOCK_D", "M"', "size", "made of M at"),
        ('"N", "BLOCK_D", "Q"', "unknown", "not a parameter"),
    ],
)
def test_each_class_of_a_key_name_is_a_rule(lint: Lint, key: str, rule: str, says: str) -> None:
    (finding,) = lint(PRODUCT.format(key=key))
    assert finding.rule == rule
    assert says in finding.message


@pytest.mark.parametrize(
    ("size", "found"),
    [("x.size(0)", ["length"]), ("weight.size(0)", []), ("b.size(0)", [])],
)
def test_the_leading_size_of_a_weight_is_not_a_length(
    lint: Lint, size: str, found: list[str]
) -> None:
    text = BACKWARD.format(value="x", BS="16").replace("BS=BS", f"BS={size}")
    assert rules(lint(text.replace("NS):", "NS, weight, b):"))) == found


#: A name in the key from which no argument but a tensor is made (torchao).
SIZED = """
@triton.autotune(configs=CONFIGS, key=["N", "K"])
@triton.jit
def kernel(x, out, N, K, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(out + columns, tl.load(x + columns), mask=columns < N)

def launch(x, N, K):
    kernel[(1,)](x, torch.empty((N, K)), N, K)
"""


def test_a_tensor_that_is_made_with_a_key_name_cannot_be_put_in_the_key(lint: Lint) -> None:
    assert rules(lint(SIZED)) == []
    padded = SIZED.replace("K, BLOCK", "K, PADDED: tl.constexpr, BLOCK").replace(
        "N, K)\n", "N, K, triton.next_power_of_2(K))\n"
    )
    read = padded.replace("mask=columns < N", "mask=columns < N + PADDED")
    assert rules(lint(read)) == ["stand-in"]


#: A matrix in a descriptor, of which Triton's key has no dtype, and its dtype.
DESCRIPTOR = """
@triton.autotune(configs=CONFIGS, key=["M", "dtype"])
@triton.jit
def kernel(matrix, out, M, dtype: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), {load}, mask=tl.arange(0, BLOCK) < M)

def launch(x, out):
    name = str(x.dtype)
    kernel[(1,)]({matrix}, out, x.shape[0], dtype=name)
"""


def test_a_dtype_is_a_phantom_only_where_the_key_has_that_of_the_tensor(lint: Lint) -> None:
    described = DESCRIPTOR.format(load="matrix.load([0])", matrix="TensorDescriptor(x, [1], [1])")
    assert rules(lint(described)) == []
    pointed = DESCRIPTOR.format(load="tl.load(matrix + tl.arange(0, BLOCK))", matrix="x")
    assert rules(lint(pointed)) == ["phantom"]


def test_a_bucket_and_a_name_without_a_launch_are_rules_too(lint: Lint) -> None:
    kernel = PRODUCT.partition("def launch")[0]
    named = kernel.replace("M, D", "M_BUCKET, D")
    assert rules(lint(named.format(key='"N", "BLOCK_D", "M_BUCKET"'))) == ["bucket"]
    assert rules(lint(kernel.format(key='"N", "D"'))) == ["unseen"]


def test_a_name_that_is_the_whole_key_is_found_although_it_is_kept(lint: Lint) -> None:
    found = lint(NORM.format(T="").replace('["D", "NB"]', '["NB"]').replace("D: tl.constexpr", "D"))
    assert rules(found) == ["phantom"]


FLAG = """
@triton.autotune(configs=CONFIGS, key=["D"])
@triton.jit
def kernel(x, y, bias, D, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    value = tl.load(x + columns, mask=columns < D)
    if SCALED:
        value = value * 2
    if HAS_BIAS:
        value += tl.load(bias + columns)
    tl.store(y + columns, value)

def is_half(tensor):
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    assert half or tensor.numel() > 0
    return half

def is_long(tensor):
    return tensor.dtype == torch.float16 and tensor.numel() > 4096

def launch(x, y, bias=None, dropout=0.0, scaled: bool = False):
    kernel[(1,)](x, y, bias, x.shape[-1], SCALED={SCALED}, HAS_BIAS={HAS_BIAS})
"""


@pytest.mark.parametrize(
    ("SCALED", "found"),
    [
        ("dropout > 0", ["flag"]),
        ("scaled", ["flag"]),
        ("bool(dropout)", ["flag"]),
        ("True", []),
        ("x.dtype == torch.float16", []),  # Triton's key has the dtypes
        ("x.shape[-1] % 64 == 0", []),  # made of a key name
        ("x.is_floating_point()", []),
        ("True if x.dtype == torch.float16 else False", []),
        ("is_half(x)", []),
        ("is_long(x)", ["flag"]),
    ],
)
def test_a_flag_is_found_where_launches_can_differ_in_it(
    lint: Lint, SCALED: str, found: list[str]
) -> None:
    assert rules(lint(FLAG.format(SCALED=SCALED, HAS_BIAS="False"))) == found


def test_of_a_launch_with_a_starred_argument_the_named_ones_count(lint: Lint) -> None:
    """Where it shows the key: otherwise what it passes may be made of that."""
    text = FLAG.format(SCALED="scaled", HAS_BIAS="False").replace("D, SCALED", "D, S, SCALED")
    starred = text.replace("x.shape[-1],", "x.shape[-1], *x.stride(),")
    assert rules(lint(starred)) == ["flag"]
    assert rules(lint(text.replace("(x, y, bias, x.shape[-1],", "(*tensors(x, y),"))) == []


def test_launches_that_pass_other_constants_differ(lint: Lint) -> None:
    once = FLAG.format(SCALED="True", HAS_BIAS="False")
    again = once.partition("def launch")[2].replace("SCALED=True", "SCALED=False")
    (finding,) = lint(f"{once}\ndef launch_again{again}")
    assert finding.rule == "flag"
    assert "launches pass False and True: calls" in finding.message


def test_the_dtypes_of_the_key_tell_one_optional_argument_and_not_two(lint: Lint) -> None:
    assert rules(lint(FLAG.format(SCALED="False", HAS_BIAS="bias is not None"))) == []
    two = FLAG.format(SCALED="y is not None", HAS_BIAS="bias is not None")
    assert rules(lint(two)) == ["flag", "flag"]
    assert rules(lint(two.replace('["D"]', '["D", "SCALED"]'))) == []
    other = two.replace("y is", "topk_length is").replace("(x, y,", "(x, topk_length,")
    assert rules(lint(other.replace("(x, topk_length, b", "(x, y, topk_length, b", 1))) == []
    heuristic = FLAG.format(SCALED="dropout > 0", HAS_BIAS="False").replace(
        "@triton.jit",
        '@triton.heuristics({"SCALED": lambda args: args["x"] is not None})\n@triton.jit',
    )
    assert rules(lint(heuristic)) == []


@pytest.mark.parametrize(
    ("before", "HAS_BIAS", "found"),
    [
        ("bias = x.sum(0) if scaled else None", "scaled", []),
        ("bias = None if not scaled else x.sum(0)", "scaled", []),
        ("HAS = bias is not None; bias = x.sum(0) if HAS else None", "HAS", []),
        ("bias = x.sum(0) if dropout else None", "scaled", ["flag"]),
        ("if scaled: bias = x\n    else: bias = y", "scaled", ["flag"]),
        ("bias = x if scaled else None; y = y if dropout else None", "scaled", ["flag"]),
        ("bias = x if scaled else None; y = None", "scaled", ["flag"]),
    ],
)
def test_a_flag_that_decides_of_one_tensor_if_it_is_none_is_told_by_the_dtypes(
    lint: Lint, before: str, HAS_BIAS: str, found: list[str]
) -> None:
    text = FLAG.format(SCALED="False", HAS_BIAS=HAS_BIAS)
    assert rules(lint(text.replace("    kernel[(1,)]", f"    {before}\n    kernel[(1,)]"))) == found


def test_a_second_tensor_that_may_be_none_hides_the_first_unless_it_is_of_integers(
    lint: Lint,
) -> None:
    made = "    bias = x.sum(0) if scaled else None\n    kernel[(1,)]"
    text = FLAG.format(SCALED="False", HAS_BIAS="scaled").replace("    kernel[(1,)]", made)
    assert rules(lint(text.replace("(x, y, bias=", "(x, y=None, bias="))) == ["flag"]
    lengths = text.replace("(x, y, bias=", "(x, lengths: torch.Tensor | None, bias=")
    assert rules(lint(lengths.replace("(x, y, bias, x", "(x, lengths, bias, x"))) == []


def test_a_list_of_one_config_is_not_timed(lint: Lint) -> None:
    text = FLAG.format(SCALED="scaled", HAS_BIAS="False")
    one = text.replace("CONFIGS", '[triton.Config({"BLOCK": width}) for width in [64]]')
    assert (rules(lint(text)), rules(lint(one))) == (["flag"], [])


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ('[triton.Config({"BLOCK": 64}, 4), triton.Config({"BLOCK": 64}, num_warps=4)]', 1),
        ('[triton.Config({"BLOCK": b}, w) for b in (64, 64) for w in (2, 4)]', 2),
        ("[triton.Config(dict(BLOCK=b), w) for b, w in itertools.product((8, 8), (2, 4))]", 2),
        ('[triton.Config({"BLOCK": 64}, num_warps=w) for w in WARPS]', 1),
        ('CONFIGS + [triton.Config({"BLOCK": 128})]', 1),
        ("CONFIGS", 0),
        ("REMADE", 2),
        ("made()", 1),
        ("made(8)", 0),
        # Not known, so nothing is said of it.
        ('[triton.Config({"BLOCK": 64}, num_warps=w) for w in WARPS if w < 8]', 0),
        ('[triton.Config({"BLOCK": 64}, num_warps=w) for w in EITHER]', 0),
        ("looped()", 0),
        ('[triton.Config({"BLOCK": 64}, pick()), triton.Config({"BLOCK": 64}, pick())]', 0),
    ],
)
def test_a_config_that_is_listed_twice_is_found_where_literals_make_the_list(
    lint: Lint, configs: str, found: int
) -> None:
    made = """
import itertools

WARPS = [4, 8, 4]
if torch.version.hip:
    EITHER = [4]
else:
    EITHER = [4, 4]
REMADE = [(64, 4), (64, 4), (32, 4), (32, 4)]
REMADE = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in REMADE]

def made(last=4):
    "Return configs."
    return [triton.Config({"BLOCK": 64}, num_warps=w) for w in (4, last)]

def looped():
    found = []
    for block in (64, 128, 64):
        found.append(triton.Config({"BLOCK": block}))
    return found
"""
    kernel = NORM.format(T="").replace('"D", "NB"', '"D"').replace("CONFIGS", configs, 1)
    assert rules(lint(made + kernel)) == ["twice"] * found


#: Configs that are not known, with a hook that a default brings.
HOOKED = """
def hook(nargs):
    nargs["x"].block_shape = [nargs["{name}"]]

def made(pre_hook=hook):
    configs = [triton.Config({{"BLOCK": 64}}, pre_hook=pre_hook)]
    return configs if torch.version.hip else []
"""


@pytest.mark.parametrize(("name", "found"), [("NB", []), ("T", ["phantom"])])
def test_what_hooks_of_unknown_configs_read_is_read(
    lint: Lint, name: str, found: list[str]
) -> None:
    kernel = NORM.format(T="").replace("=CONFIGS", "=made() if torch.version.hip else CONFIGS")
    assert rules(lint(HOOKED.format(name=name) + kernel)) == found


def test_every_rule_is_on_the_page() -> None:
    page = Path(__file__).parents[2].joinpath("docs/lint.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)[: len(RULES)] == [*RULES]


def test_nothing_of_the_tree_runs(lint: Lint, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w').close()\n" + NORM.format(T="")
    assert rules(lint(text)) == ["phantom"]
    assert not mark.exists()
