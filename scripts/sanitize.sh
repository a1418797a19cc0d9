#!/usr/bin/env bash
# sanitize.sh [asan] [tsan] [race]: the C++ tests on emulated devices under AddressSanitizer + UBSan and under
# ThreadSanitizer (those with threads; fewer seeds), and the Go tests of the library under the race detector. The runners' lines come last.
. "$(dirname "$0")/env.sh"
parts=" ${*:-asan tsan race} "
export CUDA=0
toolchain cmake
[ -n "$AR_CMAKE" ] || missing "no cmake: the C++ sanitizers are skipped"

# The seeds of a share of transports_test: 250 without sanitizers.
export AR_TEST_SEEDS="${AR_TEST_SEEDS:-12}"
export ASAN_OPTIONS="detect_stack_use_after_return=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="suppressions=$root/scripts/tsan.supp:halt_on_error=0:${TSAN_OPTIONS:-}"

# sanitized NAME FLAGS TEST...: builds and runs these C++ tests.
sanitized() {
  local name=$1 flags=$2 dir=$build/$1 pattern
  shift 2
  say "C++ tests with $flags: $*"
  "$AR_CMAKE" -S "$root" -B "$dir" -G Ninja "-DCMAKE_MAKE_PROGRAM=$AR_NINJA" -DAR_CUDA=OFF "-DCMAKE_CXX_FLAGS=$flags -g1" \
    "-DCMAKE_C_FLAGS=$flags -g1" -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_C_FLAGS_RELEASE=-O1 >"$build/$name.configure.log" 2>&1 || {
    cat "$build/$name.configure.log" >&2
    die "cmake could not configure"
  }
  "$AR_CMAKE" --build "$dir" --target "$@" -- --quiet
  pattern=$(printf '|%s' "$@")
  if ! "$(dirname "$AR_CMAKE")/ctest" --test-dir "$dir" --output-on-failure --no-tests=error --parallel "$(nproc)" \
    --timeout 300 -R "^(${pattern#|})\\." >"$build/$name.log" 2>&1; then
    grep -Ev '^ *Start +[0-9]+: | Passed +[0-9.]+ sec$' "$build/$name.log" >&2
    exit 1
  fi
  grep -A 3 '% tests passed' "$build/$name.log"
}

if [ -n "$AR_CMAKE" ]; then
  if [[ $parts == *" asan "* ]]; then sanitized asan "-fsanitize=address,undefined -fno-sanitize-recover=undefined" \
    emulated_test conformance_test conformance_capture_test hazards_test transports_test two_shot_test peer_test probe_test \
    graphs_test faults_test processes_test bounds_test; fi
  if [[ $parts == *" tsan "* ]]; then sanitized tsan "-fsanitize=thread" \
    races_test emulated_test conformance_test graphs_test; fi
fi
if [[ $parts == *" race "* ]]; then
  say "Go tests with the race detector"
  go_env emulated
  go test -race . ./device ./internal/...
fi
