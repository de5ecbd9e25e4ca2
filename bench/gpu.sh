#!/usr/bin/env bash
# Measure the kernels on a GPU: first the tests marked `gpu`, then every kernel bench. Runs on any
# machine with an NVIDIA GPU, in under nine minutes. Peers that are not installed are left out.
# Results: bench/results/kernel_speed.json. Log: bench/results/gpu.log.
#
#     bench/gpu.sh [folder for the results]        PYTHON=... names the interpreter (default python)
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
OUT=${1:-bench/results}
mkdir -p "$OUT"

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "bench/gpu.sh needs a GPU, and torch finds none." >&2
    exit 2
fi
unset TRITON_INTERPRET # left over from CPU tests, it would interpret the kernels, slowly
export PYTHONUNBUFFERED=1

{
    date -u
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
    for peer in trl liger_kernel cutlass; do
        "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$peer') is None)" ||
            echo "$peer is not installed: the tables list its sides as not measured"
    done
    # The kernels' own tests run once more, because on a GPU they compile instead of interpreting.
    timeout 150 "$PYTHON" -m pytest -q -m gpu &&
        timeout 80 "$PYTHON" -m pytest -q tests/kernels/test_{log_softmax,policy}.py
    tests=$?
    timeout 40 "$PYTHON" -m bench.kernel_speed --check
    errors=$?
    timeout 260 "$PYTHON" -m bench.kernel_speed --seconds 8 --out "$OUT"
    speed=$?
    echo "tests $tests, errors $errors, speed $speed (0 means success); $SECONDS seconds"
} 2>&1 | tee "$OUT/gpu.log"
tail -n 1 "$OUT/gpu.log" | grep -q "tests 0, errors 0, speed 0"
