// Start and end marks of work that has no deadline of its own (nccl): one thread says in pinned memory where its stream is,
// and the communicator's watchdog times a start without an end. As a kernel it is captured and replayed with the work.
//
// A start leaves the device's clock, an end 0. So a launch differs from the one before it with nothing counted and nothing to
// clear, which a call inside a capture could not do. In units of 65 us, so that 32 bits last three days: a watchdog that sees
// one value for a whole deadline (1 ms or more) has seen one launch.
#pragma once

#include "types.h"

namespace AR_NS {

struct StreamMark {
  static constexpr const char* kName = "mark";
  static constexpr int kMaxThreads = 32;
  uint32_t* word;  // this rank's, pinned
  int start;       // 1: start, 0: end

  AR_DEVICE void operator()(Block& b) const {
    b.writes(word, sizeof(uint32_t));
    b.lead([&] {
      const uint32_t now = static_cast<uint32_t>(device_clock_ns() >> 16);
      store_flag(b, Order::none, word, start == 0 ? 0 : now | 1u);
    });
  }
};

}  // namespace AR_NS
