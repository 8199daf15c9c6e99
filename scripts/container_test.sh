#!/usr/bin/env bash
# Builds docker/Dockerfile as it is and checks the image and a running container, on a machine without a Docker engine:
# buildah, podman and runc, over a base image that mmdebstrap makes from the machine's own package sources. As root.
#
# Works in a temporary folder that is removed at the end. With LAYERD_CONTAINER_DIR=DIR it works there, and leaves the
# base image and the built layers for the next time; containers and mounts are removed all the same.
# shellcheck disable=SC2016  # $(...) and $x for apt-get and for the shell in the container, not for this one.
set -euo pipefail
if [[ $EUID -ne 0 ]]; then
  exec sudo --preserve-env=LAYERD_CONTAINER_DIR "${BASH_SOURCE[0]}" "$@"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- What is asked of layerd, and how it answers.
# RMSNorm of [3, 1, 4] with eps 0 and no gamma, as JSON: {"output": {"values": [...]}}.
normalize_call=(--json normalize --kind rms_norm --input "[3,1,4]" --eps 0)
expected='[v / math.sqrt((3*3 + 1*1 + 4*4) / 3) for v in (3, 1, 4)]'
# The line of the daemon's log about OpenBLAS. Its sums follow our order, so that it is used, on CPUs with AVX-512 only.
openblas_line='event=openblas .*used='
grep -qw avx512vl /proc/cpuinfo && openblas_line+=yes
# --- Limits.
image_limit_mb=200
healthy_within_s=10
grace_s=20  # Asked of the daemon, by its environment.
stopped_within_s=10  # Nothing is in flight, so far less than the grace.

scripts/bootstrap.sh --checks

keep=0
if [[ -n "${LAYERD_CONTAINER_DIR:-}" ]]; then
  keep=1
  mkdir -p "$LAYERD_CONTAINER_DIR"
  work=$(cd "$LAYERD_CONTAINER_DIR" && pwd)
else
  work=$(mktemp -d)
fi
mkdir -p "$work/tmp"
export TMPDIR=$work/tmp  # Large scratch files of the tools, too, go away with the rest.

store=(--root "$work/store" --runroot "$work/run" --storage-driver overlay)
# runc and cgroupfs: crun refuses hybrid cgroups, and there need not be a systemd.
podman=(podman "${store[@]}" --tmpdir "$work/podman" --runtime runc --cgroup-manager cgroupfs)
buildah=(buildah "${store[@]}")
base=localhost/debian:bookworm-slim  # What `FROM debian:bookworm-slim` finds first where nothing is pulled.
image=localhost/layerd-test

heading() { printf '\n-- %s (%d s)\n' "$*" "$SECONDS"; }
pass() { echo "ok: $*"; }
fail() { echo "container_test.sh: FAILED: $*" >&2; exit 1; }

cleanup() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  set +e
  if [[ $status -ne 0 && -n "${running:-}" ]]; then
    echo "the end of the log of container $running:" >&2
    "${podman[@]}" logs --tail 30 "$running" >&2
  fi
  "${podman[@]}" rm -f -a -t 2 >/dev/null 2>&1
  "${buildah[@]}" rm -a >/dev/null 2>&1
  # Deepest first; the store's own mount is the last.
  awk -v dir="$work/" 'index($2, dir) == 1 {print $2}' /proc/self/mounts | sort -r | xargs -r -n 1 umount -l
  if ((keep)); then rm -rf "$work/tmp"; else rm -rf --one-file-system "$work"; fi
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# quietly NAME COMMAND...: the command's output only if it fails.
quietly() {
  local name=$1 out=$work/$1.log
  shift
  if ! "$@" >"$out" 2>&1; then
    tail -n 60 "$out" >&2
    fail "$name"
  fi
}

# --- The base image, like the published slim image, from the machine's own sources: the lines of Debian 12 among them,
# whatever the format of the files they stand in.
make_base() {
  apt-get indextargets --no-release-info --format 'deb $(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk '$3 ~ /^bookworm(-updates|-security)?$/' | sort -u >"$work/sources.list"
  [[ -s $work/sources.list ]] || fail "apt on this machine has no source of Debian 12"
  mmdebstrap --variant=minbase --include=usr-is-merged --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    bookworm "$work/base.part.tar" "$work/sources.list" && mv "$work/base.part.tar" "$work/base.tar"
}

