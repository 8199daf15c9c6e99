#!/usr/bin/env bash
# Installs what is missing, builds release with the tests, and runs them. Arguments go to ctest:
#
#   scripts/test.sh                    all but the slow ones
#   scripts/test.sh -L unit            one label: unit, contract, e2e, slow
#   scripts/test.sh -R rms_norm        by name
#
# LAYERD_TEST_DATA names the folder of shared test data; left out, it is ../shared where that exists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${LAYERD_TEST_DATA:-}" && -d ../shared ]]; then
  LAYERD_TEST_DATA=$(cd ../shared && pwd)
fi
[[ -z "${LAYERD_TEST_DATA:-}" ]] || export LAYERD_TEST_DATA

scripts/bootstrap.sh
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { cmake --preset release -DLAYERD_TESTS=ON && cmake --build --preset release; } >"$log" 2>&1; then
  tail -n 80 "$log" >&2
  echo "test.sh: the build failed" >&2
  exit 1
fi
echo "test.sh: built in $SECONDS s"
rm -f "$log"
[[ $# -gt 0 ]] || set -- -LE slow
exec ctest --test-dir build/release --output-on-failure --no-tests=error -j2 "$@"
