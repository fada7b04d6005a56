#!/usr/bin/env bash
# Our own steps on a GPU: recorded kernel by kernel, and foretold beside measured over the sweep of the docs. A few
# minutes; run from the repository root. Results go to $OUT (default: build/gpu); what is there is not done again.
set -euo pipefail
OUT=${OUT:-build/gpu}
MODEL=${MODEL:-random:qwen3-0.6b}
mkdir -p "$OUT"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} COLUMNS=${COLUMNS:-140}
[ -e "$OUT/profile.json" ] ||
    python3 -m rooflight profile --model "$MODEL" --out "$OUT" | tee "$OUT/profile.txt"
[ -e "$OUT/explain_measured.json" ] ||
    python3 -m rooflight explain "$MODEL" --measure --sweep --out "$OUT" | tee "$OUT/explain_measured.txt"
