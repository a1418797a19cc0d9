# shellcheck shell=bash
# Sourced by the other scripts: where things are, how to speak, and the environment Go is run in.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
cd "$root"

# auto: as found or fetched; 0: the emulated backend alone; required: its lack is a failure, and so is every missing
# tool that would otherwise cost a note and a skipped step.
case "${CUDA:-auto}" in
  auto) CUDA=auto ;;
  0 | off | no) CUDA=0 ;;
  1 | required | on | yes) CUDA=required ;;
  *)
    echo "CUDA=$CUDA: allowed are auto, 0, required" >&2
    exit 2
    ;;
esac
export CUDA
# What the build needs of toolchain.sh: CMake only where there is something for it to build.
# shellcheck disable=SC2034 # used by the sourcing scripts
if [ "$CUDA" = 0 ]; then CUDA_GROUPS=(cuda); else CUDA_GROUPS=(cuda cmake); fi

say() { printf '== %s\n' "$*"; }
note() { printf -- '-- %s\n' "$*" >&2; }
die() {
  printf '** %s\n' "$*" >&2
  exit 1
}

# missing WHAT: a step cannot run here. On CI, or with CUDA=required, that is a failure.
missing() {
  if [ "$CUDA" = required ] || [ -n "${CI:-}" ]; then die "$*"; fi
  note "$*"
}

# Runs toolchain.sh for the given groups and takes over what it found.
# shellcheck disable=SC2034 # AR_CLANG_FORMAT is used by lint.sh
AR_NVCC='' AR_CMAKE='' AR_NINJA='' AR_CLANG_FORMAT=''
toolchain() {
  local found
  found=$("$root/scripts/toolchain.sh" "$@")
  eval "$found"
}

# go_env cuda|emulated: sets tags and ldflags, and exports what cgo needs, so that Go's cache sees edits to csrc/.
# Emulated: the hash of csrc/ goes through CGO_CXXFLAGS, a key of the packages with C++ files; CGO_CPPFLAGS is one of
# every cgo package, so that each edit would compile runtime/cgo and go-nvml again (15 s instead of 1).
# CUDA: the archive's hash is a linker flag; -X sets a variable that need not exist, and only links again.
# shellcheck disable=SC2034 # tags and ldflags are used by the sourcing scripts
go_env() {
  local flags
  flags=$(printf '%s' "${CGO_CXXFLAGS:--g -O2}" | sed -E 's/ *-DAR_SOURCE_HASH=0x[0-9a-f]+//g')
  CGO_CXXFLAGS="$flags -DAR_SOURCE_HASH=$(sh "$root/scripts/source-hash.sh")"
  export CGO_CXXFLAGS
  # go-nvml wraps deprecated functions; a fixed value, since it is a key of the cache too.
  export CGO_CFLAGS="${CGO_CFLAGS:--g -O2 -Wno-deprecated-declarations}"
  tags=()
  ldflags=''
  if [ "$1" = cuda ]; then
    tags=(-tags cuda)
    ldflags=-X=gpu.example/allreduce/internal/core.archive=$(sha256sum "$build/liballreduce.a" | cut -c1-16)
  fi
}

# cmake_build TARGET...: configures build/ where needed, builds.
cmake_build() {
  local args=(-S "$root" -B "$build" -G Ninja "-DCMAKE_MAKE_PROGRAM=$AR_NINJA" "-DAR_CUDA_ARCHS=${AR_CUDA_ARCHS:-}")
  if [ -n "$AR_NVCC" ]; then
    args+=(-DAR_CUDA=ON "-DCMAKE_CUDA_COMPILER=$AR_NVCC")
  else
    args+=(-DAR_CUDA=OFF)
  fi
  # Other tools need a cache of their own; other arguments a configure run; ninja sees to everything else.
  local tools="$AR_CMAKE $AR_NINJA ${CC:-} ${CXX:-} ${CUDAHOSTCXX:-}"
  if ! holds configured.tools "$tools" || { [ -n "$AR_NVCC" ] && ! holds configured.nvcc "$AR_NVCC"; }; then
    rm -rf "$build/CMakeCache.txt" "$build/CMakeFiles" "$build/configured"
  fi
  if ! holds configured "${args[*]}" || [ ! -f "$build/build.ninja" ]; then
    rm -f "$build/configured"
    "$AR_CMAKE" "${args[@]}" >"$build/configure.log" 2>&1 || {
      cat "$build/configure.log" >&2
      die "cmake could not configure"
    }
    grep -E '^-- (CUDA|GoogleTest) ' "$build/configure.log" || true
    printf '%s\n' "$tools" >"$build/configured.tools"
    [ -z "$AR_NVCC" ] || printf '%s\n' "$AR_NVCC" >"$build/configured.nvcc"
    printf '%s\n' "${args[*]}" >"$build/configured"
  fi
  "$AR_CMAKE" --build "$build" --target "$@" -- --quiet
}

# holds FILE TEXT: build/FILE holds just TEXT.
holds() { [ "$(cat "$build/$1" 2>/dev/null)" = "$2" ]; }

command -v go >/dev/null || die "Go is not installed (go.mod says which version is needed)"
