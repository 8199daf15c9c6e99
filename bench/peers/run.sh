#!/usr/bin/env bash
# Builds and runs layerd beside the peers that bench/peers/install.sh installed; a peer that is not there is skipped.
#
#   bench/peers/run.sh [DIR] [OPTION...]    built in DIR, build/peers by default; options of peers_bench (--help)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=build/peers
if [[ $# -gt 0 && $1 != --* ]]; then
  folder=$1
  shift
fi
cmake -S bench/peers -B "$folder" -G Ninja >/dev/null
cmake --build "$folder" --target peers_bench >/dev/null || cmake --build "$folder" --target peers_bench

options=(--torch_worker bench/peers/torch_worker.py --models "$folder/models")
library=$(find "$folder/node_modules" -path '*linux/x64/libonnxruntime.so*' -type f -print -quit 2>/dev/null || true)
if [[ -n $library ]] && /usr/bin/python3 bench/peers/make_models.py "$folder/models"; then
  options+=(--onnxruntime "$library")
fi
exec "$folder/peers_bench" "${options[@]}" "$@"
