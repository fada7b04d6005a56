#!/usr/bin/env bash
# The runtime on a GPU, measured: throughput, single requests, starts, the ladder, steps taken apart and foretold, and
# what its choices of kernels and parts rest on. Run from the repository root; the library of `make kernels` is used
# where it is there. Results go to $OUT (default: build/gpu); a step whose result is there already is skipped.
#
#   scripts/h200_decode.sh [throughput] [small_steps] [request] [start] [ladder] [profile] [explain] [providers]
set -uo pipefail
OUT=${OUT:-build/gpu}
MODEL=${MODEL:-random:qwen3-0.6b}
mkdir -p "$OUT"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 COLUMNS=${COLUMNS:-120}
status=0

step() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    [ -e "$OUT/$name.json" ] && return
    "$@" --out "$OUT" >"$OUT/$name.log" 2>&1 || { status=1 && echo "== $name failed"; }
    tail -n "${LINES_SHOWN:-30}" "$OUT/$name.log"
    echo "== $name took $((SECONDS - start)) s"
}

for name in "${@:-throughput small_steps request start ladder profile explain providers}"; do
    for one in $name; do
        case $one in
        throughput) step throughput python3 -m rooflight bench throughput --model "$MODEL" --device cuda --rounds 3 ;;
        small_steps) # the cases whose prompts are more than a step of 16,384 tokens, in such steps
            mkdir -p "$OUT/small_steps"
            OUT=$OUT/small_steps step throughput python3 -m rooflight bench throughput --model "$MODEL" --device cuda \
                --rounds 3 --max-num-batched-tokens 16384 --case 256:512:128 --case 1024:128:128
            ;;
        request) step request python3 -m rooflight bench request --model "$MODEL" --device cuda --rounds 5 ;;
        start) step start python3 -m rooflight bench start --model "$MODEL" --rounds 2 ;;
        ladder) step ladder python3 -m rooflight ladder decode --model "$MODEL" --rounds 3 ;;
        profile) step profile python3 -m rooflight profile --model "$MODEL" ;;
        explain) step explain_measured python3 -m rooflight explain "$MODEL" --measure --sweep ;;
        providers) step decode_parts python3 scripts/step_providers.py --model "$MODEL" ;; # step_providers.json comes first
        esac
    done
done
exit $status
