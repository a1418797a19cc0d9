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
go build "${tags[@]}" -ldflags "$ldflags" -o "$build/allreduce" ./cmd/allreduce
# The emulated NCCL, for GGML_CUDA_NCCL_LIB on emulated devices.
library=$build/libnccl-emulated.so
if [ -n "$(find csrc/emulated/{libnccl,nccl.h} csrc/transports/nccl_api.h -newer "$library" 2>/dev/null || echo new)" ]; then
  "${CXX:-g++}" -std=c++17 -O1 -fPIC -shared -fvisibility=hidden -o "$library" csrc/emulated/libnccl/nccl.cpp
fi
