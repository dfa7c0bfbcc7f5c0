#!/usr/bin/env bash
# Everything that needs a GPU, in commands of less than ten minutes each:
#
#   OUT=results benchmarks/run_on_gpu.sh               what looks at the card's memory; kernels, demo
#   OUT=results benchmarks/run_on_gpu.sh integrations  the other GPU tests
#   OUT=results benchmarks/run_on_gpu.sh two           what needs two GPUs; one and two side by side
#   OUT=results benchmarks/run_on_gpu.sh recorded      FLA's layers from recorded calls to frozen, on
#                                                      all GPUs; needs fla-core
#   OUT=results benchmarks/run_on_gpu.sh bench         tuning time, choice quality, start-up, store
#   OUT=results benchmarks/run_on_gpu.sh startup       one of these; options for it may follow
#   OUT=results benchmarks/run_on_gpu.sh sweep         a tuning of 1,920 configs
#   OUT=results benchmarks/run_on_gpu.sh fused_moe_sweep   18 keys of SGLang's fused MoE; needs sglang
#   OUT=results benchmarks/run_on_gpu.sh fused_moe_exhaustive --caches DIR bfloat16   all their configs
#   OUT=results benchmarks/run_on_gpu.sh prune         FLA's lists of configs, shorter; needs fla-core
#   OUT=results benchmarks/run_on_gpu.sh norms         the shipped kernels; Liger and FLA beside them
#   OUT=results benchmarks/run_on_gpu.sh norms_small   the same on few rows, beside torch.compile
#   OUT=results benchmarks/run_on_gpu.sh unmodified    FLA's layers; needs fla-core
#   OUT=results benchmarks/run_on_gpu.sh cold_libraries   what a user of a library waits for
#   OUT=results benchmarks/run_on_gpu.sh same_bits    what the policy costs; FLA's layers need fla-core
#   OUT=results benchmarks/run_on_gpu.sh busy_card    choices of eight processes on one card
#   OUT=results benchmarks/run_on_gpu.sh proofs --sources DIR   libraries' tests: proof_sources.sh
#
# benchmarks/gpu_requirements.txt has what is needed besides safetune. Two modes at once need two
# cards and a CUDA_VISIBLE_DEVICES each: the tests of `checks` fail beside whatever fills their card.
#
# tests/gpu/test_unmodified.py, which takes minutes, is in none of these: `make test-gpu` has it.
#
# Benchmarks begin nothing that would end more than BUDGET seconds (default: 540) after the start,
# the most important first; run them again, with the same OUT, until nothing is left: two or three
# times for all of `bench`, about 16 minutes.
#
# Installs nothing. Results go to $OUT (default: benchmarks/results), one folder per kind of GPU, and
# each step's whole output to $LOGS (default: $OUT/logs, or a folder of its own without $OUT). Every
# step runs, under a limit of its own; the exit code is 1 when one failed. PYTHON names the
# interpreter; BENCH_COMMIT the commit, where the checkout has no .git (without it a result says
# "unknown", and tests/test_benchmarks.py will not have it).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
mode=${1:-checks}
modes="checks integrations two recorded bench"
benchmarks="tuning_time argument_size choice_quality first_tuning startup store sweep fused_moe_sweep
fused_moe_exhaustive prune install_time launch_overhead norms_host norms norms_small unmodified
cold_libraries same_bits proofs busy_card"
case " $(echo $modes $benchmarks) " in
    *" $mode "*) ;;
    *)
        echo "usage: $0 [${modes// / | } | ($(echo $benchmarks | sed 's/ / | /g')) [OPTION...]]" >&2
        exit 2
        ;;
esac
python=${PYTHON:-python3}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "${OUT:-}" ]; then
    logs=${LOGS:-$OUT/logs}
else
    OUT=benchmarks/results
    logs=${LOGS:-$(mktemp -d)}
fi
mkdir -p "$OUT" "$logs"

# But for an assembler that Triton was told of, as one that lies in a folder without its own needs it.
for name in "${!SAFETUNE_@}" "${!TRITON_@}"; do
    case $name in TRITON_PTXAS*) ;; *) unset "$name" ;; esac
done
export PYTHONUNBUFFERED=1

# Not the working directory before everything else: its folder `safetune` is not the whole package.
safe_path=(-P)
"$python" -P -c '' 2>/dev/null || safe_path=()