# The machine's own ways to its package sources (a proxy, a certificate authority) go in by mounts, never into an image.
host_apt=(-v "$work/apt.conf:/etc/apt/apt.conf.d/99host:ro")
apt-config dump | sed -n '/^Acquire::\(IndexTargets\|Changelogs\|cdrom\)/d;/^Acquire::/p' >"$work/apt.conf"
if [[ -s /etc/ssl/certs/ca-certificates.crt ]]; then
  host_apt+=(-v "/etc/ssl/certs/ca-certificates.crt:/etc/apt/host-ca.crt:ro")
  grep -q '^Acquire::https::CAInfo ' "$work/apt.conf" ||
    echo 'Acquire::https::CAInfo "/etc/apt/host-ca.crt";' >>"$work/apt.conf"
fi

# build DOCKERFILE TAG; --layers lets a later build reuse what an earlier one made.
build() {
  "${buildah[@]}" bud --isolation oci --runtime runc --network host --pull-never --layers --format docker \
    "${host_apt[@]}" -f "$1" -t "$2" .
}

# The image's own user, not what a caller of `run` asks for. Returns instead of failing: it is tried on a bad image too.
image_user_is_not_root() {
  local user
  user=$("${podman[@]}" image inspect --format '{{.Config.User}}' "$1")
  [[ "$user" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]]
}

# The restrictions that docker/compose.yaml and Kubernetes put on it. Both limits: else runc may not raise them.
confined=(--ulimit nofile=16384:16384 --ulimit nproc=16384:16384 --network none --read-only --read-only-tmpfs=false
  --tmpfs /tmp:size=16m --cap-drop all --security-opt no-new-privileges --memory 1g --pids-limit 256
  --log-driver k8s-file)

# In a container of its own that ends with it: shell TAG SCRIPT, or with a user as the third.
shell() {
  "${podman[@]}" run --rm --no-healthcheck "${confined[@]}" ${3:+--user "$3"} --entrypoint '["/bin/sh", "-c"]' "$1" "$2"
}

heading "Base image"
if ! "${podman[@]}" image exists "$base"; then
  [[ -s $work/base.tar ]] || quietly base make_base
  quietly import "${podman[@]}" import --change 'CMD ["bash"]' \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$work/base.tar" "$base"
fi

heading "Build"
quietly build build docker/Dockerfile "$image"
pass "docker/Dockerfile builds"

heading "The image"
image_user_is_not_root "$image" || fail "the image's user is root, or not a number"
pass "its user is $("${podman[@]}" image inspect --format '{{.Config.User}}' "$image")"

sed '/^USER /d' docker/Dockerfile >"$work/Dockerfile.root"
quietly build-root build "$work/Dockerfile.root" "$image-root"
image_user_is_not_root "$image-root" && fail "the check of the user lets a Dockerfile without USER pass"
pass "the check of the user refuses a Dockerfile without USER"

size_mb=$(($("${podman[@]}" image inspect --format '{{.Size}}' "$image") / 1000000))
((size_mb <= image_limit_mb)) || fail "the image has $size_mb MB, more than $image_limit_mb"
pass "its size is $size_mb MB, at most $image_limit_mb"

