#!/usr/bin/env bash
# Two nodes with a shared store, and a deployment that never tunes: what an operator and CI call.
# Runs in a new directory, with the `python` and the `safetune` of the PATH.
set -euo pipefail
cd "$(mktemp -d)"

cat > model.py <<'PYTHON'
import torch
import triton
import triton.language as tl

from safetune import safetune

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(arguments):
    """Make the tensors of a recorded call. Choices tuned on random tensors are not shared."""
    return {"x": torch.ones(arguments["n"], device=DEVICE)}


CONFIGS = [triton.Config({"BLOCK": size}) for size in (64, 128)]


@safetune(configs=CONFIGS, key=["n"], inputs=inputs)
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x + offsets, tl.load(x + offsets, mask=mask) * 2, mask=mask)


def run():
    for n in (100, 1000):
        double[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](torch.ones(n, device=DEVICE), n)
PYTHON

mkdir shared
export SAFETUNE_SHARED="file://$PWD/shared"
model=(python -c "import model; model.run()")

on() {  # on NODE COMMAND...
    SAFETUNE_CACHE_DIR="$PWD/$1" "${@:2}"
}

fails() {
    if "$@"; then
        echo "this should have failed: $*" >&2
        exit 1
    fi
}

deploy() {  # what the pipeline of a deployment does, on node one
    on one safetune tune --recorded && on one safetune coverage --fail-under 100
}

serve() {  # on NODE, which must launch choices alone
    on "$1" env SAFETUNE_MODE=frozen "${model[@]}" 2> "serve.$1"
    fails grep "has no choice" "serve.$1"
}

echo "== record on one node, tune there, serve on both"
on one env SAFETUNE_MODE=record "${model[@]}"
deploy
serve one
serve two
on two safetune list --shared
on two safetune coverage --calls one/safetune.db --fail-under 100

echo "== the kernel is edited: the pipeline stops"
sed -i 's/mask=mask) \* 2/mask=mask) * 3/' model.py
fails deploy
fails on one safetune coverage --fail-under 100

echo "== what was recorded of the old kernel goes; record again, and deploy"
on one safetune clear double --shared --yes
on one env SAFETUNE_MODE=record "${model[@]}"
deploy
serve two

echo "== a choice by hand, and what a node has of it"
on one safetune pin double --key n=100 BLOCK=64
on one safetune list
serve one
echo "== done"
