"""What `safetune lint` finds in libraries: `python benchmarks/lint_counts.py --write`.

Downloads wheels without their dependencies into a temporary folder, lints each, and counts findings
by rule, and among them those that were judged wrong by reading the code (`WRONG`). Then looks for
mistakes that are known, in the versions that had them (`KNOWN`). `--tree NAME=PATH` gives a folder
for a library that is not a wheel. `--write` puts the tables into docs/lint.md.
"""

from __future__ import annotations

import datetime
import itertools
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import bars
import click

from safetune.lint.check import check
from safetune.lint.rules import RULES, Finding

COUNTED = (
    "fla-core==0.6.0",
    "liger-kernel==0.8.5",
    "flag-gems==5.0.2",
    "sglang==0.5.23",
    "torchao==0.18.0",
)

#: Where only the kernels with a flag are counted: wheels, and checkouts that `--tree` gives.
FLAGS_ONLY = (
    "transformer-engine==2.20.2",
    "mamba e9594ce",
    "attorch 67c2772",
    "generative-recommenders db1bf8f",
    "attention-gym 7fdb85d",
)

#: Findings that are wrong, as (library, rule, pattern of the message, why).
WRONG = (
    ("flag-gems", "stand-in", r"name M:.*stride_cm", "a stride, not what M decides"),
    ("flag-gems", "flag", r"max_kernel.*UPCAST", "made of the sizes in the key"),
    ("flag-gems", "flag", r"arange_kernel.*IS_FLOAT", "told by a dtype of the key"),
    ("flag-gems", "flag", r"instance_norm_back.*HAS_WEIGHT", "told by the dtypes: weight is None"),
    ("flag-gems", "flag", r"HAS_WEIGHT_BIAS", "the same: weight and bias come together"),
    ("fla-core", "flag", r"addcmul_bwd_kernel1.*use_xg", "told by the dtypes: ixg is None"),
    ("sglang", "flag", r"STORE_KG", "told by a dtype of the key"),
    ("sglang", "flag", r"HAS_TOPK_LENGTH", "the same: a tensor of floats is in its place"),
    ("sglang", "size", r"topk_rounded", "the kernel has no tl.dot; a comment has dot("),
)

#: Known mistakes: the library, the rule, kernels, a name of each, and who reported it if not we.
KNOWN = """
fla-core==0.5.0 | phantom | causal_conv1d_{fwd,bwd}_kernel | NB | FLA #1147
flash-linear-attention==0.2.2 | phantom | layer_norm_gated_{fwd,bwd}_kernel | NB | FLA #533
flash-linear-attention==0.2.2 | length | layer_norm_gated_bwd_kernel{,1} | BS | FLA #533
fla-core==0.4.0 | length | l2norm_{fwd,bwd}_kernel | T | FLA #663, #669, #758
fla-core==0.4.0 | phantom | l2norm_{fwd,bwd}_kernel | NB | FLA #663, #669, #758
fla-core==0.6.0 | phantom | {layer_norm,layer_norm_gated,l2norm}_{fwd,bwd}_kernel | NB
fla-core==0.6.0 | phantom | chunk_{,precond_}kda_bwd_kernel_dAv | BK
torchao==0.18.0 | unknown | _triton_fp8_rowwise_3d_transpose_cast_rhs_kernel | num_elements
flag-gems==5.0.2 | stand-in | mm_kernel_general_host_tma | stride_{am,bk}
flag-gems==5.0.2 | stand-in | w8a8_block_fp8_matmul_kernel_host_tma | stride_{am,bk}
flag-gems==5.0.2 | stand-in | grouped_mm_tma_kernel | M
sglang==0.5.23 | flag | _layer_norm_fwd_1pass_kernel | HAS_DROPOUT
generative-recommenders db1bf8f | stand-in | _hstu_attn_fwd | Dim{Q,V}
generative-recommenders db1bf8f | unseen | _hstu_attn_fwd_persistent | Dim{Q,V}
generative-recommenders db1bf8f | size | _swiglu_fwd_{tma_ws_persistent,kernel} | M_BLOCK
attention-gym 7fdb85d | stand-in | _selected_attention_bwd_dlocal_kv_tma | D
attention-gym 7fdb85d | phantom | l2norm_{fwd,bwd}_kernel | NB
"""


