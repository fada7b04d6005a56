#!/usr/bin/env bash
# Step 2 on a GPU: norm kernels checked and measured, in under eight minutes. Run from the repository root; the library
# of `make kernels` is used where it is there. Results go to $OUT (default: build/gpu).
#
#   scripts/h200_norms.sh [STEP...]
#
#   shapes     sweep of the forward kernel's shapes, then its table and the library are made anew
#   ops        ceilings of the card, operators and peers
#   tests      contract suite, kernels and operators ($SELECT: a -k expression)
#   counters   DRAM bytes from Nsight Compute
#   versions   the history of the kernel
#   self       does the harness measure what it says
#
# A step whose result is there already is skipped, so a run that was cut off goes on where it ended. Peers are used where
# Python finds them; vLLM's operators alone also by their file: ROOFLIGHT_VLLM_LIBRARY=/path/to/_C_stable_libtorch.abi3.so.
set -uo pipefail
OUT=${OUT:-build/gpu}
mkdir -p "$OUT/versions"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

step() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    if [ -e "$OUT/$name.done" ]; then
        echo "== $name: done before"
        return
    fi
    if "$@" >"$OUT/$name.log" 2>&1; then touch "$OUT/$name.done"; else status=1 && echo "== $name failed"; fi
    tail -n "${LINES_SHOWN:-6}" "$OUT/$name.log" | cut -c1-200
    echo "== $name took $((SECONDS - start)) s"
}

shapes() {
    python3 scripts/norm_shapes.py measure "$OUT/norm_shapes.json" && mkdir -p results/h200 &&
        cp "$OUT/norm_shapes.json" results/h200/ && python3 scripts/norm_shapes.py write &&
        cmake -S csrc -B build/kernels -G Ninja -DPython3_EXECUTABLE="$(command -v python3)" &&
        cmake --build build/kernels && cmake --install build/kernels --prefix src
}

tests() {
    python3 -m pytest -q -n "${WORKERS:-6}" -p no:cacheprovider tests/contract tests/kernels tests/ops tests/bench \
        --ignore tests/bench/test_request.py -m "not mutant" -k "${SELECT:-test}"
}

if [ -z "${ROOFLIGHT_COMMIT:-}" ] && ! git rev-parse HEAD >/dev/null 2>&1; then
    echo "figures need a commit: set ROOFLIGHT_COMMIT where there is no git history" && exit 2
fi
nvidia-smi --query-gpu=name,driver_version,utilization.gpu --format=csv,noheader
for name in ${*:-shapes ops tests counters versions self}; do
    case $name in
    shapes) step shapes shapes ;;
    ops) step ops python3 -m rooflight bench all --out "$OUT" ;;
    tests) step tests tests ;;
    counters) step counters python3 scripts/counters.py "$OUT/counters.json" ;;
    versions)
        step versions python3 -m rooflight bench ops fused_add_rms_norm_ --dtype bf16 \
            --protocol graph --contender versions --contender rooflight --shape 1x4096 --shape 256x4096 \
            --shape 16384x1024 --shape 16384x4096 --shape 16384x8192 --out "$OUT/versions"
        ;;
    self) step self python3 -m rooflight bench self-test ;;
    *) echo "no step $name" && exit 2 ;;
    esac
done
exit $status
