#!/usr/bin/env bash
# toolchain.sh [cuda] [cmake] [lint]: finds the tools of these groups on this machine, or installs them from PyPI
# (pinned by hash) into build/toolchain. Prints shell assignments; messages go to stderr. Quick when all is there.
#   AR_NVCC   nvcc, empty: the emulated backend alone    AR_CMAKE AR_NINJA AR_CLANG_FORMAT   empty: not to be had
# CUDA=auto|0|required as in env.sh.
. "$(dirname "$0")/env.sh"
exec 3>&1 1>&2

dir=$build/toolchain
venv=$dir/venv
mkdir -p "$dir"
exec 9>"$dir/lock"
if command -v flock >/dev/null; then flock 9; fi

# install GROUP: the requirements of GROUP into the virtual environment; why it failed goes to $dir/pip.log.
install() {
  local list=$root/scripts/requirements/$1.txt stamp=$dir/$1.installed log=$dir/pip.log installed
  # Its scripts name their interpreter by path: a checkout that was moved starts again.
  installed=$(echo "$venv" && cat "$list")
  [ "$(cat "$stamp" 2>/dev/null)" != "$installed" ] || return 0
  [ "$(cat "$dir/place" 2>/dev/null)" = "$venv" ] || rm -rf "$venv" "$dir"/*.installed
  echo "$venv" >"$dir/place"
  if ! command -v python3 >/dev/null; then
    echo "no python3" >"$log"
    return 1
  fi
  say "toolchain: fetching $1 from PyPI into build/toolchain"
  : >"$log"
  # Some distributions have venv without ensurepip; their own pip can then fill it.
  local pip=("$venv/bin/python" -m pip)
  if [ ! -x "$venv/bin/python" ] || { ! "${pip[@]}" --version && [ ! -f "$dir/outer-pip" ]; } >/dev/null 2>&1; then
    rm -rf "$venv" "$dir/outer-pip"
    if ! python3 -m venv "$venv" >>"$log" 2>&1; then
      rm -rf "$venv"
      python3 -m venv --without-pip "$venv" >>"$log" 2>&1 || return 1
      touch "$dir/outer-pip"
    fi
  fi
  if [ -f "$dir/outer-pip" ]; then pip=(python3 -m pip --python "$venv/bin/python"); fi
  "${pip[@]}" --disable-pip-version-check install --quiet --no-deps --only-binary=:all: --require-hashes \
    --no-compile --retries 2 --timeout 20 -r "$list" >>"$log" 2>&1 || return 1
  printf '%s\n' "$installed" >"$stamp"
}

# pip's last error, or the last line of its log.
why() { { grep -E '^ERROR' "$dir/pip.log" || cat "$dir/pip.log"; } | tail -n 1; }

# usable NVCC: 11.8 or newer, and it gets along with the host compiler.
usable() {
  local version
  version=$("$1" --version 2>/dev/null | sed -nE 's/.*release ([0-9]+)\.([0-9]+).*/\1 \2/p') || return 1
  # shellcheck disable=SC2086 # two numbers
  set -- "$1" $version
  [ "$((${2:-0} * 100 + ${3:-0}))" -ge 1108 ] || return 1
  [ -f "$dir/probe.cu" ] || echo '__global__ void k() {}  int main() { k<<<1, 1>>>(); }' >"$dir/probe.cu"
  "$1" -o "$dir/probe.out" "$dir/probe.cu" >"$dir/probe.log" 2>&1
}

find_cuda() {
  AR_NVCC=
  if [ "$CUDA" = 0 ]; then
    note "CUDA=0: building the emulated backend alone"
    return
  fi
  local candidate seen=
  for candidate in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    [ -x "$candidate" ] || continue
    # A toolkit is tried once; the answer holds as long as the file does.
    if [ "$(cat "$dir/probed" 2>/dev/null)" = "$candidate $(stat -Lc %Y-%s "$candidate")" ] || usable "$candidate"; then
      echo "$candidate $(stat -Lc %Y-%s "$candidate")" >"$dir/probed"
      AR_NVCC=$candidate
      return
    fi
    seen=$candidate
  done
  [ -z "$seen" ] || note "toolchain: $seen is older than CUDA 11.8 or cannot use this C++ compiler; not used"
  if install cuda && link_wheels; then
    return
  fi
  local text
  text="toolchain: no nvcc on this machine, and none from PyPI ($(why))"
  [ "$CUDA" != required ] || die "$text"
  note "$text: building the emulated backend alone"
}

# The wheels lack two links: lib64 (CMake's compiler check) and libcudart.so (a dynamic link).
link_wheels() {
  local home
  home=$(cd "$venv"/lib/python3*/site-packages/nvidia/cu13 && pwd) || return 1
  [ -e "$home/lib64" ] || ln -s lib "$home/lib64"
  [ -e "$home/lib/libcudart.so" ] || ln -s libcudart.so.13 "$home/lib/libcudart.so"
  AR_NVCC=$home/bin/nvcc
  [ -x "$AR_NVCC" ]
}

find_cmake() {
  AR_CMAKE=$(command -v cmake || true)
  AR_NINJA=$(command -v ninja || true)
  local version
  if [ -n "$AR_CMAKE" ] && [ -n "$AR_NINJA" ]; then
    version=$("$AR_CMAKE" --version | sed -nE '1s/.* ([0-9]+)\.([0-9]+).*/\1 * 100 + \2/p')
    # 3.21 for PROJECT_IS_TOP_LEVEL; ninja 1.11 for --quiet.
    if [ "$((version))" -ge 321 ] && "$AR_NINJA" --quiet --version >/dev/null 2>&1; then return; fi
  fi
  AR_CMAKE=$venv/bin/cmake
  AR_NINJA=$venv/bin/ninja
  if ! install cmake; then
    AR_CMAKE=
    AR_NINJA=
    missing "toolchain: no cmake and ninja on this machine, and none from PyPI ($(why))"
  fi
}

find_lint() {
  AR_CLANG_FORMAT=$venv/bin/clang-format
  if ! install lint; then
    AR_CLANG_FORMAT=
    missing "toolchain: no clang-format from PyPI ($(why))"
  fi
}

for group in "$@"; do
  case $group in
    cuda | cmake | lint) "find_$group" ;;
    *) die "toolchain.sh: no group $group" ;;
  esac
done
if [ -n "$AR_NVCC" ] && [ -z "$AR_CMAKE" ]; then
  note "no cmake: building the emulated backend alone"
  AR_NVCC=
fi
printf '%s=%q\n' AR_NVCC "$AR_NVCC" AR_CMAKE "$AR_CMAKE" AR_NINJA "$AR_NINJA" AR_CLANG_FORMAT "$AR_CLANG_FORMAT" >&3
