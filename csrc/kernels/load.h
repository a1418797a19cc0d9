// A compute kernel to measure what reductions cost the work beside them (`allreduce perf --overlap`). Each block takes a
// whole SM, as stream-k matrix kernels do: 1024 threads with so many live registers that no other block fits beside it.
// So a reduction that holds one SM makes a grid of one block per SM run a second wave.
#pragma once

#include "types.h"

namespace AR_NS {

constexpr int kLoadThreads = 1024;
// One round of 1024 threads x kLoadValues additions on the 128 lanes of an SM at about 1.8 GHz.
constexpr int kLoadValues = 52;
constexpr double kLoadRoundUs = 0.23;

struct Load {
  static constexpr const char* kName = "load";
  static constexpr int kMaxThreads = kLoadThreads;
  static constexpr bool kTalks = false;
  int64_t rounds;
  float start, stop;  // the total is never stop, which only the host knows
  float* never;       // null

  AR_DEVICE void operator()(Block& b) const {
    // Values that differ by thread: equal ones go to the uniform registers of newer cards, which fill no SM.
    int64_t thread = 0;
    b.each(kLoadThreads, [&](int64_t t) { thread = t; });
    float value[kLoadValues];
    AR_UNROLL
    for (int k = 0; k < kLoadValues; k++) value[k] = add_rn(start, static_cast<float>(b.index() + thread + k));
    // Each value needs its neighbour, so all of them stay in registers.
    b.work(rounds, kLoadRoundUs, [&](int64_t) {
      AR_UNROLL
      for (int k = 0; k < kLoadValues; k++) value[k] = add_rn(value[k], value[(k + 1) % kLoadValues]);
    });
    float total = 0;
    AR_UNROLL
    for (int k = 0; k < kLoadValues; k++) total = add_rn(total, value[k]);
    if (total == stop && never != nullptr) *never = total;  // keeps the additions alive
  }
};

}  // namespace AR_NS
