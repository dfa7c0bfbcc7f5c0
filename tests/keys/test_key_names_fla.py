"""The real thing: every autotuned kernel of the wheel fla-core 0.6.0, its decorator taking notes.

`pip install fla-core==0.6.0` is enough: on an Intel or NVIDIA machine without a GPU its modules
import as well. Another version is another set of kernels, so any other is skipped.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from safetune.keys.key_names import report_of
from safetune.settings import PhantomPolicy

VERSION = "0.6.0"


def _installed() -> str:
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "none"


pytestmark = [
    pytest.mark.internals,
    pytest.mark.slow,
    pytest.mark.skipif(_installed() != VERSION, reason=f"needs fla-core=={VERSION}"),
]

#: Notes what `classify` says wherever the wheel makes an autotuner, while its modules are loading.
SCAN = """
import importlib, inspect, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
from triton.runtime.autotuner import Autotuner
from safetune.keys.identity import base_function, kernel_identity
from classified import classify
from safetune.launch.call_shape import constexpr_names

notes, kernels, construct = [], [], Autotuner.__init__

def noting(self, fn, arg_names, configs, key, *args, **kwargs):
    call = inspect.signature(construct).bind(self, fn, arg_names, configs, key, *args, **kwargs)
    readers = ("prune_configs_by", "pre_hook", "post_hook")
    options = {name: call.arguments.get(name) for name in readers}
    report = classify(fn, key, configs=configs, **options)
    kernels.append(fn)
    notes.append({
        "kernel": report.kernel,
        "location": report.location,
        "names": [[name.name, name.kind.value, name.reason] for name in report.names],
        "missing": report.missing,
        "constexprs": [name for name in report.pinned if name in constexpr_names(fn)],
    })
    construct(self, fn, arg_names, configs, list(report.kept), *args, **kwargs)

Autotuner.__init__ = noting
import fla
failed = []
for module in pkgutil.walk_packages(fla.__path__, "fla."):
    try:
        importlib.import_module(module.name)
    except Exception as error:
        failed.append(f"{module.name}: {error}")
for note, kernel in zip(notes, kernels, strict=True):
    identity = kernel_identity(kernel)
    note["source"], note["digest"] = identity.source, identity.digest

import phantom_oracle
from fla.modules.norm.layernorm import layer_norm_bwd_kernel
jit, _ = base_function(layer_norm_bwd_kernel)
types = {name: "*fp32" for name in jit.arg_names} | {"T": "i32"}
flags = ("IS_RMS_NORM", "STORE_DRESIDUAL", "HAS_WEIGHT", "HAS_BIAS", "RECOMPUTE_OUTPUT")
fixed = dict.fromkeys(flags, False) | {"G": 1, "D": 64, "BS": 8, "BT": 8, "BD": 64, "GS": 4}
codes = {
    f"{residual} {blocks}": phantom_oracle.compiled(
        jit, {**fixed, "HAS_DRESIDUAL": residual, "NB": blocks}, types
    )
    for residual in (False, True)
    for blocks in (1, 2, 7, 16)
}
print(json.dumps({"notes": notes, "failed": failed, "codes": codes}))
"""


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one fresh process found: the wheel checks for devices as it is imported."""
    import os
    import subprocess
    import sys

    directory = tmp_path_factory.mktemp("fla")
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", SCAN],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def named(scan: dict[str, Any], module: str, kernel: str) -> dict[str, Any]:
    (found,) = (
        note
        for note in scan["notes"]
        if note["kernel"] == kernel and note["location"].rpartition(":")[0].endswith(module)
    )
    return found


def kinds(note: dict[str, Any]) -> dict[str, str]:
    return {name: kind for name, kind, _ in note["names"]}


