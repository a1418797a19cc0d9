#!/usr/bin/env bash
# install.sh PREFIX: both libraries, libcudart_static.a, headers, pkg-config file, and the command. DESTDIR is honoured.
. "$(dirname "$0")/env.sh"
prefix=${1:?usage: install.sh PREFIX}
case $prefix in /*) ;; *) prefix=$OLDPWD/$prefix ;; esac

toolchain "${CUDA_GROUPS[@]}" cmake
[ -n "$AR_CMAKE" ] || die "make install needs cmake and ninja"
"$root/scripts/build.sh"
cmake_build allreduce allreduce_shared
"$AR_CMAKE" --install "$build" --prefix "$prefix" >"$build/install.log" || { cat "$build/install.log" >&2; exit 1; }
install -D -m 755 "$build/allreduce" "${DESTDIR:-}$prefix/bin/allreduce"
say "installed in ${DESTDIR:-}$prefix"
