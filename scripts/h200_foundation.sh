#!/usr/bin/env bash
# Step 1 on a GPU: the contract suite over every provider on the card, value tests, and a tiny model end to end.
# Run from the repository root on the GPU machine; logs go to $OUT (default: build/gpu).
set -uo pipefail
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'

# The GPU half first, one process per test worker; then what runs anywhere, as a check of these versions.
python3 -m pytest -q -n 6 -p no:cacheprovider tests/contract tests/kernels tests/ops \
    --junitxml="$OUT/contract.xml" >"$OUT/contract.log" 2>&1
status=$?
tail -n 40 "$OUT/contract.log"
python3 scripts/gpu_tiny_model.py >"$OUT/tiny_model.log" 2>&1 || status=1
tail -n 20 "$OUT/tiny_model.log"
exit $status
