#!/usr/bin/env bash
# Everything that needs a GPU, in two commands of less than ten minutes each:
#
#   OUT=results benchmarks/run_on_gpu.sh               tests, demo, launch overhead
#   OUT=results benchmarks/run_on_gpu.sh tuning_time   tuning time; again goes on where it ended
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
case $mode in
    checks | tuning_time) ;;
    *) echo "usage: $0 [checks | tuning_time [OPTION...]]" >&2 && exit 2 ;;
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

unset "${!SAFETUNE_@}" "${!TRITON_@}"
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

pytest=("$python" "${safe_path[@]}" -m pytest -p no:cacheprovider --durations=12)
has pytest_timeout && pytest+=(--timeout=100)
parallel=()
has xdist && parallel=(-n 6 --dist loadfile)

checks() {
    step gpu_tests 200 "${pytest[@]}" tests/gpu
    step kernel_tests 110 "${pytest[@]}" "${parallel[@]:0:2}" -m gpu --ignore=tests/gpu
    step launch_overhead 60 "$python" benchmarks/launch_overhead.py --out "$OUT"
    if [ -f docs/examples/demo.py ]; then
        step demo 60 "$python" docs/examples/demo.py
    else
        echo "        demo             not run: no docs/examples/demo.py" >>"$summary"
    fi
    # All but what needs a package index.
    step other_tests 120 "${pytest[@]}" "${parallel[@]}" -m 'not gpu' \
        --ignore=tests/test_packaging.py
}

tuning_time() {
    step tuning_time 560 "$python" benchmarks/tuning_time.py --out "$OUT" --budget 450 "$@"
}

nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
(cd benchmarks && "$python" -c 'import recording; print(recording.versions(), recording.commit())')

case $mode in
    checks) checks ;;
    tuning_time) tuning_time "${@:2}" ;;
esac

printf '\n== steps (logs in %s)\n' "$logs"
cat "$summary"
exit "$failed"
