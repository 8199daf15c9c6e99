#!/usr/bin/env bash
# Installs what a bare Debian 12 lacks to build, test and check layerd. Quiet and fast when nothing is missing.
#
#   scripts/bootstrap.sh              what building and testing needs
#   scripts/bootstrap.sh --build      only what building needs: the builder stage of docker/Dockerfile
#   scripts/bootstrap.sh --checks     also the clang and container tools of .ci/run
set -euo pipefail

build_packages=(
  # Toolchain.
  ca-certificates cmake g++ ninja-build pkg-config
  # gRPC and Protocol Buffers, with channelz and reflection; zlib, for compressed messages; Abseil.
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc zlib1g-dev libabsl-dev
  # Linear algebra, SIMD, threads.
  libopenblas-dev libopenblas0-pthread libhwy-dev libtbb-dev
  # Logs, command lines, JSON.
  libspdlog-dev libcli11-dev nlohmann-json3-dev
  # SHA-256.
  libssl-dev
)
test_packages=(
  # Fetching the tree; tests and benchmarks in C++.
  git libgtest-dev libgmock-dev libbenchmark-dev
  # End-to-end tests and examples in Python.
  python3 python3-numpy python3-grpcio python3-protobuf
)
check_packages=(clang libclang-rt-14-dev clang-format clang-tidy buildah podman runc mmdebstrap)

case "${1:-}" in
  "") packages=("${build_packages[@]}" "${test_packages[@]}") ;;
  --build) packages=("${build_packages[@]}") ;;
  --checks) packages=("${build_packages[@]}" "${test_packages[@]}" "${check_packages[@]}") ;;
  *)
    echo "bootstrap.sh: unknown argument '$1' (known: --build, --checks)" >&2
    exit 2
    ;;
esac

# One query for all of them; a package that was never heard of is only absent from the answer.
installed=$(dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null |
  sed -n 's/^ii  *//p' || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF -- "$package" <<<"$installed" || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $EUID -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "bootstrap.sh: run it as root, or install sudo; missing: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "bootstrap.sh: installing ${missing[*]}" >&2
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The status of the update does not count: it is 0 when downloads fail, and not 0 for a source that has nothing to do
# with us. What is really missing, the installation says.
if ! { "${apt[@]}" update; "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 40 "$log" >&2
  echo "bootstrap.sh: the installation failed" >&2
  exit 1
fi
