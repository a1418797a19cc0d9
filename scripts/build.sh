#!/usr/bin/env bash
# build.sh: build/allreduce. With nvcc the command links build/liballreduce.a (both backends); without, cgo compiles the
# emulated backend into it.
. "$(dirname "$0")/env.sh"

toolchain "${CUDA_GROUPS[@]}"
if [ -n "$AR_NVCC" ]; then
  cmake_build allreduce
  go_env cuda
else
  go_env emulated
fi
go build "${tags[@]}" -o "$build/allreduce" ./cmd/allreduce
