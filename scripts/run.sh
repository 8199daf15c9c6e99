#!/usr/bin/env bash
# From a fresh clone to a running daemon: installs what is missing, builds, starts layerd on loopback, waits until it is
# healthy, shows the demo and compares seeded layers with the float64 reference.
#
#   scripts/run.sh               then keeps the daemon in the foreground until Ctrl-C or SIGTERM
#   scripts/run.sh --once        then stops the daemon and ends: 0 if all of it was good
#   scripts/run.sh --port N      on a port of your choice instead of a free one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- What is checked after the demo: arguments of `layerctl check`. Seeded, so that every machine sees the same layers.
check_args=(--seed 1 --rows 4 --dim 512 --hidden 1365)
# --- Bounds in seconds. The last is more than the daemon's own grace period, so a kill means that the daemon hung.
healthy_within_s=30
stopped_within_s=40

once=0
port=0
while [[ $# -gt 0 ]]; do
  case "$1" in
    --once) once=1 ;;
    --port) port="${2:-}"; [[ $# -eq 1 ]] || shift ;;
    --port=*) port="${1#*=}" ;;
    -h | --help) sed -n '2,/^set -/s/^# \{0,1\}//p' scripts/run.sh; exit 0 ;;
    *) echo "run.sh: unknown argument '$1' (known: --once, --port N)" >&2; exit 2 ;;
  esac
  shift
done
if ! [[ "$port" =~ ^[0-9]{1,5}$ ]] || ((10#$port > 65535)); then
  echo "run.sh: --port wants a number from 0 to 65535, got '$port'" >&2
  exit 2
fi

work=$(mktemp -d)
daemon=
log=$work/layerd.log

heading() { printf '\n== %s\n' "$*"; }
fail() { echo "run.sh: $*" >&2; exit 1; }
alive() { [[ -n "$daemon" ]] && kill -0 "$daemon" 2>/dev/null; }

# Stops the daemon by SIGTERM; its exit status is left in $stop_status. 137 when it had to be killed.
stop_daemon() {
  local pid=$daemon deadline=$((SECONDS + stopped_within_s))
  kill -TERM "$pid" 2>/dev/null || true
  while alive && ((SECONDS < deadline)); do sleep 0.05; done
  alive && kill -KILL "$pid" 2>/dev/null
  daemon=
  stop_status=0
  wait "$pid" || stop_status=$?
}

on_exit() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  if [[ -n "$daemon" ]]; then stop_daemon; fi
  if [[ $status -ne 0 && -s $log ]]; then
    echo "run.sh: the end of the daemon's log:" >&2
    tail -n 30 "$log" >&2
  fi
  rm -rf "$work"
  exit "$status"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

heading "Build"
scripts/bootstrap.sh
build() { cmake --preset release && cmake --build --preset release --target layerd layerctl; }
if ! build >"$work/build.log" 2>&1; then
  tail -n 80 "$work/build.log" >&2
  fail "the build failed"
fi
bin=$PWD/build/release/bin
echo "build/release/bin/layerd and layerctl are up to date ($SECONDS s)"

heading "Start"
# In a session of its own, so that Ctrl-C reaches this script alone and the daemon is told to stop once.
setsid "$bin/layerd" --grpc_listen="127.0.0.1:$port" --port_file="$work/ports" >"$log" 2>&1 </dev/null &
daemon=$!
deadline=$((SECONDS + healthy_within_s))
bound=
until bound=$(sed -n 's/^grpc \([0-9][0-9]*\)$/\1/p' "$work/ports" 2>/dev/null) && [[ -n "$bound" ]]; do
  alive || fail "the daemon ended while it was starting"
  ((SECONDS < deadline)) || fail "no port after $healthy_within_s s"
  sleep 0.05
done
server=127.0.0.1:$bound
until timeout 5 "$bin/layerctl" --server "$server" health >"$work/health" 2>&1; do
  alive || fail "the daemon ended while it was starting"
  ((SECONDS < deadline)) || fail "not healthy after $healthy_within_s s: $(tail -n 1 "$work/health")"
  sleep 0.1
done
echo "layerd is healthy at $server"

heading "layerctl demo"
"$bin/layerctl" --server "$server" demo || fail "the demo ended with status $?"

heading "layerctl check ${check_args[*]}"
"$bin/layerctl" --server "$server" check "${check_args[@]}" || fail "the check ended with status $?"

if ((once)); then
  heading "Stop"
  stop_daemon
  [[ $stop_status -eq 0 ]] || fail "the daemon ended with status $stop_status on SIGTERM"
  echo "the daemon ended with status 0 on SIGTERM"
  exit 0
fi

heading "Serving at $server; Ctrl-C stops it"
cat <<EOF
In another shell:
  export LAYERD_SERVER=$server
  build/release/bin/layerctl health
  build/release/bin/layerctl demo
  build/release/bin/layerctl check ${check_args[*]}
  build/release/bin/layerctl --help
The daemon's log:
EOF
stopping=0
trap 'stopping=1' INT TERM
tail -n +1 -f "$log" --pid="$daemon" &
follower=$!
# `wait` comes back when the daemon ends and when a signal is trapped.
end_status=0
wait "$daemon" || end_status=$?
if ((stopping)); then
  echo "stopping"
  stop_daemon
  end_status=$stop_status
fi
daemon=
wait "$follower" || true  # It ends by itself, having shown the last lines.
[[ $end_status -eq 0 ]] || fail "the daemon ended with status $end_status"
echo "the daemon ended with status 0"
