#!/usr/bin/env bash
# Step 3 on a GPU: transformers' decode of a model of Qwen3-0.6B's shapes, recorded and explained. A minute or two; run
# from the repository root. Results go to $OUT (default: build/gpu).
set -euo pipefail
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
[ -e "$OUT/transformers_decode.json.gz" ] || python3 scripts/record_trace.py "$OUT/transformers_decode.json.gz"
python3 -m rooflight explain --trace "$OUT/transformers_decode.json.gz" --gpu h200 | tee "$OUT/transformers_decode.txt"
python3 -m rooflight explain --trace "$OUT/transformers_decode.json.gz" --gpu h200 --json >"$OUT/transformers_decode.json"
