#!/usr/bin/env bash
# Fuzzes every decoder for some time each, two at once: tests/fuzz/run.sh [SECONDS=60] [TARGET...]. Needs clang.
#
# Starts from tests/fuzz/corpus and leaves what it learns in $FUZZ_DIR (default: build/fuzz), also inputs that break
# something. Ends in one line per target; fails if one was broken.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-60}
targets=("${@:2}")
[ "${#targets[@]}" -gt 0 ] || targets=(solve_fuzz stream_fuzz npy_fuzz text_fuzz error_fuzz)
dir=${FUZZ_DIR:-build/fuzz}

# Bazel finds its compiler once per output base, so clang has one of its own, of this checkout alone.
base=$(bazel info output_base)-fuzz
CC=${CLANG:-clang-14} bazel --output_base="$base" build --config=fuzz --noshow_progress "${targets[@]/#/tests/fuzz:}"
bin=$(CC=${CLANG:-clang-14} bazel --output_base="$base" info --config=fuzz bazel-bin 2>/dev/null)
bazel --output_base="$base" shutdown

fuzz() {
  local target=$1 status=0
  mkdir -p "$dir/$target"
  "$bin/tests/fuzz/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=256 \
    -max_len=4096 -print_final_stats=1 -artifact_prefix="$dir/$target-" "$dir/$target" "tests/fuzz/corpus/$target" \
    >"$dir/$target.log" 2>&1 || status=$?
  awk -v target="$target" -v status="$status" '
    /stat::number_of_executed_units/ {runs = $2} /stat::peak_rss_mb/ {rss = $2}
    END {
      found = status ? "BROKEN: see " target ".log" : "nothing found"
      printf "%-12s %10d executions  peak %d MB  %s\n", target, runs, rss, found
    }
  ' "$dir/$target.log"
  return "$status"
}
export -f fuzz
export dir bin seconds
printf '%s\n' "${targets[@]}" | xargs -P 2 -I{} bash -c 'fuzz {}'
