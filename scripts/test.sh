#!/usr/bin/env bash
# test.sh [cpp] [go]: all tests, or one half: C++, vet, Go without tags, Go with -tags cuda. go test's lines come last.
. "$(dirname "$0")/env.sh"
parts=" ${*:-cpp go} "
read -ra go_test_flags <<<"${GO_TEST_FLAGS:-}"

# ctest names every test twice: on a terminal it draws one line, elsewhere only failures and the sum are shown.
run_ctest() {
  local ctest log=$build/ctest.log
  ctest=("$(dirname "$AR_CMAKE")/ctest" --test-dir "$build" --output-on-failure --no-tests=error --parallel "$(nproc)")
  if [ -t 1 ]; then
    "${ctest[@]}" --progress
  elif "${ctest[@]}" >"$log" 2>&1; then
    grep -A 100 '% tests passed' "$log"
  else
    grep -Ev '^ *Start +[0-9]+: | Passed +[0-9.]+ sec$' "$log" >&2
    exit 1
  fi
}

toolchain "${CUDA_GROUPS[@]}" cmake
if [ -n "$AR_CMAKE" ]; then
  say "building the C++ library and its tests"
  cmake_build all
  if grep -q '^GTest_DIR:PATH=.*NOTFOUND' "$build/CMakeCache.txt"; then
    missing "GoogleTest is not installed: C++ tests skipped (Debian: apt-get install libgtest-dev)"
  fi
fi
if [[ $parts == *" cpp "* ]] && [ -n "$AR_CMAKE" ]; then
  say "C++ tests"
  run_ctest
fi
if [[ $parts == *" go "* ]]; then
  say "go vet, also without cgo"
  go_env emulated
  go vet ./...
  CGO_ENABLED=0 go vet ./...
  say "Go tests, emulated backend compiled by cgo"
  go test "${go_test_flags[@]}" ./...
  if [ -n "$AR_NVCC" ]; then
    say "Go tests, -tags cuda: linked with build/liballreduce.a"
    go_env cuda
    go vet "${tags[@]}" ./...
    go test "${tags[@]}" -ldflags "$ldflags" "${go_test_flags[@]}" ./...
  fi
fi
