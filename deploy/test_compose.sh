#!/usr/bin/env bash
# Builds the images, starts compose.yaml, trains the digits on two workers once undisturbed and once with the serving
# coordinator killed in the middle, compares the bits of both, and takes everything down.
#
#   deploy/test_compose.sh
#
# Needs docker with a daemon that runs, docker-compose (or docker's compose plug-in), and git. Where no image can be
# fetched: root and debootstrap, which make the base image, and pip, which fetches the wheels outside of the containers.
# Says what is missing and ends with 77 (skipped) where something is. KEEP=1 leaves the containers up.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "test_compose: skipped: $*" >&2; exit 77; }
say() { echo "test_compose: $*" >&2; }

command -v docker >/dev/null || skip "docker is not installed (Debian: docker.io)"
docker info >/dev/null 2>&1 || skip "no docker daemon answers (start dockerd, or set DOCKER_HOST)"
if command -v docker-compose >/dev/null; then compose=(docker-compose); else compose=(docker compose); fi
"${compose[@]}" version >/dev/null 2>&1 || skip "docker-compose is not installed"

work=$(mktemp -d)
export COMPOSE_PROJECT_NAME="horovodtest$$" TAG="horovod-test" WORKERS=2 WEB_PORT1=0 WEB_PORT2=0 EPOCHS=${EPOCHS:-120}
export TOKEN_FILE="$work/token" WEB_TOKEN_FILE="$work/web-token"
run() { "${compose[@]}" -f "$work/context/deploy/compose.yaml" "$@"; }

finish() {
  code=$?
  if [ "$code" != 0 ] && [ -d "$work/context" ]; then run logs --tail=40 >&2 2>/dev/null || true; fi
  if [ -z "${KEEP:-}" ]; then
    [ ! -d "$work/context" ] || run down --volumes --remove-orphans --timeout 3 >/dev/null 2>&1 || true
    rm -rf "$work"
  fi
  exit "$code"
}
trap finish EXIT

# What git knows or would take; a wheelhouse of earlier runs may be given.
mkdir "$work/context"
git ls-files --cached --others --exclude-standard | tar --create --files-from=- | tar --extract --directory "$work/context"
openssl rand -hex 32 >"$TOKEN_FILE"
openssl rand -hex 32 >"$WEB_TOKEN_FILE"
chmod 644 "$TOKEN_FILE" "$WEB_TOKEN_FILE" # the containers' user reads them by way of a mount

BASE=${BASE:-debian:bookworm-slim}
if ! docker image inspect "$BASE" >/dev/null 2>&1 && ! timeout 60 docker pull --quiet "$BASE" >/dev/null 2>&1; then
  BASE=horovod-test-base
  if ! docker image inspect "$BASE" >/dev/null 2>&1; then
    command -v debootstrap >/dev/null || skip "no image can be fetched, and debootstrap is not installed to make one"
    [ "$(id -u)" = 0 ] || skip "no image can be fetched, and debootstrap needs root to make one"
    say "making a base image by debootstrap"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$work/base" >"$work/debootstrap.log" ||
      skip "debootstrap failed: $(tail -n 1 "$work/debootstrap.log")"
    tar --directory "$work/base" --create . | docker import - "$BASE" >/dev/null
    rm -rf "$work/base"
  fi
fi
if [ -n "${WHEELS:-}" ]; then
  cp -r "$WHEELS" "$work/context/wheels"
elif [ "$BASE" = horovod-test-base ]; then
  say "fetching wheels"
  python=$(command -v .venv/bin/python || command -v python3)
  "$python" -m pip download --quiet --disable-pip-version-check --python-version 3.11 --only-binary=:all: \
    --dest "$work/context/wheels" --constraint constraints.txt torch numpy scikit-learn tqdm cloudpickle grpcio packaging \
    protobuf psutil PyYAML scikit-build-core pybind11 grpcio-tools mypy-protobuf cmake ninja setuptools wheel
fi
[ ! -d "$work/context/wheels" ] || export PIP_ARGS="--no-index --find-links /wheels"
export BASE

say "building images from $BASE"
run build --quiet >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; exit 1; }

say "starting etcd and coordinators"
run up --detach etcd1 etcd2 etcd3 coordinator1 coordinator2 >"$work/up.log" 2>&1
container() { run ps --quiet "$1"; }
eventually() { # eventually SECONDS COMMAND...
  local limit=$((SECONDS + $1)); shift
  until "$@"; do [ "$SECONDS" -lt "$limit" ] || { say "gave up on: $*"; return 1; }; sleep 0.2; done
}
ready() { docker exec "$(container "$1")" python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9400/readyz', timeout=5)" 2>/dev/null; }
eventually 90 ready coordinator1
eventually 90 ready coordinator2
run run --rm client >&2

train() { # train JOB: starts two workers
  JOB=$1 run up --detach --force-recreate --no-deps --scale worker=2 worker >"$work/up.log" 2>&1
}
lines() { run logs --no-color --no-log-prefix worker 2>/dev/null || run logs --no-color worker; }
events() { lines | sed -n 's/^[^{]*\({"event".*}\).*$/\1/p'; }
reached() { events | grep -q "\"event\": \"$1\""; }
done_twice() { [ "$(events | grep -c '"event": "done"')" = 2 ]; }
digest() { events | sed -n 's/.*"sha256": "\([0-9a-f]*\)".*/\1/p' | sort --unique; }

say "training undisturbed"
train undisturbed
eventually 180 done_twice
expected=$(digest)
events | grep '"done"' >&2

say "training with the serving coordinator killed"
train disturbed
eventually 120 reached epoch
serves() { # whether it is this coordinator that has the world of the job
  docker exec "$(container "$1")" python -c "
import sys, urllib.request
request = urllib.request.Request('http://127.0.0.1:9400/metrics', headers={'Authorization': 'Bearer ' + open('/run/secrets/web-token').read().strip()})
sys.exit('horovod_epoch{job=\"disturbed\"}' not in urllib.request.urlopen(request, timeout=5).read().decode())" 2>/dev/null
}
if serves coordinator1; then serving=coordinator1; else serves coordinator2; serving=coordinator2; fi
! done_twice || { say "the training was over before the coordinator could be killed"; exit 1; }
docker kill --signal=KILL "$(container $serving)" >/dev/null
say "killed $serving"
eventually 180 done_twice
events | grep '"done"' >&2
found=$(digest)

[ "$(wc -w <<<"$expected")" = 1 ] || { say "the ranks of the undisturbed run differ: $expected"; exit 1; }
[ "$expected" = "$found" ] || { say "the runs differ: $expected and $found"; exit 1; }
say "ok: both runs ended with the same bits ($expected)"