@pytest.mark.full
def test_lint_gives_each_name_of_each_kernel_the_class_that_it_has_at_run_time(
    scan: dict[str, Any],
) -> None:
    """From text alone: nothing of the wheel is imported. Where a function makes the configs, their
    names are not known, and are among those that the key lacks.
    """
    import fla

    from safetune.lint.check import tuners_under

    folder = Path(next(iter(fla.__path__)))
    classes = {}
    for _, tuner in tuners_under([folder]):
        key = tuner.key()
        assert key is not None, tuner.name
        report = report_of(tuner.facts(), key, PhantomPolicy.DROP)
        names = [[name.name, name.kind.value, name.reason] for name in report.names]
        classes[report.location] = [names, [*report.missing] if tuner.written else None]
    assert sum(missing is None for _, missing in classes.values()) <= 15
    met = {
        note["location"]: [
            note["names"],
            note["missing"] if classes[note["location"]][1] is not None else None,
        ]
        for note in scan["notes"]
    }
    assert {place: classes.get(place) for place in met} == met


NORMS = {
    ("norm/layernorm.py", "layer_norm_fwd_kernel"): ["NB"],
    ("norm/layernorm.py", "layer_norm_fwd_kernel_row"): [],
    ("norm/layernorm.py", "layer_norm_bwd_kernel"): ["NB"],
    ("norm/layernorm.py", "layer_norm_bwd_kernel_row"): [],
    ("norm/l2norm.py", "l2norm_fwd_kernel"): ["NB"],
    ("norm/l2norm.py", "l2norm_fwd_kernel_row"): [],
    ("norm/l2norm.py", "l2norm_bwd_kernel"): ["NB"],
    ("norm/l2norm.py", "l2norm_bwd_kernel_row"): [],
    ("norm/fused_norm_gate.py", "layer_norm_gated_fwd_kernel"): ["NB"],
    ("norm/fused_norm_gate.py", "layer_norm_gated_fwd_kernel_row"): [],
    ("norm/fused_norm_gate.py", "layer_norm_gated_bwd_kernel"): ["NB"],
    ("norm/fused_norm_gate.py", "layer_norm_gated_bwd_kernel_row"): [],
}


@pytest.mark.parametrize(("where", "phantoms"), NORMS.items(), ids=[name for _, name in NORMS])
def test_nb_is_unused_in_the_norm_kernels_that_have_it(
    scan: dict[str, Any], where: tuple[str, str], phantoms: list[str]
) -> None:
    """#796: NB buckets the token count, nothing reads it, and each new value compiles again."""
    note = named(scan, *where)
    found = kinds(note)
    assert [name for name, kind in found.items() if kind == "phantom"] == phantoms
    assert {kind for name, kind in found.items() if name not in phantoms} == {"read"}
    assert note["constexprs"] == phantoms


def test_flags_of_the_residual(scan: dict[str, Any]) -> None:
    """HAS_DRESIDUAL is a flag of the caller in one file and set by a heuristic in the other."""
    for where in (
        ("norm/layernorm.py", "layer_norm_bwd_kernel"),
        ("norm/fused_norm_gate.py", "layer_norm_gated_bwd_kernel"),
    ):
        assert kinds(named(scan, *where))["HAS_DRESIDUAL"] == "read"


def test_dropping_loses_no_code(scan: dict[str, Any]) -> None:
    """Four values of NB are one kernel; with and without the residual's gradient are two."""
    codes = {case: code for case, code in scan["codes"].items() if code.startswith("error")}
    assert not codes
    assert len({code for case, code in scan["codes"].items() if case.startswith("True")}) == 1
    assert len({code for case, code in scan["codes"].items() if case.startswith("False")}) == 1
    assert len(set(scan["codes"].values())) == 2


def test_flags_that_the_key_lacks(scan: dict[str, Any]) -> None:
    """C10: tuned without weights, a config serves the calls with them."""
    note = named(scan, "norm/layernorm.py", "layer_norm_bwd_kernel")
    assert {"HAS_WEIGHT", "HAS_BIAS", "G", "BS", "GS"} <= set(note["missing"])
    assert not {"BT", "D", "NB"} & set(note["missing"])