tools=$(shell "$image" 'for t in cc c++ gcc g++ clang cpp as ld cmake ninja make protoc; do command -v "$t"; done
  dpkg-query -W -f "\${Package}\n" | grep -e "-dev$"; true')
[[ -z "$tools" ]] || fail "build tools in the image: $tools"
pass "no compiler, build tool or -dev package in it"

libraries=$(shell "$image" 'for f in /usr/local/bin/layerd /usr/local/bin/layerctl \
  "$(ldconfig -p | sed -n "s/.*libopenblas\.so\.0 .*=> //p")"; do echo "$f:"; ldd "$f" || echo "not found: $f"; done')
grep -q 'layerctl:' <<<"$libraries" || fail "ldd did not run: $libraries"
! grep 'not found' <<<"$libraries" >&2 || fail "libraries are missing"
pass "ldd finds every library of layerd, layerctl and OpenBLAS"

written=$(shell "$image" 'echo x >/written && echo written' 0:0 2>&1) && fail "user 0 can write to /"
[[ "$written" == *"Read-only file system"* ]] || fail "a write to / failed for another reason: $written"
pass "a write to / fails, even as user 0"

# serve NAME [OPTION...]: starts a container and leaves its first process's id in $pid.
serve() {
  running=$1
  shift
  local started=$SECONDS
  # Quietly: podman complains that there is no systemd to run the health check now and then. We call it ourselves.
  quietly run "${podman[@]}" run -d --replace --name "$running" "${confined[@]}" --env LAYERD_GRACE_S=$grace_s "$@" \
    "$image"
  pid=$("${podman[@]}" inspect --format '{{.State.Pid}}' "$running")
  until "${podman[@]}" healthcheck run "$running" >"$work/health.log" 2>&1; do
    [[ -d /proc/$pid && $pid -ne 0 ]] || fail "the daemon ended while it was starting"
    ((SECONDS - started < healthy_within_s)) || fail "not healthy after $healthy_within_s s: $(cat "$work/health.log")"
    sleep 0.1
  done
  pass "$running: its HEALTHCHECK passes within $((SECONDS - started + 1)) s, with a read-only root and no capabilities"
}

# status FIELD: of the daemon, from the host's /proc, without the field's name.
status() { sed -n "s/^$1:[[:space:]]*//p" "/proc/$pid/status"; }

# expect_user UID
expect_user() {
  local uids groups
  read -ra uids <<<"$(status Uid)"
  read -ra groups <<<"$(status Gid)"
  [[ "${uids[*]}" == "$1 $1 $1 $1" && "${groups[*]}" == "$1 $1 $1 $1" ]] ||
    fail "$running runs as ${uids[*]} of group ${groups[*]}, not as $1"
  pass "$running: runs as $1:$1"
}

expect_confined() {
  local set
  for set in CapInh CapPrm CapEff CapBnd CapAmb; do
    [[ "$(status $set)" =~ ^0+$ ]] || fail "$running: $set is $(status $set)"
  done
  [[ "$(status NoNewPrivs)" == 1 ]] || fail "$running: new privileges are possible"
  [[ "$(status NSpid | awk '{print $NF}')" == 1 ]] || fail "$running: the daemon is not process 1"
  pass "$running: CapEff 0, no new privileges, process 1"
}

# The image's own layerctl, run on the host in the container's network: what a sidecar would see.
expect_answer() {
  "${podman[@]}" cp "$running:/usr/local/bin/layerctl" "$work/layerctl"
  timeout 20 nsenter -t "$pid" -n "$work/layerctl" --server 127.0.0.1:50051 "${normalize_call[@]}" >"$work/answer.json"
  /usr/bin/python3 - "$work/answer.json" <<END || fail "$running: a wrong answer: $(cat "$work/answer.json")"
import json, math, sys
values = json.load(open(sys.argv[1]))["output"]["values"]
expected = $expected
while values and isinstance(values[0], list):
    values = sum(values, [])
assert len(values) == len(expected), values
assert all(abs(v - e) <= 1e-6 * abs(e) for v, e in zip(values, expected)), values
END
  pass "$running: layerctl ${normalize_call[*]} gives the right numbers"
}

expect_openblas() {
  grep -q '/libopenblas' "/proc/$pid/maps" || fail "$running: OpenBLAS is not loaded"
  "${podman[@]}" logs "$running" >"$work/daemon.log" 2>&1
  grep -qiE -- "$openblas_line" "$work/daemon.log" || fail "$running: no line in the log with $openblas_line"
  pass "$running: OpenBLAS is loaded, and the log says: $(grep -iE -m1 -- "$openblas_line" "$work/daemon.log")"
}

# expect_layer [COMMAND...]: runs layerctl as above, then verifies the layer that it uploads, or that is there already.
expect_layer() {
  local ask=(timeout 30 nsenter -t "$pid" -n "$work/layerctl" --server 127.0.0.1:50051)
  if (($# > 0)); then quietly upload "${ask[@]}" "$@"; fi
  quietly verify "${ask[@]}" layers verify "$layer"
  pass "$running: $layer is there, whole, and answers within the contract"
}

expect_clean_stop() {
  local began=$SECONDS code
  quietly stop "${podman[@]}" stop -t $((grace_s + 10)) "$running"
  code=$("${podman[@]}" inspect --format '{{.State.ExitCode}}' "$running")
  [[ $code -eq 0 ]] || fail "$running: exit status $code after SIGTERM"
  ((SECONDS - began <= stopped_within_s)) || fail "$running: took $((SECONDS - began)) s to stop"
  pass "$running: SIGTERM ends it with status 0 within $((SECONDS - began + 1)) s"
  running=
}

# A named volume takes the owner of the folder that it covers, so that the image's user may write.
layers_volume=(--volume layers:/var/lib/layerd --env LAYERD_LAYER_STORE=/var/lib/layerd)
layer=models/box/layers/mlp

heading "As the image's own user"
serve own-user "${layers_volume[@]}"
expect_user 65532
expect_confined
expect_answer
expect_openblas
expect_layer layers upload "$layer" --seed 1 --dim 64 --hidden 128
expect_clean_stop

heading "In another container, with the same volume"
serve own-user "${layers_volume[@]}"
expect_layer
expect_clean_stop

heading "As a user that the image does not know"
serve other-user --user 12345:12345
expect_user 12345
expect_confined
expect_answer
expect_clean_stop

heading "All good"
