"""What `safetune lint` finds in libraries: `python benchmarks/lint_counts.py --write`.

Downloads wheels without their dependencies into a temporary folder, lints each, and counts findings
by rule, and among them those that were judged wrong by reading the code (`WRONG`). Then looks for
mistakes that are known, in the versions that had them (`KNOWN`). `--tree NAME=PATH` gives a folder
for a library that is not a wheel. `--write` puts the tables into docs/lint.md.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

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

#: Known mistakes, as (library, rule, kernel, name, where it was reported).
KNOWN = (
    *(
        ("fla-core==0.5.0", "phantom", f"causal_conv1d_{way}_kernel", "NB", "FLA #1147")
        for way in ("fwd", "bwd")
    ),
    *(
        ("flash-linear-attention==0.2.2", rule, f"layer_norm_gated_{kernel}", name, "FLA #533")
        for rule, kernel, name in (
            ("phantom", "fwd_kernel", "NB"),
            ("phantom", "bwd_kernel", "NB"),
            ("length", "bwd_kernel", "BS"),
            ("length", "bwd_kernel1", "BS"),
        )
    ),
    *(
        ("fla-core==0.4.0", rule, f"l2norm_{way}_kernel", name, "FLA #663, #669, #758")
        for way in ("fwd", "bwd")
        for rule, name in (("length", "T"), ("phantom", "NB"))
    ),
    *(
        ("fla-core==0.6.0", "phantom", f"{kernel}_{way}_kernel", "NB", "this project")
        for kernel in ("layer_norm", "layer_norm_gated", "l2norm")
        for way in ("fwd", "bwd")
    ),
    *(
        ("fla-core==0.6.0", "phantom", f"chunk_{kind}kda_bwd_kernel_dAv", "BK", "this project")
        for kind in ("", "precond_")
    ),
    (
        "torchao==0.18.0",
        "unknown",
        "_triton_fp8_rowwise_3d_transpose_cast_rhs_kernel",
        "num_elements",
        "this project",
    ),
    *(
        ("flag-gems==5.0.2", "stand-in", f"{kernel}_host_tma", name, "this project")
        for kernel in ("mm_kernel_general", "w8a8_block_fp8_matmul_kernel")
        for name in ("stride_am", "stride_bk")
    ),
    ("flag-gems==5.0.2", "stand-in", "grouped_mm_tma_kernel", "M", "this project"),
    ("sglang==0.5.23", "flag", "_layer_norm_fwd_1pass_kernel", "HAS_DROPOUT", "this project"),
    *(
        ("generative-recommenders db1bf8f", rule, kernel, name, "this project")
        for rule, kernel, name in (
            ("stand-in", "_hstu_attn_fwd", "DimQ"),
            ("stand-in", "_hstu_attn_fwd", "DimV"),
            ("unseen", "_hstu_attn_fwd_persistent", "DimQ"),
            ("unseen", "_hstu_attn_fwd_persistent", "DimV"),
            ("size", "_swiglu_fwd_tma_ws_persistent", "M_BLOCK"),
            ("size", "_swiglu_fwd_kernel", "M_BLOCK"),
        )
    ),
    *(
        ("attention-gym 7fdb85d", rule, kernel, name, "this project")
        for rule, kernel, name in (
            ("stand-in", "_selected_attention_bwd_dlocal_kv_tma", "D"),
            ("phantom", "l2norm_fwd_kernel", "NB"),
            ("phantom", "l2norm_bwd_kernel", "NB"),
        )
    ),
)


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
    for library, rule, kernel, name, source in KNOWN:
        groups.setdefault((library, source, rule), []).append((kernel, name))
    found = {
        library: {
            (f.rule, f.kernel, word.rstrip(":"))
            for f in check([tree])[0]
            for word in f.message.split()[:3]
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
        wanted = {*COUNTED, *FLAGS_ONLY, *(library for library, *_ in KNOWN)} - {*trees}
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
