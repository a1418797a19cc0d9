// Signatures: where ranks are enqueued by several processes or launched by several graphs, each leaves a line about the
// call that it is in, before its part of it. The host compares the lines (shared.cpp): ranks that disagree are told so,
// instead of waiting for each other until the deadline.
//
// Lines are counted on the device, so that a replay is counted too: a ring of 4 by that count. Both halves of a line carry
// the count, so that a half-written one is no line.
#pragma once

#include "../shared.h"

namespace AR_NS {

struct Signature {
  SignatureLine* lines;  // the rank's kSignatures; null: no signatures
  uint32_t* counter;     // device memory
  uint32_t what;         // type | wire << 4 | op << 8 | path << 12 | strided << 16 | captured << 17
  uint32_t call;
  uint32_t count[2];  // elements

  // By one thread.
  AR_DEVICE void leave(Block& b) const {
    b.reads(counter, sizeof(uint32_t));
    const uint32_t n = *counter + 1;
    b.writes(counter, sizeof(uint32_t));
    *counter = n;
    Vec16* line = lines[n % kSignatures].w;
    store_sys(b, line, Vec16{{n, what, count[0], count[1]}});
    store_sys(b, line + 1, Vec16{{n, call, 0, 0}});
  }
};

// For paths whose kernels are not ours.
struct Sign {
  static constexpr const char* kName = "sign";
  static constexpr int kMaxThreads = 32;
  Signature signature;
  AR_DEVICE void operator()(Block& b) const {
    b.lead([&] { signature.leave(b); });
  }
};

}  // namespace AR_NS
