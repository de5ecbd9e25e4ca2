#!/usr/bin/env bash
# Compare training with TRL on a GPU: one step of the 0.6B and the 1.7B shape, then full GRPO steps
# of the 0.6B shape. Runs on any machine with an NVIDIA GPU, in under nine minutes. Without TRL its
# sides are left out. Results: bench/results/step_large.json and end_to_end.json.
# Log: bench/results/gpu_train.log.
#
#     bench/gpu_train.sh [folder for the results]  PYTHON=... names the interpreter (default python)
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
OUT=${1:-bench/results}
mkdir -p "$OUT"

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "bench/gpu_train.sh needs a GPU, and torch finds none." >&2
    exit 2
fi
unset TRITON_INTERPRET # left over from CPU tests, it would interpret the kernels, slowly
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# on several GPUs TRL's trainer would split its batches
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

{
    date -u
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
    without=
    if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("trl") is None)'; then
        without=--no-trl
        echo "TRL is not installed: its sides and the comparison of full steps are left out"
    fi
    timeout 165 "$PYTHON" -m bench.step_time --shape 0.6B $without --out "$OUT"
    small=$?
    timeout 205 "$PYTHON" -m bench.step_time --shape 1.7B $without --repeats 3 --out "$OUT"
    large=$?
    [ -n "$without" ] ||
        timeout 150 "$PYTHON" -m bench.end_to_end --shape 0.6B --cases uneven --rounds 1 --steps 5 --out "$OUT"
    full=$?
    echo "0.6B $small, 1.7B $large, full steps $full (0 means success); $SECONDS seconds"
} 2>&1 | tee "$OUT/gpu_train.log"
tail -n 1 "$OUT/gpu_train.log" | grep -q "0.6B 0, 1.7B 0, full steps 0"
