#!/usr/bin/env bash
# What the engine does on this machine: latency of one request, throughput of many, and both in a file.
set -euo pipefail
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

quire bench latency --input-len 64 --output-len 32 --iters 3 -o "$out/latency.json"
quire bench throughput --num-prompts 32 --input-len 16:64 --output-len 8:32
