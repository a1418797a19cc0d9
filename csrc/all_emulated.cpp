// The emulated backend: the one source of everything, against platform/emulated.h, and the emulated runtime itself.
#define AR_PLATFORM_EMULATED 1
#include "check.cpp"
#include "comm.cpp"
#include "devices.cpp"
#include "shared.cpp"
#include "storage.cpp"
#include "transports/copy_engine.cpp"
#include "transports/copy_engine_two_shot.cpp"
#include "transports/internal.cpp"
#include "transports/nccl.cpp"

#include "bench.cpp"  // uses helpers of devices.cpp

#include "emulated/blocks.cpp"
#include "emulated/capture.cpp"
#include "emulated/controls.cpp"
#include "emulated/fiber.cpp"
#include "emulated/hazards.cpp"
#include "emulated/links.cpp"
#include "emulated/memory.cpp"
#include "emulated/nccl_host.cpp"
#include "emulated/ops.cpp"
#include "emulated/report.cpp"
#include "emulated/scheduler.cpp"
#include "emulated/streams.cpp"
#include "emulated/world.cpp"
