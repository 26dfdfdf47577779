#!/usr/bin/env bash
# All benchmarks, beside other libraries, into tests/bench/results: tables (Markdown and JSON) and a plot.
#
#   tests/bench/run.sh                               all of it, about fifteen minutes; leave the machine alone meanwhile
#   tests/bench/run.sh --only fixed,cold,serving     some of it; the other tables stay as they are
#   tests/bench/run.sh --rows 'clouds 1,000' --out /tmp/tables
#
# The peers come from PyPI into .venv-bench and .venv-bench-triton (7 GB together: PyTorch's wheel brings CUDA along).
set -euo pipefail
cd "$(dirname "$0")/../.."

./deploy/install.sh
bazel build --noshow_progress //tests/bench:sinkhorn_bench_solver //server:sinkhorn_server \
  //client/loadgen:sinkhorn_loadgen
# An idle Bazel server holds memory and wakes up now and then.
export BAZEL_BIN="${BAZEL_BIN:-$(bazel info bazel-bin)}"
bazel shutdown

# Debian's own python3: Triton's interpreter is linked with it.
make_venv() { # FOLDER REQUIREMENTS
  cmp -s "$2" "$1/requirements.txt" && return
  rm -rf "$1"
  /usr/bin/python3 -m venv "$1"
  "$1/bin/pip" install -q -r "$2"
  cp "$2" "$1/requirements.txt"
}
make_venv .venv-bench tests/bench/requirements.txt
make_venv .venv-bench-triton tests/bench/requirements-triton.txt

exec .venv-bench/bin/python tests/bench/bench.py --out tests/bench/results \
  --triton-python .venv-bench-triton/bin/python "$@"
