// Counts wrong elements where they are, so that every timed reduction can be checked without a copy to the host
// (`allreduce perf`).
#pragma once

#include "types.h"

namespace AR_NS {

constexpr int kCompareThreads = 512;

// Rows of `count` elements, `pitch` bytes apart. tolerance 0: the bits must be equal. Else the values may differ by as much;
// a NaN is always wrong. Every thread adds to a counter of its own: no atomics.
template <class T>
struct Compare {
  static constexpr const char* kName = "compare";
  static constexpr int kMaxThreads = kCompareThreads;
  const char* got;
  const char* want;
  uint32_t* wrong;  // blocks * kCompareThreads
  int64_t rows, count, pitch;
  float tolerance;

  AR_DEVICE void operator()(Block& b) const {
    using Bits = typename T::Bits;
    const int64_t share = (count + b.count() - 1) / b.count();
    const int64_t lo = b.index() * share;
    const int64_t n = count - lo < share ? count - lo : share;
    if (n <= 0) return;
    uint32_t* mine = wrong + static_cast<int64_t>(b.index()) * kCompareThreads;
    for (int64_t r = 0; r < rows; r++) {
      const Bits* g = reinterpret_cast<const Bits*>(got + r * pitch) + lo;
      const Bits* w = reinterpret_cast<const Bits*>(want + r * pitch) + lo;
      b.reads(g, n * static_cast<int64_t>(sizeof(Bits)));
      b.reads(w, n * static_cast<int64_t>(sizeof(Bits)));
      b.each(kCompareThreads, [&](int64_t t) {
        uint32_t bad = 0;
        for (int64_t i = t; i < n; i += kCompareThreads) bad += differs(g[i], w[i]) ? 1 : 0;
        if (bad != 0) mine[t] += bad;
      });
    }
  }

 private:
  AR_DEVICE bool differs(typename T::Bits a, typename T::Bits b) const {
    if (a == b || tolerance <= 0) return a != b;
    const float x = T::load(a), y = T::load(b);
    return !(x - y <= tolerance && y - x <= tolerance);
  }
};

}  // namespace AR_NS
