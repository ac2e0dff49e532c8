#!/usr/bin/env bash
# Builds the images, starts compose.yaml, and trains the digits by `horovodrun --coordinator` on the agents of two
# containers: once undisturbed; once while each coordinator in turn is killed and started again, which must change no
# bit; and once until a worker's container is killed, which the launcher must say and end with. Takes everything down.
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
export COMPOSE_PROJECT_NAME="horovodtest$$" TAG="horovod-test" WORKERS=2 WEB_PORT1=0 WEB_PORT2=0 EPOCHS=${EPOCHS:-200}
export TOKEN_FILE="$work/token" WEB_TOKEN_FILE="$work/web-token" ETCD_TLS="$work/etcd-tls"
python=$(command -v .venv/bin/python || command -v python3)
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
"$python" -m horovod.launch certs "$ETCD_TLS" --hosts etcd1,etcd2,etcd3 >/dev/null ||
  skip "horovodrun certs makes no certificates (make build, or pip install 'horovod[tls]')"
chmod 755 "$ETCD_TLS"
chmod 644 "$TOKEN_FILE" "$WEB_TOKEN_FILE" "$ETCD_TLS"/*.key # the containers' user reads them by way of a mount

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
  "$python" -m pip download --quiet --disable-pip-version-check --python-version 3.11 --only-binary=:all: \
    --dest "$work/context/wheels" --constraint constraints.txt torch numpy scikit-learn tqdm cloudpickle cryptography grpcio packaging \
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

say "starting agents"
run up --detach --no-deps --scale worker=2 worker >>"$work/up.log" 2>&1
client() { run run --rm --no-deps -T client "$@" </dev/null; } # a launcher; without arguments, the one of compose.yaml
agents_ready() { # agents_ready COUNT
  [ "$(client horovodrun ps --output-format json 2>/dev/null | grep -c '"state": "ready"')" = "$1" ]
}
eventually 90 agents_ready 2
client horovodrun ps >&2

launcher=""
train() { # train JOB: a launcher in the background, whose output and exit code are kept
  export JOB=$1
  : >"$work/$JOB.out"
  { code=0; client >"$work/$JOB.out" 2>"$work/$JOB.err" || code=$?; echo "$code" >"$work/$JOB.code"; } &
  launcher=$!
}
events() { sed -n 's/^[^{]*\({"event".*}\).*$/\1/p' "$work/$JOB.out"; }
epochs() { events | grep -c "\"epoch\"" || true; }
reached() { [ "$(epochs)" -gt "$1" ]; } # more lines about epochs than that
ended() { [ -s "$work/$JOB.code" ]; }
runs() { ! ended || { say "the training was over before anything could be killed: give it more EPOCHS"; exit 1; }; }
digest() { events | sed -n 's/.*"sha256": "\([0-9a-f]*\)".*/\1/p'; }
check_trained() { # both ranks have said what came out, and the launcher is content
  eventually 240 ended
  wait "$launcher"
  [ "$(cat "$work/$JOB.code")" = 0 ] || { say "$JOB ended with $(cat "$work/$JOB.code")"; cat "$work/$JOB.err" >&2; exit 1; }
  events | grep '"done"' >&2
  [ "$(digest | wc -l)" = 2 ] || { say "$JOB: not both ranks have ended"; exit 1; }
  [ "$(digest | sort --unique | wc -l)" = 1 ] || { say "the ranks of $JOB differ: $(digest)"; exit 1; }
}

say "training undisturbed"
train undisturbed
check_trained
expected=$(digest | head -n 1)

say "training while each coordinator is killed: the one that serves the agents, the one that has the world"
train disturbed
for number in 1 2; do
  before=$(epochs)
  eventually 120 reached "$before"
  runs
  id=$(container "coordinator$number")
  docker kill --signal=KILL "$id" >/dev/null
  before=$(epochs)
  say "killed coordinator$number after $before lines about epochs"
  eventually 120 reached "$((before + 3))"
  runs
  docker start "$id" >/dev/null
  eventually 90 ready "coordinator$number"
done
check_trained
found=$(digest | head -n 1)
[ "$expected" = "$found" ] || { say "the runs differ: $expected and $found"; exit 1; }

say "training until a worker's container is killed"
train lost
eventually 120 reached 0
runs
victim=$(run ps --quiet worker | head -n 1)
host=$(docker inspect --format '{{.Config.Hostname}}' "$victim")
docker kill --signal=KILL "$victim" >/dev/null
say "killed the container of host $host"
eventually 120 ended
wait "$launcher"
sed 's/^/  /' "$work/lost.err" | tail -n 5 >&2
[ "$(cat "$work/lost.code")" = 255 ] || { say "the launcher ended with $(cat "$work/lost.code"), not 255"; exit 1; }
grep -q "horovodrun: Rank [01] on host $host .*is lost: host $host has had no connection to the coordinator" "$work/lost.err" ||
  { say "the launcher does not say that host $host is lost"; exit 1; }
left() { client horovodrun ps --output-format json 2>/dev/null | tr -d ' \n' | grep -q '"free_slots":1,'; }
eventually 60 agents_ready 1
eventually 60 left # the other host is free again
say "ok: two runs ended with the same bits ($expected), and the third one named the lost host"
