#!/usr/bin/env bash
# The GPU half of the evidence: the tests marked `gpu`, then every kernel bench. On any machine with an NVIDIA GPU, in under nine
# minutes; needs what is installed and nothing else. Rows: bench/results/kernel_speed.json. Log: bench/results/gpu.log.
#
#     bench/gpu.sh [folder for the rows]        PYTHON=... names the interpreter, if not `python`
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
OUT=${1:-bench/results}
mkdir -p "$OUT"

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "bench/gpu.sh measures on a GPU, and torch sees none here." >&2
    exit 2
fi
unset TRITON_INTERPRET # a leftover of CPU tests would interpret the kernels, slowly
export PYTHONUNBUFFERED=1

{
    date -u
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
    for peer in trl liger_kernel cutlass; do
        "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$peer') is None)" ||
            echo "peer $peer is not installed: its sides are left out of the tables by name"
    done
    # The kernels' own tests once more: on a GPU they compile instead of interpreting.
    timeout 150 "$PYTHON" -m pytest -q -m gpu && timeout 80 "$PYTHON" -m pytest -q tests/test_kernels_{log_softmax,policy}.py
    tests=$?
    timeout 40 "$PYTHON" -m bench.kernel_speed --check
    right=$?
    timeout 260 "$PYTHON" -m bench.kernel_speed --seconds 8 --out "$OUT"
    speed=$?
    echo "tests $tests, errors $right, speed $speed (0 is good); $SECONDS seconds"
} 2>&1 | tee "$OUT/gpu.log"
tail -n 1 "$OUT/gpu.log" | grep -q "tests 0, errors 0, speed 0"