#: Names that no kernel of the wheel reads in its body, as (name, kernel, kind).
UNREAD = {
    ("NB", "layer_norm_fwd_kernel", "phantom"),
    ("NB", "layer_norm_bwd_kernel", "phantom"),
    ("NB", "l2norm_fwd_kernel", "phantom"),
    ("NB", "l2norm_bwd_kernel", "phantom"),
    ("NB", "layer_norm_gated_fwd_kernel", "phantom"),
    ("NB", "layer_norm_gated_bwd_kernel", "phantom"),
    ("BK", "chunk_kda_bwd_kernel_dAv", "phantom"),
    ("BK", "chunk_precond_kda_bwd_kernel_dAv", "phantom"),
    ("B", "chunk_local_cumsum_vector_kernel", "grid"),
    ("B", "chunk_global_cumsum_scalar_kernel", "grid"),
    ("B", "chunk_global_cumsum_vector_kernel", "grid"),
    ("B", "chunk_comba_cumsum_scalar_fwd_kernel", "grid"),
    ("B", "chunk_comba_cumsum_scalar_bwd_kernel", "grid"),
    ("B", "rotary_embedding_kernel", "grid"),
    ("B", "grpo_fwd_kernel", "grid"),
    ("num_heads", "gate_output_correction_fwd_kernel", "grid"),
    ("num_heads", "gate_output_correction_bwd_kernel", "grid"),
    ("ES", "attnres_fwd_kernel_gluon", "early_config_prune"),
    ("T_BUCKET", "parallel_nsa_compression_bwd_kernel_dkv", "early_config_prune"),
    ("LAYOUT", "parallel_nsa_compression_bwd_kernel_dkv", "early_config_prune"),
    ("T_BUCKET", "parallel_wall_attn_fwd_kernel", "early_config_prune"),
    ("T_BUCKET", "parallel_wall_attn_bwd_kernel_dq", "bucket"),
    ("T_BUCKET", "parallel_wall_attn_bwd_kernel_dkv", "bucket"),
    ("KV_CHUNKS_BUCKET", "parallel_wall_attn_decode_kernel", "bucket"),
}


def reader(kind: str, reason: str) -> str:
    return next((who for who in ("the body", "early_config_prune", "grid") if who in reason), kind)


def test_every_kernel_of_the_wheel(scan: dict[str, Any]) -> None:
    """C1. Those that are not here import something that is not installed (tilelang, an NPU)."""
    notes = scan["notes"]
    unread = Counter(
        (name, note["kernel"], reader(kind, reason))
        for note in notes
        for name, kind, reason in note["names"]
        if reader(kind, reason) != "the body"
    )
    print(
        f"{len(notes)} kernels, {sum(len(n['names']) for n in notes)} names, {len(unread)} unread"
    )
    assert set(unread) == UNREAD
    assert len(notes) >= 250
    assert sum(len(note["names"]) for note in notes) >= 900


def test_phantoms_are_not_even_mentioned(scan: dict[str, Any]) -> None:
    """Another way to the same answer: their name is nowhere below the signature, nor handed on."""
    for note in scan["notes"]:
        _, _, body = note["source"].partition("):\n")
        for name in (name for name, kind, _ in note["names"] if kind == "phantom"):
            assert not re.search(rf"\b{name}\b", body), f"{note['location']}: {name}"


def test_a_name_that_is_never_mentioned_is_never_called_read_by_the_body(
    scan: dict[str, Any],
) -> None:
    for note in scan["notes"]:
        _, _, body = note["source"].partition("):\n")
        for name, kind, reason in note["names"]:
            if reader(kind, reason) == "the body":
                assert re.search(rf"\b{name}\b", body), f"{note['location']}: {name}"


def test_kernels_are_told_apart(scan: dict[str, Any]) -> None:
    """The wheel has kernels of one name in several files: same text, same kernel, and only then."""
    sources: dict[str, set[str]] = {}
    for note in scan["notes"]:
        sources.setdefault(note["digest"], set()).add(note["source"])
    assert all(len(texts) == 1 for texts in sources.values())
    assert len(sources) > 200
    assert Path(scan["notes"][0]["location"].rpartition(":")[0]).is_file()
