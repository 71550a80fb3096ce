#!/usr/bin/env bash
# Measure the engine on this machine: the latency of one request and the throughput of many.
set -euo pipefail
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

quire bench latency --input-len 64 --output-len 32 --iters 3 -o "$out/latency.json"
quire bench throughput --num-prompts 32 --input-len 16:64 --output-len 8:32
