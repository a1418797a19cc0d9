// Flags between processes, where events cannot go: one block tells that its stream has come so far, another one waits for
// that. Values count up and are compared by signed difference, so they may wrap. They are the host's, so none of this is
// captured: a replay would tell the same value again.
#pragma once

#include "shares.h"

namespace AR_NS {

struct Tell {
  static constexpr const char* kName = "tell";
  static constexpr int kMaxThreads = 32;
  uint32_t* flag;
  uint32_t value;
  AR_DEVICE void operator()(Block& b) const {
    b.lead([&] {
      fence_sys(b, Order::none);
      store_flag(b, Order::none, flag, value);
    });
  }
};

struct AwaitTold {
  static constexpr const char* kName = "await";
  static constexpr int kMaxThreads = 32;
  const uint32_t* flag;
  uint32_t value;
  Order order;
  uint32_t *abort, *aborts;
  int abort_words;
  uint64_t timeout_ns;
  Vec16* record;
  uint32_t peer, call;
  AR_DEVICE void operator()(Block& b) const {
    b.lead([&] {
      uint32_t seen = 0;
      const Spin s = spin(b, order, SpinLimit{abort, timeout_ns}, flag, [&] {
        seen = load_flag(b, flag);
        return static_cast<int32_t>(seen - value) >= 0;
      });
      fence_sys(b, Order::none);
      if (s != Spin::expired) return;
      store_sys(b, record, Vec16{{static_cast<uint32_t>(Phase::told) | peer << 8, value, seen, call}});
      AR_NO_UNROLL
      for (int p = 0; p < abort_words; p++) store_flag(b, Order::none, aborts + p * kFlagStride, 1);
    });
  }
};

}  // namespace AR_NS