def known() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the known mistakes as (library, rule, kernel, name, source)."""
    for line in KNOWN.strip().splitlines():
        library, rule, kernels, names, *others = line.split(" | ")
        for kernel, name in itertools.product(bars.expand(kernels), bars.expand(names)):
            yield library, rule, kernel, name, "".join(others) or "this project"


def unpacked(requirement: str, folder: Path) -> Path:
    """Return the folder of a wheel's files."""
    words = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    target = folder / requirement.replace("==", "-")
    subprocess.run([sys.executable, "-m", *words, "--dest", target, requirement], check=True)
    (wheel,) = target.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target / "files")
    return target / "files"


def wrong_in(library: str, findings: list[Finding]) -> int:
    """Return how many findings were judged wrong."""
    judged = [(rule, re.compile(text)) for name, rule, text, _ in WRONG if name == library]
    return sum(
        any(
            finding.rule == rule
            and text.search(f"{finding.path} {finding.kernel} {finding.message}")
            for rule, text in judged
        )
        for finding in findings
    )


def count_rows(trees: Mapping[str, Path]) -> Iterator[str]:
    """Yield the rows of the table of counts; of some libraries only the flags are counted."""
    yield "| library | tuners | findings | wrong | kernels that lack a flag |"
    yield "| --- | --- | --- | --- | --- |"
    total = [0, 0]
    for library in (*COUNTED, *FLAGS_ONLY):
        if library not in trees:
            print(f"{library} is not given: --tree '{library}=PATH'", file=sys.stderr)
            continue
        findings, tuners = check([trees[library]])
        flags = len({(each.path, each.kernel) for each in findings if each.rule == "flag"})
        total = [total[0] + tuners, total[1] + flags]
        listed, wrong = "", ""
        if library in COUNTED:
            kinds = Counter(finding.rule for finding in findings)
            listed = ", ".join(f"{kinds[rule]} {rule}" for rule in RULES if kinds[rule])
            wrong = str(wrong_in(library.partition("==")[0], findings))
        yield f"| {library} | {tuners} | {listed} | {wrong} | {flags} |"
    yield f"| all | {total[0]} | | | {total[1]} |"


def known_rows(trees: Mapping[str, Path]) -> Iterator[str]:
    """Yield the rows of the table of known mistakes."""
    yield "| library | reported | found |"
    yield "| --- | --- | --- |"
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for library, rule, kernel, name, source in known():
        groups.setdefault((library, source, rule), []).append((kernel, name))
    found = {
        library: {
            (f.rule, f.kernel, word)
            for f in check([tree])[0]
            for word in re.findall(r"\w+", f.message)[:5]
        }
        for library, tree in trees.items()
        if any(library == known for known, _, _ in groups)
    }
    rows: dict[tuple[str, str], list[str]] = {}
    for (library, source, rule), names in groups.items():
        if library not in found:
            print(f"{library} is not given: --tree {library}=PATH", file=sys.stderr)
            continue
        seen = [(rule, kernel, name) in found[library] for kernel, name in names]
        rows.setdefault((library, source), []).append(f"{sum(seen)} of {len(seen)} {rule}")
    for (library, source), found_of_rules in rows.items():
        yield f"| {library} | {source} | {', '.join(found_of_rules)} |"


@click.command()
@click.option("--tree", "given", multiple=True, help="NAME=PATH of a checkout.")
@click.option("--write", is_flag=True, help="Put the tables into docs/lint.md.")
def main(given: tuple[str, ...], write: bool) -> None:
    """Count what `safetune lint` finds in libraries, and look for known mistakes."""
    with tempfile.TemporaryDirectory() as folder:
        trees = {name: Path(path) for name, _, path in (each.rpartition("=") for each in given)}
        wanted = {*COUNTED, *FLAGS_ONLY, *(library for library, *_ in known())} - {*trees}
        wheels = sorted(name for name in wanted if "==" in name)
        trees.update((name, unpacked(name, Path(folder))) for name in wheels)
        today = datetime.date.today().isoformat()
        tables = {
            f"Counted on {today}": count_rows(trees),
            "Known mistakes": known_rows(trees),
        }
        text = "\n\n".join(f"{title}:\n\n" + "\n".join(rows) for title, rows in tables.items())
    print(text)
    if write:
        page = Path(__file__).parents[1] / "docs" / "lint.md"
        head, start, rest = page.read_text(encoding="utf-8").partition("<!-- counts -->\n")
        _, end, tail = rest.partition("<!-- end of counts -->\n")
        page.write_text(f"{head}{start}\n{text}\n\n{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