has() { (cd / && "$python" -c "import $1") >/dev/null 2>&1; }

if ! has safetune.kernels; then
    echo "safetune is not installed: putting the checkout together as pyproject.toml does"
    mkdir -p "$scratch/site/safetune"
    ln -s "$root"/safetune/* "$root/kernels" "$root/cache" "$scratch/site/safetune/"
    export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi

summary=$scratch/summary
failed=0
# step NAME LIMIT_S COMMAND...: its output goes to a log, the end of that to the terminal.
step() {
    local name=$1 limit=$2 started=$SECONDS status=0 verdict
    shift 2
    printf '\n== %s: %s\n' "$name" "$*"
    timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1 </dev/null || status=$?
    tail -n "${TAIL_LINES:-25}" "$logs/$name.log" | cut -c -200
    case $status in
        0) verdict=ok ;;
        124 | 137) verdict="FAILED: over its limit of $limit s" failed=1 ;;
        *) verdict="FAILED with exit code $status" failed=1 ;;
    esac
    printf '%5ds  %-16s %s\n' "$((SECONDS - started))" "$name" "$verdict" >>"$summary"
}

export SAFETUNE_TEST_FULL=1 # what the default suite leaves out, too
pytest=("$python" "${safe_path[@]}" -m pytest -p no:cacheprovider --durations=12 -m gpu)
has pytest_timeout && pytest+=(--timeout=240)
# workers N: the options for so many test processes at once.
workers() { if has xdist; then echo "-n $1 --dist ${2:-load} --no-loadscope-reorder"; fi; }

# These look at how much of the card's memory is free, or count tunings, and a choice of a busy card
# is raced again: nothing else may use it beside them.
alone=()
for name in memory inputs faults capture scratch threads silent_faults device_faults hand_over \
    without_torch device_timer driver_start; do
    alone+=("tests/gpu/test_$name.py")
done

checks() {
    step launch_overhead 60 "$python" benchmarks/launch_overhead.py --out "$OUT"
    step norms_host 60 "$python" benchmarks/norms_host.py --out "$OUT"
    step alone 330 "${pytest[@]}" "${alone[@]}"
    # shellcheck disable=SC2046
    step kernels 150 "${pytest[@]}" $(workers 6) tests/kernels
    step demo 60 "$python" docs/examples/demo.py
}

integrations() {
    # shellcheck disable=SC2046
    step others 560 "${pytest[@]}" $(workers 4 loadfile) tests/gpu tests/test_triton_contract.py \
        "${alone[@]/#/--ignore=}" --ignore=tests/gpu/test_unmodified.py
}

two() {
    step two_gpus 200 "${pytest[@]}" -m two_gpus tests
    step devices 250 "$python" benchmarks/devices.py --out "$OUT"
}

recorded() {
    step recorded 560 "$python" docs/examples/record_to_frozen.py --fla --devices all
}

# parts NAME BENCHMARK OPTION...: a benchmark that runs in parts, within what is left of the budget.
parts() {
    local name=$1 script=benchmarks/$2.py left=$((${BUDGET:-540} - SECONDS))
    shift 2
    if [ "$left" -lt 20 ]; then
        printf '        %-16s not run: no time left\n' "$name" >>"$summary"
        return
    fi
    step "$name" "$((left + 30))" "$python" "$script" --out "$OUT" --budget "$left" "$@"
}

bench() {
    parts tuning_time tuning_time
    parts argument_size argument_size
    parts choice_quality choice_quality
    parts first_tuning first_tuning
    parts startup startup
    parts sweep sweep
    parts store store
}

nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
(cd benchmarks && "$python" -c 'import recording; print(recording.versions(), recording.commit())')

case $mode in
    checks | integrations | two | recorded | bench) "$mode" ;;
    launch_overhead | norms_host) step "$mode" 120 "$python" "benchmarks/$mode.py" --out "$OUT" "${@:2}" ;;
    busy_card) step "$mode" 540 "$python" benchmarks/busy_card.py --out "$OUT" "${@:2}" ;;
    fused_moe_exhaustive) parts "$mode" fused_moe_sweep --exhaustive "${@:2}" ;;
    *) parts "$mode" "$mode" "${@:2}" ;;
esac

printf '\n== steps (logs in %s)\n' "$logs"
cat "$summary"
exit "$failed"
