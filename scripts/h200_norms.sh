#!/usr/bin/env bash
# Step 2 on a GPU: norm kernels checked and measured, in under eight minutes. Run from the repository root after
# `make kernels` (the built library is used where it is there); results go to $OUT (default: build/gpu).
#
#   scripts/h200_norms.sh [STEP...]    steps: tests counters self ops versions shapes (default: all but shapes)
#
# A step whose result is there already is skipped, so a run that was cut off goes on where it ended. Peers are used where
# Python finds them; vLLM's operators alone also by their file: ROOFLIGHT_VLLM_LIBRARY=/path/to/_C_stable_libtorch.abi3.so.
set -uo pipefail
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
rooflight() { python3 -m rooflight "$@"; }
status=0

step() { # NAME RESULT COMMAND...
    local name=$1 result=$OUT/$2
    shift 2
    if [ -e "$result" ]; then
        echo "== $name: done before"
        return
    fi
    echo "== $name"
    local start=$SECONDS
    "$@" >"$OUT/$name.log" 2>&1 || { status=1; echo "$name failed"; }
    tail -n "${LINES_SHOWN:-15}" "$OUT/$name.log" | cut -c1-200
    echo "== $name took $((SECONDS - start)) s"
}

tests() {
    python3 -m pytest -q -n "${WORKERS:-10}" -p no:cacheprovider tests/contract tests/kernels tests/ops tests/bench \
        -m "not mutant" && touch "$OUT/tests.passed"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,utilization.gpu --format=csv,noheader
for name in ${*:-tests counters self ops versions}; do
    case $name in
    tests) step tests tests.passed tests ;;
    counters) step counters counters.json python3 scripts/counters.py "$OUT/counters.json" ;;
    self) step self self.passed bash -c "python3 -m rooflight bench self-test && touch $OUT/self.passed" ;;
    ops) step ops layer_norm_backward.csv rooflight bench all --out "$OUT" ;;
    versions)
        mkdir -p "$OUT/versions"
        step versions versions/fused_add_rms_norm_.csv rooflight bench ops fused_add_rms_norm_ --dtype bf16 --protocol graph \
            --contender versions --contender rooflight --shape 1x4096 --shape 256x4096 --shape 16384x1024 \
            --shape 16384x4096 --shape 16384x8192 --out "$OUT/versions"
        ;;
    shapes) step shapes norm_shapes.json python3 scripts/norm_shapes.py measure "$OUT/norm_shapes.json" ;;
    *) echo "no step $name" && exit 2 ;;
    esac
done
exit $status
