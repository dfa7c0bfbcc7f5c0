"""The tuning key has one builder, and Triton's own key one more."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from safetune.keys.tuning_key import readable_key, triton_key

ROOT = Path(__file__).resolve().parents[2]


def constructions(name: str) -> list[str]:
    """Return the product files that call `name`, once for each call."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in ("safetune", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


def test_a_tuning_key_is_made_in_one_place() -> None:
    """A second builder that forgets a part of the key makes other digests, silently."""
    assert constructions("TuningKey") == ["safetune/keys/tuning_key.py"]


def test_tritons_key_keeps_the_values_and_the_dtypes_in_the_order_of_the_call() -> None:
    x, y = torch.zeros(2, dtype=torch.float16), torch.zeros(2)
    arguments = {"n": 4, "y": y, "x": x, "num_warps": 8}

    assert triton_key(["n", "x", "absent"], ["x", "y", "n"], arguments) == (
        4,
        x,
        "torch.float32",
        "torch.float16",
    )
    assert readable_key(["n", "x"], ["x", "y", "n"], arguments) == (
        4,
        "torch.float16",
        "torch.float32",
        "torch.float16",
    )
