#!/usr/bin/env bash
# Brings what proofs.py runs and packages do not have, at the commits that proof_list.py names:
#
#   benchmarks/proof_sources.sh DIR      FLA's and Liger's tests, Triton's tutorials, a Hugging Face kernel
#
# FLA_GIT, HUB_GIT and TRITON_GIT may name a clone to take them from. A source that cannot be had is
# named at the end, with exit code 1; the others are there, and proofs.py --only runs them.
set -uo pipefail
[ $# -eq 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" && cd "$1" || exit 2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
missing=()

# bring NAME REPOSITORY COMMIT PATH: the files below PATH go to NAME/PATH.
bring() {
    rm -rf "$1" && mkdir -p "$1"
    git clone -q --bare --filter=tree:0 "$2" "$scratch/$1" &&
        git --git-dir="$scratch/$1" archive "$3" "$4" | tar x -C "$1" || missing+=("$1")
}

bring fla "${FLA_GIT:-https://github.com/fla-org/flash-linear-attention}" bc3b101 tests
bring hub "${HUB_GIT:-https://github.com/huggingface/kernels-community}" 40d4194 finegrained-fp8
rm -rf finegrained-fp8 && mv hub/finegrained-fp8 . 2>/dev/null; rm -rf hub
bring triton "${TRITON_GIT:-https://github.com/triton-lang/triton}" 004d7f5 python/tutorials
rm -rf tutorials && mv triton/python/tutorials . 2>/dev/null; rm -rf triton

rm -rf liger && mkdir liger
python3 -m pip download -q --no-deps --no-binary :all: -d "$scratch/sdist" liger-kernel==0.8.5 &&
    tar xzf "$scratch"/sdist/liger*.tar.gz --strip-components 1 -C liger || missing+=(liger)

[ ${#missing[@]} -eq 0 ] || { echo "could not be had: ${missing[*]}" >&2; exit 1; }
