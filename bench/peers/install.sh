#!/usr/bin/env bash
# Installs the peers that bench/peers runs beside layerd: OpenBLAS, oneDNN, PyTorch and onnx from Debian, ONNX Runtime's
# C library from the npm package onnxruntime-node. The product needs none of it.
#
#   bench/peers/install.sh [DIR]     ONNX Runtime goes to DIR, build/peers by default
#
# A peer that cannot be had is named, and the rest installed: bench/peers/run.sh skips it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(realpath -m "${1:-build/peers}")

as_root=()
[[ $EUID -eq 0 ]] || as_root=(sudo)
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
"${apt[@]}" update || true
wanted=("libopenblas0-pthread" "libdnnl-dev" "python3-torch python3-numpy" "python3-onnx python3-numpy")
command -v npm >/dev/null || wanted+=("npm")
for packages in "${wanted[@]}"; do
  read -ra names <<<"$packages"
  "${apt[@]}" install -y --no-install-recommends "${names[@]}" >/dev/null ||
    echo "install.sh: not installed: $packages" >&2
done

mkdir -p "$folder"
# Its install script fetches libraries for GPUs, which nothing here uses.
npm install --prefix "$folder" --ignore-scripts --no-audit --no-fund --silent onnxruntime-node@1.30 ||
  echo "install.sh: not installed: onnxruntime-node" >&2
find "$folder" -path '*linux/x64/libonnxruntime.so*' -type f
