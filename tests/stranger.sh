#!/usr/bin/env bash
# The path of someone who meets safetune for the first time, from a checkout: install, demo, a kernel of
# their own, a misspelt key, a second process, the commands, the site. Each step says what it expects, and
# the first that shows something else ends the script. Needs no GPU and no network beyond the install.
#
#     bash tests/stranger.sh [PYTHON]      # PYTHON: of an environment that has torch and Triton
set -euo pipefail

checkout=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SAFETUNE_CACHE_DIR=$work/store TRITON_CACHE_DIR=$work/triton TRITON_INTERPRET=1 COLUMNS=80
unset PYTHONPATH

step() { printf '\n== %s\n' "$1"; }
expect() {  # expect TEXT COMMAND...: the command succeeds and prints the text
    local text=$1 output status=0
    shift
    output=$("$@" 2>&1) || status=$?
    printf '$ %s\n%s\n' "$*" "$output"
    [ "$status" -eq 0 ] || { echo "exit code $status" >&2; exit 1; }
    grep -qF -- "$text" <<<"$output" || { echo "does not say: $text" >&2; exit 1; }
}
refuse() {  # refuse TEXT COMMAND...: the command fails and says why
    local text=$1 output status=0
    shift
    output=$("$@" 2>&1) || status=$?
    printf '$ %s\n%s\n' "$*" "$output"
    [ "$status" -ne 0 ] || { echo "did not fail" >&2; exit 1; }
    grep -qF -- "$text" <<<"$output" || { echo "does not say: $text" >&2; exit 1; }
}

step "install: beside the torch and Triton that are there"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m venv --without-pip "$work/venv"
echo "$packages" >"$("$work"/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
mkdir "$work/checkout"
tar -C "$checkout" --exclude='./.*' --exclude=./build --exclude='*.egg-info' -cf - . | tar -C "$work/checkout" -xf -
"$work/venv/bin/python" -m pip install --quiet --no-deps --no-index --no-build-isolation --ignore-installed \
    "$work/checkout"
PATH=$work/venv/bin:$PATH
expect "safetune 0." safetune --version
cd "$work"

step "demo"
expect "nothing was measured twice" safetune demo

step "a kernel of one's own"
cat >own.py <<'PYTHON'
import torch
import triton
import triton.language as tl

from safetune import safetune


@safetune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["count"])
@triton.jit
def halve_kernel(pointer, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pointer + offsets, mask=offsets < count)
    tl.store(pointer + offsets, value / 2, mask=offsets < count)


numbers = torch.ones(300)
halve_kernel[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](numbers, 300)
assert (numbers == 0.5).all()
print("tuned for", halve_kernel.bench_time, "s:", halve_kernel.best_config)
PYTHON
expect "tuned for" python own.py

step "a misspelt key"
sed 's/key=\["count"\]/key=["cuont"]/' own.py >misspelt.py
refuse "did you mean 'count'?" python misspelt.py

step "a second process"
expect "tuned for 0.0 s" python own.py

step "list, show, doctor"
expect "halve_kernel" safetune list
expect "BLOCK" safetune show halve_kernel
expect "0 failures" safetune doctor

step "clear"
refuse "--yes" safetune clear halve_kernel
safetune clear halve_kernel --yes
refuse "halve_kernel" safetune show halve_kernel

step "the site"
expect "" python -m sphinx -q -W -b html "$checkout/docs" "$work/site"
ls "$work/site/index.html" "$work/site/reference/commands.html"
