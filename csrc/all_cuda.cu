// The CUDA backend: the one source of everything, against platform/cuda.h.
#define AR_PLATFORM_CUDA 1
#include "check.cpp"
#include "comm.cpp"
#include "devices.cpp"
#include "shared.cpp"
#include "storage.cpp"
#include "transports/copy_engine.cpp"
#include "transports/copy_engine_two_shot.cpp"
#include "transports/internal.cpp"
#include "transports/nccl.cpp"
#include "transports/peer.cpp"

// These use helpers of devices.cpp.
#include "bench.cpp"
#include "probe.cpp"
