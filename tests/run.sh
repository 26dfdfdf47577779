#!/usr/bin/env bash
# Installs what is missing, builds everything, runs every test, and ends in one line: N passed, N failed[, N skipped].
#
#   tests/run.sh                     all of it
#   tests/run.sh --quick             no sanitizers
#   tests/run.sh --quick //server/...   C++ tests of these targets only, and the Python tests
#
# A test joins a sanitizer's run by its tags: `sanitize` (addresses and undefined behaviour), `tsan` (data races).
set -uo pipefail
cd "$(dirname "$0")/.."

quick=false
if [ "${1:-}" = --quick ]; then quick=true; shift; fi
# By name, since Bazel working apart takes the other's links for packages.
everything=(//:all //client/... //deploy/... //kernels/... //proto/... //server/... //tests/...)
targets=("${@:-${everything[@]}}")
plain=("${targets[@]}")
# Tests of what does no arithmetic run under the sanitizers alone: compiling them twice takes minutes.
arithmetic_alone=(-//tests/client/... -//tests/fuzz/... -//tests/scheduler/... -//tests/server/...)
$quick || [ $# -gt 0 ] || plain+=("${arithmetic_alone[@]}")
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

say() { printf '\n== %s\n' "$*"; }

# A step that breaks, rather than running tests that fail, counts as one failure.
broke() { echo "$1" >>"$results/broken"; }

base=()  # What tells Bazel to work apart, when it does.
# What one Bazel has made the other need not: GPUs' kernels take ten minutes to compile, and are the same for both.
cache=()
$quick || cache=(--disk_cache="$results/cache")
# cpp_tests NAME FLAGS... -- TARGETS...: runs the C++ tests and leaves Bazel's account of them in $results/NAME.bep.
cpp_tests() {
  local name=$1 status=0
  shift
  say "C++ tests: $name"
  bazel "${base[@]}" test "${cache[@]}" --keep_going --noshow_progress --color=no \
    --build_event_json_file="$results/$name.bep" "$@" || status=$?
  # 3: some test failed, which the account says. 4: no test carries the tag.
  case $status in 0 | 3 | 4) ;; *) broke "the $name build (bazel exit code $status)" ;; esac
}

# The virtual environment follows tests/requirements.txt.
make_venv() {
  cmp -s tests/requirements.txt .venv/requirements.txt && return
  rm -rf .venv && python3 -m venv .venv && .venv/bin/pip install -q -r tests/requirements.txt &&
    cp tests/requirements.txt .venv/
}

python_tests() {
  local status=0
  say "Python tests"
  make_venv || { broke "the virtual environment"; return; }
  .venv/bin/python -m pytest -c tests/pytest.ini --rootdir=. --junitxml="$results/python.xml" || status=$?
  case $status in 0 | 1 | 5) ;; *) broke "pytest (exit code $status)" ;; esac  # 5: no test found.
}

# This processor's instruction sets that kernels are compiled for, narrowest first, as Highway names them.
sets=(SCALAR)
if grep -qsw avx2 /proc/cpuinfo; then sets+=(AVX2); fi
if grep -qsw avx512vl /proc/cpuinfo; then sets+=(AVX3); fi
# The tests above ran by the widest one; those of what differs in the others run by each of them.
narrower_sets() {
  local set
  for set in "${sets[@]::${#sets[@]}-1}"; do
    cpp_tests "${set,,}" --test_env=SINKHORN_TEST_INSTRUCTION_SET="$set" --test_tag_filters=instruction_sets \
      --build_tests_only -- "${targets[@]}"
  done
}

# sanitized NAME COMMAND...: COMMAND, with what chooses the sanitizer NAME's tests.
sanitized() {
  local name=$1 set=()
  shift
  case $name,${sets[-1]} in
    sanitize,AVX2) set=(--config=sanitized-avx2) ;;
    sanitize,AVX3) set=(--config=sanitized-avx512) ;;
  esac
  "$@" --config="$name" "${set[@]}" --test_tag_filters="$name" --build_tests_only -- "${targets[@]}"
}
# Apart, and after all else, so that this may go on beside tests that mostly wait. What breaks shows when they are run.
sanitized_ahead() {
  local name
  for name in tsan sanitize; do
    sanitized $name nice -n 19 bazel "${base[@]}" build "${cache[@]}" --keep_going --noshow_progress --color=no
  done
  # Arithmetic has no deadlines: it is tested there and then. Bazel keeps what passes, and runs the rest again below.
  targets+=("${arithmetic_alone[@]}")
  sanitized sanitize nice -n 19 bazel "${base[@]}" test "${cache[@]}" --keep_going --noshow_progress --color=no
}

if ! ./deploy/install.sh; then
  broke "deploy/install.sh"
else
  cpp_tests plain -- "${plain[@]}"
  narrower_sets
  if $quick; then
    python_tests
  else
    base=("--output_base=$(bazel info output_base)-sanitized")
    sanitized_ahead >"$results/sanitized.log" 2>&1 &
    ahead=$!
    python_tests
    wait "$ahead"
    sanitized sanitize cpp_tests sanitize
    sanitized tsan cpp_tests tsan
  fi
fi

say "Results"
python3 tests/report.py "$results"
