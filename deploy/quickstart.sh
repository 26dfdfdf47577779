#!/usr/bin/env bash
# From a fresh Debian 12 to a picture: installs what is missing, builds the server, starts it, sends it a real problem
# (colour transfer between two photographs) from the Python client, and stops it.
#
#   deploy/quickstart.sh           about ten minutes the first time on two cores, under a minute later
#   deploy/quickstart.sh --keep    leaves the server running, and says how to reach it and how to stop it
#
# Everything it makes is in build/quickstart/, Bazel's cache apart. Needs root or sudo for missing Debian packages.
set -euo pipefail
cd "$(dirname "$0")/.."

keep=false
case "${1:-}" in
  "") ;;
  --keep) keep=true ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0 || exit 2 ;;
esac

dir=$PWD/build/quickstart
python=$dir/venv/bin/python
server_log=$dir/server.log
server_pid=
picture=$dir/colour_transfer.png
mkdir -p "$dir"

main() {
  step "Installing Debian packages" install.log ./deploy/install.sh
  step "Building the server (minutes, the first time)" build.log build_server
  step "Installing the Python client" client.log install_client
  start_server
  echo
  "$python" client/python/examples/colour_transfer.py --server "$address" --picture "$picture"
  echo
  if $keep; then tell_how_to_stop; else stop_server && echo "Stopped the server. Look at the picture: $picture"; fi
}

# step TITLE LOG COMMAND...: runs it with its output in $dir/LOG; shows the end of that if it fails.
step() {
  local title=$1 log=$dir/$2 start=$SECONDS
  shift 2
  printf '%-48s' "$title"
  # In a shell of its own, and not as an `if`, where `set -e` would not hold.
  set +e
  (set -e; "$@") >"$log" 2>&1
  local status=$?
  set -e
  if [ "$status" -ne 0 ]; then
    printf 'failed\n\n'
    tail -n 40 "$log" >&2
    printf '\nThe whole log: %s\n' "$log" >&2
    exit "$status"
  fi
  printf 'done, %d s\n' $((SECONDS - start))
}

build_server() {
  trap 'bazel shutdown' EXIT  # Of this step's own shell.
  bazel build -c opt //server:sinkhorn_server
  ln -sfn "$(bazel info -c opt bazel-bin)/server/sinkhorn_server" "$dir/sinkhorn_server"
}

install_client() {
  [ -x "$python" ] || python3 -m venv "$dir/venv"
  "$python" -m pip install --disable-pip-version-check './client/python[demo]'
}

start_server() {
  stop_earlier
  local ports_file=$dir/ports
  rm -f "$ports_file"
  local flags=(
    --listen="127.0.0.1:$(port_if_free 8001)" --metrics_listen="127.0.0.1:$(port_if_free 8002)"
    --port_file="$ports_file"
  )
  $keep || flags+=(--drain_grace=0s)  # Nobody else calls it: it need not wait for them to notice.
  printf '%-48s' "Starting the server"
  # A session of its own: Ctrl-C here, or the end of this shell, does not reach it.
  setsid "$dir/sinkhorn_server" "${flags[@]}" >"$server_log" 2>&1 </dev/null &
  server_pid=$!
  echo "$server_pid" >"$dir/server.pid"
  local deadline=$((SECONDS + 60)) ports
  until [ -s "$ports_file" ] && mapfile -t ports <"$ports_file" && address=127.0.0.1:${ports[0]} && healthy; do
    if ! kill -0 "$server_pid" 2>/dev/null || [ "$SECONDS" -gt "$deadline" ]; then
      printf 'failed\n\n'
      tail -n 20 "$server_log" >&2
      exit 1
    fi
    sleep 0.1
  done
  metrics=http://127.0.0.1:${ports[1]}/metrics
  echo "ready at $address"
}

# The port, or 0 for any free one if somebody listens there.
port_if_free() {
  if (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; then echo 0; else echo "$1"; fi
}

healthy() {
  "$python" -c "from sinkhorn_client import Client; Client('$address').wait_until_ready(10)" 2>>"$server_log"
}

# Ends the server of this run: it drains, and is killed only if that takes too long.
stop_server() {
  [ -n "$server_pid" ] || return 0
  kill -TERM "$server_pid" 2>/dev/null || true
  for _ in $(seq 100); do
    kill -0 "$server_pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -TERM "$server_pid" 2>/dev/null && sleep 1  # The second one ends it without drain.
  kill -KILL "$server_pid" 2>/dev/null || true
  wait "$server_pid" 2>/dev/null || true
  server_pid=
  rm -f "$dir/server.pid"
}

# Ends the server that an earlier run with --keep left.
stop_earlier() {
  local pid
  pid=$(cat "$dir/server.pid" 2>/dev/null) || return 0
  if [ "$(readlink -f "/proc/$pid/exe")" = "$(readlink -f "$dir/sinkhorn_server")" ]; then
    echo "Stopping the server that an earlier run kept, process $pid"
    server_pid=$pid
    stop_server
  fi
}

tell_how_to_stop() {
  cat <<TEXT
The server keeps running, process $server_pid.
  problems  $address        ($python has the client)
  metrics   $metrics
  log       $server_log
  stop      kill $server_pid
TEXT
  server_pid=
}

trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
main
