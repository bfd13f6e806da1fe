#!/usr/bin/env bash
# Check and measure pd on this host's GPUs. Writes results as JSON and logs, and prints a table.
set -uo pipefail

PARTS=(tests kernels attention engine idle tensor transfer split)

usage() {
    cat <<END
usage: scripts/gpu_check.sh [OUT_DIR] [PART…]      (OUT_DIR: ./gpu-check)

parts, all by default:
  tests       GPU tests and the kernels' tests, on the GPU; memory that does not grow; transfers
              between tensor-parallel nodes of other sizes
  kernels     benchmarks/kernels.py
  attention   benchmarks/attention.py
  engine      pd-bench engine: decode, prefill, offline
  idle        how much of a decode step the GPU is idle (of the same run as engine, if that is chosen)
  tensor      sums between GPUs; pd-bench engine over two, tensor parallel, and Llama-3.1-70B's shape
              over four
  transfer    pd-bench transfer between two GPUs
  split       a split over two GPUs beside two unified nodes

environment:
  PYTHON       the interpreter (default: .venv/bin/python, or python3)
  MODEL        a directory or a name that pd-bench engine knows (default: llama-3.1-8b, dummy weights)
  NODE_FLAGS   more flags of pd-launch unified, for engine, idle, tensor and split

The exit status is that of the worst part.
END
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
out=gpu-check
if [ $# -gt 0 ] && [[ " ${PARTS[*]} " != *" $1 "* ]]; then
    out=$1
    shift
fi
chosen=("$@")
[ ${#chosen[@]} -gt 0 ] || chosen=("${PARTS[@]}")
for part in "${chosen[@]}"; do
    [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "gpu_check.sh: no part $part; see --help" >&2; exit 2; }
done
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-}
[ -n "$python" ] || { python=python3; [ -x .venv/bin/python ] && python=.venv/bin/python; }
model=${MODEL:-llama-3.1-8b}
read -ra node_flags <<< "${NODE_FLAGS:-}"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
[ "$gpus" -gt 0 ] || { echo "gpu_check.sh: torch sees no GPU here" >&2; exit 1; }

has() { [[ " ${chosen[*]} " == *" $1 "* ]]; }

table="" worst=0
# Run a part: its name, its time-out in seconds, its command. Shows its last lines at once.
part() {
    local name=$1 limit=$2 status began=$SECONDS
    shift 2
    echo "== $name"
    # NOTE: a hung GPU program may ignore SIGTERM.
    timeout --kill-after=15 "$limit" "$@" > "$out/$name.log" 2> "$out/$name.err"
    status=$?
    tail -n "${SHOW:-15}" "$out/$name.log"
    [ $status -eq 0 ] || tail -n 15 "$out/$name.err" >&2
    table+=$(printf '%-10s %-14s %5d s' "$name" "$(verdict $status)" $((SECONDS - began)))$'\n'
    [ $status -le $worst ] || worst=$status
}

verdict() {
    case $1 in 0) echo ok ;; 124 | 137) echo "timed out" ;; *) echo "FAILED ($1)" ;; esac
}

skip() { table+=$(printf '%-10s %s' "$1" "skipped: $2")$'\n'; }

if has tests; then
    # The log names each test when it ends; FlashInfer compiles for minutes.
    pytest=("$python" -m pytest -p no:cacheprovider -vv --timeout 300 -m "not full and not starved")
    part tests 1500 "${pytest[@]}" "--junitxml=$out/tests.xml" \
        tests/gpu tests/kernels tests/speculative/test_draft_graphs.py \
        tests/node/test_unified_memory.py
    if [ "$gpus" -ge 2 ]; then
        part sizes 300 env PD_TEST_DEVICE=cuda "${pytest[@]}" \
            "--junitxml=$out/tests-sizes.xml" -m "" -k "not mooncake" \
            tests/engine/test_tensor_parallel_transfers.py
    else
        skip sizes "needs two GPUs"
    fi
fi
for name in kernels attention; do
    has $name && SHOW=60 part $name 300 "$python" benchmarks/$name.py --output "$out/${name}_gpu.json"
done
trace=$out/decode_trace.json.gz
profile=()
has idle && profile=(--profile "$trace")
if has engine; then
    part engine 600 "$python" -m pd.bench engine --model "$model" "${node_flags[@]}" \
        --work decode:1,8,32,64,128,256 prefill:1024,8192,32768 cached:32768 offline:512x1024x128 \
        "${profile[@]}" --output "$out/engine_gpu.json"
elif has idle; then
    part profile 300 "$python" -m pd.bench engine --model "$model" "${node_flags[@]}" \
        --work decode:64 "${profile[@]}"
fi
if has idle; then
    part idle 120 "$python" scripts/gpu_idle.py "$trace" --output "$out/gpu_idle.json"
fi
if [ "$gpus" -lt 2 ]; then
    for name in tensor transfer split; do has $name && skip $name "needs two GPUs"; done
else
    fast=nvlink
    "$python" -c 'import nixl' 2> /dev/null && fast=nvlink,nixl
    if has tensor; then
        part sums 120 "$python" benchmarks/all_reduce.py --output "$out/all_reduce_gpu.json"
        part tensor 300 "$python" -m pd.bench engine --model "$model" "${node_flags[@]}" --tp-size 2 \
            --work decode:1,8,64 prefill:1024,8192 --output "$out/engine_tp2_gpu.json"
        for sizes in "1 1" "2 1" "2 2"; do # one GPU; experts cut over two; whole on either
            read -r ranks groups <<< "$sizes"
            part experts_tp${ranks}_ep$groups 300 "$python" -m pd.bench engine \
                --model deepseek-v2-lite "${node_flags[@]}" --tp-size "$ranks" --ep-size "$groups" \
                --context 4096 --work decode:1,32,128 prefill:8192 \
                --output "$out/engine_deepseek_tp${ranks}_ep${groups}_gpu.json"
        done
        if [ "$gpus" -ge 4 ]; then
            part tensor4 300 "$python" -m pd.bench engine --model llama-3.1-70b "${node_flags[@]}" \
                --tp-size 4 --work decode:1,8,64 prefill:1024,8192 \
                --output "$out/engine_tp4_70b_gpu.json"
        else
            skip tensor4 "needs four GPUs"
        fi
    fi
    if has transfer; then
        backends=$fast,tcp
        "$python" -c 'import mooncake.engine' 2> /dev/null && backends+=,mooncake
        part transfer 300 "$python" -m pd.bench transfer --backend $backends --connections 1 \
            --repeats 5 --timeout 60 --device cuda:0,cuda:1 --output "$out/transfer_gpu.json"
    fi
    if has split; then
        SHOW=40 part split 590 "$python" scripts/split_benchmark.py --model "$model" \
            --systems $fast,unified "--node-flags=${NODE_FLAGS:-}" \
            --output "$out/split_gpu.json" --logs "$out/split-logs"
    fi
fi

echo "== results in $out"
printf '%s' "$table"
exit $worst
